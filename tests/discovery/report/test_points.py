"""The points of the map: the same rows of a file, however it is cut into row groups."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_inputs import blobs

from discovery.report import points


@pytest.mark.parametrize("rows", [0, 1, 999, 2_500])
@pytest.mark.parametrize("group_rows", [1, 97, 1_000])
def test_the_points_do_not_depend_on_row_groups_or_batches(tmp_path, monkeypatch, rows, group_rows):
    monkeypatch.setattr(points, "MOST_POINTS", 700)
    table = blobs(2_500, 5).slice(0, rows)
    pq.write_table(table, tmp_path / "whole.parquet", row_group_size=10_000)
    pq.write_table(table, tmp_path / "cut.parquet", row_group_size=max(group_rows, rows // 200))
    whole = points.map_points(tmp_path / "whole.parquet", [0, 1, 2, 3, 4])
    monkeypatch.setattr(points, "BATCH_ROWS", 64)
    assert points.map_points(tmp_path / "cut.parquet", [0, 1, 2, 3, 4]) == whole
    chosen = table.take(pa.array(points.even_rows(rows, 700)))
    assert (whole["shown"], whole["total"]) == (min(rows, 700), rows)
    assert set(whole["requests"]) == set(chosen["request_id"].to_pylist())
