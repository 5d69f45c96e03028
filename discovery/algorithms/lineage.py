"""Lineage: which cluster of tonight is which of the last run, though no row is in both.

Two cross-labellings are compared. `forward` are this run's rows as the parent's landmarks label
them, `backward` are the parent's rows (its references) as this run's landmarks label them. A
cluster that was born beside an old one has rows that the parent takes for the old one's, but none
of the old one's rows are in it; one that died is the other way round. So only what both see is
common:

    common[i, j] = min(forward[i, j], backward[i, j])

Child i and parent j are linked when enough of the smaller one is common. Ids then follow DESIGN.md
section 5: of a split the largest child keeps the id, of a merge the largest parent's id survives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Two clusters are linked when more than this share of the smaller is common to both. In planted
# nights (benchmarks/nights.py, ten seeds) it is 0.42 to 1 of those that are one behaviour, and
# below 0.08 of those that are not; two that meet halfway between their old places have the least.
LINKED = 0.2
# Events of the parent's clusters whose id is gone; the others are of this run's.
GONE = ("died", "absorbed")
Event = dict[str, Any]


class Match(NamedTuple):
    """c clusters of this run against p of the parent's.

    common float64[c, p], shares of all rows; linked bool[c, p]; heir_of int64[c], the parent whose
    id each cluster keeps, -1 for a fresh id.
    """

    common: NDArray[np.float64]
    linked: NDArray[np.bool_]
    heir_of: NDArray[np.int64]


def match(
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    shares: NDArray[np.float64],
    parent_shares: NDArray[np.float64],
) -> Match:
    """Links between the clusters of two runs, and who keeps whose id.

    Args:
        forward: float64[c, p], share of this run's rows that are in cluster i and that the parent's
            landmarks label j.
        backward: float64[c, p], share of the parent's rows that are in its cluster j and that this
            run's landmarks label i.
        shares: float64[c], share of this run's rows in each cluster.
        parent_shares: float64[p], the same of the parent's.
    """
    common = np.minimum(forward, backward)
    # A behaviour may have become commoner or rarer, so either one's own share will do.
    smaller = np.minimum(shares[:, None], parent_shares[None])
    linked = common > LINKED * smaller
    heir_of = np.full(len(shares), -1, np.int64)
    # The largest parent chooses first, and takes the child with most of its rows tonight: a merge
    # then leaves the smaller parent without one, and a split the smaller part without an id.
    for parent in np.argsort(-parent_shares, kind="stable"):
        free = np.flatnonzero(linked[:, parent] & (heir_of < 0))
        if len(free):
            heir_of[free[np.argmax(forward[free, parent])]] = parent
    return Match(common, linked, heir_of)


def cluster_ids(found: Match, parent_ids: NDArray[np.int32], first_fresh: int) -> NDArray[np.int32]:
    """Ids of the clusters, int32[c]: an heir's is its parent's, the others' are fresh in order."""
    fresh = found.heir_of < 0
    ids = np.empty(len(fresh), np.int32)
    ids[~fresh] = parent_ids[found.heir_of[~fresh]]
    ids[fresh] = first_fresh + np.arange(int(fresh.sum()), dtype=np.int32)
    return ids


def events(found: Match, ids: NDArray[np.int32], parent_ids: NDArray[np.int32]) -> list[Event]:
    """What became of every cluster of both runs: one event for each of this run's (kept, merged,
    split, born), and one for each id of the parent's that is gone (died, absorbed)."""
    told: list[Event] = []
    for index, cluster in enumerate(ids.tolist()):
        own = np.flatnonzero(found.linked[index])
        own = own[np.argsort(-found.common[index, own], kind="stable")]
        parents = parent_ids[own].tolist()
        if not parents:
            told.append(event("born", cluster, [], []))
        elif found.heir_of[index] < 0:
            told.append(event("split", cluster, parents, []))
        elif len(absorbed := gone_into(found, index)) == 0:
            told.append(event("kept", cluster, [cluster], []))
        else:
            # Only those whose id ended here: one that went on elsewhere has merely lost rows.
            gone = parent_ids[absorbed].tolist()
            told.append(event("merged", cluster, [cluster, *gone], []))
    for index, parent in enumerate(parent_ids.tolist()):
        if (found.heir_of == index).any():
            continue
        if found.linked[:, index].any():
            told.append(event("absorbed", parent, [], [int(ids[largest_part(found, index)])]))
        else:
            told.append(event("died", parent, [], []))
    return told


def gone_into(found: Match, child: int) -> NDArray[np.int64]:
    """Parents that are in this child and whose id nobody has, the largest part first: int64[m]."""
    own = np.flatnonzero(found.linked[child])
    lost = ~np.isin(own, found.heir_of)
    # A parent in pieces without an heir counts where its largest piece is.
    there = [largest_part(found, int(parent)) == child for parent in own]
    own = own[lost & np.array(there, bool)]
    return own[np.argsort(-found.common[child, own], kind="stable")]


def largest_part(found: Match, parent: int) -> int:
    """The child with the largest part of a parent that has any."""
    children = np.flatnonzero(found.linked[:, parent])
    return int(children[np.argmax(found.common[children, parent])])


def event(kind: str, cluster: int, parents: list[int], children: list[int]) -> Event:
    return {"event": kind, "cluster_id": cluster, "parents": parents, "children": children}


def in_words(told: Event, labels: Mapping[int, str], before: Mapping[int, str]) -> str:
    """One sentence on an event.

    Args:
        labels: what each cluster of this run is called, by id.
        before: what each of the parent's was called.
    """

    def named(cluster: int, names: Mapping[int, str]) -> str:
        return f"{cluster} ({names[cluster]})"

    cluster, parents, children = told["cluster_id"], told["parents"], told["children"]
    match told["event"]:
        case "kept":
            return f"{named(cluster, labels)} went on"
        case "merged":
            others = " and ".join(named(parent, before) for parent in parents[1:])
            return f"{named(cluster, labels)} took in {others}"
        case "split":
            return f"{named(cluster, labels)} came off {named(parents[0], before)}"
        case "born":
            return f"{named(cluster, labels)} is new"
        case "absorbed":
            return f"{named(cluster, before)} is now part of {named(children[0], labels)}"
        case _:
            return f"{named(cluster, before)} is gone"
