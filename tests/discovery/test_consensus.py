"""Clusters that trees of many halves of the requests agree on."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted
from published import ALL_NOW, RUN_ID, make_store
from shared import REPO
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors

from discovery.algorithms.consensus.cell_tree import POWER, Tree, nearest_cells, trees_of
from discovery.algorithms.consensus.clusters import (
    MOST_THREADS,
    TREES,
    halves,
    stable_clusters,
)
from discovery.algorithms.consensus.found_again import (
    CHANCE,
    COMPARED,
    chosen_groups,
    found_again,
    likest,
)
from discovery.algorithms.consensus.partition import (
    families_of,
    improved,
    median_partition,
    without_small,
)
from discovery.algorithms.map_clusters import clusters_of_rows, rows_to_cluster
from discovery.artifacts.read import open_artifacts
from discovery.engines.cpu import CpuEngine

RNG = np.random.default_rng


def compiled_loops() -> ModuleType:
    """Not imported with this module, as what they compile is to be compiled once (conftest.py)."""
    from discovery.algorithms.consensus import loops

    return loops


def blobs(sizes: list[int], seed: int, dimensions: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Rows float32[n, d] of behaviours 8 apart, shuffled, and the behaviour of each."""
    rng = RNG(seed)
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    centres = 8.0 * rng.permutation(np.eye(max(len(sizes), dimensions))[: len(sizes)], axis=1)
    rows = centres[truth][:, :dimensions] if len(sizes) <= dimensions else centres[truth]
    return (rows + rng.normal(size=rows.shape)).astype(np.float32), truth


def neighbors_of(rows: np.ndarray, k: int = 20) -> np.ndarray:
    found = NearestNeighbors(n_neighbors=k + 1).fit(rows).kneighbors(rows, return_distance=False)
    return found[:, 1:].astype(np.int32)


def merge_cells(shared: np.ndarray, sizes: np.ndarray, least: float) -> np.ndarray:
    """The merges int64[m, 2] of cells that share so many neighbours."""
    merged = np.empty((len(shared) - 1, 2), np.int64)
    done = compiled_loops().merge(shared.copy(), sizes.astype(float), float(least), POWER, merged)
    return merged[:done]


def shared_neighbors(cell: np.ndarray, near: np.ndarray, taken: np.ndarray) -> list[list[float]]:
    found = np.zeros((2, 2), np.int64)
    compiled_loops().count_shared(cell, near, taken, found)
    return ((found + found.T) / 2).tolist()


def test_a_worker_of_a_run_loads_no_numba():
    """Its 60 MB are more than what a worker with the least memory has to spare."""
    code = "import sys, discovery.stages.registry; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@given(st.integers(1, 30), st.integers(0, 2**31), st.floats(0, 1))
def test_a_tree_has_each_group_once_and_no_group_before_its_parts(cells, seed, empty):
    rng = RNG(seed)
    shared = rng.integers(0, 50, (cells, cells)).astype(float)
    # Cells that share nothing, and cells without a row.
    shared[rng.random(cells) < empty] = 0.0
    shared = (shared + shared.T) / 2 * (rng.random((cells, cells)) < 0.5)
    shared = np.maximum(shared, shared.T)
    merged = merge_cells(shared, rng.integers(0, 20, cells), 5.0)
    parts = merged.ravel().tolist()
    assert len(parts) == len(set(parts))
    assert all(max(pair) < cells + number for number, pair in enumerate(merged.tolist()))


