"""The history of clusters: composed from manifests, in words and in JSON."""

from __future__ import annotations

import json
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import Lineage, run_id_of

from discovery.artifacts.read import read_manifest
from discovery.commands.history import sparkline
from discovery.runs.history import ancestry, descent
from discovery.runs.state import manifests, survey


def week(output: Path) -> list[str]:
    """Seven runs: 4 comes off 3 and 5 off 4, 1 takes in 2, 6 is born and dies, 0 dies."""
    lineage = Lineage(output)
    return [
        lineage.night({0: 0.1, 1: 0.3, 2: 0.2, 3: 0.4}, zone=0.5),
        lineage.night({0: 0.1, 1: 0.3, 2: 0.2, 3: 0.25, 4: 0.15}, ("split", 4, [3], [])),
        lineage.night({0: 0.1, 1: 0.3, 2: 0.2, 3: 0.25, 4: 0.15}),
        lineage.night(
            {0: 0.1, 1: 0.5, 3: 0.25, 4: 0.1, 5: 0.05},
            ("merged", 1, [1, 2], []), ("split", 5, [4], []), ("absorbed", 2, [], [1]),
        ),
        lineage.night({0: 0.1, 1: 0.5, 3: 0.2, 4: 0.1, 5: 0.05, 6: 0.05}, ("born", 6, [], [])),
        lineage.night(
            {1: 0.55, 3: 0.3, 4: 0.1, 5: 0.05}, ("died", 6, [], []), ("died", 0, [], []),
            labels={3: "a new name"},
        ),
        lineage.night(
            {1: 0.5, 3: 0.25, 5: 0.05, 7: 0.2}, ("born", 7, [], []), ("absorbed", 4, [], [3]),
            ("merged", 3, [3, 4], []), labels={3: "a new name"}, zone=0.7,
        ),
    ]  # fmt: skip


@pytest.fixture
def output(tmp_path) -> Path:
    week(tmp_path)
    return tmp_path


