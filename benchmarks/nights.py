"""Whether cluster ids survive from run to run, beside matching by nearest centroid.

    python benchmarks/nights.py [--seeds 20] [--nights 14] [--rows 10000] [--json PATH]

Rows are drawn by tests/nights.py. For every seed two nights go through the job one after the other
into one output folder: everything drifts a little, one behaviour dies, one is born, one splits and
two merge. Then a fortnight, in which nothing happens but drift. A cluster stands for the behaviour
that most of its rows are of, so that the true answer is known for every id: a behaviour that went
on keeps its id, the larger part of a split does, the larger parent of a merge does, what is new has
an id that was never used, and what died is gone. The event in the manifest and its
parents must be the true ones too.

A behaviour that the clustering of a night did not find, or found as several clusters, or lumped
with another one, has no single id to judge: it is counted, named and left out. Exits 1 where an id
or event is wrong, or where more than 5% had to be left out.

The peer is what one would write: of all pairs of a cluster and one of the night before, the one
whose centroids are nearest takes the id first. It is judged by the same ids on the same runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# The repository is not an installed package, and `discovery` must be the package, not this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from discovery.artifacts.read import open_artifacts
from discovery.job import discover
from discovery.options import DiscoverOptions
from tests.nights import Night, Origin, fortnight, two_nights
from tests.planted import NOISE

MOST_LEFT_OUT = 0.05
# Least share of a cluster's rows, noise aside, that are of the behaviour it stands for.
PURE = 0.8
Ids = dict[int, int]


class Found(NamedTuple):
    """One night as the job found it: its clusters' ids and centroids float64[c, 20], the event of
    every id, the cluster of each behaviour that is one cluster, and the behaviours that are not."""

    ids: list[int]
    centroids: NDArray[np.float64]
    events: dict[int, dict[str, Any]]
    cluster_of: dict[int, int]
    unclear: list[int]
    run: dict[str, Any]


class Verdict(NamedTuple):
    """How many behaviours were judged, to how many the peer gave the right id, what was wrong with
    the job's (one line a behaviour), and what could not be judged."""

    judged: int
    peer_right: int
    wrong: list[str]
    left_out: list[str]


def run_night(night: Night, db: Path, output: Path) -> Found:
    """The job of one night, over the 24 hours before its end."""
    common.make_store(db, night.records)
    options = DiscoverOptions(db=str(db), output=str(output), hours=24)
    manifest = discover(options, now=night.end)
    artifacts = open_artifacts(output / manifest["run_id"])
    clusters = artifacts.table("clusters")
    truth = dict(zip(keys(night.records), night.truth.tolist(), strict=True))
    members: dict[int, Counter[int]] = {}
    embedding = artifacts.table("embedding")
    if embedding.num_rows != len(truth):
        raise WrongAnswerError(f"run {manifest['run_id']} is of {embedding.num_rows} rows")
    for key, cluster in zip(
        keys(embedding), embedding.column("cluster_id").to_pylist(), strict=True
    ):
        if cluster != NOISE:
            members.setdefault(cluster, Counter())[truth[key]] += 1
    standing = {}
    for cluster, counted in members.items():
        identity, rows = counted.most_common(1)[0]
        # A cluster of two behaviours stands for neither.
        behaving = sum(count for who, count in counted.items() if who != NOISE)
        if identity == NOISE or rows >= PURE * behaving:
            standing[cluster] = identity
    often = Counter(standing.values())
    who = sorted({behaviour.identity for behaviour in night.behaviours})
    return Found(
        clusters.column("cluster_id").to_pylist(),
        np.array(clusters.column("centroid").to_pylist()),
        {event["cluster_id"]: event for event in manifest["lineage"]["events"]},
        {
            identity: cluster
            for cluster, identity in standing.items()
            if identity != NOISE and often[identity] == 1
        },
        [identity for identity in who if often[identity] != 1],
        {"run_id": manifest["run_id"], "gate": manifest["quality"]["gate"]["passed"],
         "seconds": sum(manifest["stage_seconds"].values())},
    )  # fmt: skip


