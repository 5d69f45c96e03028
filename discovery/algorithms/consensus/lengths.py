"""Rows of one request that do the same at twice the context: what keeps a behaviour in one piece.

A behaviour that looks at a share of its context looks elsewhere with each octave of it, and rows
show it as a chain of groups, each of an octave and each found again. Requests that grow through
these octaves say that it is one: where one group ends, the next begins, in the same requests.
A workload that has one length has no such requests, and nothing is said of it.
"""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints
from capture_kernels.fingerprint.vector import HIST_BINS

# A group that keeps this share of its links is worth as much as one that keeps all: links of
# requests that do many things lead astray. With 0.5 and 0.7 none of 13 planted data sets became
# worse (the half to develop on, seeds besides its own; mean ARI 0.79 to 0.83); with 1 four did, by
# 0.02 to 0.12. (Before `LEAST_COMPARED`, which was tried on four of them.)
ENOUGH = 0.7
# So many links for each row of a group count as kept, whatever there are. Of planted rows of
# requests that grow 0.2 to 0.3 a row were found; of such as decode at one length, or are of one
# octave, under 0.01, and those say little.
ASSUMED = 0.02
# Rows of a request and octave, at least, and of the next: of fewer even the nearest may do another
# thing. 17 rows a request, of 12 behaviours, made links that joined several of them.
LEAST_COMPARED = 5
# Rows of a request and octave that are compared with those of the next, which bounds their memory.
MOST_COMPARED = 512


def links_of(rows: Floats, requests: Ints, octaves: Ints) -> Ints:
    """Pairs of rows of a request, of an octave of context and of the next, each the nearest to the
    other among the request's rows there: int64[m, 2] (mutual nearest neighbours, Haghverdi et al.
    2018, within requests).

    Args:
        rows: float32[n, d]; requests, octaves: int64[n], of each.
    """
    key = requests * HIST_BINS + octaves
    order = np.argsort(key, kind="stable")
    group, first = np.unique(key[order], return_index=True)
    members = np.split(order, first[1:])
    enough = np.diff(np.append(first, len(key))) >= LEAST_COMPARED
    follows = (np.diff(group) == 1) & (group[1:] % HIST_BINS > 0) & enough[1:] & enough[:-1]
    found = [np.empty((0, 2), np.int64)]
    for at in np.flatnonzero(follows).tolist():
        lower, upper = (own[:: -(-len(own) // MOST_COMPARED)] for own in members[at : at + 2])
        # |x - p|^2 = |x|^2 + |p|^2 - 2 x.p, of a few dozen rows.
        apart = np.square(rows[lower]).sum(axis=1)[:, None] + np.square(rows[upper]).sum(axis=1)
        apart -= 2.0 * rows[lower] @ rows[upper].T
        up, down = apart.argmin(axis=1), apart.argmin(axis=0)
        mutual = np.flatnonzero(down[up] == np.arange(len(lower)))
        found.append(np.column_stack([lower[mutual], upper[up[mutual]]]))
    return np.concatenate(found)


def links_of_atoms(links: Ints, atom: Ints, atoms: int) -> Floats:
    """How many links each two atoms have, both ways: float32[a, a].

    Args:
        links: int64[m, 2], as of `links_of`; atom: int64[n], of each row; atoms: how many.
    """
    pair = atom[links[:, 0]] * atoms + atom[links[:, 1]]
    found = np.bincount(pair, minlength=atoms * atoms).reshape(atoms, atoms)
    return (found + found.T).astype(np.float32)


def kept_within(share: Floats, rows: Ints, linked: Floats) -> Doubles:
    """How far each group keeps its links: float64[g] in [0, 1]. 1 for one without links, and for
    one that keeps `ENOUGH` of them.

    Args:
        share: float32[g, a], of each atom's rows that are in each group; rows: int64[g], of each.
        linked: float32[a, a], as of `links_of_atoms`.
    """
    own = ((share @ linked) * share).sum(axis=1, dtype=np.float64)
    ends = (share @ linked.sum(axis=1)).astype(np.float64)
    assumed = ASSUMED * np.maximum(rows, 1)
    return np.minimum((own + assumed) / (ends + assumed) / ENOUGH, 1.0)