@given(
    st.integers(2, 60), st.integers(1, 5), st.integers(1, 9), st.integers(1, 7),
    st.integers(0, 2**31),
)  # fmt: skip
def test_the_groups_of_a_tree_are_its_cells_and_what_they_merge_into(n, trees, cells, atoms, seed):
    rng = RNG(seed)
    rows, near = rng.normal(size=(n, 3)).astype("f4"), rng.integers(0, n, (n, 4)).astype("i4")
    taken = rng.random((trees, n)) < 0.6
    taken[:, 0] = True
    atom = np.unique(rng.integers(0, atoms, n), return_inverse=True)[1]
    of_atom = np.bincount(atom)
    starts = [
        rng.choice(own, min(own, int(rng.integers(1, cells + 1))), replace=False)
        for own in taken.sum(axis=1)
    ]
    found = trees_of(rows, near, taken, starts, np.full(trees, 2.0), atom, of_atom)
    for tree, start in zip(found, starts, strict=True):
        assert tree.cells == len(start) and len(tree.share) == len(start) + len(tree.merged)
        # The groups in no other have all rows, each once.
        roots = sorted(set(range(len(tree.share))) - set(tree.merged.ravel().tolist()))
        np.testing.assert_allclose(tree.share[roots].sum(axis=0), 1, atol=1e-5)
        np.testing.assert_allclose(tree.share @ of_atom, tree.rows, atol=1e-3)
        for number, (first, second) in enumerate(tree.merged.tolist(), tree.cells):
            np.testing.assert_allclose(
                tree.share[number], tree.share[first] + tree.share[second], atol=1e-5
            )
            assert tree.rows[number] == tree.rows[first] + tree.rows[second]
    # One tree is the same alone.
    alone = trees_of(rows, near, taken[-1:], starts[-1:], np.full(1, 2.0), atom, of_atom)
    assert all(np.array_equal(one, other) for one, other in zip(alone[0], found[-1], strict=True))


def test_loops_are_compiled_before_a_thread_calls_them():
    """Numba and Python's imports are not made for a second thread that compiles or imports."""
    rows, _ = blobs([300, 200], 1)
    near, loops = neighbors_of(rows), compiled_loops()
    called = (
        loops.nearest, loops.means, loops.trees, loops.cells_of_atoms, loops.likest_again,
        loops.settled, loops.best_of_starts,
    )  # fmt: skip
    before = [list(loop.signatures) for loop in called]
    for one in (rows, RNG(0).normal(size=rows.shape).astype("f4")):  # behaviours and a continuum
        stable_clusters(one, near, np.arange(len(one)) // 7, 20, 0)
    assert [list(loop.signatures) for loop in called] == before
    assert all(before)


def merged_by_hand(shared: np.ndarray, size: list[float], least: float) -> list[list[int]]:
    """The merges of `merge_cells`, with every pair compared anew each time."""
    shared, number, found = shared.copy(), list(range(len(shared))), []
    volume = [max(float(row.sum()), 0.5) for row in shared]
    while True:
        pairs = [(a, b) for a in range(len(shared)) for b in range(a + 1, len(shared))
                 if shared[a, b] > 0]  # fmt: skip
        if not pairs:
            return found
        # Small ones first, then the likest, then the first.
        a, b = max(
            pairs,
            key=lambda at: (
                min(size[at[0]], size[at[1]]) < least,
                shared[at] / (volume[at[0]] * volume[at[1]]) ** POWER,
                -at[0],
                -at[1],
            ),
        )
        found.append([number[a], number[b]])
        number[a] = len(shared) + len(found) - 1
        shared[a] += shared[b]
        shared[:, a] = shared[a]
        shared[b] = shared[:, b] = 0.0
        volume[a] += volume[b]
        size[a] += size[b]


@given(st.integers(1, 25), st.integers(0, 2**31), st.floats(0, 12))
def test_a_tree_is_the_one_by_hand(cells, seed, least):
    rng = RNG(seed)
    # Distinct numbers: what a rounding makes of equally like pairs is another matter.
    shared = np.triu(rng.random((cells, cells)) * (rng.random((cells, cells)) < 0.4), 1)
    shared += shared.T
    sizes = rng.integers(0, 20, cells)
    assert merge_cells(shared, sizes, least).tolist() == merged_by_hand(
        shared, sizes.astype(float).tolist(), least
    )


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_cells_are_those_of_the_nearest_centre_and_their_centres_the_means(n, count, width, seed):
    rng = RNG(seed)
    rows = rng.normal(size=(n, width)).astype(np.float32)
    centres = rng.normal(size=(count, width)).astype(np.float32)
    cell = nearest_cells(rows, centres)
    apart = np.linalg.norm(rows[:, None].astype(float) - centres, axis=2)
    np.testing.assert_allclose(apart[np.arange(n), cell], apart.min(axis=1), atol=1e-3)
    moved = centres.copy()
    compiled_loops().means(rows, cell, moved)
    for own in range(count):
        mean = rows[cell == own].mean(axis=0) if (cell == own).any() else centres[own]
        np.testing.assert_allclose(moved[own], mean, atol=1e-5)
    # Of equally near ones the first.
    assert nearest_cells(rows, np.repeat(centres, 2, axis=0)).tolist() == (2 * cell).tolist()


def test_cells_that_share_most_for_their_size_merge_first_and_small_ones_before_all():
    shared = np.array([[40.0, 9, 0, 0], [9, 40, 1, 0], [0, 1, 40, 3], [0, 0, 3, 40]])
    in_turn = merge_cells(shared, np.array([50, 50, 50, 50]), 0)
    assert [sorted(pair) for pair in in_turn.tolist()] == [[0, 1], [2, 3], [4, 5]]
    small_first = merge_cells(shared, np.array([50, 50, 50, 5]), 10)
    assert small_first.tolist()[0] == [2, 3]


def test_shared_neighbors_count_pairs_both_ways_among_the_taken_rows():
    near = np.array([[1], [2], [3], [0]], np.int32)
    cell = np.array([0, 0, 1, 1])
    assert shared_neighbors(cell, near, np.ones(4, bool)) == [[1, 1], [1, 1]]
    assert shared_neighbors(cell, near, np.array([True, True, True, False])) == [[1, 0.5], [0.5, 0]]


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 120])
def test_both_halves_of_the_requests_are_asked_and_share_none(requests):
    of_row = RNG(0).integers(0, requests, 1_000)
    _, of_row = np.unique(of_row, return_inverse=True)
    found = halves(of_row, RNG(1))
    assert len(found) == TREES
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first.any() and second.any()
        if requests > 1:
            assert not set(of_row[first]) & set(of_row[second])
            assert (first | second).all()


