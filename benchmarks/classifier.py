"""How fast one core classifies fingerprints, and whether it answers right.

    python benchmarks/classifier.py [--artifacts DIR] [--db STORE] [--rows 1000000] [--json PATH]

Against a finished run (or one made now, of the sample where it is there, else of planted rows):
fingerprints a second in batches of 65,536, and microseconds for a single one, cluster, place and
zone each. Floors: 200,000 a second and 300 us.

Peers, in the same process: scikit-learn's nearest neighbour by a k-d tree over the same landmarks
(after the same projection, with no zones), and the plain recipe's own way with a new row, UMAP's
transform and hdbscan.approximate_predict, on a small sample because it is slow.

Checked on 10,000 rows, some of them far from every behaviour: the same cluster and place as a plain
float64 search through all landmarks, with the run's noise rule and reach. A row may differ only
where two answers are equal to rounding. Exits 1 when one is wrong, or when the manifest says that
the classifier agrees with fewer than 90% of the run's held-out rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import SAMPLE, WrongAnswerError
from capture_kernels.fingerprint.vector import Layout
from discovery.artifacts.classifier import Classified, Classifier
from discovery.artifacts.projection import Projection
from discovery.artifacts.prototypes import Borders
from discovery.artifacts.read import Artifacts, open_artifacts
from discovery.artifacts.schema import NOISE
from discovery.artifacts.tables import borders_of
from pipeline.record import vectors as record_vectors
from tests.planted import planted, planted_batch

BATCH_ROWS = 65_536
SINGLE_CALLS = 5_000
CHECKED_ROWS = 10_000
FLOOR_PER_SECOND, FLOOR_MICROSECONDS = 200_000, 300
LEAST_AGREEMENT = 0.9
# How far float32 distances may be off, in the units of the projected space.
ROUNDING = 1e-4
PLANTED_ROWS = 20_000
PLAIN_ROWS, PLAIN_QUERIES, PLAIN_SINGLES = 5_000, 2_000, 20


class Tables(NamedTuple):
    """A run's tables in float64, as its files hold them."""

    projection: Projection
    landmarks: NDArray[np.float64]
    cluster: NDArray[np.int32]
    place: NDArray[np.float32]
    reach: float
    noise_factor: float
    borders: Borders | None


def read_tables(artifacts: Artifacts) -> Tables:
    saved = artifacts.table("projection").to_pylist()[0]
    landmarks = artifacts.table("landmarks")
    return Tables(
        Projection(
            np.array(saved["mean"], np.float32).reshape(-1, 20),
            np.array(saved["scale"], np.float32),
            np.array(saved["components"], np.float32).reshape(20, -1),
            np.array(saved["explained"]),
            np.array(saved["power"]),
        ),
        np.array(landmarks.column("projected").to_pylist(), np.float64),
        landmarks.column("cluster_id").to_numpy(),
        np.column_stack([landmarks.column(c).to_numpy() for c in ("x", "y")]),
        saved["reach"],
        saved["noise_factor"],
        borders_of(saved),
    )


def plain_octave(vector: NDArray[np.float32], layout: Layout) -> int:
    """The last histogram bin with any mass."""
    reached = [b for b in range(16) if vector[4 + b] > 0]
    return reached[-1] if reached and layout is Layout.LOG16 else 0


