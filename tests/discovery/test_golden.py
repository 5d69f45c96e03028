"""Artifacts that an earlier version published load, verify and classify as they did then.

report.html, which no reader of artifacts needs, was taken out of the run.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from shared import REPO
from watching import logged

from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.runs.parent import open_parent

GOLDEN = REPO / "tests" / "golden"
RUN_ID = "2026-11-23T00-00-00"


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    """Vectors of the shipped sample, with what the version that made the run answered for each."""
    lines = (GOLDEN / "run_v1_answers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_file_of_a_run_of_version_1_is_verified():
    artifacts = open_artifacts(GOLDEN / "run_v1")
    artifacts.verify()
    assert artifacts.run_id == RUN_ID
    assert artifacts.table("embedding").num_rows == artifacts.manifest["counts"]["rows"] == 518


def test_a_run_of_version_1_classifies_as_it_did(answers):
    classifier = Classifier.load(GOLDEN / "run_v1")
    found = classifier.answer([answer["vector"] for answer in answers])
    kinds = {answer["answer"]["manifold"]["cluster_id"] for answer in answers}
    assert len(answers) > 100 and -1 in kinds and len(kinds) > 5
    for one, saved in zip(found, answers, strict=True):
        was = saved["answer"]
        assert (one["run_id"], one["schema_version"]) == (was["run_id"], was["schema_version"])
        # Processors round the last digit of a confidence differently.
        confidence = {"confidence": pytest.approx(was["manifold"]["confidence"], abs=2e-6)}
        # Prototypes of version 1 name no second cluster.
        assert one["manifold"] == was["manifold"] | confidence | {"second": None}
    vectors = np.array([answer["vector"] for answer in answers], np.float32)
    wanted = np.array([answer["coordinates"] for answer in answers], np.float32)
    np.testing.assert_array_equal(classifier.classify(vectors).coordinates, wanted)


def test_a_run_of_version_1_can_be_a_parent(tmp_path):
    (tmp_path / RUN_ID).symlink_to(GOLDEN / "run_v1", target_is_directory=True)
    parent = open_parent(tmp_path, RUN_ID)
    assert len(parent.ids) == len(set(parent.ids.tolist())) == len(parent.labels) > 5
    assert parent.references.shape[1] == 20
    assert set(parent.reference_cluster.tolist()) <= set(range(len(parent.ids)))


def test_the_events_of_a_run_of_version_1_fit_todays_schema():
    events = logged(GOLDEN / "run_v1")
    assert (events[0]["event"], events[-1]["event"]) == ("run_started", "run_finished")
