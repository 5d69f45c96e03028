"""`attn drift`: drift between two runs, a run and a window of a store, or two windows."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import typer

from capture_kernels.errors import ArtifactError, OptionError
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.drift import drift
from discovery.algorithms.shares import Shares
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import Artifacts, open_artifacts
from discovery.artifacts.schema import NOISE, identity_of
from discovery.runs.folder import run_folder
from pipeline.progress import shown_progress
from pipeline.record import impossible_rows, vectors
from pipeline.store.base import Selection
from pipeline.store.open import open_store

from .drift import KINDS, Baseline, past_limit, read_baseline, spread_over

# Exit code if drift is past --fail-above.
PAST_LIMIT = 3
# Rows that are classified together, and rows between two lines of progress without a terminal.
CHUNK_ROWS, PROGRESS_ROWS = 65_536, 1_000_000


class Found(NamedTuple):
    """Drift of both kinds, `clusters` None if there is no cluster in both; what each side is and
    how clusters were matched, in words; names of the clusters; how many rows were left out because
    no attention row has such a vector."""

    zones: dict[str, Any]
    clusters: dict[str, Any] | None
    before: str
    after: str
    matched: str
    labels: dict[str, str]
    left_out: int = 0


def command(
    run: Annotated[str, typer.Argument(help="Run id, or latest: what drift is measured from.")],
    other: Annotated[
        str | None, typer.Argument(help="Run id, or latest: compare with this run.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "--output-dir", help="Folder of the runs.")
    ] = Path("discovery_outputs"),
    db: Annotated[
        Path | None, typer.Option(help="Compare with a window of this store instead.")
    ] = None,
    hours: Annotated[float, typer.Option(help="With --db: window in hours; 0 takes all.")] = 24.0,
    earlier_hours: Annotated[
        float | None,
        typer.Option(
            help="With --db: measure from the window of this many hours before --hours, not from "
            "the run, which only classifies."
        ),
    ] = None,
    now: Annotated[
        datetime | None, typer.Option(help="With --db: end of the window (UTC); default: now.")
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 3 if the lower end of an interval exceeds this PSI."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """How far zone and cluster shares moved: PSI with its 95% interval, as the gate measures it.

    Give two runs, or a run and --db for a window of a store that the run classifies.
    """
    check_options(other, db, hours, earlier_hours)
    artifacts = open_artifacts(run_folder(output, run))
    if db is None:
        assert other is not None
        found = between_runs(artifacts, open_artifacts(run_folder(output, other)))
    else:
        end = utc(now) if now else datetime.now(UTC)
        found = of_store(artifacts, db, hours, earlier_hours, end)
    limits = None if fail_above is None else dict.fromkeys(KINDS, fail_above)
    kinds = {kind: figures for kind in KINDS if (figures := getattr(found, kind)) is not None}
    past = past_limit(kinds, limits) if limits else []
    if as_json:
        print(json.dumps({**found._asdict(), "limit": fail_above, "past_limit": past}))
    else:
        show(found, past, fail_above)
    if past:
        raise typer.Exit(PAST_LIMIT)


def check_options(
    other: str | None, db: Path | None, hours: float, earlier_hours: float | None
) -> None:
    """OptionError says which comparison cannot be meant."""
    if (other is None) == (db is None):
        raise OptionError(
            "give two runs, or one run and --db"
            + ("" if other is None else ": not both a second run and --db")
        )
    if db is None and earlier_hours is not None:
        raise OptionError("--earlier-hours needs --db")
    if not 0 <= hours < np.inf:
        raise OptionError(f"--hours must be 0 or more, got {hours}")
    if earlier_hours is not None and not (hours and 0 < earlier_hours < np.inf):
        raise OptionError("--earlier-hours must be more than 0, and needs --hours above 0")


def utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def between_runs(first: Artifacts, second: Artifacts) -> Found:
    """Drift from one run to another.

    To a run from its parent it is what that run's gate judged, with the parent's labels on both
    sides. Between other runs clusters are matched by their ids, which lineage keeps.

    Raises:
        ArtifactError: the runs are of different models, layouts or captures.
    """
    identities = identity_of(first.manifest), identity_of(second.manifest)
    if differing := [n for n in identities[0] if identities[0][n] != identities[1][n]]:
        name = differing[0]
        raise ArtifactError(
            f"{first.run_id} is of {name} {identities[0][name]}, {second.run_id} of "
            f"{identities[1][name]}: only runs of one model, layout and capture can be compared"
        )
    before, after = read_baseline(first), read_baseline(second)
    seed = int(second.manifest["parameters"].get("seed", 0))
    judged = second.manifest["quality"].get("drift")
    if second.manifest["parent_run"] == first.run_id and judged:
        clusters, matched = judged["clusters"], f"labelled by {first.run_id} in both"
    else:
        clusters, matched = by_ids(before, after, seed), "matched by cluster id"
    return Found(
        drift(before.zones, after.zones, ZONES, seed),
        clusters,
        f"run {first.run_id}",
        f"run {second.run_id}",
        matched if clusters else "no cluster is in both",
        {**labels_of(second), **labels_of(first)},
    )


def by_ids(before: Baseline, after: Baseline, seed: int) -> dict[str, Any] | None:
    """Drift of all clusters that either run has; None if they have none in common."""
    if not np.intersect1d(before.ids, after.ids).size:
        return None
    union = np.union1d(before.ids, after.ids).astype(np.int32)
    sides = [spread_over(side.clusters, side.ids, union) for side in (before, after)]
    return drift(sides[0], sides[1], [str(i) for i in (*union.tolist(), NOISE)], seed)


def of_store(
    artifacts: Artifacts, db: Path, hours: float, earlier_hours: float | None, end: datetime
) -> Found:
    """Drift from a run, or from an earlier window, to a window of a store.

    The run classifies the rows of both windows.

    Raises:
        ArtifactError, StoreError: the run or the store cannot be read.
        OptionError: a window has no row that the run can classify.
    """
    baseline = read_baseline(artifacts)
    classifier = Classifier(artifacts)
    start = end - timedelta(hours=hours) if hours else None
    own = {
        "model": artifacts.manifest["model"],
        "capture_id": classifier.capture_id,
        "layout": int(classifier.layout),
    }
    selection = Selection(start=start, end=end if hours else None, **own)
    zones, clusters, left_out = window_shares(baseline, classifier, db, selection)
    after, before = in_words(selection), f"run {artifacts.run_id}"
    if earlier_hours is not None:
        assert start is not None
        earlier = replace(selection, start=start - timedelta(hours=earlier_hours), end=start)
        *shares, also_left_out = window_shares(baseline, classifier, db, earlier)
        baseline = baseline._replace(zones=shares[0], clusters=shares[1])
        before, left_out = in_words(earlier), left_out + also_left_out
    found = baseline.against(zones, clusters)
    return Found(
        found["zones"],
        found["clusters"],
        before,
        f"{after} of {db}",
        f"labelled by {artifacts.run_id} in both",
        labels_of(artifacts),
        left_out,
    )


def window_shares(
    baseline: Baseline, classifier: Classifier, db: Path, selection: Selection
) -> tuple[Shares, Shares, int]:
    """Shares of zones and clusters of the selected rows, read and classified in chunks, and how
    many rows were left out."""
    window = baseline.window(np.inf)
    done = left_out = 0
    columns = ["request_id", "layout", "vector"]
    with (
        open_store(db, read_only=True) as store,
        shown_progress(f"classifying {db.name}", PROGRESS_ROWS) as display,
    ):
        for batch in store.scan(selection, columns=columns, batch_rows=CHUNK_ROWS):
            done += batch.num_rows
            of_batch = {"layout": batch.column("layout"), "vector": vectors(batch)}
            reasons = impossible_rows(of_batch).values()
            possible = ~np.logical_or.reduce([np.zeros(batch.num_rows, bool), *reasons])
            left_out += batch.num_rows - int(possible.sum())
            batch = batch.filter(pa.array(possible))
            found = classifier.classify(vectors(batch))
            cluster = baseline.cluster_index(found.cluster_id)
            window.add(batch.column("request_id"), found.zone, cluster, now=float(done))
            display.show(done, f"{done:,} rows")
        if not done:
            others = store.groups(replace(selection, model=None, layout=None, capture_id=None))
            raise OptionError(
                f"{db} has no row of {selection.model} (capture {selection.capture_id}) in the "
                f"{in_words(selection)}: "
                + (
                    f"its rows are of {others[0].model} (capture {others[0].capture_id}); choose a "
                    "run of that capture"
                    if others
                    else "choose --hours and --now"
                )
            )
    return *window.shares(now=float(done)), left_out


def in_words(selection: Selection) -> str:
    if selection.start is None or selection.end is None:
        return "window of all rows"
    ends = (f"{moment:%Y-%m-%dT%H:%M:%SZ}" for moment in (selection.start, selection.end))
    return f"window {' to '.join(ends)}"


def labels_of(artifacts: Artifacts) -> dict[str, str]:
    """Names of the clusters of a run, by id."""
    columns = artifacts.table("clusters", ["cluster_id", "label"]).to_pydict()
    return dict(zip(map(str, columns["cluster_id"]), columns["label"], strict=True))


def show(found: Found, past: list[str], limit: float | None) -> None:
    """Print drift for a person: a line for each kind, then the categories by how far they moved."""
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False, markup=False, soft_wrap=True)
    screen.print(f"from {found.before} to {found.after}")
    if found.left_out:
        screen.print(f"rows left out, which no attention row can have: {found.left_out:,}")
    for kind in KINDS:
        figures = getattr(found, kind)
        if figures is None:
            screen.print(f"{kind}: not measured, {found.matched}")
            continue
        how = f", {found.matched}" if kind == "clusters" else ""
        verdict = f"; PAST the limit of {limit:g}" if kind in past else ""
        screen.print(
            f"{kind}: PSI {figures['psi']:.3f} ({figures['low']:.3f} to {figures['high']:.3f}), "
            f"by chance alone up to {figures['by_chance']:.3f}, {figures['requests']:,} "
            f"requests{how}{verdict}"
        )
        table = Table(kind[:-1], "before", "after", "change", "", box=None)
        pairs = [(n, figures["parent_shares"][n], share) for n, share in figures["shares"].items()]
        for name, was, share in sorted(pairs, key=lambda row: -abs(row[2] - row[1])):
            label = "no cluster" if name == str(NOISE) else found.labels.get(name, "")
            table.add_row(
                name, f"{was:.1%}", f"{share:.1%}", f"{100 * (share - was):+z.1f}",
                label if kind == "clusters" else "",
            )  # fmt: skip
        screen.print(table)
