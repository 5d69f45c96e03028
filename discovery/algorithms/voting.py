"""A cluster by the vote of the nearest fitted rows, for rows outside the fit sample."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Floats, Int32s, Mask, array_module, dots
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.schema import NOISE

# Weight of the voters' mean, beside the nearest voter, in a query's map coordinates.
TO_MEAN = 0.1


class Votes(NamedTuple):
    """For m queries: memberships, and map coordinates float32[m, 2], on the neighbours' device."""

    members: Memberships
    coordinates: Floats


class Elected(NamedTuple):
    """The clusters of m queries by their k neighbours: label int32[m]; weights float32[m, k], of
    the neighbours, and agree bool[m, k], which of them are of that cluster."""

    label: Int32s
    weights: Floats
    agree: Mask


def vote(distances: Floats, voters: Memberships, coordinates: Floats) -> Votes:
    """The cluster of each query by its k neighbours, as `memberships_by_vote`, and its place.

    Only voters of the winner place the query on the map, for a mean over several clusters would lie
    in the void between them: at the nearest of them, moved a little towards their mean, so that
    queries do not coincide. The mean alone blurs the map (100,000 planted rows, 25,000 of them
    fitted: trustworthiness 0.988 instead of 0.991).

    Args:
        distances: float32[m, k], ascending; voters: memberships of each neighbour, arrays [m, k];
            coordinates: float32[m, k, 2], their places on the map.
    """
    found = elected(distances, voters.label)
    winning = found.weights * found.agree
    total = winning.sum(axis=1)
    mean = dots(coordinates.swapaxes(1, 2), winning[:, None]) / total[:, None]
    rows = array_module(distances).arange(len(distances))
    nearest = coordinates[rows, found.agree.argmax(axis=1)]
    moved = (1.0 - TO_MEAN) * nearest + TO_MEAN * mean
    return Votes(averaged(found.weights, voters, found.label), moved.astype(np.float32))


def memberships_by_vote(distances: Floats, voters: Memberships) -> Memberships:
    """The cluster with the most weight among each query's k neighbours, ties to the nearer. The
    query belongs to it, and to a second one, as far as its neighbours do on average.

    Args:
        distances, voters: as of `vote`.
    """
    found = elected(distances, voters.label)
    return averaged(found.weights, voters, found.label)


def elected(distances: Floats, labels: Int32s) -> Elected:
    """A neighbour weighs 1 / (its distance + the nearest one's): an exact match outweighs far ones,
    and equally far ones weigh the same.

    Args:
        distances: float32[m, k], ascending; labels: int32[m, k].
    """
    weights = 1.0 / (distances + distances[:, :1] + 1e-6)
    # agree[q, i, j]: neighbours i and j of query q are of one cluster
    agree = labels[:, :, None] == labels[:, None, :]
    support = dots(agree.astype(np.float32), weights[:, None])
    winner = support.argmax(axis=1)
    rows = array_module(distances).arange(len(labels))
    return Elected(labels[rows, winner], weights, agree[rows, winner])


def averaged(weights: Floats, voters: Memberships, label: Int32s) -> Memberships:
    """How far each query belongs to its cluster and to the likeliest other: the weighted mean of
    its voters. One that is noise belongs nowhere.

    Args:
        weights: float32[m, k]; label: int32[m], the cluster of each query.
    """
    xp = array_module(weights)
    share = weights / weights.sum(axis=1)[:, None]
    cluster = xp.concatenate([voters.label, voters.second], axis=1)
    belongs = xp.concatenate(
        [share * voters.probability, share * voters.second_probability], axis=1
    )
    inside, own = label != NOISE, cluster == label[:, None]
    probability = (belongs * own).sum(axis=1) * inside
    other = belongs * (~own & (cluster != NOISE) & inside[:, None])
    total = dots((cluster[:, :, None] == cluster[:, None, :]).astype(np.float32), other[:, None])
    most = total.argmax(axis=1)
    rows = xp.arange(len(label))
    second_probability = total[rows, most]
    second = xp.where(second_probability > 0, cluster[rows, most], NOISE)
    return Memberships(
        label,
        probability.astype(np.float32),
        second.astype(np.int32),
        second_probability.astype(np.float32),
    )
