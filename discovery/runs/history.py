"""What became of clusters over the nights, told from manifests alone (DESIGN.md section 5).

A run's manifest names its parent and holds every event of its own night and of all nights before
it, so the story stays whole when the folders of runs in between are gone. An event that is not
there is one that changed nothing: the cluster kept its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from discovery.artifacts.schema import Manifest, was_served

from .folder import run_order

Event = dict[str, Any]


class Cluster(NamedTuple):
    """A cluster on one night: its label, and its share of the run's rows in [0, 1]."""

    label: str
    share: float


Clusters = Mapping[int, Cluster]


class Ancestry(NamedTuple):
    """The runs that a run descends from, oldest first, itself the last; those of them whose folder
    is gone. Where some are gone, there may have been more that nothing tells of."""

    runs: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True)
class Ending:
    """How a cluster id ended: the run that no longer has it, "died" or "absorbed", into what."""

    run_id: str
    event: str
    into: tuple[int, ...]


@dataclass(frozen=True)
class Descent:
    """What the events of several nights amount to.

    origins: by cluster of the last night, the clusters of the first that its rows were in, in the
        order of its parents (largest first); none where it was born since.
    through: by cluster of the last night that is not one of the first, the ids that it came off on
        the way, oldest first.
    since: by the same, the run that gave it its id.
    ended: by cluster of the first night whose id is gone, how that came.
    """

    origins: dict[int, tuple[int, ...]]
    through: dict[int, tuple[int, ...]]
    since: dict[int, str]
    ended: dict[int, Ending]


def history(manifest: Manifest) -> list[Event]:
    """Every event up to this run that changed an id, oldest first; none in runs without lineage."""
    lineage = manifest.get("lineage") or {}
    return list(lineage.get("history", []))


def ancestry(run_id: str, manifests: Mapping[str, Manifest]) -> Ancestry:
    """The runs that `run_id` descends from, as far as they are known.

    The chain of `parent_run` is followed. Where it leads to a run that is gone, it goes on with the
    newest run before that which could have been a parent and whose history this run continues.

    Args:
        manifests: by run id, of every run that is still there; `run_id` is one of them.
    """
    told = history(manifests[run_id])
    found, current = [run_id], run_id
    while (parent := manifests[current]["parent_run"]) is not None:
        found.append(parent)
        if parent not in manifests:
            older = [
                other
                for other, manifest in manifests.items()
                if run_order(other) < run_order(parent)
                and was_served(manifest)
                and _continues(told, history(manifest))
            ]
            if not older:
                break
            parent = max(older, key=run_order)
            found.append(parent)
        current = parent
    known = {*found, *(event["run_id"] for event in told)}
    in_time = tuple(sorted(known, key=run_order))
    return Ancestry(in_time, tuple(run for run in in_time if run not in manifests))


def _continues(later: Sequence[Event], earlier: Sequence[Event]) -> bool:
    """Whether one history begins with another, which must tell of something."""
    marks = [[(e["run_id"], e["event"], e["cluster_id"]) for e in h] for h in (later, earlier)]
    return bool(earlier) and marks[0][: len(earlier)] == marks[1]


def descent(start: Iterable[int], steps: Sequence[Event]) -> Descent:
    """Compose the events of several nights.

    Args:
        start: the cluster ids of the first night.
        steps: the events of the nights after it, in order.
    """
    first = set(start)
    origins: dict[int, tuple[int, ...]] = {cluster: (cluster,) for cluster in first}
    through: dict[int, tuple[int, ...]] = {}
    since: dict[int, str] = {}
    ended: dict[int, Ending] = {}
    for run_id, night in groupby(steps, key=lambda event: event["run_id"]):
        before, way = dict(origins), dict(through)
        gone = []
        for event in night:
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
        # Last, since an id may go into one that this same night gave out.
        for event in gone:
            cluster, into = event["cluster_id"], tuple(event["children"])
            for child in into:
                origins[child] = _union((origins.get(child, ()), before.get(cluster, ())))
            if cluster in first:
                ended[cluster] = Ending(run_id, event["event"], into)
        for event in gone:
            for known in (origins, through, since):
                known.pop(event["cluster_id"], None)
    return Descent(origins, through, since, ended)


