"""What became of clusters from run to run, from manifests alone (DESIGN.md section 5).

A run's manifest names its parent and holds this run's events and those of the last runs before
it, so the story stays whole if the folders of a few runs in between are gone; older events are read
from older manifests. A cluster without an event kept its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

from capture_kernels.errors import ArtifactError
from discovery.artifacts.schema import Manifest, identity_of, was_served

from .folder import run_order

# Events of earlier runs that a manifest repeats: some weeks of ordinary ones.
HISTORY_EVENTS = 256
Event = dict[str, Any]


class Cluster(NamedTuple):
    """A cluster in one run: its label, and its share of the run's rows in [0, 1]."""

    label: str
    share: float


Clusters = Mapping[int, Cluster]


class Ancestry(NamedTuple):
    """The runs that a run descends from, oldest first, with itself last; those whose manifest is
    gone or cannot be read; and the events of all, as far as they are known, oldest first. Where
    runs are gone, there may have been more that nothing mentions."""

    runs: tuple[str, ...]
    gone: tuple[str, ...]
    events: tuple[Event, ...]


class Descent(NamedTuple):
    """The composition of the events of several runs.

    origins: by cluster after them, those before them that its rows were in, largest parent first.
    through: by cluster that is new since, the ids that it came off on the way, oldest first.
    since: by the same, the run that gave it its id.
    ended: by cluster before them whose id is gone, how it ended: run_id (the first run without it),
        event ("died" or "absorbed") and into.
    """

    origins: dict[int, tuple[int, ...]]
    through: dict[int, tuple[int, ...]]
    since: dict[int, str]
    ended: dict[int, dict[str, Any]]


def history(manifest: Manifest) -> list[Event]:
    """The events that a manifest holds, oldest first; empty in runs without lineage."""
    return list((manifest.get("lineage") or {}).get("history", []))


def history_to_keep(earlier: Sequence[Event], own: Sequence[Event]) -> list[Event]:
    """The history of a new manifest: the run's own events, after the newest of its parent's.

    The events of one run are kept or left out together, as they refer to one another.
    """
    kept = list(own)
    for _, events in groupby(reversed(earlier), itemgetter("run_id")):
        same_run = [*events]
        if len(kept) - len(own) + len(same_run) > HISTORY_EVENTS:
            break
        kept = same_run[::-1] + kept
    return kept


def next_free_id(manifests: Iterable[Manifest]) -> int:
    """A cluster id above all that these runs mention."""
    lineages = [manifest.get("lineage") or {} for manifest in manifests]
    named = (lineage.get(name, []) for lineage in lineages for name in ("events", "history"))
    return max((event["cluster_id"] for events in named for event in events), default=-1) + 1


def ancestry(run_id: str, manifests: Mapping[str, Manifest]) -> Ancestry:
    """The runs that `run_id` descends from, as far as they are known.

    The chain of `parent_run` is followed. Past a run that is gone it continues with the newest
    earlier run that could have been a parent and whose history this run extends.

    Args:
        manifests: by run id, of every readable run; `run_id` is one of them. A parent is older
            than its child.
    """
    events = history(manifests[run_id])
    known, current = {run_id}, run_id
    while (parent := manifests[current]["parent_run"]) is not None:
        known.add(parent)
        if parent not in manifests:
            older = [
                other
                for other, manifest in manifests.items()
                if run_order(other) < run_order(parent)
                and was_served(manifest)
                and _is_extended(history(manifest), events)
            ]
            if not older:
                break
            parent = max(older, key=run_order)
            known.add(parent)
        events = [*_before(history(manifests[parent]), events), *events]
        current = parent
    in_time = tuple(sorted({*known, *(event["run_id"] for event in events)}, key=run_order))
    return Ancestry(in_time, tuple(run for run in in_time if run not in manifests), tuple(events))


def _before(older: list[Event], events: list[Event]) -> list[Event]:
    """Those of `older` from runs before the first of `events`."""
    if not events:
        return older
    return [e for e in older if run_order(e["run_id"]) < run_order(events[0]["run_id"])]


def _is_extended(older: list[Event], events: list[Event]) -> bool:
    """Whether `events` go on from `older`: they overlap and are the same there."""
    common = older[len(_before(older, events)) :]
    mark = itemgetter("run_id", "event", "cluster_id")
    return bool(common) and [*map(mark, common)] == [*map(mark, events[: len(common)])]


