"""Re-clustering with RAPIDS, in its own process on a real GPU."""

from __future__ import annotations

import numpy as np
import pytest
from live_rows import rows
from planted import planted
from sklearn.metrics import adjusted_rand_score
from test_recluster import round_of

from discovery.engines.rapids import why_not
from sidecar.clusters.buffer import RecentRows
from sidecar.clusters.recluster import Reclusterer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=f"no GPU: {why_not()}"),
]


def test_rounds_on_a_gpu_find_the_clusters_and_keep_their_ids() -> None:
    vectors, truth = planted(10_000, 0)
    recent = RecentRows(10_000)
    recent(rows(vectors))
    found = Reclusterer(recent, interval=3_600, engine="rapids")
    found.start()
    try:
        status = round_of(found)
        assert status["last_error"] is None and status["engine"] == "rapids"
        first = found.predict(vectors)
        assert adjusted_rand_score(truth, np.where(first.within, first.cluster_id, -1)) >= 0.85
        recent(rows(planted(500, 1)[0]))
        again = round_of(found)
        assert again["last_error"] is None and again["rounds"] == 2
        second = found.predict(vectors).cluster_id
        assert (first.cluster_id == second).mean() > 0.9
    finally:
        found.close()
