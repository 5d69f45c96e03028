"""Points in the plane on a GPU: exact neighbours, and the spanning tree that HDBSCAN* is made of.

The kernels are in spanning_tree.cu, which also says how they work; this file orders their launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import array_module

# As in spanning_tree.cu.
LEAF, NONE = 8, -1
HILBERT_CELLS = 2**31 - 1

# launch(k, name, threads, *arguments): run a kernel, compiled for k neighbours, on so many threads.
# Arguments are device arrays and NumPy scalars.
Launch = Callable[..., None]


class PlaneTree(NamedTuple):
    """Points float32[n, 2] in the order of a Hilbert curve; order int64[n], their numbers as they
    were given; boxes float32[2 leaves, 4] of the tree over them."""

    points: Any
    order: Any
    boxes: Any

    @property
    def leaves(self) -> int:
        return len(self.boxes) // 2


class SpanningTree(NamedTuple):
    """Edges by rising weight: low, high int32[n - 1], places in `order`, low < high; weight
    float64[n - 1], mutual reachability distances. order int64[n]: the number of the point at each
    place."""

    low: Any
    high: Any
    weight: Any
    order: Any


def plane_tree(points: Any, launch: Launch) -> PlaneTree:
    """The tree over points float32[n, 2], n > 0, finite."""
    xp = array_module(points)
    n = len(points)
    low = points.min(axis=0).astype(np.float64)
    widest = float((points.max(axis=0) - low).max())
    code = xp.empty(n, np.uint64)
    scale = HILBERT_CELLS / widest if widest > 0 else 0.0
    low_x, low_y = (np.float64(float(value)) for value in low)
    launch(1, "hilbert", n, points, low_x, low_y, np.float64(scale), code, np.int64(n))
    order = xp.argsort(code, kind="stable")
    points = xp.ascontiguousarray(points[order])
    leaves = 1 << max(0, -(-n // LEAF) - 1).bit_length()
    boxes = xp.empty((2 * leaves, 4), np.float32)
    launch(1, "leaf_boxes", leaves, points, boxes, np.int64(n), np.int64(leaves))
    join_levels(launch, "join_boxes", boxes)
    return PlaneTree(points, order, boxes)


def join_levels(launch: Launch, kernel: str, nodes: Any) -> None:
    """Fill the inner nodes of a tree from its leaves, level by level."""
    count = len(nodes) // 4
    while count:
        launch(1, kernel, count, nodes, np.int64(count))
        count //= 2


def nearest(tree: PlaneTree, queries: Any, k: int, launch: Launch) -> tuple[Any, Any]:
    """The k nearest points of each query, exactly: distances float32[m, k], ascending, and
    int64[m, k], the points' numbers as they were given.

    Args:
        queries: float32[m, 2].
        k: at most the number of points.
    """
    squared, place = _nearest(tree, queries, k, launch)
    return array_module(queries).sqrt(squared), tree.order[place]


def _nearest(tree: PlaneTree, queries: Any, k: int, launch: Launch) -> tuple[Any, Any]:
    """Squared distances float32[m, k] and places in the tree's order int32[m, k]."""
    xp = array_module(queries)
    m = len(queries)
    squared = xp.empty((m, k), np.float32)
    place = xp.empty((m, k), np.int32)
    if m:
        launch(k, "nearest", m, tree.points, tree.boxes, queries, squared, place,
               np.int64(len(tree.points)), np.int64(tree.leaves), np.int64(m))  # fmt: skip
    return squared, place


def spanning_tree(points: Any, min_samples: int, launch: Launch) -> SpanningTree:
    """The minimum spanning tree under mutual reachability distance, the same every time.

    Args:
        points: float32[n, 2], n > 1, finite.
        min_samples: a point's core distance is that to its min_samples-th other point; less than n.
    """
    xp = array_module(points)
    tree = plane_tree(points, launch)
    points, n = tree.points, len(points)
    count = np.int64(n)
    core = xp.empty(n, np.float32)
    # In slices: the lists of neighbours are the largest arrays there are, and only the last counts.
    step = max(1, (1 << 28) // (min_samples + 1))
    for start in range(0, n, step):
        squared, _ = _nearest(tree, points[start : start + step], min_samples + 1, launch)
        core[start : start + step] = squared[:, -1]
    leaves = np.int64(tree.leaves)
    least = xp.empty(2 * tree.leaves, np.float32)
    launch(1, "leaf_cores", tree.leaves, core, least, count, leaves)
    join_levels(launch, "join_cores", least)

    # Points on one another have one core distance, which is the least that any edge of theirs can
    # weigh: they are joined at once, instead of each looking at all of the others.
    first = xp.ones(n, bool)
    first[1:] = (points[1:] != points[:-1]).any(axis=1)
    starts = xp.flatnonzero(first).astype(np.int32)
    component = starts[xp.cumsum(first) - 1]
    again = xp.flatnonzero(~first)
    edges = xp.empty(n - 1, np.uint64)
    weights = xp.empty(n - 1, np.float32)
    done = len(again)
    edges[:done] = (again.astype(np.uint64) - 1) << np.uint64(32) | again.astype(np.uint64)
    weights[:done] = core[again]

    weight = xp.zeros(n, np.float32)
    other = xp.full(n, NONE, np.int32)
    owner = xp.empty(2 * tree.leaves, np.int32)
    joined = xp.full(1, done, np.uint32)
    while done < n - 1:
        launch(1, "leaf_owners", tree.leaves, component, owner, count, leaves)
        join_levels(launch, "join_owners", owner)
        best = xp.full(n, np.float32(np.inf).view(np.uint32), np.uint32)
        pair = xp.full(n, np.iinfo(np.uint64).max, np.uint64)
        parent = xp.arange(n, dtype=np.int32)
        launch(1, "recall", n, component, weight, other, best, count)
        launch(1, "search", n, points, core, tree.boxes, least, component, owner, weight, other,
               best, count, leaves)  # fmt: skip
        launch(1, "choose", n, component, weight, other, best, pair, count)
        launch(1, "join", n, component, best, pair, parent, edges, weights, joined, count)
        for _ in range((n - done).bit_length()):
            launch(1, "shorten", n, component, parent, count)
        launch(1, "relabel", n, component, parent, count)
        before, done = done, int(joined[0])
        if done == before:
            raise ArithmeticError("a round joined nothing: the points are not finite")
    by_ends = xp.argsort(edges, kind="stable")
    edges, weights = edges[by_ends], weights[by_ends]
    rising = xp.argsort(weights, kind="stable")
    edges, weights = edges[rising], weights[rising]
    return SpanningTree(
        (edges >> np.uint64(32)).astype(np.int32),
        (edges & np.uint64(0xFFFFFFFF)).astype(np.int32),
        xp.sqrt(weights.astype(np.float64)),
        tree.order,
    )
