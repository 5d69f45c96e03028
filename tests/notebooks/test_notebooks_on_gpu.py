"""Notebooks where a GPU answers: frames are cuDF's, and the runs are RAPIDS'."""

from __future__ import annotations

from pathlib import Path

import pytest
from executing import execute

from discovery.engines.rapids import why_not
from discovery.notebook import NotebookData, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=f"no GPU: {why_not()}"),
]


def test_the_map_is_a_frame_of_cudf(notebooks_folder: Path, notebook_data: NotebookData) -> None:
    done = execute("02_map", notebooks_folder)
    run = Run(notebook_data.runs)
    assert run.manifest["engine"] == "rapids"
    assert f"run {run.run_id}, frames of cudf" in done.printed
    counts = run.manifest["counts"]
    assert f"{counts['rows']:,} rows, {counts['clusters']} clusters" in done.printed


@pytest.mark.parametrize("name", ["03_nights", "04_zones", "06_tuning", "07_scale"])
def test_notebooks_of_runs_run_on_a_gpu(name: str, notebooks_folder: Path) -> None:
    done = execute(name, notebooks_folder)
    assert done.printed
    if name == "07_scale":
        assert "engine rapids; RAPIDS: works here" in done.printed