def test_groups_are_like_by_the_rows_of_both_over_the_rows_of_either():
    atoms = np.array([10, 30, 60])
    first = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], np.float32)
    second = np.array([[1, 1, 0], [0, 1, 1]], np.float32)
    assert likest(first, second, atoms) == pytest.approx([0.25, 1.0, 60 / 90])
    assert likest(first, second[:0], atoms).tolist() == [0, 0, 0]


@given(
    st.integers(2, 40), st.integers(1, 12), st.integers(1, 9), st.integers(1, 50),
    st.integers(0, 2**31),
)  # fmt: skip
def test_groups_are_looked_for_in_the_next_trees(count, most, atoms, at_once, seed):
    rng = RNG(seed)
    weights = rng.integers(1, 30, atoms)
    trees = []
    for _ in range(count):
        cells = int(rng.integers(1, most + 1))
        counts = np.array([rng.multinomial(w, rng.dirichlet(np.full(cells, 0.3))) for w in weights])
        share = (counts / weights[:, None]).T
        left, merged = list(range(cells)), []
        for number in range(int(rng.integers(cells))):
            merged.append([left.pop(rng.integers(len(left))) for _ in range(2)])
            share = np.vstack([share, share[merged[-1]].sum(axis=0)])
            left.append(cells + number)
        rows = np.rint(share @ weights).astype(np.int64)
        pairs = np.array(merged, np.int64).reshape(-1, 2)
        trees.append(Tree(cells, pairs, share.astype("f4", order="C"), rows))
    size = int(rng.integers(1, 40))
    with ThreadPoolExecutor(2) as pool:
        found = found_again(trees, weights, size, pool, at_once)
    for number, (tree, again) in enumerate(zip(trees, found, strict=True)):
        others = [*trees[number + 1 :], *trees[:number]][:COMPARED]
        each = [likest(tree.share, o.share[o.rows >= size / 2], weights) for o in others]
        expected = np.where(tree.rows >= size, np.mean(each, axis=0), 0.0)
        np.testing.assert_allclose(again, expected, atol=1e-5)