def _union(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """All members once, in order of first appearance."""
    return tuple(dict.fromkeys(member for group in groups for member in group))


def clusters_by_run(
    known: Ancestry, manifests: Mapping[str, Manifest], own: Mapping[str, Clusters]
) -> dict[str, Clusters]:
    """The clusters of each run of an ancestry that can still be told: of a run that is gone, those
    that its child has noted of it.

    Args:
        own: by run id, the clusters of the runs that are there.
    """
    found: dict[str, Clusters] = {}
    for run_id in known.runs:
        manifest = manifests.get(run_id)
        if manifest is None:
            continue
        found[run_id] = own[run_id]
        parent = manifest["parent_run"]
        if parent in known.gone:
            noted = manifest["lineage"]["parent_clusters"]
            found[parent] = {c["cluster_id"]: Cluster(c["label"], c["share"]) for c in noted}
    return found


def compare(
    before: Manifest, after: Manifest, then: Clusters, now: Clusters, known: Ancestry
) -> dict[str, Any]:
    """What changed between two runs of one lineage.

    Args:
        before, after: the manifests of the earlier run and of the later, which descends from it.
        then, now: their clusters.
        known: the ancestry of the later run.

    Returns:
        from, to, deleted_between (run ids), rows, clusters, and lists of clusters, the largest
        first: merged, split, born, died, and kept by how much their share changed. Shares are of
        a run's rows, in [0, 1]; `share_then` is the earlier run's. Also zones and quality, each
        name with then and now.
    """
    place = known.runs.index(before["run_id"])
    later = set(known.runs[place + 1 :])
    found = descent(then, [event for event in history(after) if event["run_id"] in later])
    kept: list[dict[str, Any]] = []
    merged: list[dict[str, Any]] = []
    split: list[dict[str, Any]] = []
    born: list[dict[str, Any]] = []
    died: list[dict[str, Any]] = []
    for cluster, (label, share) in now.items():
        one: dict[str, Any] = {"cluster_id": cluster, "label": label, "share": share}
        parents = found.origins.get(cluster, ())
        if cluster in then:
            one |= {"label_then": then[cluster].label, "share_then": then[cluster].share}
            if others := [parent for parent in parents if parent != cluster]:
                merged.append({**one, "parents": [cluster, *others]})
            else:
                kept.append(one)
            continue
        one |= {
            "run_id": found.since.get(cluster, after["run_id"]),
            "through": list(found.through.get(cluster, ())),
        }
        (split if parents else born).append({**one, "parents": list(parents)})
    for cluster, (label, share) in then.items():
        if cluster in now:
            continue
        ending = found.ended.get(cluster, Ending(after["run_id"], "died", ()))
        died.append(
            {"cluster_id": cluster, "label": label, "share_then": share, "run_id": ending.run_id,
             "event": ending.event, "into": list(ending.into),
             "lives_on_in": [c for c in now if cluster in found.origins.get(c, ())]}
        )  # fmt: skip
    for group in (merged, split, born):
        group.sort(key=lambda one: (-one["share"], one["cluster_id"]))
    died.sort(key=lambda one: (-one["share_then"], one["cluster_id"]))
    kept.sort(key=lambda one: (-abs(one["share"] - one["share_then"]), one["cluster_id"]))
    return {
        "from": before["run_id"],
        "to": after["run_id"],
        "deleted_between": [run for run in known.runs[place + 1 :] if run in known.gone],
        "rows": {"then": before["counts"]["rows"], "now": after["counts"]["rows"]},
        "clusters": {"then": len(then), "now": len(now)},
        "merged": merged,
        "split": split,
        "born": born,
        "died": died,
        "kept": kept,
        "zones": _then_and_now(*(m["stages"]["zones"]["shares"] for m in (before, after))),
        "quality": _then_and_now(*(_figures(m["quality"]) for m in (before, after))),
    }


def _figures(quality: dict[str, Any]) -> dict[str, Any]:
    """What of a run's quality can be set beside another's: its numbers, and its gate's answer."""
    numbers = {
        name: value
        for name, value in quality.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    return {"gate_passed": quality["gate"]["passed"], **numbers}


def _then_and_now(then: dict[str, Any], now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"then": then.get(name), "now": now.get(name)} for name in {**now, **then}}


def story(
    cluster: int, manifest: Manifest, known: Ancestry, seen: Mapping[str, Clusters]
) -> dict[str, Any] | None:
    """The life of a cluster id up to a run, or None where its lineage never had it.

    Args:
        manifest: of the run that the story ends with.
        known: its ancestry.
        seen: by run id, the clusters of every run of it that can still be told.

    Returns:
        cluster_id, run_id, alive; born (run_id, event, parents); ended (run_id, event, into) or
        None; nights: run_id, share and label of every run that is known to have had it, None where
        that run is gone; labels with the run they begin with; absorbed and came_off: run_id and
        cluster_ids; deleted_runs: those of its nights whose folder is gone.
    """
    events = history(manifest)
    birth = _birth(cluster, events, known, seen)
    if birth is None:
        return None
    ending = next(
        (e for e in events if e["cluster_id"] == cluster and e["event"] in ("died", "absorbed")),
        None,
    )
    begin = known.runs.index(birth["run_id"])
    end = known.runs.index(ending["run_id"]) if ending else len(known.runs)
    nights: list[dict[str, Any]] = []
    for run_id in known.runs[begin:end]:
        there = seen.get(run_id, {}).get(cluster)
        nights.append(
            {"run_id": run_id, "share": there.share if there else None,
             "label": there.label if there else _noted_label(cluster, run_id, events)}
        )  # fmt: skip
    return {
        "cluster_id": cluster,
        "run_id": manifest["run_id"],
        "alive": ending is None,
        "born": birth,
        "ended": ending
        and {"run_id": ending["run_id"], "event": ending["event"], "into": ending["children"]},
        "nights": nights,
        "labels": list(_changes(nights)),
        "absorbed": [
            {"run_id": e["run_id"], "cluster_ids": [p for p in e["parents"] if p != cluster]}
            for e in events
            if e["event"] == "merged" and e["cluster_id"] == cluster
        ],
        "came_off": [
            {"run_id": run_id, "cluster_ids": [e["cluster_id"] for e in group]}
            for run_id, group in groupby(
                (e for e in events if e["event"] == "split" and cluster in e["parents"]),
                key=lambda e: e["run_id"],
            )
        ],
        "deleted_runs": [night["run_id"] for night in nights if night["run_id"] in known.gone],
    }


def _birth(
    cluster: int, events: Sequence[Event], known: Ancestry, seen: Mapping[str, Clusters]
) -> Event | None:
    """Where the id was given out; in a lineage that tells no events, where it is first seen."""
    for event in events:
        if event["cluster_id"] == cluster and event["event"] in ("born", "split"):
            return {name: event[name] for name in ("run_id", "event", "parents")}
    first = next((run for run in known.runs if cluster in seen.get(run, {})), None)
    return {"run_id": first, "event": "born", "parents": []} if first else None


def _noted_label(cluster: int, run_id: str, events: Sequence[Event]) -> str | None:
    """The label that an event of that run has kept."""
    own = (e for e in events if e["run_id"] == run_id and e["cluster_id"] == cluster)
    return next((str(e["label"]) for e in own), None)


def _changes(nights: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Each label with the first night that has it, until another takes its place."""
    last = None
    for night in nights:
        if night["label"] is not None and night["label"] != last:
            last = night["label"]
            yield {"label": last, "since": night["run_id"]}
