"""The helpers that read, compare and draw runs in notebooks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from planted import planted, planted_batch
from shared import START, AttnCommand

from capture_kernels.errors import ArtifactError, OptionError, StoreError
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.schema import NOISE
from discovery.notebook import (
    NotebookData,
    Run,
    agreement,
    changes,
    explained,
    life,
    lineage,
    linked_maps,
    plot_lineage,
    plot_map,
    plot_shares,
    prepare,
    read_rows,
    same_rows,
    stored_table,
    transfer,
    trial,
    with_task,
)
from discovery.notebook.data import ABSENT, rows_of_night, sample_rows
from discovery.notebook.style import bin_names, color_of, palette
from pipeline.store.open import open_store


def test_a_run_as_tables_is_what_its_files_say(notebook_data: NotebookData) -> None:
    run = Run(notebook_data.runs)
    rows, clusters = run.map(gpu=False), run.clusters()
    counts = run.manifest["counts"]
    assert len(rows) == counts["rows"] and len(clusters) == counts["clusters"]
    sizes = rows[rows["cluster_id"] != NOISE]["cluster_id"].value_counts()
    assert dict(zip(clusters["cluster_id"], clusters["size"], strict=True)) == sizes.to_dict()
    assert clusters["size"].is_monotonic_decreasing
    centroids, labels = run.centroids()
    assert centroids.shape == (len(clusters), 20) and labels == clusters["label"].to_list()
    assert run.checks()["passed"].all() == run.manifest["quality"]["gate"]["passed"]
    assert run.seconds().index[0] == "extract"
    assert run.axes()["explained"].is_monotonic_decreasing


def test_rows_of_a_store_have_the_twenty_numbers_by_name(notebook_data: NotebookData) -> None:
    rows = with_task(read_rows(notebook_data.store))
    table = stored_table(notebook_data.store)
    assert len(rows) == table.num_rows and rows["task"].nunique() == 9
    hist = rows[[f"hist_{b}" for b in range(16)]].to_numpy()
    np.testing.assert_allclose(hist.sum(axis=1), 1, atol=1e-4)
    np.testing.assert_allclose(hist[:, :3].sum(axis=1), rows["local_mass"], atol=1e-4)
    assert set(rows["phase"]) <= {"prompt", "think", "output"}
    both = same_rows(rows, Run(notebook_data.runs).map(gpu=False))
    assert len(both) == Run(notebook_data.runs).manifest["counts"]["rows"]


def test_a_store_that_cannot_be_shown_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with open_store(tmp_path / "empty.db", create=True):
        pass
    with pytest.raises(StoreError, match="import or capture some first"):
        read_rows(tmp_path / "empty.db")
    with pytest.raises(ArtifactError):
        Run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot make"):
        prepare(tmp_path / "file" / "data")


def test_what_is_prepared_is_not_made_again(notebook_data: NotebookData) -> None:
    said: list[str] = []
    before = Run(notebook_data.runs).run_id
    assert prepare(notebook_data.folder, say=said.append) == notebook_data
    assert not said and Run(notebook_data.runs).run_id == before


@pytest.mark.parametrize("night", range(len(ABSENT)))
def test_a_night_has_requests_of_its_own(night: int) -> None:
    rows = sample_rows(6)
    own = set(rows_of_night(rows, night).column("request_id").to_pylist())
    others = {
        name
        for other in range(len(ABSENT))
        if other != night
        for name in rows_of_night(rows, other).column("request_id").to_pylist()
    }
    assert own and own.isdisjoint(others)
    assert not any(one.startswith(f"{ABSENT[night]}-") for one in own)
    times = rows_of_night(rows, night).column("captured_at").to_pylist()
    assert (max(times) - min(times)).total_seconds() < 3600


def test_lineage_is_what_the_commands_print(notebook_data: NotebookData, attn: AttnCommand) -> None:
    shares, events = lineage(notebook_data.nights)
    assert shares.groupby("run_id")["share"].sum().to_numpy() == pytest.approx(1.0)
    assert set(events["run_id"]) <= set(shares["run_id"])
    nights = sorted(set(shares["run_id"]))
    printed = attn("runs", "diff", nights[0], nights[1], "--output", notebook_data.nights)
    said = changes(notebook_data.nights, nights[0], nights[1])
    assert printed.stdout.splitlines()[: len(said)] == said
    kept = int(shares[shares["run_id"] == nights[1]]["cluster_id"].max())
    story = attn("runs", "lineage", str(kept), "--run", nights[1], "--output", notebook_data.nights)
    assert story.stdout.splitlines()[:2] == life(notebook_data.nights, kept, nights[1])[:2]
    with pytest.raises(ArtifactError, match="no cluster 999"):
        life(notebook_data.nights, 999)


@pytest.mark.slow
def test_trials_agree_with_themselves_and_less_with_others(tmp_path: Path) -> None:
    rows = [pa.Table.from_batches([planted_batch(planted(900, seed)[0], START, f"s{seed}")])
            for seed in (0, 1)]  # fmt: skip
    first = trial(rows[0], folder=tmp_path / "a", seed=1)
    again = trial(rows[0], folder=tmp_path / "b", seed=1)
    other = trial(rows[0], folder=tmp_path / "c", seed=2)
    assert agreement(first, again) == 1.0
    assert 0.3 < agreement(first, other) <= 1.0
    assert first.map(gpu=False)["x"].equals(again.map(gpu=False)["x"])
    # The same behaviours, in other rows.
    assert transfer(first, trial(rows[1], seed=1), rows[1]) > 0.5


def test_explained_variance_is_all_of_it_by_rows_and_none_by_one_group() -> None:
    points = np.random.default_rng(0).normal(size=(50, 3))
    assert explained(points, np.arange(50)) == pytest.approx(1.0)
    assert explained(points, np.zeros(50)) == pytest.approx(0.0)
    two = np.repeat([0.0, 2.0], 25)[:, None]
    assert explained(two, two[:, 0]) == pytest.approx(1.0)
    assert explained(np.ones((4, 2)), [0, 0, 1, 1]) == 0.0


def test_colours_are_those_of_the_report() -> None:
    assert len(palette()["slots"]) == 64
    # As in sidecar/static/css/tokens.css.
    assert color_of("syntax_floor") == "#0072b2" and color_of("long_range") == "#d55e00"
    assert color_of(64) == color_of(0) != color_of(1)
    assert color_of(NOISE) == color_of("unknown") == palette()["noise"]
    assert len(bin_names()) == 16 and bin_names()[:2] == ["0-1", "2-3"]
    assert bin_names()[10:] == ["1k", "2k", "4k", "8k", "16k", "32k+"]


def test_plots_show_every_row_and_name_what_they_show(notebook_data: NotebookData) -> None:
    run = Run(notebook_data.runs)
    rows = run.map(gpu=False)
    drawn = plot_map(rows)
    points = sum(len(one.get_offsets()) for one in drawn.axes[0].collections)
    assert points == len(rows)
    shares = pd.DataFrame({zone: [0.2] for zone in reversed(ZONES)}, index=["a"])
    legend = plot_shares(shares).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [z.replace("_", " ") for z in ZONES]
    assert plot_lineage(*lineage(notebook_data.nights)).axes[0].get_xticklabels()[0].get_text()


def test_a_selection_in_one_view_is_one_in_all(notebook_data: NotebookData) -> None:
    rows = Run(notebook_data.runs).map(gpu=False)
    _, (first, second) = linked_maps(rows, {"map": ("x", "y"), "again": ("y", "x")})
    chosen = rows.index[rows["cluster_id"] == rows["cluster_id"].max()]
    first.selection(chosen)
    assert set(second.selection()) == set(chosen)