def check_descent(before: Manifest, after: Manifest, known: Ancestry) -> None:
    """Check that the later run descends from the earlier, so that they can be compared.

    Raises:
        ArtifactError: it does not; the message says why.
    """
    if before["run_id"] in known.runs:
        return
    a, b = (" / ".join(identity_of(manifest).values()) for manifest in (before, after))
    first, last = before["run_id"], after["run_id"]
    reason = f"{last} comes from {', '.join(known.runs[:-1][-3:])}"
    if a != b:
        reason = f"they are of {a} and of {b}"
    elif len(known.runs) == 1:
        reason = f"{last} is the first of its lineage"
    raise ArtifactError(f"{first} and {last} are not of one lineage: {reason}")


def descent(start: Iterable[int], steps: Sequence[Event]) -> Descent:
    """Compose events, which are in the order of the runs; `start` are the cluster ids before."""
    first = set(start)
    origins: dict[int, tuple[int, ...]] = {cluster: (cluster,) for cluster in first}
    through: dict[int, tuple[int, ...]] = {}
    since: dict[int, str] = {}
    ended: dict[int, dict[str, Any]] = {}
    for run_id, changes in groupby(steps, key=lambda event: event["run_id"]):
        before, way = dict(origins), dict(through)
        gone = []
        for event in changes:
            cluster, kind = event["cluster_id"], event["event"]
            if kind in ("died", "absorbed"):
                gone.append(event)
                continue
            parents = event["parents"]
            origins[cluster] = _union(before.get(parent, ()) for parent in parents)
            if cluster not in before:
                since[cluster] = run_id
                off = parents[0] if parents else None
                through[cluster] = () if off is None or off in first else (*way.get(off, ()), off)
        # Last, because an id may be absorbed by one that this same run gave out.
        for event in gone:
            cluster = event["cluster_id"]
            for child in event["children"]:
                origins[child] = _union((origins.get(child, ()), before.get(cluster, ())))
            if cluster in first:
                ended[cluster] = _ending(event)
        for event in gone:
            for known in (origins, through, since):
                known.pop(event["cluster_id"], None)
    return Descent(origins, through, since, ended)


def _ending(event: Event) -> dict[str, Any]:
    return {"run_id": event["run_id"], "event": event["event"], "into": event["children"]}


