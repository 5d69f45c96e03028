"""The judge of clustering methods: its figures are right, and a method can be plugged in."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from shared import REPO

from benchmarks.behaviours import options_of
from benchmarks.common import WrongAnswerError
from benchmarks.judge import methods
from benchmarks.judge.datasets import Task, judge
from benchmarks.judge.kinds import plant, recipes
from benchmarks.judge.measures import (
    agreement,
    between_halves,
    between_seeds,
    check_found,
    facts_of,
    found_by,
    mean_of,
    of_planted,
    task_ceiling,
)
from benchmarks.judge.methods import METHODS, Found, method_named, placed
from benchmarks.judge.rows import Rows

ROWS = 400


def behaviours(half="develop", *arguments: object, folder=None) -> subprocess.CompletedProcess:
    """The command, as a user runs it."""
    paths = [str(REPO), *([str(folder)] if folder else [])]
    return subprocess.run(
        [sys.executable, str(REPO / "benchmarks/behaviours.py"), "--half", half,
         *map(str, arguments)],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Rows:
    (recipe,) = recipes("develop", ["few"])
    return plant(recipe, ROWS)


@pytest.fixture
def plugged(monkeypatch):
    """Make a function a method by a name."""

    def plug(name, method):
        monkeypatch.setitem(METHODS, name, method)

    return plug


def test_a_method_sees_neither_truth_nor_task(rows, plugged):
    seen = []

    def method(shown, seed):
        seen.append(shown)
        return Found(np.zeros(len(shown), np.int64))

    plugged("curious", method)
    found_by(["curious"], rows, 0)
    between_halves(["curious"], rows, 0)
    assert len(seen) == 3
    assert all(one.truth is None and one.tasks is None for one in seen)


def test_the_truth_is_judged_perfect_and_its_noise_is_counted(rows, plugged):
    plugged("oracle", lambda shown, seed: Found(rows.truth))
    figures = of_planted(found_by(["oracle"], rows, 0)["oracle"], rows)
    assert figures["ari"] == 1 and figures["noise_called_noise"] == 1
    assert figures["real_called_noise"] == 0 and figures["clusters"] == 3
    assert figures["noise_share"] == (rows.truth < 0).mean()


def test_rows_called_noise_cost_agreement_with_the_truth(rows, plugged):
    half = np.where(np.arange(ROWS) % 2, rows.truth, -1)
    plugged("shy", lambda shown, seed: Found(half))
    figures = of_planted(found_by(["shy"], rows, 0)["shy"], rows)
    assert figures["ari"] < 0.7 and 0.4 < figures["real_called_noise"] < 0.6


def test_probabilities_are_judged_by_the_rows_that_they_doubt(rows, plugged):
    wrong = np.random.default_rng(0).random(ROWS) < 0.1
    labels = np.where(wrong, (rows.truth + 1) % 3, np.abs(rows.truth))
    for name, sure in (("knows", 1.0 - 0.5 * wrong), ("does not", np.full(ROWS, 0.5))):
        plugged(name, lambda shown, seed, sure=sure: Found(labels, probabilities=sure))
    done = found_by(["knows", "does not"], rows, 0)
    aucs = {name: of_planted(one, rows)["probability_auc"] for name, one in done.items()}
    assert aucs["knows"] > 0.8 and aucs["does not"] == 0.5
    unsure = found_by(["k-means"], rows, 0)["k-means"]
    assert of_planted(unsure, rows)["probability_auc"] is None


def test_chance_is_judged_as_chance(rows, plugged):
    def chance(shown, seed):
        return Found(np.random.default_rng(seed).integers(0, 5, len(shown)))

    plugged("chance", chance)
    done = [found_by(["chance"], rows, seed)["chance"] for seed in range(3)]
    assert abs(of_planted(done[0], rows)["ari"]) < 0.05
    assert abs(between_seeds([one.found.labels for one in done])["ari"]) < 0.05
    assert abs(between_halves(["chance"], rows, 0)["chance"]["ari"]) < 0.1


def test_k_means_has_as_many_centres_as_todays_clusters(rows, plugged):
    plugged("today", lambda shown, seed: Found(np.arange(len(shown)) % 7 - 1))
    done = found_by(["today", "k-means"], rows, 0)
    assert done["k-means"].found.clusters == done["today"].found.clusters == 6


def test_a_half_labels_the_others_rows_by_the_methods_own_classifier(rows, plugged):
    truth = {tuple(v): t for v, t in zip(rows.vectors.tolist(), rows.truth.tolist(), strict=True)}

    def known(shown):
        return np.array([truth[tuple(v)] for v in shown.vectors.tolist()], np.int64)

    def oracle(shown, seed):
        labels = known(shown)
        return Found(labels, known, families=labels // 2, place_families=lambda o: known(o) // 2)

    plugged("oracle", oracle)
    plugged("upside down", lambda shown, seed: Found(known(shown), lambda o: known(o) * 0))
    halves = between_halves(["oracle", "upside down"], rows, 0)
    assert halves["oracle"]["ari"] == halves["oracle"]["families"]["ari"] == 1
    assert halves["upside down"]["ari"] == 0 and "families" not in halves["upside down"]


def test_without_a_classifier_the_nearest_rows_vote(rows):
    known = Found(rows.truth)
    assert agreement(placed(known, rows, rows), rows.truth)["ari"] > 0.8


def test_what_can_be_reached_stands_beside_the_figures(rows):
    facts = facts_of(rows)
    assert facts["behaviours"] == 3 and facts["rows"] == ROWS and facts["ceiling"] > 0.95


def test_tasks_are_classified_by_what_other_requests_show(rows):
    # By the behaviour a task is known, by its request's number it is not.
    rows = rows[rows.truth >= 0]
    shown = dataclasses.replace(rows, tasks=np.array([f"task{t}" for t in rows.truth]))
    assert task_ceiling(shown) > 0.8
    dice = np.random.default_rng(0).integers(0, 3, len(np.unique(rows.requests)))
    _, number = np.unique(rows.requests, return_inverse=True)
    chance = dataclasses.replace(rows, tasks=np.array([f"task{t}" for t in dice[number]]))
    assert abs(task_ceiling(chance)) < 0.1


@pytest.mark.parametrize(
    "labels", [np.zeros(3, np.int64), np.zeros(ROWS), np.full(ROWS, -2)], ids=["few", "real", "-2"]
)
def test_a_method_that_leaves_rows_without_a_label_is_a_wrong_answer(labels):
    with pytest.raises(WrongAnswerError, match="wrong: "):
        check_found("wrong", Found(labels), ROWS)


def test_means_are_over_the_figures_that_all_have():
    assert mean_of([{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"c": 4}, "d": 1}]) == {
        "a": 2, "b": {"c": 3},
    }  # fmt: skip
    assert mean_of([]) == {}


@pytest.mark.slow
def test_todays_method_labels_each_row_where_it_stands(rows):
    """Rows in any order: a label belongs to its row, and the classifier gives the same ones."""
    order = np.random.default_rng(0).permutation(ROWS)
    found = methods.today(rows[order], 42)
    plain = methods.today(rows, 42)
    # Laid out in another order, rows come to lie elsewhere, and a few change their cluster.
    assert agreement(found.labels, plain.labels[order])["ari"] > 0.5
    inside = found.labels >= 0
    again = placed(found, rows[order], rows[order])
    assert (again[inside] == found.labels[inside]).mean() > 0.8


def test_tied_and_mixed_rows_of_the_sample_are_judged(plugged):
    plugged("octaves", lambda shown, seed: Found(np.log2(shown.positions).astype(np.int64)))
    figures = judge(Task("sample tied and mixed", "develop", 0, 2, ("octaves",), 1))
    of_method = figures["methods"]["octaves"]
    # Lengths give tied tasks away entirely, and mixed ones not at all.
    assert of_method["tied"]["ami_task"] > 0.99 and of_method["mixed"]["ami_task"] < 0.05
    assert figures["facts"]["tied"]["tasks_log2_position"] > 0.85


@pytest.mark.parametrize("half", ["develop", "held_out"])
def test_planted_names_all_kinds_of_planted_rows(half):
    kinds = [recipe.kind for recipe in recipes(half)]
    named = options_of(["--half", half, "--only", "fresh,planted,few"]).names
    assert named == [*kinds, "fresh"]
    # Without a choice all are judged, but for what takes half an hour to capture.
    assert set(kinds) < set(options_of(["--half", half]).names)


@pytest.mark.slow
def test_a_quick_run_prints_a_table_and_writes_its_figures(tmp_path):
    path = tmp_path / "figures.json"
    done = behaviours(
        "develop", "--quick", "--rows", "300", "--only", "few,tests/planted.py",
        "--methods", "today,k-means", "--json", path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "planted rows: ARI with the truth" in done.stdout and "held out" not in done.stdout
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["half"] == "develop" and set(figures["data"]) == {"few", "tests/planted.py"}
    assert set(figures["data"]["few"]["methods"]) == {"today", "k-means"}


@pytest.mark.slow
def test_a_method_from_elsewhere_is_judged_and_a_held_out_half_says_so(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from benchmarks.judge.methods import Found\n"
        "def ones(rows, seed):\n"
        "    return Found(np.ones(len(rows), np.int64))\n",
        encoding="utf-8",
    )
    done = behaviours(
        "held_out", "--quick", "--rows", "200", "--only", "few,clean", "--methods", "",
        "--method", "mine:ones", "--workers", "2", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "held out: these figures are only reported" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  few")]
    assert line.split()[-2:] == ["0.000", "(1)"]


@pytest.mark.slow
def test_the_words_of_a_finished_run_are_reported(tmp_path):
    path = tmp_path / "figures.json"
    run = REPO / "tests/golden/run_v1"  # of rows of the sample, where the plain recipe finds them
    done = behaviours("develop", "--artifacts", run, "--permutations", "1", "--json", path)
    assert done.returncode == 0, done.stderr
    assert "the plain recipe: " in done.stdout and "left out" not in done.stdout
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["job"]["rows"] == figures["plain_recipe"]["rows"] == 518
    assert len(figures["clusters"]) == figures["job"]["clusters"]
    assert "data" not in figures


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--only", "nothing"), "no data set 'nothing'"),
        pytest.param(("--methods", "guess"), "no method 'guess'", marks=pytest.mark.slow),
        pytest.param(
            ("--method", "nowhere:at_all"), "no method 'nowhere:at_all'", marks=pytest.mark.slow
        ),
        pytest.param(("--rows", "0"), "must be 1 or more", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_judged_is_refused(arguments, says):
    done = behaviours("develop", *arguments)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_every_method_of_the_judge_labels_rows_of_either_layout():
    pytest.importorskip("igraph")
    for kind in ("layered", "sparse"):
        (recipe,) = recipes("develop", [kind])
        rows = plant(recipe, ROWS)
        for name, timed in found_by(list(METHODS), rows, 42).items():
            assert timed.found.clusters >= 2, name
            others = placed(timed.found, rows, rows[:50])
            assert others.shape == (50,) and set(others.tolist()) <= {-1, *timed.found.labels}
    assert method_named("leiden") is METHODS["leiden"]
