"""Every notebook runs from top to bottom, and what it shows is what the files of its runs say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jupytext
import numpy as np
import pytest
from executing import NOTEBOOKS, Executed, execute
from shared import REPO
from sklearn.metrics import roc_auc_score

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ripple
from discovery.notebook import NotebookData, Run, lineage, read_rows, stored_table, with_task
from pipeline.store.open import open_store

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
WIDGET = "application/vnd.jupyter.widget-view+json"


def found_in(done: Executed, pattern: str) -> re.Match[str]:
    """The first match in what a notebook printed."""
    found = re.search(pattern, done.printed)
    assert found, f"no {pattern} in:\n{done.printed}"
    return found


@pytest.mark.slow
def test_a_model_becomes_fingerprints(notebooks_folder: Path) -> None:
    done = execute("01_fingerprints", notebooks_folder)
    assert found_in(done, r"answer '([^']*)'")[1].startswith(" 1729")
    rows = int(found_in(done, r"(\d+) rows,")[1])
    assert f"stored {rows} rows, 0 were there already" in done.printed
    assert f"stored 0 rows, {rows} were there already" in done.printed
    assert float(found_in(done, r"largest difference of a bin: (\S+)")[1]) < 1e-3
    assert done.shown("image/png") == 2


@pytest.mark.slow
def test_the_map_is_that_of_the_run(notebooks_folder: Path, notebook_data: NotebookData) -> None:
    done = execute("02_map", notebooks_folder)
    run = Run(notebook_data.runs)
    counts = run.manifest["counts"]
    assert f"run {run.run_id}, frames of pandas" in done.printed
    assert f"{counts['rows']:,} rows, {counts['clusters']} clusters" in done.printed
    largest = run.clusters().iloc[0]
    says = f"{largest['size']:,} rows of cluster {largest['cluster_id']}: {largest['label']}"
    assert says in done.printed
    assert done.shown("image/png") == 3 and done.shown(WIDGET) == 1


@pytest.mark.slow
def test_nights_are_those_of_the_runs(notebooks_folder: Path, notebook_data: NotebookData) -> None:
    done = execute("03_nights", notebooks_folder)
    shares, _ = lineage(notebook_data.nights)
    nights = list(dict.fromkeys(shares["run_id"]))
    assert len(nights) == 3
    for night in nights:
        manifest = Run(notebook_data.nights / night).manifest
        counts, parent = manifest["counts"], manifest["parent_run"] or "-"
        assert (
            f"{night}: {counts['rows']:,} rows, {counts['clusters']} clusters, parent {parent}"
        ) in done.printed
    first, last = (Run(notebook_data.nights / nights[i]).manifest["counts"] for i in (0, -1))
    assert f"{first['clusters']} -> {last['clusters']} clusters" in done.printed
    assert done.shown("image/png") == 4


@pytest.mark.slow
def test_zones_are_judged_by_the_rows_of_the_store(
    notebooks_folder: Path, notebook_data: NotebookData
) -> None:
    done = execute("04_zones", notebooks_folder)
    rows = with_task(read_rows(notebook_data.store))
    assert f"{len(rows):,} rows, thresholds" in done.printed
    rows["ripple"] = ripple(rows[list(Layout.LOG16.columns)].to_numpy(np.float32), Layout.LOG16)
    own = rows[rows["task"].isin(("table", "prose"))]
    auc = roc_auc_score(own["task"] == "table", own["ripple"])
    assert float(found_in(done, r"'table': ([\d.]+)")[1]) == pytest.approx(auc, abs=6e-4)
    assert len(re.findall(r"of the rows change zone", done.printed)) == 5
    assert done.shown("image/png") == 5


@pytest.mark.slow
def test_a_request_is_shown_token_by_token(
    notebooks_folder: Path, notebook_data: NotebookData
) -> None:
    done = execute("05_tokens", notebooks_folder)
    assert "' 1729" in done.printed
    prompt, answer = map(
        int, found_in(done, r"(\d+) tokens of prompt, (\d+) of the answer").groups()
    )
    assert f"pinned: token {prompt + 1}, '7'" in done.printed
    assert done.shown(WIDGET) == 1
    # The row before each generated token is in the sidecar's store.
    with open_store(notebook_data.folder / "asked.db", read_only=True) as store:
        assert store.counts().rows >= answer


@pytest.mark.slow
def test_tuning_compares_runs(notebooks_folder: Path) -> None:
    done = execute("06_tuning", notebooks_folder)
    seeds = re.findall(r"seed \d: (\d+) clusters", done.printed)
    assert len(seeds) == 3 and all(int(count) > 1 for count in seeds)
    pairs = found_in(done, r"ARI between seeds: \{(.*)\}")[1]
    values = [float(value) for value in re.findall(r": ([-\d.]+)", pairs)]
    # With another seed the clusters are alike, and not the same to the row.
    assert len(values) == 3 and all(0.3 < value < 1 for value in values)
    # umap-learn's progress is counted, and drawn by nobody.
    assert done.shown(WIDGET) == 0


@pytest.mark.slow
def test_scale_is_measured_here_and_read_from_the_results(
    notebooks_folder: Path, notebook_data: NotebookData
) -> None:
    done = execute("07_scale", notebooks_folder)
    table = stored_table(notebook_data.store)
    sizes = re.findall(r"([\d,]+) rows: [\d.]+ s in stages", done.printed)
    assert len(sizes) == 2 and int(sizes[-1].replace(",", "")) >= table.num_rows // 4
    same = found_in(done, r"the same files: (.*)")[1].split(", ")
    assert {"embedding.parquet", "landmarks.parquet"} <= set(same)
    quoted = json.loads((REPO / "benchmarks/results/discovery-100m-gpu.json").read_text())
    seconds = quoted["sizes"]["100000000"]["job"]["seconds"]
    shown = [o["data"].get("text/html", "") for c in done.cells for o in c.outputs if "data" in o]
    assert any(f"{seconds:.1f}" in html and "100,000,000" in html for html in shown)


@pytest.mark.slow
def test_models_with_fewer_bits_differ_more(notebooks_folder: Path) -> None:
    done = execute("08_two_models", notebooks_folder)
    apart = re.findall(r"demo-int(\d): median distance of a row ([\d.]+)", done.printed)
    assert [bits for bits, _ in apart] == ["8", "4", "3"]
    distances = [float(distance) for _, distance in apart]
    assert distances == sorted(distances) and distances[0] < distances[-1]
    similar = re.findall(r"similarity ([\d.]+)", done.printed)
    assert len(similar) == 3 and all(0 <= float(one) <= 1 for one in similar)
    assert "'demo': '100%'" in done.printed


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_begins_with_a_title_and_leads_to_the_next(name: str) -> None:
    cells = jupytext.read(NOTEBOOKS / f"{name}.py").cells
    number = int(name[:2])
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# {number}. ")
    # What it shows is computed, so that no file of the repository has outputs.
    linked = re.findall(r"\((\d\d_\w+)\.ipynb\)", "".join(cell.source for cell in cells))
    assert set(linked) <= set(NAMES)
    if number < len(NAMES):
        assert NAMES[number] in linked