def _union(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """All members once, in order of first appearance."""
    return tuple(dict.fromkeys(member for group in groups for member in group))


def clusters_by_run(
    known: Ancestry, manifests: Mapping[str, Manifest], own: Mapping[str, Clusters]
) -> dict[str, Clusters]:
    """The clusters of each run of an ancestry, as far as they are known: `own`, those of the runs
    that are readable, and for the others those that a child recorded."""
    found = dict(own)
    for run_id in known.runs:
        manifest = manifests.get(run_id, {})
        parent, lineage = manifest.get("parent_run"), manifest.get("lineage") or {}
        if parent is not None and parent not in own:
            recorded = lineage.get("parent_clusters", [])
            found[parent] = {c["cluster_id"]: Cluster(c["label"], c["share"]) for c in recorded}
    return found


def compare(
    before: Manifest, after: Manifest, then: Clusters, now: Clusters, known: Ancestry
) -> dict[str, Any]:
    """What changed between two runs of one lineage.

    Args:
        before, after: manifests, the later run's descending from the earlier's; then, now: their
            clusters; known: the ancestry of the later run.

    Returns:
        from, to, deleted_between (run ids), rows, clusters, and lists of clusters: merged, split,
        born and died by falling share, and kept by falling change of the share. Shares are of a
        run's rows, in [0, 1]; `share_then` is the earlier run's. Also zones and quality, by name
        with then and now.
    """
    index = known.runs.index(before["run_id"])
    later = known.runs[index + 1 :]
    found = descent(then, [event for event in known.events if event["run_id"] in later])
    lists: dict[str, list[dict[str, Any]]]
    lists = {name: [] for name in ("merged", "split", "born", "died", "kept")}
    for cluster, (label, share) in now.items():
        one: dict[str, Any] = {"cluster_id": cluster, "label": label, "share": share}
        parents = list(found.origins.get(cluster, ()))
        if cluster in then:
            one |= {"label_then": then[cluster].label, "share_then": then[cluster].share}
            others = [parent for parent in parents if parent != cluster]
            if others:
                one["parents"] = [cluster, *others]
            lists["merged" if others else "kept"].append(one)
        else:
            one |= {
                "run_id": found.since.get(cluster, after["run_id"]),
                "through": list(found.through.get(cluster, ())),
                "parents": parents,
            }
            lists["split" if parents else "born"].append(one)
    for cluster in then.keys() - now.keys():
        died = {"run_id": after["run_id"], "event": "died", "into": []}
        label, share = then[cluster]
        one = {"cluster_id": cluster, "label": label, "share_then": share}
        lives_on_in = [c for c in now if cluster in found.origins.get(c, ())]
        lists["died"].append({**one, **found.ended.get(cluster, died), "lives_on_in": lives_on_in})
    for name, clusters in lists.items():
        share_of = "share_then" if name == "died" else "share"
        clusters.sort(key=lambda c: (-c[share_of], c["cluster_id"]))
    lists["kept"].sort(key=lambda c: (-abs(c["share"] - c["share_then"]), c["cluster_id"]))
    return {
        "from": before["run_id"],
        "to": after["run_id"],
        "deleted_between": [run for run in later if run in known.gone],
        "rows": {"then": before["counts"]["rows"], "now": after["counts"]["rows"]},
        "clusters": {"then": len(then), "now": len(now)},
        **lists,
        "zones": _then_and_now(*(m["stages"]["zones"]["shares"] for m in (before, after))),
        "quality": _then_and_now(*(_figures(m["quality"]) for m in (before, after))),
    }


def _figures(quality: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a run's quality, and whether it passed its gate."""
    numbers = {n: value for n, value in quality.items() if type(value) in (int, float, NoneType)}
    return {"gate_passed": quality["gate"]["passed"], **numbers}


def _then_and_now(then: dict[str, Any], now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"then": then.get(name), "now": now.get(name)} for name in {**now, **then}}


def story(
    cluster: int, manifest: Manifest, known: Ancestry, seen: Mapping[str, Clusters]
) -> dict[str, Any] | None:
    """The life of a cluster id up to a run, or None if its lineage never had it.

    Args:
        manifest: of the run that the story ends with; known: its ancestry.
        seen: by run id, the clusters of the runs of the ancestry, as far as they are known.

    Returns:
        cluster_id, run_id, alive; born (run_id, event, parents), where the event is "seen" if only
        later runs are known; ended (run_id, event, into) or None; runs: run_id, share and label
        for every run that is known to have had it, None where that run is gone; labels, each with
        the run it begins with; absorbed and came_off: run_id and cluster_ids; thinned: run_id and
        lost, the share of it that was gone; deleted_runs: those of runs that are gone.
    """
    own = [event for event in known.events if event["cluster_id"] == cluster]
    births = [event for event in own if event["event"] in ("born", "split")]
    if not births:
        # Its birth is older than what is known.
        named = {event["run_id"] for event in own}
        first = (run for run in known.runs if run in named or cluster in seen.get(run, {}))
        births = [{"run_id": run, "event": "seen", "parents": []} for run in first]
    if not births:
        return None
    birth = {name: births[0][name] for name in ("run_id", "event", "parents")}
    ending = next((event for event in own if event["event"] in ("died", "absorbed")), None)
    recorded = {event["run_id"]: str(event["label"]) for event in reversed(own)}
    begin = known.runs.index(birth["run_id"])
    end = known.runs.index(ending["run_id"]) if ending else len(known.runs)
    runs: list[dict[str, Any]] = []
    for run_id in known.runs[begin:end]:
        there = seen.get(run_id, {}).get(cluster)
        label = there.label if there else recorded.get(run_id)
        runs.append({"run_id": run_id, "share": there.share if there else None, "label": label})
    labelled = groupby((run for run in runs if run["label"] is not None), itemgetter("label"))
    came_off = [e for e in known.events if e["event"] == "split" and cluster in e["parents"]]
    return {
        "cluster_id": cluster,
        "run_id": manifest["run_id"],
        "alive": ending is None,
        "born": birth,
        "ended": ending and _ending(ending),
        "runs": runs,
        "labels": [{"label": label, "since": next(same)["run_id"]} for label, same in labelled],
        "absorbed": [
            {"run_id": e["run_id"], "cluster_ids": [p for p in e["parents"] if p != cluster]}
            for e in own
            if e["event"] == "merged"
        ],
        "came_off": [
            {"run_id": run_id, "cluster_ids": [e["cluster_id"] for e in group]}
            for run_id, group in groupby(came_off, itemgetter("run_id"))
        ],
        "thinned": [
            {"run_id": e["run_id"], "lost": e["lost"]} for e in own if e["event"] == "thinned"
        ],
        "deleted_runs": [run["run_id"] for run in runs if run["run_id"] in known.gone],
    }