def test_a_group_is_taken_for_its_parts_where_it_is_found_again_better():
    tree = Tree(
        2, np.array([[0, 1]]), np.array([[1, 0], [0, 1], [1, 1]], "f4"), np.array([50, 50, 100])
    )

    def taken(again: list[float], most: float = 100, detail: float = 1.1) -> list[int]:
        worth = np.maximum(np.array(again) - CHANCE, 0.0)
        return sorted(chosen_groups(tree, worth, 20, most, detail).tolist())

    assert taken([0.5, 0.5, 0.9]) == [2]
    assert taken([0.9, 0.9, 0.9]) == [0, 1]
    assert taken([0.9, 0.9, 0.9], detail=0.9) == [2]
    assert taken([0.5, 0.5, 0.9], most=80) == [0, 1]
    assert taken([0.2, 0.2, 0.25]) == []


@given(st.integers(1, 30), st.floats(1.0, 4.0), st.integers(0, 2**31))
def test_the_groups_taken_are_worth_most_and_none_is_within_another(cells, detail, seed):
    rng = RNG(seed)
    top, merged, inside = list(range(cells)), [], [{cell} for cell in range(cells)]
    for _ in range(rng.integers(0, cells)):
        pair = rng.choice(top, 2, replace=False).tolist()
        top = [*(group for group in top if group not in pair), len(inside)]
        inside.append(inside[pair[0]] | inside[pair[1]])
        merged.append(pair)
    rows = np.array([10 * len(one) for one in inside])
    tree = Tree(
        cells, np.array(merged, np.int64).reshape(-1, 2), np.empty((len(rows), 1), "f4"), rows
    )
    worth = rng.random(len(rows)) * (rng.random(len(rows)) < 0.7)

    def best(group: int) -> tuple[float, list[int]]:
        own = rows[group] * worth[group] if 20 <= rows[group] <= 100 else 0.0
        parts = [best(part) for part in (merged[group - cells] if group >= cells else ())]
        within = sum(value for value, _ in parts)
        if own > 0.0 and own >= detail * within:
            return own, [group]
        return within, [one for _, some in parts for one in some]

    found = chosen_groups(tree, worth, 20, 100, detail).tolist()
    assert sorted(found) == sorted(one for group in top for one in best(group)[1])
    assert sum(len(inside[group]) for group in found) == len(
        set().union(*map(inside.__getitem__, found))
    )


@given(st.integers(1, 25), st.integers(2, 12), st.integers(0, 2**31))
def test_the_partition_agrees_with_the_clusterings_no_less_than_each_of_them(atoms, most, seed):
    rng = RNG(seed)
    weights = rng.integers(1, 40, atoms)
    parts = [rng.integers(0, rng.integers(1, 6) + 1, atoms) for _ in range(most)]
    together = np.mean([part[:, None] == part for part in parts], axis=0)
    gain = (together - 0.5) * np.outer(weights, weights)
    np.fill_diagonal(gain, 0)

    def gained(labels: np.ndarray) -> float:
        return float(gain[labels[:, None] == labels].sum())

    found = median_partition(together, weights, parts)
    assert found.shape == (atoms,) and set(found) == set(range(found.max() + 1))
    assert gained(found) >= max(map(gained, parts)) - 1e-6 * np.abs(gain).sum()
    # No atom is better in another cluster, or alone.
    to_cluster = gain @ np.eye(found.max() + 1)[found]
    own = to_cluster[np.arange(atoms), found]
    assert (own >= np.maximum(to_cluster.max(axis=1), 0.0) - 1e-6 * np.abs(gain).sum()).all()
    assert np.array_equal(improved(gain, found.copy()), found)