def check_answers(
    tables: Tables, layout: Layout, rows: NDArray[np.float32], found: Classified
) -> dict[str, Any]:
    """How many answers are those of the plain search, and how many equal to rounding.

    Raises:
        WrongAnswerError: one is neither.
    """
    is_noise = tables.cluster == NOISE
    same = noise = beyond = 0
    for i, vector in enumerate(rows):
        octave = plain_octave(vector, layout)
        mean, scale = tables.projection.mean[octave], tables.projection.scale
        raised = vector.astype(np.float64) ** float(tables.projection.power)
        point = ((raised - mean) / scale) @ tables.projection.components.astype(np.float64)
        apart = np.sqrt(((tables.landmarks - point) ** 2).sum(axis=1))
        members = ~is_noise
        if tables.borders:
            values = point @ tables.borders.weights + tables.borders.bias
            # On a border a rounding decides.
            close = values >= values.max() - ROUNDING * np.abs(tables.borders.weights).max()
            said = tables.borders.labels == found.cluster_id[i]
            at = said if (said & close).any() else values == values.max()
            members = tables.cluster == tables.borders.labels[at.argmax()]
        member = apart[members].min(initial=np.inf)
        stray = apart[is_noise].min(initial=np.inf)
        answers_noise = is_noise.all() or stray < tables.noise_factor * member
        allowed = is_noise if answers_noise else members
        row = int(np.where(allowed, apart, np.inf).argmin())
        noise += answers_noise
        beyond += bool(apart[row] > tables.reach and not answers_noise)
        # The landmark that was answered with: it must be the right one, or as near as it.
        theirs = np.flatnonzero((tables.place == found.coordinates[i]).all(axis=1))
        answered = int(theirs[apart[theirs].argmin()]) if len(theirs) else -1
        near_noise_rule = abs(stray - tables.noise_factor * member) < ROUNDING
        as_near = allowed[answered] and apart[answered] - apart[row] < ROUNDING
        clusters = {int(tables.cluster[answered])} if apart[answered] <= tables.reach else {NOISE}
        if abs(apart[answered] - tables.reach) < ROUNDING:
            clusters = {int(tables.cluster[answered]), NOISE}
        if (
            answered < 0
            or not (answered == row or as_near or near_noise_rule)
            or int(found.cluster_id[i]) not in clusters
        ):
            raise WrongAnswerError(
                f"row {i}: cluster {found.cluster_id[i]}, where the nearest landmark is {row} of "
                f"cluster {tables.cluster[row]}, {apart[row]:.4f} away"
            )
        same += answered == row and len(clusters) == 1
    return {
        "rows": len(rows), "same": same, "equal_to_rounding": len(rows) - same,
        "by_noise_landmark": int(noise), "beyond_reach": beyond,
    }  # fmt: skip


