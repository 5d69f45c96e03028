"""Lineage: which cluster of this run is which of the parent's, though the runs share no row.

Two cross-labellings are compared. `forward` are this run's rows as the parent's prototypes label
them, `backward` are the parent's rows (its references) as this run's prototypes label them. A
cluster that was born beside an old one has rows that the parent takes for the old one's, but none
of the old one's rows are in it; for one that died it is the other way round. So only what both see
is common:

    common[i, j] = min(forward[i, j], backward[i, j])

Child i and parent j are linked when enough of the smaller one is common. Ids then follow DESIGN.md
section 5: of a split the largest child keeps the id, of a merge the largest parent's id survives.
What the clustering went on with, or found to be new, is known before and not asked again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Int32s, Ints, Mask

# Two clusters are linked when more than this share of the smaller is common to both. In planted
# runs (benchmarks/nights.py, ten seeds) it is 0.42 to 1 for clusters of one behaviour, and below
# 0.08 for others; two that meet halfway between their old positions have the least.
LINKED = 0.2
# Clusters that are cut otherwise may be chance where one of them is less stable than this, and any
# event where the rows of one are worth fewer requests than that.
STABLE, LEAST_REQUESTS = 0.7, 3.0
Event = dict[str, Any]


class Match(NamedTuple):
    """c clusters of this run against p of the parent's.

    common float64[c, p], shares of all rows; linked bool[c, p]; heir_of int64[c], the parent whose
    id each cluster keeps, -1 for a fresh id.
    """

    common: Doubles
    linked: Mask
    heir_of: Ints


def match(
    forward: Doubles,
    backward: Doubles,
    shares: Doubles,
    parent_shares: Doubles,
    heir_of: Int32s,
    new: Mask,
) -> Match:
    """Links between the clusters of two runs, and which cluster inherits which id.

    Args:
        forward: float64[c, p], share of this run's rows that are in cluster i and that the parent's
            prototypes label j.
        backward: float64[c, p], share of the parent's rows that are in its cluster j and that this
            run's prototypes label i.
        shares: float64[c], share of this run's rows in each cluster.
        parent_shares: float64[p], the same of the parent's.
        heir_of, new: int32[c] and bool[c], what the clustering says, as of `Clusters`.
    """
    common = np.minimum(forward, backward)
    # A behaviour may have become commoner or rarer, so either one's own share will do.
    smaller = np.minimum(shares[:, None], parent_shares[None])
    linked = common > LINKED * smaller
    linked[new] = False
    heirs = heir_of.astype(np.int64)
    goes_on = np.flatnonzero(heir_of >= 0)
    linked[goes_on, heir_of[goes_on]] = True
    # The largest parent chooses first, and takes the child with most of its rows in this run: a
    # merge then leaves the smaller parent without an heir, and a split the smaller child without
    # an id.
    for parent in np.argsort(-parent_shares, kind="stable"):
        free = np.flatnonzero(linked[:, parent] & (heirs < 0))
        if len(free) and parent not in heir_of:
            heirs[free[np.argmax(forward[free, parent])]] = parent
    return Match(common, linked, heirs)


def cluster_ids(found: Match, parent_ids: Int32s, first_fresh: int) -> Int32s:
    """Ids of the clusters, int32[c]: an heir's is its parent's, the others count up from
    `first_fresh`."""
    fresh = found.heir_of < 0
    ids = (first_fresh - 1 + np.cumsum(fresh)).astype(np.int32)
    ids[~fresh] = parent_ids[found.heir_of[~fresh]]
    return ids


def events(found: Match, ids: Int32s, parent_ids: Int32s) -> list[Event]:
    """What became of every cluster of both runs.

    Args:
        ids: int32[c], of this run's clusters; parent_ids: int32[p].

    Returns:
        event, cluster_id, parents and children: one for each cluster of this run (kept, merged,
        split, born), then one for each of the parent's ids that is gone (died, absorbed).
    """
    happened: list[Event] = []
    overlap = np.where(found.linked, found.common, -1.0)
    # Of each parent that is linked to any, the child with the largest overlap.
    largest_child = overlap.argmax(axis=0) if len(ids) else np.empty(0, np.int64)
    ended = ~np.isin(np.arange(len(parent_ids)), found.heir_of)
    for index, cluster in enumerate(ids.tolist()):
        own = np.argsort(-overlap[index], kind="stable")[: found.linked[index].sum()]
        parents = parent_ids[own].tolist()
        # Only those whose id ended here: one that went on elsewhere has merely lost rows.
        absorbed = parent_ids[own[ended[own] & (largest_child[own] == index)]].tolist()
        if found.heir_of[index] < 0:
            kind = "split" if parents else "born"
        else:
            kind, parents = "merged" if absorbed else "kept", [cluster, *absorbed]
        happened.append({"event": kind, "cluster_id": cluster, "parents": parents, "children": []})
    for index in np.flatnonzero(ended).tolist():
        parent, linked = int(parent_ids[index]), found.linked[:, index].any()
        into = [int(ids[largest_child[index]])] if linked else []
        kind = "absorbed" if linked else "died"
        happened.append({"event": kind, "cluster_id": parent, "parents": [], "children": into})
    return happened


def thinned(happened: list[Event], parent_ids: Int32s, lost: Doubles) -> list[Event]:
    """The events, where a cluster that went on is thinned if a part of it is gone: with `lost`, the
    share of its rows in the parent run that this was.

    Args:
        parent_ids: int32[p]; lost: float64[p], 0 where no part is gone.
    """
    parts = dict(zip(parent_ids.tolist(), lost.tolist(), strict=True))
    return [
        {**event, "event": "thinned", "lost": round(parts[event["cluster_id"]], 4)}
        if event["event"] == "kept" and parts[event["cluster_id"]] > 0
        else event
        for event in happened
    ]


class Evidence(NamedTuple):
    """Of the clusters `ids` int32[c] of a run: stability float64[c], NaN where it is not known, and
    requests float64[c], how many equal ones their rows are worth."""

    ids: Int32s
    stability: Doubles
    requests: Doubles

    def by_id(self) -> dict[int, tuple[float, float]]:
        """Stability and requests of each cluster."""
        pairs = zip(self.stability.tolist(), self.requests.tolist(), strict=True)
        return dict(zip(self.ids.tolist(), pairs, strict=True))


def with_evidence(happened: list[Event], now: Evidence, before: Evidence) -> list[Event]:
    """The events, each with what it rests on, and whether it may be what these requests happened to
    be: `perhaps_chance`, never of the first run.

    stability is that of the least stable cluster that it is about, None where one is not known, and
    requests the fewest that one of them is worth. They are the cluster itself, what it took in or
    is part of now. What another came off stays what it is.
    """
    ours, theirs = now.by_id(), before.by_id()
    found = []
    for event in happened:
        cluster, kind = event["cluster_id"], event["event"]
        about = [theirs[cluster] if kind in ("died", "absorbed") else ours[cluster]]
        about += [theirs[parent] for parent in event["parents"][1:] if kind == "merged"]
        about += [ours[child] for child in event["children"]]
        stability, requests = np.min(about, axis=0).tolist()
        known = None if np.isnan(stability) else round(stability, 4)
        # Rows come and go however a cluster is cut.
        cut = kind not in ("kept", "thinned", "born", "died") and stability < STABLE
        rare = kind != "kept" and requests < LEAST_REQUESTS
        chance = bool(len(before.ids) and (cut or rare))
        found.append(
            {**event, "stability": known, "requests": round(requests, 1), "perhaps_chance": chance}
        )
    return found
