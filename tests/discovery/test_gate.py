"""The gate: what each limit stops, what it says of it, and the file that overrides the limits."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from capture_kernels.errors import OptionError
from discovery.gate import LEAST_HELD_OUT, GateRules, Measures, judge, recall_limit, wilson


def moved(psi: float, low: float, high: float) -> dict[str, Any]:
    return {"psi": psi, "low": low, "high": high, "by_chance": 0.02}


# A night as the job measures planted ones.
GOOD = Measures(
    identity="planted-model (log16, capture planted00000)",
    rows=6_000,
    map_rows=6_000,
    clusters=12,
    inconsistent_rows=0.0,
    trustworthiness=0.99,
    neighbor_recall=0.4,
    noise_share=0.05,
    mean_persistence=0.4,
    mean_stability=0.6,
    classifier_agreement=0.97,
    held_out_rows=1_200,
    effective_rows=1_200,
)
LATER = replace(
    GOOD,
    recognised=0.98,
    agreement=0.95,
    zone_drift=moved(0.0, 0.0, 0.01),
    cluster_drift=moved(0.02, 0.004, 0.05),
    fewest_rows=6_100,
    latest="2026-01-09T06-00-00",
    served=GOOD.identity,
)


def failing(measures: Measures, rules: GateRules | None = None) -> list[str]:
    verdict = judge(measures, rules or GateRules())
    failed = [check for check in verdict["checks"] if not check["passed"]]
    assert verdict["passed"] == (not failed)
    assert verdict["reasons"] == [check["says"] for check in failed]
    for reason in verdict["reasons"]:
        assert "\n" not in reason and "--no-gate" in reason
    return [check["name"] for check in failed]


@pytest.mark.parametrize("measures", [GOOD, LATER])
def test_a_good_night_passes(measures):
    verdict = judge(measures, GateRules())
    assert verdict["passed"] and verdict["reasons"] == []
    assert verdict["rules"] == asdict(GateRules())
    # As it stands in a manifest.
    assert json.loads(json.dumps(verdict, allow_nan=False)) == verdict


def test_every_check_is_told_whether_it_was_measured_or_not():
    names = [[check["name"] for check in judge(m, GateRules())["checks"]] for m in (GOOD, LATER)]
    assert names[0] == names[1]
    assert set(asdict(GateRules())) == set(names[0]) - {"clusters", "identity", "parent"}
    unmeasured = [check for check in judge(GOOD, GateRules())["checks"] if check["value"] is None]
    assert [check["name"] for check in unmeasured] == [
        "recognised", "agreement", "zone_drift", "cluster_drift", "volume", "identity",
        "parent",
    ]  # fmt: skip
    assert all(check["passed"] for check in unmeasured)
    assert all("not measured" in check["says"] for check in unmeasured[:-2])


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({"clusters": 0}, "clusters", "no clusters"),
        ({"inconsistent_rows": 0.02}, "inconsistent_rows", "is 2.00%, and must be at most 1.00%"),
        ({"trustworthiness": 0.81}, "trustworthiness", "is 0.810, and must be at least 0.900"),
        ({"trustworthiness": float("nan")}, "trustworthiness", "at least 0.900"),
        ({"neighbor_recall": 0.12}, "neighbor_recall", "is 12.0%, and must be at least 16.0%"),
        ({"noise_share": 0.8}, "noise_share", "is 80.0%, and must be at most 75.0%"),
        ({"mean_persistence": 0.047}, "mean_persistence", "is 0.047, and must be at least 0.080"),
        ({"mean_stability": 0.27}, "mean_stability", "is 0.270, and must be at least 0.450"),
        ({"classifier_agreement": 0.66}, "classifier_agreement", "is 66.0% (63.3% to 68.6%)"),
        ({"recognised": 0.84}, "recognised", "is 84.0%, and must be at least 90.0%"),
        ({"agreement": 0.2}, "agreement", "is 0.200, and must be at least 0.300"),
        ({"agreement": -0.01}, "agreement", "is 0.000, and must be at least 0.300"),
        ({"zone_drift": moved(0.5, 0.3, 0.7)}, "zone_drift", "is 0.500 (0.300 to 0.700)"),
        ({"cluster_drift": moved(0.5, 0.3, 0.7)}, "cluster_drift", "and must be at most 0.250"),
        ({"fewest_rows": 12_000}, "volume", "is 50%, and must be at least 60%"),
        ({"served": "another model"}, "identity", "but latest is of another model"),
        (
            {"damaged": "run B is damaged", "parent": "A"},
            "parent",
            "with A, because run B is damaged",
        ),
    ],
)
def test_a_night_that_fails_says_why_and_what_to_do(change, name, says):
    bad = replace(LATER, **change)
    assert failing(bad) == [name]
    assert says in judge(bad, GateRules())["reasons"][0]


def test_a_change_of_shares_fails_only_where_it_is_sure():
    assert failing(replace(LATER, cluster_drift=moved(0.6, 0.24, 1.4))) == []
    assert failing(replace(LATER, cluster_drift=moved(0.3, 0.26, 0.34))) == ["cluster_drift"]


def test_the_classifier_fails_only_where_enough_rows_say_so():
    few = replace(GOOD, classifier_agreement=0.8, held_out_rows=71, effective_rows=71)
    assert failing(few) == []
    assert failing(replace(few, held_out_rows=1_000, effective_rows=1_000)) == [
        "classifier_agreement"
    ]
    none = replace(
        few,
        classifier_agreement=0.0,
        held_out_rows=LEAST_HELD_OUT - 1,
        effective_rows=LEAST_HELD_OUT - 1,
    )
    assert failing(none) == []
    assert failing(replace(none, held_out_rows=LEAST_HELD_OUT, effective_rows=LEAST_HELD_OUT)) == [
        "classifier_agreement"
    ]
    checks = judge(few, GateRules())["checks"]
    (check,) = (one for one in checks if one["name"] == "classifier_agreement")
    assert check["low"] < check["value"] < check["high"]
    assert check["limit"] == 0.85


def test_half_the_rows_missing_fails_and_a_dip_that_was_there_before_does_not():
    night = replace(LATER, rows=40_000)
    assert failing(replace(night, fewest_rows=80_000)) == ["volume"]
    # The weekend before was as low.
    assert failing(replace(night, fewest_rows=41_000)) == []
    assert failing(replace(night, fewest_rows=None)) == []
    assert failing(replace(night, rows=500_000, fewest_rows=41_000)) == []


def test_another_model_is_served_only_where_that_was_asked_for():
    other = replace(LATER, served="another-model (log16, capture 012345678901)")
    assert failing(other) == ["identity"]
    reason = judge(other, GateRules())["reasons"][0]
    assert other.served in reason and other.identity in reason and "--capture-id" in reason
    assert failing(replace(other, asked=True)) == []
    assert failing(replace(other, latest=None, served=None)) == []


def test_what_is_served_is_said_only_where_it_is_known():
    def says(**change) -> str:
        return {c["name"]: c["says"] for c in judge(replace(LATER, **change), GateRules())[
            "checks"]}["identity"]  # fmt: skip

    assert says(latest=None, served=None) == f"of {GOOD.identity}: nothing is served yet"
    assert says() == f"of {GOOD.identity}, as latest is"
    assert says(served=None) == (
        f"of {GOOD.identity}; not compared with latest, as that run, {LATER.latest}, cannot be read"
    )


def test_several_reasons_are_all_given():
    bad = replace(LATER, clusters=0, mean_persistence=None, noise_share=1.0, recognised=0.5)
    assert failing(bad) == ["clusters", "noise_share", "recognised"]


@pytest.mark.parametrize(
    # Neighbour recall of runs on planted rows, and on Dirichlet histograms of concentration 1 or 2.
    ("rows", "planted", "noise"),
    [(6_000, 0.397, 0.109), (40_000, 0.226, 0.018)],
)
def test_the_limit_of_recall_follows_the_rows_of_the_map(rows, planted, noise):
    limit = GateRules().neighbor_recall
    assert noise < 0.9 * recall_limit(limit, rows) and recall_limit(limit, rows) < 0.8 * planted


def test_the_limit_of_recall_is_a_share_however_few_the_rows():
    assert recall_limit(0.35, 1_000) == pytest.approx(0.35)
    assert recall_limit(0.35, 4) == recall_limit(0.35, 300) < 0.5
    assert recall_limit(1.0, 4) == 1.0
    assert recall_limit(0.0, 1_000_000) == 0.0


def test_the_interval_of_a_share_is_wilsons():
    assert wilson(0.9, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert wilson(1.0, 50) == pytest.approx((0.9287, 1.0), abs=1e-4)
    assert wilson(0.0, 50) == pytest.approx((0.0, 0.0713), abs=1e-4)


WORST = replace(
    LATER,
    inconsistent_rows=1.0,
    trustworthiness=0.0,
    neighbor_recall=0.0,
    noise_share=1.0,
    mean_persistence=0.0,
    mean_stability=0.0,
    classifier_agreement=0.0,
    recognised=0.0,
    agreement=-0.5,
    zone_drift=moved(20, 19, 21),
    cluster_drift=moved(20, 19, 21),
    fewest_rows=1_000_000,
)


def test_every_limit_stops_something_and_its_far_end_leaves_the_check_out():
    known = asdict(GateRules())
    assert failing(WORST) == list(known)
    ends = dict.fromkeys(known, 0.0)
    ends |= {"inconsistent_rows": 1.0, "noise_share": 1.0, "zone_drift": 100.0}
    ends |= {"cluster_drift": 100.0}
    assert failing(WORST, GateRules(**ends)) == []
    for name, end in ends.items():
        assert failing(WORST, GateRules(**{name: end})) == [n for n in known if n != name]


def test_a_file_overrides_the_limits_it_names(tmp_path):
    file = tmp_path / "gate.toml"
    file.write_text("trustworthiness = 0.5\nzone_drift = 2\n")
    rules = GateRules.from_toml(file)
    assert rules == GateRules(trustworthiness=0.5, zone_drift=2.0)
    file.write_text("")
    assert GateRules.from_toml(file) == GateRules()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("volume = ", "is not a TOML file"),
        ("volumes = 0.5", "unknown gate limit 'volumes': use agreement, "),
        ("volume = 'half'", "volume must be a number, got 'half'"),
        ("volume = true", "volume must be a number"),
        ("volume = 1.5", "gate limit volume must lie between 0 and 1, got 1.5"),
        ("volume = -0.1", "volume must lie between"),
        ("volume = nan", "volume must lie between"),
        ("zone_drift = inf", "zone_drift must lie between 0 and 100"),
        ("[gate]\nvolume = 0.5", "unknown gate limit 'gate'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_reason(tmp_path, text, message):
    file = tmp_path / "gate.toml"
    file.write_text(text)
    with pytest.raises(OptionError) as refused:
        GateRules.from_toml(file)
    assert message in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path):
    with pytest.raises(OptionError, match=r"cannot read .*missing\.toml"):
        GateRules.from_toml(tmp_path / "missing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="is not a TOML file"):
        GateRules.from_toml(tmp_path / "bytes.toml")