def keys(table: Any) -> Iterable[tuple[str, int]]:
    return zip(
        table.column("request_id").to_pylist(), table.column("position").to_pylist(), strict=True
    )


def by_centroid(before: Found, after: Found, known: Ids, fresh: int) -> Ids:
    """The peer: the id that each cluster of the later night gets, by its id in the job's run.

    Args:
        known: the peer's ids of the night before, by the same.
        fresh: the first id that was never used.
    """
    apart = np.linalg.norm(after.centroids[:, None] - before.centroids[None], axis=2)
    given: Ids = {}
    taken: set[int] = set()
    for index in np.argsort(apart, axis=None, kind="stable").tolist():
        child, parent = divmod(index, len(before.ids))
        if after.ids[child] not in given and parent not in taken:
            given[after.ids[child]] = known[before.ids[parent]]
            taken.add(parent)
    for cluster in after.ids:
        if cluster not in given:
            given[cluster], fresh = fresh, fresh + 1
    return given


def judge(
    before: Found,
    after: Found,
    origins: dict[int, Origin],
    died: Sequence[int],
    peer_before: Ids,
    peer_after: Ids,
) -> Verdict:
    """What is right of the later night's ids and events, behaviour by behaviour."""
    unclear = {*before.unclear}
    used, peer_used = {*before.ids}, {*peer_before.values()}
    judged = peer_right = 0
    wrong, left_out = [], []
    for who, origin in origins.items():
        name = f"{who} ({origin.kind})"
        if who in after.unclear or unclear & {*origin.parents}:
            left_out.append(name)
            continue
        judged += 1
        cluster = after.cluster_of[who]
        parents = [before.cluster_of[parent] for parent in origin.parents]
        event = after.events[cluster]
        keeps = origin.kind in ("kept", "merged") or (origin.kind == "split" and origin.larger)
        kind = "kept" if origin.kind == "split" and origin.larger else origin.kind
        if keeps and cluster != parents[0]:
            wrong.append(f"{name}: id {cluster}, not {parents[0]}")
        elif not keeps and cluster in used:
            wrong.append(f"{name}: id {cluster} was used before")
        # A cluster of noise that went into it, or came off it, is not a behaviour.
        elif as_behaviours(event, before) != (kind, sorted(parents)):
            wrong.append(f"{name}: recorded as {event['event']} from {event['parents']}")
        elif any(not went_into(after, parent, cluster) for parent in parents[1:]):
            wrong.append(f"{name}: {parents[1:]} not recorded as absorbed")
        peer = peer_after[cluster]
        peer_right += peer == peer_before[parents[0]] if keeps else peer not in peer_used
    for who in died:
        if who in unclear:
            left_out.append(f"{who} (died)")
            continue
        judged += 1
        cluster = before.cluster_of[who]
        event = after.events.get(cluster, {"event": "nothing"})
        if cluster in after.ids or event["event"] != "died":
            wrong.append(f"{who} (died): id {cluster} recorded as {event['event']}")
        peer_right += peer_before[cluster] not in peer_after.values()
    return Verdict(judged, peer_right, wrong, left_out)


def as_behaviours(event: dict[str, Any], before: Found) -> tuple[str, list[int]]:
    """An event of the later night and its parents, less those parents that stand for noise or for
    a behaviour in pieces."""
    clear = {*before.cluster_of.values()}
    parents = sorted(parent for parent in event["parents"] if parent in clear)
    alone = event["event"] == "merged" and len(parents) == 1
    return "kept" if alone else event["event"], parents


def went_into(after: Found, parent: int, cluster: int) -> bool:
    event = after.events.get(parent)
    return event is not None and (event["event"], event["children"]) == ("absorbed", [cluster])


def judge_two_nights(seed: int, rows: int, folder: Path) -> tuple[Verdict, list[dict[str, Any]]]:
    planted = two_nights(seed, rows)
    db, output = folder / f"{seed}.db", folder / f"{seed}"
    before = run_night(planted.first, db, output)
    after = run_night(planted.second, db, output)
    own = {cluster: cluster for cluster in before.ids}
    peer = by_centroid(before, after, own, max(before.ids) + 1)
    verdict = judge(before, after, planted.origins, planted.died, own, peer)
    return verdict, [before.run, after.run]


