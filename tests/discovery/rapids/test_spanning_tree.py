"""The kernels behind HDBSCAN on a GPU, run thread by thread on the host."""

from __future__ import annotations

import numpy as np
import pytest
from hdbscan import HDBSCAN
from host_kernels import COMPILER, HostLaunch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial import KDTree
from sklearn.metrics import adjusted_rand_score

from discovery.engines.rapids.hdbscan import clusters_of_tree
from discovery.engines.rapids.plane import SpanningTree, nearest, plane_tree, spanning_tree

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> HostLaunch:
    return HostLaunch(tmp_path_factory.mktemp("kernels"))


def blobs(n: int, seed: int = 0) -> NDArray[np.float32]:
    """A map as UMAP makes them: dense clumps of very different sizes, threads and dust."""
    rng = np.random.default_rng(seed)
    centre = rng.uniform(-12, 12, (9, 2))
    spread = rng.gamma(1.0, 0.4, 9)
    own = rng.integers(0, 9, n)
    points = centre[own] + rng.normal(size=(n, 2)) * spread[own, None]
    dust = rng.random(n) < 0.03
    points[dust] = rng.uniform(-15, 15, (int(dust.sum()), 2))
    thread = rng.random(n) < 0.05
    points[thread] = rng.uniform(-10, 10, int(thread.sum()))[:, None]
    return points.astype(np.float32)


def mutual_reachability(points: NDArray[np.float32], min_samples: int) -> NDArray[np.float64]:
    exact = points.astype(np.float64)
    apart = np.sqrt(((exact[:, None] - exact[None]) ** 2).sum(axis=2))
    core = np.sort(apart, axis=1)[:, min_samples]
    return np.maximum(apart, np.maximum(core[:, None], core[None]))


def weight_by_prim(distance: NDArray[np.float64]) -> float:
    """The weight of the minimum spanning tree of a full graph."""
    n = len(distance)
    inside = np.zeros(n, bool)
    near = np.full(n, np.inf)
    near[0] = total = 0.0
    for _ in range(n):
        at = int(np.where(inside, np.inf, near).argmin())
        total += near[at]
        inside[at] = True
        near = np.minimum(near, distance[at])
    return total


def components(tree: SpanningTree) -> int:
    """Components of the graph of a tree's edges."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(tree.order)
    graph = coo_array((np.ones(n - 1), (tree.low, tree.high)), shape=(n, n))
    return int(connected_components(graph, directed=False)[0])


@pytest.mark.parametrize("n", [2, 3, 7, 8, 9, 64, 65, 257, 1_009])
@pytest.mark.parametrize(
    "kind", ["blobs", "all alike", "half repeated", "a grid", "a line", "far apart"]
)
def test_the_tree_is_the_minimum_spanning_tree(launch, n, kind):
    points = blobs(n)
    if kind == "all alike":
        points[:] = points[0]
    elif kind == "half repeated":
        points[n // 2 :] = points[: n - n // 2]
    elif kind == "a grid":
        points = np.round(points)
    elif kind == "a line":
        points[:, 1] = 0.25
    elif kind == "far apart":
        points[0] = (1e6, -1e6)
    min_samples = min(10, n - 1)
    tree = spanning_tree(points, min_samples, launch)
    distance = mutual_reachability(points, min_samples)
    low, high = tree.order[tree.low], tree.order[tree.high]
    assert components(tree) == 1 and len(tree.low) == n - 1
    assert (np.diff(tree.weight) >= 0).all()
    np.testing.assert_allclose(tree.weight, distance[low, high], rtol=1e-6, atol=1e-12)
    assert tree.weight.sum() == pytest.approx(weight_by_prim(distance), rel=1e-6)


@given(
    st.lists(st.tuples(st.integers(-6, 6), st.integers(-6, 6)), min_size=2, max_size=60),
    st.integers(1, 12),
)
def test_ties_do_not_close_circles(launch, cells, min_samples):
    points = np.array(cells, np.float32) / 2
    min_samples = min(min_samples, len(points) - 1)
    tree = spanning_tree(points, min_samples, launch)
    assert components(tree) == 1
    expected = weight_by_prim(mutual_reachability(points, min_samples))
    assert tree.weight.sum() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_order_in_which_threads_run_changes_nothing(launch, tmp_path):
    backwards = HostLaunch(tmp_path, lambda n: range(n - 1, -1, -1))
    for points in (blobs(3_001), np.round(blobs(3_001))):
        there, back = (spanning_tree(points, 10, run) for run in (launch, backwards))
        for name, one, other in zip(SpanningTree._fields, there, back, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("min_cluster_size", [5, 40, 400])
@pytest.mark.parametrize("most", [1_500, 20_000])
def test_clusters_are_those_of_hdbscan(launch, min_cluster_size, most):
    points = blobs(6_000, seed=3)
    tree = spanning_tree(points, 10, launch)
    found = clusters_of_tree(tree.low, tree.high, tree.weight, min_cluster_size, most)
    labels = np.empty(len(points), np.int32)
    labels[tree.order] = found.labels
    probabilities = np.empty(len(points), np.float32)
    probabilities[tree.order] = found.probabilities
    peer = HDBSCAN(
        min_cluster_size=min_cluster_size, min_samples=10, max_cluster_size=most,
        approx_min_span_tree=False, core_dist_n_jobs=1,
    ).fit(points.astype(np.float64))  # fmt: skip
    assert adjusted_rand_score(peer.labels_, labels) >= 0.98
    assert ((peer.labels_ < 0) == (labels < 0)).mean() >= 0.99
    assert len(found.persistence) == len(peer.cluster_persistence_)
    np.testing.assert_allclose(
        np.sort(found.persistence), np.sort(peer.cluster_persistence_), atol=5e-4
    )
    # Of edges that weigh the same either may come first, which matters to very small clusters.
    same = np.abs(probabilities - peer.probabilities_) < 1e-3
    assert same.mean() >= (0.8 if min_cluster_size < 40 else 0.999)


def test_one_clump_is_no_cluster_and_says_so_in_empty_arrays(launch):
    points = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    tree = spanning_tree(points, 10, launch)
    found = clusters_of_tree(tree.low, tree.high, tree.weight, 200, 300)
    assert (found.labels == -1).all() and not found.probabilities.any()
    assert found.persistence.shape == (0,)


@pytest.mark.parametrize("k", [2, 15, 33])
@pytest.mark.parametrize("n", [33, 1_000, 4_099])
def test_neighbours_in_the_plane_are_exact(launch, n, k):
    points = blobs(n, seed=n)
    queries = np.concatenate([points[::7], blobs(50, seed=1), [[1e4, 1e4]]]).astype(np.float32)
    distance, index = nearest(plane_tree(points, launch), queries, k, launch)
    expected, _ = KDTree(points).query(queries, k=k)
    np.testing.assert_allclose(distance, expected, rtol=1e-5, atol=1e-6)
    own = np.linalg.norm(queries[:, None] - points[index], axis=2)
    np.testing.assert_allclose(own, distance, rtol=1e-5, atol=1e-6)
    assert all(len(set(row)) == k for row in index.tolist())
