"""How fast vectors become zones, and how well the ripple tells structured prompts from prose.

    python benchmarks/zones.py [--db STORE] [--rows 1000000] [--json PATH]

Time: random vectors of every reach to zones on one core, best of 3, beside a plain loop over a part
of the rows, in float64, which must give the same zones. Exits 1 when it does not.

AUC: counting, table and code prompts against prose, of `ripple` and of other shares of the same
spectrum. STORE is a store, or a Parquet file of records, by default the shipped sample when it is
there; its request ids are `<task>-NNNN`. Requests with an even number served to choose `ripple`, so
the figures are of the odd ones. Long contexts have other histograms than short ones, and prompts
of one task are longer than those of another: `balanced` compares rows of one octave of the position
only, and averages over the octaves that have 50 rows or more of either kind.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from capture_kernels.fingerprint.vector import HIST_BINS, Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules, ripple
from pipeline import record
from pipeline.store.open import open_store

SAMPLE = Path(__file__).resolve().parents[1] / "examples" / "sample" / "fingerprints.parquet"
STRUCTURED = ("counting", "table", "code")
PLAIN = "prose"
MIN_POSITIONS = (1, 64)
MIN_ROWS = 50
PEER_ROWS = 20_000


class WrongAnswerError(Exception):
    """The zones differ from those of the plain loop."""


def random_vectors(rows: int) -> NDArray[np.float32]:
    """log16 vectors of contexts that reach 1 .. 16 bins: float32[rows, 20]."""
    rng = np.random.default_rng(0)
    vectors = np.empty((rows, 20), np.float32)
    masses = rng.standard_exponential((rows, HIST_BINS), np.float32)
    masses[np.arange(HIST_BINS) >= rng.integers(1, HIST_BINS + 1, (rows, 1))] = 0
    masses /= masses.sum(axis=1, keepdims=True)
    vectors[:, 4:] = masses
    vectors[:, 0] = masses[:, :3].sum(axis=1)
    vectors[:, 1] = masses[:, 3:8].sum(axis=1)
    vectors[:, 2] = masses[:, 8:].sum(axis=1)
    vectors[:, 3] = rng.random(rows)
    return vectors


def plain_ripple(histogram: NDArray[np.float32]) -> float:
    """The ripple of one histogram, float32[16], as the FFT of its mirrored square root."""
    amplitudes = np.sqrt(np.trim_zeros(histogram.astype(np.float64), "b"))
    energy = np.abs(np.fft.fft(np.concatenate([amplitudes, amplitudes[::-1]]))) ** 2
    energy = energy[1 : len(amplitudes)]
    total = energy.sum()
    return float(energy[1 : HIST_BINS // 2 - 1].sum() / total) if total > 1e-9 else 0.0


def plain_evidence(vector: NDArray[np.float32], rules: ZoneRules) -> list[float]:
    """Evidence for each zone of one vector."""
    signals = [*vector[:3].tolist(), plain_ripple(vector[4:]), float(vector[3])]
    strong = [rules.local_mass, rules.mid_mass, rules.long_mass, rules.ripple, rules.entropy]
    return [
        v / (2 * s) if v < s else 1 - (1 - v) / (2 * (1 - s))
        for v, s in zip(signals, strong, strict=True)
    ]


def measure_speed(rows: int) -> dict[str, float]:
    """Rows a second, checked against the plain loop."""
    vectors, rules = random_vectors(rows), ZoneRules()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        zoned = rules.classify(vectors, Layout.LOG16)
        seconds.append(time.perf_counter() - start)
    part = vectors[:PEER_ROWS]
    start = time.perf_counter()
    plain = [plain_evidence(vector, rules) for vector in part]
    plain_s = time.perf_counter() - start
    for row, evidence in enumerate(plain):
        # Two zones as likely as each other to the last digits of a float32 may be either.
        missing = max(evidence) - evidence[zoned.zone[row]]
        share = max(evidence) / sum(evidence)
        if missing > 1e-5 or abs(share - float(zoned.confidence[row])) > 1e-5:
            name = ZONES[int(zoned.zone[row])]
            raise WrongAnswerError(f"row {row}: {name}, where the plain loop has {evidence}")
    fast, slow = rows / min(seconds), len(part) / plain_s
    return {
        "rows": rows, "seconds": min(seconds), "rows_per_second": fast,
        "plain_loop_rows_per_second": slow, "ratio": fast / slow,
    }  # fmt: skip


class Rows(NamedTuple):
    """Rows of a store: task str[n], request number and position int[n], vector float32[n, 20]."""

    task: NDArray[np.str_]
    number: NDArray[np.int64]
    position: NDArray[np.int64]
    vector: NDArray[np.float32]

    def where(self, keep: NDArray[np.bool_]) -> Rows:
        return Rows(self.task[keep], self.number[keep], self.position[keep], self.vector[keep])


def read_rows(path: Path) -> Rows:
    """The log16 records of the tasks that are compared."""
    columns = ["request_id", "position", "layout", "vector"]
    if path.suffix == ".parquet" and path.is_file():
        table = pq.read_table(path, columns=columns)
    else:
        schema = pa.schema([record.SCHEMA.field(name) for name in columns])
        with open_store(path, read_only=True) as store:
            batches = [batch.select(columns) for batch in store.scan(columns=columns)]
        table = pa.Table.from_batches(batches, schema)
    ids = [name.rpartition("-") for name in table.column("request_id").to_pylist()]
    rows = Rows(
        np.array([task for task, _, _ in ids], dtype=str),
        np.array([int(n) if n.isdecimal() else -1 for _, _, n in ids], dtype=np.int64),
        table.column("position").to_numpy().astype(np.int64),
        record.vectors(table),
    )
    log16 = table.column("layout").to_numpy() == Layout.LOG16
    return rows.where(log16 & (rows.number >= 0) & np.isin(rows.task, [*STRUCTURED, PLAIN]))


def cosine_energy(amplitudes: NDArray[np.float64]) -> NDArray[np.float64]:
    """DCT-II energies of rows, float64[n, m], the constant's first."""
    mirrored = np.concatenate([amplitudes, amplitudes[:, ::-1]], axis=1)
    return np.abs(np.fft.rfft(mirrored, axis=1)[:, : amplitudes.shape[1]]) ** 2