def judge_fortnight(nights: int, rows: int, folder: Path) -> tuple[Verdict, list[dict[str, Any]]]:
    """Every id against that of the first night, so that one error counts on all nights after it."""
    db, output = folder / "fortnight.db", folder / "fortnight"
    runs = []
    total = Verdict(0, 0, [], [])
    first = before = None
    peer: Ids = {}
    fresh = 0
    for night in fortnight(0, nights, rows):
        after = run_night(night, db, output)
        runs.append(after.run)
        if first is None or before is None:
            first, peer = after, {cluster: cluster for cluster in after.ids}
            fresh = max(after.ids) + 1
        else:
            peer = by_centroid(before, after, peer, fresh)
            fresh = max(fresh, *(given + 1 for given in peer.values()))
            origins = {who: Origin("kept", (who,)) for who in first.cluster_of}
            own = {cluster: cluster for cluster in first.ids}
            found = judge(first, after, origins, (), own, peer)
            wrong = [f"{after.run['run_id']}: {what}" for what in found.wrong]
            left = [f"{after.run['run_id']}: {what}" for what in found.left_out]
            total = Verdict(
                total.judged + found.judged, total.peer_right + found.peer_right,
                [*total.wrong, *wrong], [*total.left_out, *left],
            )  # fmt: skip
        before = after
    return total, runs


def figures_of(verdict: Verdict, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "judged": verdict.judged,
        "right": verdict.judged - len(verdict.wrong),
        "peer_right": verdict.peer_right,
        "wrong": verdict.wrong,
        "left_out": verdict.left_out,
        "runs": runs,
    }


def line(figures: dict[str, Any]) -> str:
    said = (
        f"{figures['right']} of {figures['judged']} right, nearest centroid "
        f"{figures['peer_right']}, {sum(run['seconds'] for run in figures['runs']):.0f} s"
    )
    failed = [run["run_id"] for run in figures["runs"] if not run["gate"]]
    said += f", gate failed: {', '.join(failed)}" if failed else ""
    return "\n".join(
        [said, *(f"    WRONG {what}" for what in figures["wrong"]),
         *(f"    not one cluster: {what}" for what in figures["left_out"])]
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20, help="pairs of nights; 0: none")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--nights", type=int, default=14, help="of the long series; 0: none")
    parser.add_argument("--rows", type=int, default=10_000, help="of a night")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.rows < 4_000 or options.seeds < 0 or options.nights < 0 or options.nights == 1:
        parser.error("--rows must be 4000 or more, --nights 0 or from 2 on, --seeds 0 or more")
    if not options.seeds and not options.nights:
        parser.error("--seeds and --nights are both 0")
    began = time.perf_counter()
    by_seed: dict[str, dict[str, Any]] = {}
    series: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            found = judge_two_nights(seed, options.rows, Path(made))
            by_seed[str(seed)] = figures_of(*found)
            print(f"two nights, seed {seed}: {line(by_seed[str(seed)])}", flush=True)
        if options.nights:
            series = figures_of(*judge_fortnight(options.nights, options.rows, Path(made)))
            print(f"{options.nights} nights of drift alone: {line(series)}", flush=True)
    everything = [*by_seed.values(), *([series] if series else [])]
    total = {
        name: sum(figures[name] for figures in everything)
        for name in ("judged", "right", "peer_right")
    }
    left_out = sum(len(figures["left_out"]) for figures in everything)
    print(
        f"in all: {total['right']} of {total['judged']} ids and events right; by nearest centroid "
        f"{total['peer_right']}; {left_out} behaviours were not one cluster; "
        f"{time.perf_counter() - began:.0f} s"
    )
    if options.json:
        figures = {"rows": options.rows, "two_nights": by_seed, "fortnight": series,
                   "total": {**total, "left_out": left_out}}  # fmt: skip
        common.write_figures(options.json, figures)
    few = left_out <= MOST_LEFT_OUT * (left_out + total["judged"])
    return 0 if few and total["right"] == total["judged"] else 1


if __name__ == "__main__":
    sys.exit(main())