def rows_to_check(vectors: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Four fifths of the run's own kind, one tenth planted noise, and one tenth of the run's kind
    with numbers blown up, to lie beyond reach: float32[10000, 20]."""
    tenth = CHECKED_ROWS // 10
    own = vectors[rng.integers(len(vectors), size=9 * tenth)]
    own[:tenth] *= rng.uniform(1, 8, (tenth, 1)).astype(np.float32)
    return np.concatenate([own, planted(tenth, seed=1, noise=1.0)[0]])


def batches_per_second(work: Callable[[NDArray[Any]], object], rows: NDArray[Any]) -> float:
    """Rows a second through `work`, in batches, after one that is not counted."""
    work(rows[:BATCH_ROWS])
    began = time.perf_counter()
    for start in range(0, len(rows), BATCH_ROWS):
        work(rows[start : start + BATCH_ROWS])
    return len(rows) / (time.perf_counter() - began)


def microseconds(
    work: Callable[[NDArray[Any]], object], rows: NDArray[Any], calls: int
) -> dict[str, float]:
    """Median and 99th percentile of one call with one row."""
    spent = []
    for i in range(calls + 10):
        row = rows[i % len(rows)][None]
        began = time.perf_counter_ns()
        work(row)
        spent.append((time.perf_counter_ns() - began) / 1000)
    spent = spent[10:]
    return {"median": statistics.median(spent), "p99": float(np.quantile(spent, 0.99))}


def measure(
    artifacts: Artifacts, vectors: NDArray[np.float32], rows: int
) -> dict[str, dict[str, Any]]:
    """Rates of the classifier and of the k-d tree over the same landmarks, and the check."""
    from sklearn.neighbors import KNeighborsClassifier

    classifier, tables = Classifier(artifacts), read_tables(artifacts)
    rng = np.random.default_rng(0)
    many = vectors[rng.integers(len(vectors), size=rows)]
    checked = rows_to_check(vectors, rng)
    answers = classifier.classify(checked)
    check = check_answers(tables, classifier.layout, checked, answers)
    tree = KNeighborsClassifier(n_neighbors=1, algorithm="kd_tree")
    tree.fit(tables.landmarks, tables.cluster)

    def by_tree(rows: NDArray[np.float32]) -> NDArray[np.int32]:
        return np.asarray(tree.predict(tables.projection(rows, classifier.layout)))

    cpu, wall = time.process_time(), time.perf_counter()
    ours = {
        "per_second": batches_per_second(classifier.classify, many),
        "microseconds": microseconds(classifier.classify, many, SINGLE_CALLS),
    }
    # More than 1 would mean that more than one core was at work.
    ours["cores_used"] = (time.process_time() - cpu) / (time.perf_counter() - wall)
    peer = {
        "per_second": batches_per_second(by_tree, many[:BATCH_ROWS]),
        "microseconds": microseconds(by_tree, many, SINGLE_CALLS // 5),
        # It knows neither the noise rule nor the reach.
        "same_cluster": float((by_tree(checked) == answers.cluster_id).mean()),
    }
    return {"check": check, "classifier": ours, "kd_tree": peer}


def measure_plain(vectors: NDArray[np.float32]) -> dict[str, Any]:
    """The plain recipe's way with new rows: UMAP's transform, then approximate_predict."""
    from hdbscan import approximate_predict

    scaler, pca, reducer, clusterer = common.plain_recipe(vectors[:PLAIN_ROWS], 42).steps

    def predict(rows: NDArray[np.float32]) -> NDArray[np.int64]:
        points = reducer.transform(pca.transform(scaler.transform(rows)))
        return np.asarray(approximate_predict(clusterer, points)[0])

    queries = vectors[-PLAIN_QUERIES:]
    return {
        "fitted_rows": PLAIN_ROWS,
        "queries": len(queries),
        "per_second": batches_per_second(predict, queries),
        "microseconds": microseconds(predict, queries, PLAIN_SINGLES),
    }


def print_figures(figures: dict[str, Any]) -> None:
    check, ours = figures["check"], figures["classifier"]
    rate, single = ours["per_second"], ours["microseconds"]
    print(
        f"checked: {check['same']:,} of {check['rows']:,} answers are the plain search's, "
        f"{check['equal_to_rounding']} equal to rounding; {check['by_noise_landmark']:,} by a "
        f"noise landmark, {check['beyond_reach']:,} beyond reach of a cluster's"
    )
    print(f"agreement with held-out rows, by the manifest: {figures['agreement']:.1%}")
    print(
        f"classifier, {figures['landmarks']:,} landmarks in {figures['dimensions']} dimensions, "
        f"{ours['cores_used']:.2f} cores: {rate:,.0f} a second; one in {single['median']:.0f} us "
        f"(p99 {single['p99']:.0f})"
    )
    for name in ("kd_tree", "plain_recipe"):
        peer = figures[name]
        print(
            f"  {name}: {peer['per_second']:,.0f} a second ({rate / peer['per_second']:.1f}x); one "
            f"in {peer['microseconds']['median']:,.0f} us "
            f"({peer['microseconds']['median'] / single['median']:.1f}x)"
        )
    for floor, met in (
        (f"{FLOOR_PER_SECOND:,} a second", rate >= FLOOR_PER_SECOND),
        (f"{FLOOR_MICROSECONDS} us for one", single["median"] < FLOOR_MICROSECONDS),
    ):
        print(f"floor of {floor}: {'met' if met else 'not met'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--artifacts", type=Path, help="a run folder, or an output folder")
    parser.add_argument("--db", type=Path, help="records to classify; default: the sample, if any")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.rows < BATCH_ROWS:
        parser.error(f"--rows must be {BATCH_ROWS} or more")
    source = options.db or (SAMPLE if SAMPLE.exists() else None)
    if source:
        records = common.read_records(source)
    else:
        rows = planted(PLANTED_ROWS, seed=0)[0]
        records = pa.Table.from_batches([planted_batch(rows, common.NOW)])
    vectors = np.random.default_rng(0).permutation(record_vectors(records))
    try:
        with tempfile.TemporaryDirectory() as made:
            if options.artifacts:
                artifacts = open_artifacts(options.artifacts)
            else:
                db = common.make_store(Path(made) / "records.db", records)
                artifacts = common.run_job(db, Path(made) / "out", 42).artifacts
            agreement = artifacts.manifest["quality"]["classifier_agreement"] or 0.0
            tables = read_tables(artifacts)
            figures: dict[str, Any] = {
                "rows": options.rows,
                "landmarks": len(tables.landmarks),
                "dimensions": tables.landmarks.shape[1],
                "agreement": agreement,
            }
            with threadpool_limits(limits=1):
                figures |= measure(artifacts, vectors, options.rows)
                figures["plain_recipe"] = measure_plain(vectors)
        print_figures(figures)
        if options.json:
            common.write_figures(options.json, figures)
        if agreement < LEAST_AGREEMENT:
            raise WrongAnswerError(f"agreement {agreement:.3f} is below {LEAST_AGREEMENT}")
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