def test_clusterings_that_are_one_partition_give_it_and_small_clusters_join_their_like():
    truth = np.array([0, 0, 1, 1, 1, 2])
    together = (truth[:, None] == truth).astype(float)
    weights = np.array([10, 10, 10, 10, 10, 3])
    assert np.array_equal(median_partition(together, weights, [truth]), truth)
    together[5, 2:5] = together[2:5, 5] = 0.4

    def rows(labels: np.ndarray) -> np.ndarray:
        return np.bincount(labels, weights)

    assert without_small(truth, together, weights, 5, rows).tolist() == [0, 0, 1, 1, 1, 1]
    assert without_small(truth, together, weights, 1_000, rows).tolist() == [0] * 6


def test_families_are_of_clusters_that_a_third_of_the_clusterings_have_together():
    inside = 10 * np.eye(4)[[0, 0, 1, 2, 3]].T
    together = np.eye(5)
    together[:3, :3] = 0.4
    together[3, 4] = together[4, 3] = 0.3
    assert families_of(inside, together).tolist() == [0, 0, 1, 2]
    assert families_of(inside, np.ones((5, 5))).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("sizes", [[300, 300], [211, 101, 97, 53], [400, 60, 60]])
def test_behaviours_that_lie_apart_are_the_clusters(sizes):
    rows, truth = blobs(sizes, 3)
    requests = RNG(1).integers(0, 40, len(rows))
    found = stable_clusters(rows, neighbors_of(rows), requests, 30, 0)
    # None may hold more than half of the rows: a behaviour that does is cut.
    whole = np.isin(truth, np.flatnonzero(np.array(sizes) <= len(rows) / 2))
    assert adjusted_rand_score(truth[whole], found.labels[whole]) > 0.99
    assert not set(found.labels[whole]) & set(found.labels[~whole])
    counts = np.bincount(found.labels)
    assert (np.diff(counts) <= 0).all() and counts.min() >= 30
    assert ((found.stability > 0.3) & (found.stability <= 1)).all()
    assert len(found.stability) == len(found.family) == len(counts)
    assert ((found.members.probability > 0) & (found.members.probability <= 1)).all()


def test_what_one_request_does_is_no_cluster():
    rows, truth = blobs([300, 300, 60], 11)
    requests = RNG(1).integers(0, 40, len(rows))
    requests[truth == 2] = 40
    found = stable_clusters(rows, neighbors_of(rows), requests, 30, 0)
    assert len(set(found.labels[truth == 2]) - set(found.labels[truth < 2])) == 0
    # Those of several are one, however few there are.
    requests[truth == 2] = RNG(2).integers(40, 46, 60)
    found = stable_clusters(rows, neighbors_of(rows), requests, 30, 0)
    assert len(set(found.labels[truth == 2]) - set(found.labels[truth < 2])) == 1


