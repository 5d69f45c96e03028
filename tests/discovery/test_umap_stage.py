"""The map: turned onto the parent's, from exact neighbours, and stopped between epochs."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import quick_layout
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from planted import planted

from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.pca import Moments
from discovery.engines import cpu as cpu_engine
from discovery.engines.cpu import CpuEngine, EpochCounter, prunes
from discovery.engines.rapids import engine as rapids_engine
from discovery.stages.umap import rotated_onto

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_engine, "epochs_for", quick_layout.every_epoch)


def rotation(angle: float, mirrored: bool) -> NDArray[np.float64]:
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return turn @ np.diag([1.0, -1.0]) if mirrored else turn


def random_map(rows: int, seed: int) -> NDArray[np.float32]:
    """A map about as wide as UMAP's, and no rounder one way than another."""
    points = np.random.default_rng(seed).normal(0, [6.0, 3.0], (rows, 2))
    return (points @ rotation(seed % 7, False)).astype(np.float32)


def between_all(points: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.linalg.norm(points[:, None] - points[None], axis=2)


@given(
    rows=st.integers(3, 60), seed=SEEDS, angle=st.floats(-7, 7), mirrored=st.booleans(),
    x=st.floats(-40, 40), y=st.floats(-40, 40),
)  # fmt: skip
@example(rows=40, seed=0, angle=np.pi, mirrored=False, x=0.0, y=0.0)
@example(rows=40, seed=0, angle=0.0, mirrored=True, x=0.0, y=0.0)
def test_a_map_that_was_turned_mirrored_and_shifted_comes_back(rows, seed, angle, mirrored, x, y):
    before = random_map(rows, seed)
    moved = (before @ rotation(angle, mirrored) + [x, y]).astype(np.float32)
    found = rotated_onto(moved, before)
    np.testing.assert_allclose(found, before, atol=1e-4)
    assert found.dtype == np.float32


@given(rows=st.integers(2, 60), seed=SEEDS, scale=st.floats(0.05, 20), noise=st.floats(0, 5))
def test_a_map_is_never_scaled(rows, seed, scale, noise):
    points = random_map(rows, seed)
    noise_at = np.random.default_rng(seed).normal(0, noise, points.shape)
    before = (scale * points @ rotation(2.0, True) + noise_at).astype(np.float32)
    found = rotated_onto(points, before)
    np.testing.assert_allclose(between_all(found), between_all(points), atol=1e-4)
    np.testing.assert_allclose(found.mean(axis=0), before.mean(axis=0), atol=1e-4)


@given(seed=SEEDS, angle=st.floats(-7, 7), mirrored=st.booleans())
def test_no_other_turn_lies_nearer(seed, angle, mirrored):
    points, before = random_map(30, seed), random_map(30, seed + 1)
    found = rotated_onto(points, before)
    centred = points - points.mean(axis=0)
    other = centred @ rotation(angle, mirrored) + before.mean(axis=0)
    assert np.square(found - before).sum() <= np.square(other - before).sum() + 1e-2


def test_a_map_whose_rows_are_all_in_one_place_is_shifted_there():
    points, before = np.ones((5, 2), np.float32), np.full((5, 2), 7.0, np.float32)
    assert rotated_onto(points, before).tolist() == before.tolist()


@functools.cache
def projected(rows: int, seed: int) -> NDArray[np.float32]:
    """Planted fingerprints in the space that neighbours are looked for in."""
    vectors = planted(rows, seed)[0]
    fitted = Moments.of(vectors, Layout.LOG16).projection()
    return fitted(vectors, Layout.LOG16)


def noise(rows: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, 16)).astype(np.float32)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rows", [3_000, 8_000])
def test_a_tree_is_chosen_for_fingerprints_and_not_for_noise(rows, seed):
    assert prunes(projected(rows, seed), 30)
    assert not prunes(noise(rows, seed), 30)


def test_the_choice_of_a_search_is_always_the_same():
    # A resumed run must choose as the killed one did: counts, not times.
    for rows in (projected(3_000, 0), noise(1_000, 0)):
        assert len({prunes(rows.copy(), 30) for _ in range(5)}) == 1


@pytest.mark.parametrize("k", [1, 2, 30])
@pytest.mark.parametrize("fit", [projected(2_000, 0), noise(1_000, 0)], ids=["rows", "noise"])
def test_both_searches_find_the_same_neighbours(monkeypatch, fit, k):
    queries = np.concatenate([fit[::7], fit[:50] + np.float32(0.01)])
    found = []
    for tree in (True, False):
        monkeypatch.setattr(cpu_engine, "prunes", lambda fit, k, tree=tree: tree)
        found.append(CpuEngine().neighbors(fit, queries, k))
    (by_tree, apart_by_tree), (by_product, apart_by_product) = found
    assert by_tree.shape == by_product.shape == (len(queries), k)
    assert (by_tree.dtype, apart_by_tree.dtype) == (np.int32, np.float32)
    assert (by_product.dtype, apart_by_product.dtype) == (np.int32, np.float32)
    assert np.array_equal(by_tree, by_product)
    np.testing.assert_allclose(apart_by_tree, apart_by_product, atol=1e-5)
    exact = np.linalg.norm(queries[:, None].astype(float) - fit[by_tree], axis=2)
    np.testing.assert_allclose(apart_by_tree, exact, atol=1e-5)
    assert (np.diff(apart_by_tree) >= 0).all()


