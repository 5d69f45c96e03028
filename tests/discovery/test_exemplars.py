"""The rows that show a cluster are its nearest, one of a request, however the rows are cut."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from discovery.describe.exemplars import Exemplars, candidates


def plainly(targets, points, label, requests, most) -> list[list[int]]:
    """Row numbers of each cluster's exemplars, by looking at all rows together."""
    chosen = []
    for cluster, target in enumerate(targets):
        rows = np.flatnonzero(label == cluster)
        apart = np.linalg.norm(points[rows] - target, axis=1)
        found: dict[str, int] = {}
        for row in rows[np.argsort(apart, kind="stable")].tolist():
            found.setdefault(requests[row], row)
        chosen.append(list(found.values())[:most])
    return chosen


@given(
    rows=st.integers(0, 200),
    clusters=st.integers(0, 4),
    several=st.integers(1, 30),
    most=st.integers(1, 6),
    seed=st.integers(0, 1_000),
    ties=st.booleans(),
    data=st.data(),
)
def test_exemplars_are_the_nearest_rows_of_different_requests_however_they_are_cut(
    rows, clusters, several, most, seed, ties, data
):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(rows, 3)).astype(np.float32)
    if ties:
        points = points.round()
    targets = rng.normal(size=(clusters, 3)).astype(np.float32)
    label = rng.integers(-1, clusters, rows).astype(np.int32)
    request = rng.integers(0, several, rows).astype(np.int32)
    requests = [f"request-{i}" for i in request]
    batch = pa.record_batch(
        {
            "request_id": pa.array(requests, pa.string()),
            "position": pa.array(np.arange(rows), pa.int32()),
            "layer": pa.array(np.full(rows, -1), pa.int16()),
        }
    )
    found = Exemplars(clusters, most)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    # Workers that are ahead know the reach as it was some parts ago.
    late = data.draw(st.integers(0, 2))
    reaches = [found.reach.copy()] * (late + 1)
    for start, end in zip([0, *cuts], [*cuts, rows], strict=True):
        own = slice(start, end)
        near = candidates(points[own], label[own], request[own], targets, reaches[-1 - late], most)
        found.add(near, label[own], batch.slice(start, end - start))
        reaches.append(found.reach.copy())
    for cluster, wanted in enumerate(plainly(targets, points, label, requests, most)):
        assert [key["position"] for key in found.of(cluster)] == wanted
        assert [key["request_id"] for key in found.of(cluster)] == [requests[i] for i in wanted]