def share(part: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    rest = total.sum(axis=1)
    return np.where(rest > 1e-9, part.sum(axis=1) / np.where(rest > 0, rest, 1), 0.0)


def reached_share(amplitudes: NDArray[np.float64], first: int) -> NDArray[np.float64]:
    """Share of cosines first .. 7 in all but the constant, over the bins that each row reaches."""
    reach = HIST_BINS - (amplitudes[:, ::-1] > 0).argmax(axis=1)
    shares = np.zeros(len(amplitudes))
    for bins in np.unique(reach):
        energy = cosine_energy(amplitudes[reach == bins, :bins])
        shares[reach == bins] = share(energy[:, first : HIST_BINS // 2], energy[:, 1:])
    return shares


def statistics(vectors: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """`ripple` and its alternatives, by name: float[n] each."""
    masses = vectors[:, 4:].astype(np.float64)
    whole = cosine_energy(np.sqrt(masses))
    fourier = np.abs(np.fft.rfft(masses, axis=1)) ** 2
    fourier[:, 1:-1] *= 2
    return {
        "ripple": ripple(vectors, Layout.LOG16),
        "masses, no square root": reached_share(masses, 2),
        "slope counted": reached_share(np.sqrt(masses), 1),
        "all 16 bins": share(whole[:, 2 : HIST_BINS // 2], whole[:, 1:]),
        "lowest quarter of the DFT": share(fourier[:, 1:3], fourier[:, 1:]),
    }


def auc(values: NDArray[Any], structured: NDArray[np.bool_]) -> float:
    return float(roc_auc_score(structured, values))


def balanced_auc(
    values: NDArray[Any], structured: NDArray[np.bool_], position: NDArray[np.int64]
) -> float | None:
    """Mean AUC within octaves of the position; None where none has rows enough of both kinds."""
    octave = np.frexp(position)[1]
    found = []
    for one in np.unique(octave):
        rows = octave == one
        if min(structured[rows].sum(), (~structured[rows]).sum()) >= MIN_ROWS:
            found.append(auc(values[rows], structured[rows]))
    return float(np.mean(found)) if found else None


def measure_auc(rows: Rows) -> dict[str, dict[str, Any]]:
    """By least position and statistic: AUC overall and balanced, for each task and their mean."""
    figures: dict[str, dict[str, Any]] = {}
    for least in MIN_POSITIONS:
        kept = rows.where((rows.position >= least) & (rows.number % 2 == 1))
        tasks = [task for task in STRUCTURED if (kept.task == task).any()]
        if not tasks or not (kept.task == PLAIN).any():
            continue
        table = figures[f"position >= {least}"] = {}
        for name, values in statistics(kept.vector).items():
            overall: dict[str, float] = {}
            balanced: dict[str, float] = {}
            for task in tasks:
                pair = np.isin(kept.task, [task, PLAIN])
                structured = kept.task[pair] == task
                overall[task] = auc(values[pair], structured)
                within = balanced_auc(values[pair], structured, kept.position[pair])
                if within is not None:
                    balanced[task] = within
            for cells in (overall, balanced):
                if cells:
                    cells["mean"] = float(np.mean(list(cells.values())))
            table[name] = {"overall": overall, "balanced": balanced}
    return figures


def zone_shares(rows: Rows) -> dict[str, dict[str, float]]:
    """Share of each zone, by task."""
    shares = {}
    for task in np.unique(rows.task).tolist():
        zoned = ZoneRules().classify(rows.vector[rows.task == task], Layout.LOG16)
        counts = np.bincount(zoned.zone, minlength=len(ZONES))
        shares[task] = dict(zip(ZONES, (counts / counts.sum()).tolist(), strict=True))
    return shares


def print_cells(name: str, cells: dict[str, float]) -> None:
    print(f"  {name:<36} " + "  ".join(f"{key} {value:.3f}" for key, value in cells.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--db", type=Path, help="a store, or a Parquet file of records")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.rows < 1:
        parser.error("--rows must be 1 or more")
    try:
        with threadpool_limits(limits=1):
            speed = measure_speed(options.rows)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.rows:,} vectors to zones on one core: {speed['seconds']:.3f} s, "
        f"{speed['rows_per_second']:,.0f} rows a second; plain loop "
        f"{speed['plain_loop_rows_per_second']:,.0f} ({speed['ratio']:.0f}x)"
    )
    figures: dict[str, Any] = {"speed": speed}
    path = options.db or (SAMPLE if SAMPLE.exists() else None)
    if path:
        rows = read_rows(path)
        if not len(rows.task):
            parser.error(f"{path} has no log16 records of {PLAIN} or of structured prompts")
        figures["auc"] = measure_auc(rows)
        figures["zones"] = zone_shares(rows)
        for least, table in figures["auc"].items():
            print(f"AUC against {PLAIN}, {least}, odd requests of {path.name}")
            for name, measured in table.items():
                for kind, cells in measured.items():
                    print_cells(f"{name}, {kind}", cells)
        print("zones by task, all rows")
        for task, cells in figures["zones"].items():
            print_cells(task, cells)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