def test_a_life_is_legible_in_an_ascii_locale(output, monkeypatch, fresh_attn):
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    shutil.rmtree(output / run_id_of(2))
    shutil.rmtree(output / run_id_of(3))
    edited = output / run_id_of(7) / "manifest.json"
    edited.write_text(edited.read_text().replace("cluster number 1", "␣the"))
    done = fresh_attn("runs", "lineage", "3", "--output", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n7 runs: 8?66566  40.0% -> 25.0% of the rows\n" in done.stdout
    done = fresh_attn("runs", "lineage", "9", "--output", output)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no cluster 9 in the lineage of run ")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    assert "\n7 runs: █·▆▆▅▆▆ " in fresh_attn("runs", "lineage", "3", "--output", output).stdout


def by_id(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {one["cluster_id"]: one for one in found}


def asked(attn, *arguments: str | Path) -> dict[str, Any]:
    done = attn("runs", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(attn, *arguments: str | Path) -> str:
    done = attn("runs", *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    return done.stderr


def test_diff_composes_the_events_of_all_runs_between(attn, output):
    found = asked(attn, "diff", run_id_of(1), "latest", "--output", output)
    assert (found["from"], found["to"]) == (run_id_of(1), run_id_of(7))
    assert {c: one["parents"] for c, one in by_id(found["split"]).items()} == {5: [3]}
    assert by_id(found["split"])[5]["through"] == [4]
    assert by_id(found["split"])[5]["run_id"] == run_id_of(4)
    assert {c: one["parents"] for c, one in by_id(found["merged"]).items()} == {1: [1, 2]}
    # 3 took in 4, which had come off it: it is what it was.
    assert {c: (o["share_then"], o["share"]) for c, o in by_id(found["kept"]).items()} == {
        3: (0.4, 0.25)
    }
    assert by_id(found["kept"])[3]["label_then"] == "cluster number 3"
    assert set(by_id(found["born"])) == {7}
    died = by_id(found["died"])
    assert {c: (one["event"], one["run_id"]) for c, one in died.items()} == {
        0: ("died", run_id_of(6)), 2: ("absorbed", run_id_of(4))
    }  # fmt: skip
    assert died[2]["into"] == died[2]["lives_on_in"] == [1]
    assert found["zones"]["diffuse"] == {"then": 0.5, "now": 0.7}
    assert found["rows"] == {"then": 2_000, "now": 8_000}
    assert found["quality"]["trustworthiness"] == {"then": 0.988694, "now": 0.988694}
    assert found["deleted_between"] == []


def test_diff_in_words_says_the_largest_change_first_and_lists_what_was_kept(attn, output):
    done = attn("runs", "diff", run_id_of(1), run_id_of(7), "--output", output)
    lines = done.stdout.splitlines()
    assert lines[0] == (
        f"{run_id_of(1)} -> {run_id_of(7)}: 4 -> 4 clusters, 2 of them the same; "
        "2,000 -> 8,000 rows"
    )
    kinds = [line.partition(":")[0] for line in lines[1:6]]
    assert kinds == ["merged", "born", "absorbed", "died", "split"]
    assert lines[5] == (
        f'split: 5 "cluster number 5" (5.0%) came off 3 through 4, in run {run_id_of(4)}'
    )
    assert lines[6] == '3 is called "a new name" now; it was "cluster number 3"'
    assert lines[7] == "zones: diffuse 50.0% -> 70.0%, long_range 50.0% -> 30.0%"
    assert lines[-1].split() == ["3", "40.0%", "25.0%", "a", "new", "name"]


def test_diff_works_from_the_history_where_the_runs_between_are_deleted(attn, output):
    whole = asked(attn, "diff", run_id_of(1), run_id_of(7), "--output", output)
    for day in range(2, 7):
        shutil.rmtree(output / run_id_of(day))
    found = asked(attn, "diff", run_id_of(1), run_id_of(7), "--output", output)
    # Day 3 changed no id: with its folder nothing is left that tells of it.
    assert found["deleted_between"] == [run_id_of(day) for day in (2, 4, 5, 6)]
    assert "4 runs known of are deleted" in found["says"][1]
    same = set(whole) - {"deleted_between", "says"}
    assert {k: found[k] for k in same} == {k: whole[k] for k in same}


def test_diff_can_be_asked_either_way_round(attn, output):
    there = asked(attn, "diff", run_id_of(2), run_id_of(5), "--output", output)
    back = asked(attn, "diff", run_id_of(5), run_id_of(2), "--output", output)
    assert f"{run_id_of(5)} is the later" in back["says"][0]
    assert back["says"][1:] == there["says"]
    same = asked(attn, "diff", "latest", "latest", "--output", output)
    assert not (same["born"] or same["died"] or same["split"] or same["merged"])


def test_diff_refuses_runs_that_cannot_be_compared(attn, output):
    other = Lineage(output, "another model", first_day=20).night({90: 1.0})
    failed = Lineage(output, first_day=25)
    failed.night({91: 1.0}, passed=False)
    ask = ("--output", output)
    said = refusal(attn, "diff", run_id_of(1), other, *ask)
    assert "not of one lineage: they are of model / log16 / a and of another model" in said
    said = refusal(attn, "diff", run_id_of(7), run_id_of(25), *ask)
    assert "is the first of its lineage" in said
    assert "the newest there" in refusal(attn, "diff", run_id_of(1), "2020-01-01T00-00-00", *ask)
    shutil.copy(output / run_id_of(2) / "embedding.parquet",
                output / run_id_of(7) / "clusters.parquet")  # fmt: skip
    assert "damaged" in refusal(attn, "diff", run_id_of(1), run_id_of(7), *ask)


def test_a_run_that_failed_its_gate_is_compared_with_its_parent_but_is_nobodys(attn, tmp_path):
    lineage = Lineage(tmp_path)
    first = lineage.night({0: 0.5, 1: 0.5})
    failed = lineage.night({0: 0.5, 2: 0.5}, ("split", 2, [0], []), ("died", 1, [], []),
                           passed=False)  # fmt: skip
    after = lineage.night({0: 0.4, 1: 0.6})
    found = asked(attn, "diff", first, failed, "--output", tmp_path)
    assert set(by_id(found["died"])) == {1} and set(by_id(found["split"])) == {2}
    assert f"{after} comes from {first}" in refusal(
        attn, "diff", failed, after, "--output", tmp_path
    )


def test_a_sibling_is_not_taken_for_an_ancestor_where_the_chain_is_broken(tmp_path):
    lineage = Lineage(tmp_path)
    first = lineage.night({0: 1.0})
    lineage.night({0: 1.0}, passed=False)
    gone = lineage.night({0: 1.0})
    last = lineage.night({0: 1.0})
    other = Lineage(tmp_path, first_day=20)
    other.night({7: 1.0})
    shutil.rmtree(tmp_path / gone)
    known = ancestry(last, manifests(survey(tmp_path)))
    assert known.runs == (first, gone, last)
    assert known.gone == (gone,)


def test_the_story_of_a_cluster_that_came_off_and_was_taken_in(attn, output):
    found = asked(attn, "lineage", "4", "--output", output)
    assert found["born"] == {"run_id": run_id_of(2), "event": "split", "parents": [3]}
    assert found["ended"] == {"run_id": run_id_of(7), "event": "absorbed", "into": [3]}
    assert not found["alive"]
    assert [run["share"] for run in found["runs"]] == [0.15, 0.15, 0.1, 0.1, 0.1]
    assert found["came_off"] == [{"run_id": run_id_of(4), "cluster_ids": [5]}]
    said = attn("runs", "lineage", "4", "--output", output).stdout.splitlines()
    assert said == [
        'cluster 4 "cluster number 4"',
        f"{run_id_of(2)}  split off from 3",
        f"{run_id_of(4)}  5 came off",
        f"{run_id_of(7)}  went into 3",
        "5 runs: ██▆▆▆  15.0% -> 10.0% of the rows",
    ]


def test_the_story_of_a_living_cluster_names_what_it_took_in_and_what_it_was_called(attn, output):
    found = asked(attn, "lineage", "3", "--output", output)
    assert found["alive"] and found["ended"] is None
    assert found["absorbed"] == [{"run_id": run_id_of(7), "cluster_ids": [4]}]
    assert found["came_off"] == [{"run_id": run_id_of(2), "cluster_ids": [4]}]
    assert found["labels"] == [
        {"label": "cluster number 3", "since": run_id_of(1)},
        {"label": "a new name", "since": run_id_of(6)},
    ]
    earlier = asked(attn, "lineage", "3", "--run", run_id_of(3), "--output", output)
    assert len(earlier["runs"]) == 3 and len(earlier["labels"]) == 1


def test_the_story_says_when_a_cluster_lost_a_part(attn, tmp_path):
    lineage = Lineage(tmp_path)
    lineage.night({0: 0.6, 1: 0.4})
    second = lineage.night({0: 0.7, 1: 0.3}, ("thinned", 1, [1], [], 0.4123))
    found = asked(attn, "lineage", "1", "--output", tmp_path)
    assert found["alive"] and found["thinned"] == [{"run_id": second, "lost": 0.4123}]
    said = attn("runs", "lineage", "1", "--output", tmp_path).stdout
    assert f"\n{second}  lost a part, 41.2% of it\n" in said
    assert asked(attn, "lineage", "0", "--output", tmp_path)["thinned"] == []


def test_a_story_goes_on_past_deleted_runs(attn, output):
    for day in (1, 2, 3, 4, 5):
        shutil.rmtree(output / run_id_of(day))
    found = asked(attn, "lineage", "3", "--output", output)
    assert found["born"]["run_id"] == run_id_of(1)
    # Day 6 has noted the shares of its parent; of the days before only the events are known.
    shares = {run["run_id"]: run["share"] for run in found["runs"]}
    assert shares == {
        run_id_of(1): None, run_id_of(2): None, run_id_of(4): None, run_id_of(5): 0.2,
        run_id_of(6): 0.3, run_id_of(7): 0.25,
    }  # fmt: skip
    assert found["runs"][0]["label"] == "cluster number 3"
    assert found["deleted_runs"] == [run_id_of(day) for day in (1, 2, 4, 5)]
    dead = asked(attn, "lineage", "2", "--output", output)
    assert dead["ended"]["into"] == [1]
    assert "and there may have been more" in dead["says"][-1]


def test_an_unknown_cluster_is_refused_with_what_there_is(attn, output):
    other = Lineage(output, "another model", first_day=20).night({90: 1.0})
    ask = ("--run", run_id_of(7), "--output", output)
    assert "its clusters are 1, 3, 5, 7" in refusal(attn, "lineage", "44", *ask)
    assert f"use --run {other}" in refusal(attn, "lineage", "90", *ask)
    nowhere = refusal(attn, "lineage", "1", "--output", output / "nowhere")
    assert "no latest run" in nowhere


def test_runs_of_before_there_was_lineage_can_be_asked_of(attn, tmp_path):
    run_id = Lineage(tmp_path).night({0: 0.5, 1: 0.5})
    path = tmp_path / run_id / "manifest.json"
    manifest = read_manifest(tmp_path / run_id)
    del manifest["lineage"]
    path.write_text(json.dumps(manifest))
    assert asked(attn, "lineage", "1", "--output", tmp_path)["runs"][0]["share"] == 0.5
    assert asked(attn, "diff", run_id, run_id, "--output", tmp_path)["kept"]


def test_a_sparkline_is_as_high_as_the_largest_share_and_shows_gaps():
    assert sparkline([0.0, 0.05, None, 0.1]) == "▁▅·█"
    assert sparkline([None, 0.0]) == "·▁"
    assert sparkline([]) == ""


def event_of(run_id: str, event: str, cluster: int, parents=(), children=()) -> dict[str, Any]:
    return {"run_id": run_id, "event": event, "cluster_id": cluster, "parents": list(parents),
            "children": list(children)}  # fmt: skip


def test_the_events_of_a_run_refer_to_the_run_before_whatever_their_order():
    night = [
        event_of("r1", "merged", 0, [0, 1]),
        event_of("r1", "split", 5, [0]),
        event_of("r1", "split", 6, [2, 3]),
        event_of("r1", "absorbed", 1, [], [0]),
        event_of("r1", "absorbed", 4, [], [7]),
        event_of("r1", "born", 7),
    ]
    for steps in (night, night[::-1]):
        found = descent([0, 1, 2, 3, 4], steps)
        # 5 came off 0 before 1 went into it; 4 went into one that was new that night.
        assert found.origins == {0: (0, 1), 2: (2,), 3: (3,), 5: (0,), 6: (2, 3), 7: (4,)}
        assert {c: ending["into"] for c, ending in found.ended.items()} == {1: [0], 4: [7]}


def test_every_id_on_the_way_is_listed():
    steps = [event_of(f"r{n}", "split", n + 1, [n]) for n in range(4)]
    found = descent([0], [*steps, event_of("r5", "born", 9), event_of("r6", "split", 10, [9])])
    assert found.through == {1: (), 2: (1,), 3: (1, 2), 4: (1, 2, 3), 9: (), 10: (9,)}
    assert found.origins[4] == (0,) and found.origins[10] == ()
    assert found.since[4] == "r3"


@st.composite
def chains(draw) -> tuple[list[int], list[dict[str, Any]]]:
    """The clusters of a first run, and the events of up to six runs after it."""
    alive = list(range(draw(st.integers(1, 5))))
    start, fresh = list(alive), len(alive)
    steps: list[dict[str, Any]] = []
    for night in range(draw(st.integers(0, 6))):
        before, used = list(alive), set()

        def tell(kind: str, cluster: int, parents=(), children=(), night=night) -> None:
            steps.append(event_of(f"r{night}", kind, cluster, parents, children))

        for kind in draw(
            st.lists(st.sampled_from(["born", "split", "merged", "died"]), max_size=4)
        ):
            free = [cluster for cluster in before if cluster not in used]
            if kind == "born":
                tell("born", fresh)
                alive.append(fresh)
                fresh += 1
            elif kind == "split" and free:
                tell("split", fresh, [draw(st.sampled_from(free))])
                alive.append(fresh)
                fresh += 1
            elif kind == "died" and free:
                gone = draw(st.sampled_from(free))
                tell("died", gone)
                alive.remove(gone)
                used.add(gone)
            elif kind == "merged" and len(free) > 1:
                one, *rest = draw(st.permutations(free))[: draw(st.integers(2, len(free)))]
                tell("merged", one, [one, *rest])
                used |= {one, *rest}
                for gone in rest:
                    tell("absorbed", gone, [], [one])
                    alive.remove(gone)
    assert descent(start, steps).origins.keys() == set(alive)
    return start, steps


@given(chains(), st.integers(0, 6))
def test_events_compose_however_the_runs_are_cut(chain, cut):
    """Two descents, one after the other, are the descent over both."""
    start, steps = chain
    whole = descent(start, steps)
    early = descent(start, [event for event in steps if int(event["run_id"][1:]) < cut])
    late = descent(early.origins, [event for event in steps if int(event["run_id"][1:]) >= cut])
    for cluster, middle in late.origins.items():
        through_both = {origin for one in middle for origin in early.origins[one]}
        assert set(whole.origins[cluster]) == through_both
        assert len(whole.origins[cluster]) == len(through_both)


@given(chains())
def test_every_cluster_of_the_first_run_lives_on_or_has_an_ending(chain):
    start, steps = chain
    found = descent(start, steps)
    alive = set(found.origins)
    assert {*found.ended} == set(start) - alive
    assert {*found.through} == {*found.since} == alive - set(start)
    for cluster, origins in found.origins.items():
        assert set(origins) <= set(start)
        assert cluster not in start or cluster in origins
    # What a cluster came off on its way is told by its own events, one link after the other.
    births = {e["cluster_id"]: e for e in steps if e["event"] in ("split", "born")}
    for cluster, through in found.through.items():
        parents = births[cluster]["parents"]
        way = [parents[0]] if parents and parents[0] not in start else []
        assert list(through[-1:]) == way
    for run_id, night in groupby(steps, key=lambda e: e["run_id"]):
        ids = [e["cluster_id"] for e in night]
        assert {c for c, run in found.since.items() if run == run_id} <= set(ids)