def test_one_tree_serves_all_chunks_of_queries_and_is_gone_with_its_rows(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_engine, "prunes", lambda fit, k: asked.append(k) or True)
    fit, engine = projected(500, 0).copy(), CpuEngine()
    whole, _ = engine.neighbors(fit, fit, 5)
    chunks = [engine.neighbors(fit, fit[i : i + 100], 5)[0] for i in range(0, 500, 100)]
    assert np.array_equal(np.concatenate(chunks), whole) and asked == [5]
    assert engine.neighbors(fit, fit, 3)[0].shape == (500, 3) and asked == [5, 3]
    same = pickle.loads(pickle.dumps(engine)).neighbors(fit.copy(), fit, 5)[0]
    assert np.array_equal(same, whole) and asked == [5, 3, 5]
    del fit
    assert engine._last_tree is None


EPOCHS = 40


class Stop(Exception):
    """Raised by a callback."""


class EveryEpoch(EpochCounter):
    """Hears of epochs that are over before the bar would tick."""

    def __init__(self, epochs: int, on_epoch: Callable[[int, int], None]) -> None:
        super().__init__(epochs, on_epoch)
        self.tqdm_options |= {"mininterval": 0, "miniters": 1}


@pytest.fixture
def lay_out(monkeypatch) -> Callable[..., NDArray[np.float32]]:
    """UMAP of 120 rows in 40 epochs, of `every` one of which the callback is told."""
    monkeypatch.setattr(cpu_engine, "EPOCHS_SMALL", EPOCHS)
    fit, engine = projected(2_000, 0)[:120], CpuEngine()
    neighbors = engine.neighbors(fit, fit, 10)

    def run(on_epoch: Callable[[int, int], None], every: bool = True) -> NDArray[np.float32]:
        monkeypatch.setattr(cpu_engine, "EpochCounter", EveryEpoch if every else EpochCounter)
        return engine.layout(fit, neighbors, fit[:, :2].copy(), 0.0, 3, on_epoch)

    return run


def test_every_epoch_is_told_of_from_the_first_to_the_last(lay_out):
    told: list[tuple[int, int]] = []
    lay_out(lambda done, of: told.append((done, of)))
    assert told == [(epoch, EPOCHS) for epoch in range(EPOCHS + 1)]


def test_however_seldom_the_first_and_the_last_epoch_are_told_of(lay_out):
    told: list[int] = []
    lay_out(lambda done, of: told.append(done), every=False)
    assert told == sorted(set(told)) and (told[0], told[-1]) == (0, EPOCHS)


@pytest.mark.parametrize("at", [0, 1, 17, EPOCHS])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_what_the_callback_raises_ends_the_layout_at_once(lay_out, at, error):
    told: list[int] = []

    def stop(done: int, of: int) -> None:
        told.append(done)
        if done >= at:
            raise error("asked to")

    with pytest.raises(error, match="asked to") as raised:
        lay_out(stop)
    assert told == list(range(at + 1))
    assert raised.value.__context__ is None
    # The next layout is told of anew.
    told.clear()
    lay_out(lambda done, of: told.append(done))
    assert set(told) == set(range(EPOCHS + 1))


def test_an_ended_layout_does_not_keep_others_from_being_made_in_another_thread(lay_out):
    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lay_out(end)
    made = []
    other = threading.Thread(target=lambda: made.append(lay_out(lambda done, total: None)))
    other.start()
    other.join(timeout=60)
    assert len(made) == 1


def test_the_map_does_not_depend_on_who_is_told(lay_out):
    def busy(done: int, of: int) -> None:
        np.random.random(1_000)

    silent = lay_out(lambda done, of: None, every=False)
    assert silent.shape == (120, 2) and silent.dtype == np.float32 and np.isfinite(silent).all()
    assert np.array_equal(lay_out(busy), silent)


def test_the_bar_prints_nothing(lay_out, capfd):
    lay_out(lambda done, of: None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rows", [50, 400])
def test_no_queries_have_no_neighbours(rows):
    fit = np.random.default_rng(0).normal(size=(rows, 16)).astype(np.float32)
    for prunable in (fit, np.repeat(fit[:5], rows // 5, axis=0)):
        indices, distances = CpuEngine().neighbors(prunable, prunable[:0], 3)
        assert (indices.shape, distances.shape) == ((0, 3), (0, 3))
        assert (indices.dtype, distances.dtype) == (np.int32, np.float32)


def test_a_gpu_takes_more_epochs_than_the_cpu_and_most_for_few_rows():
    rows = (0, 10_000, 10_001, 100_000, 100_001, 1_000_000)
    expected = [1600, 1600, 1600, 1600, 800, 800]
    assert [rapids_engine.epochs_for(count) for count in rows] == expected
    assert [cpu_engine.epochs_for(count) for count in rows] == [500, 500, 200, 200, 200, 200]
