"""The graph of neighbours that a GPU's map is laid out from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from sklearn.neighbors import NearestNeighbors

from discovery.engines.compiled import umap_class
from discovery.engines.rapids import why_not
from discovery.engines.rapids.graph import fuzzy_graph
from discovery.stages.neighbors import self_first


def neighbors_of(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    distances, indices = NearestNeighbors(n_neighbors=k).fit(rows).kneighbors(rows)
    return self_first(indices.astype(np.int32), distances.astype(np.float32), 0)


@given(
    st.integers(3, 400), st.integers(2, 16), st.floats(0, 1), st.integers(0, 2**31)
)  # fmt: skip
def test_the_graph_is_umap_learns(n, k, equal, seed):
    umap_class()  # which has what umap-learn compiles kept on disk
    from umap.umap_ import fuzzy_simplicial_set

    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, 4)).astype(np.float32)
    rows[: int(equal * n)] = rows[0]
    indices, distances = neighbors_of(rows, min(k, n))
    wanted, _, _ = fuzzy_simplicial_set(
        rows, min(k, n), np.random.RandomState(0), "euclidean", knn_indices=indices,
        knn_dists=distances,
    )  # fmt: skip
    found = fuzzy_graph(indices, distances, sparse)
    assert found.shape == (n, n) and found.dtype == np.float32
    assert abs(found.tocsr() - wanted.tocsr()).max() < 1e-4
    assert abs(found - found.T).max() < 1e-6
    # Row by row, each pair once, as is said of it.
    order = found.row.astype(np.int64) * n + found.col
    assert (np.diff(order) > 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(why_not() is not None, reason=f"no GPU: {why_not()}")
def test_the_graph_is_cumls():
    import cupy
    from cuml.manifold import umap
    from cupyx.scipy import sparse as device_sparse

    rows = np.random.default_rng(0).normal(size=(5_003, 6)).astype(np.float32)
    rows[:40] = rows[0]
    indices, distances = map(cupy.asarray, neighbors_of(rows, 15))
    found = fuzzy_graph(indices, distances, device_sparse).tocsr()
    wanted = umap.fuzzy_simplicial_set(
        cupy.asarray(rows), n_neighbors=15, random_state=0,
        knn_indices=indices.astype(np.int64), knn_dists=distances,
    ).tocsr()  # fmt: skip
    assert float(abs(found - wanted).max()) < 1e-4