def test_the_same_rows_give_the_same_clusters_and_another_seed_nearly_so():
    vectors, truth = planted(3_001, 5, noise=0.0)
    rows = np.sqrt(vectors)
    requests = np.arange(len(rows)) // 50
    near = neighbors_of(rows)
    found, again, other = (
        stable_clusters(rows, near, requests, 60, seed, threads=threads)
        for seed, threads in ((0, None), (0, MOST_THREADS), (1, None))
    )
    for ours, same in zip((*found.members, *found[1:]), (*again.members, *again[1:]), strict=True):
        assert np.array_equal(ours, same)
    assert adjusted_rand_score(found.labels, other.labels) > 0.9
    assert adjusted_rand_score(truth, found.labels) > 0.85
    # A row whose neighbours are of other clusters is less sure of its own.
    lonely = (found.labels[near] != found.labels[:, None]).mean(axis=1)
    assert np.corrcoef(lonely, found.members.probability)[0, 1] < -0.2


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 31, 97])
@pytest.mark.parametrize("kinds", [1, 2])
def test_few_rows_and_exact_duplicates_are_clustered_or_noise(count, kinds):
    rows = np.repeat(np.eye(kinds, 3, dtype=np.float32), -(-count // kinds), axis=0)[:count]
    apart = np.zeros(count, np.float32)
    chosen = rows_to_cluster(CpuEngine(), rows, apart, np.arange(count) // 7, 20, 0)
    found = clusters_of_rows(CpuEngine(), rows, chosen, chosen.clusters())
    assert found.labels.shape == found.members.probability.shape == (count,)
    assert found.labels.max() == len(found.stability) - 1 == len(found.family) - 1
    assert (found.members.probability[found.labels < 0] == 0).all()
    if count < 20:
        assert (found.labels == -1).all()


def test_sparse_rows_are_noise_and_rows_beyond_the_sample_join(monkeypatch):
    rows, truth = blobs([400, 300, 301], 7)
    apart = np.ones(len(rows), np.float32)
    apart[:5] = 100.0
    monkeypatch.setattr("discovery.algorithms.map_clusters.SAMPLE_ROWS", 500)
    requests = RNG(0).integers(0, 50, len(rows))
    chosen = rows_to_cluster(CpuEngine(), rows, apart, requests, 100, 0)
    found = clusters_of_rows(CpuEngine(), rows, chosen, chosen.clusters())
    assert (found.labels[:5] == -1).all() and (found.labels[5:] >= 0).all()
    assert adjusted_rand_score(truth[5:], found.labels[5:]) > 0.99
    assert np.isnan(found.persistence).all() and (found.stability > 0.8).all()


@pytest.mark.slow
def test_a_run_by_consensus_publishes_stability_and_families(attn, tmp_path):
    db = make_store(tmp_path / "rows.db", planted(2_503, 2)[0])
    output = tmp_path / "out"
    asked = ("discover", "--db", db, "--output", output, "--clustering", "consensus", *ALL_NOW)
    done = attn(*asked)
    assert done.returncode == 0, done.stderr
    artifacts = open_artifacts(output / RUN_ID)
    clusters = artifacts.table("clusters").to_pylist()
    assert len(clusters) > 5
    assert all(0.3 < cluster["stability"] <= 1 for cluster in clusters)
    assert all(cluster["persistence"] is None for cluster in clusters)
    families = {cluster["family"] for cluster in clusters}
    assert families == set(range(len(families)))
    summary = artifacts.manifest["stages"]["cluster"]
    assert summary["families"] == len(families)
    mean = np.mean([cluster["stability"] for cluster in clusters])
    assert summary["stability"] == pytest.approx(mean) and summary["went_on"] == 0
    # The gate looks at them before those that are not found again are merged.
    assert 0.45 < artifacts.manifest["quality"]["mean_stability"] <= mean + 1e-9
    assert artifacts.manifest["quality"]["mean_persistence"] is None
    assert artifacts.manifest["parameters"]["clustering"] == "consensus"
    report = (output / RUN_ID / "report.html").read_text()
    assert "found again in half of the requests" in report

    assert "Clusters are groups that other requests have as well" in report
    shown = attn("runs", "show", "latest", "--output", output, "--tree")
    assert "Clusters are groups that other requests have as well" in shown.stdout
    assert shown.returncode == 0 and "stability" in shown.stdout.splitlines()[0]
    ids = [line.split()[0] for line in shown.stdout.splitlines()[1:] if line[:1] != " "]
    assert {str(cluster["cluster_id"]) for cluster in clusters} <= set(shown.stdout.split())
    assert ids
    listed = attn("runs", "show", "latest", "--output", output, "--json")
    assert {c["family"] for c in json.loads(listed.stdout)["clusters"]} == families


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--clustering", "leiden"), "unknown clustering 'leiden': use consensus or hdbscan"),
        (
            ("--min-samples", "5"),
            "--min-samples is HDBSCAN's: add --clustering hdbscan",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(attn, tmp_path, given, says):
    db = make_store(tmp_path / "rows.db", planted(150, 2)[0])
    done = attn("discover", "--db", db, "--output", tmp_path / "out", *given)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == f"error: {says}"
