"""What live clusters and rows are said to be."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pages import GUIDE, code_in, table
from shared import REPO

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.describe.axes import axes_in_words
from discovery.describe.claims import TRAITS
from sidecar.traits import BY_TRAIT, BY_ZONE, cluster_traits, explain, sampling_hint

RUN = REPO / "tests/golden/run_v1"


def test_live_and_published_clusters_have_the_same_traits_by_the_same_centroid() -> None:
    clusters = open_artifacts(RUN).table("clusters").to_pylist()
    assert len(clusters) == 9
    usual = np.average(
        [c["centroid"] for c in clusters], axis=0, weights=[c["size"] for c in clusters]
    )
    # What a mean row alone decides; the others compare with rows of as much context.
    absolute = {"local_attention", "retrieval_heavy", "context_aware", "mixed_range", "focused",
                "diffuse", "periodic"}  # fmt: skip
    seen = set()
    for cluster in clusters:
        ours = cluster_traits(np.array(cluster["centroid"]), usual, Layout.LOG16)
        assert set(ours) <= set(TRAITS)
        assert set(ours) & absolute == set(cluster["traits"]) & absolute
        seen |= set(ours)
    assert {"local_attention", "retrieval_heavy", "periodic"} <= seen


def test_the_hint_of_every_zone_and_trait_is_the_documented_one() -> None:
    zones = {code_in(row[0])[0]: row[1:] for row in table(GUIDE, "Sampling hints")}
    traits = {code_in(row[0])[0]: row[1:] for row in table(GUIDE, "What traits add to a hint")}
    assert list(zones) == list(ZONES) == list(BY_ZONE)
    assert set(traits) == set(BY_TRAIT) and set(traits) <= set(TRAITS)
    for zone, (temperature, top_p, why) in zones.items():
        hint = sampling_hint(zone)
        assert (hint.temperature, hint.top_p) == (float(temperature), float(top_p))
        assert why in hint.reason
    for trait, (temperature, top_p, why) in traits.items():
        hint, bare = sampling_hint("syntax_floor", [trait]), sampling_hint("syntax_floor")
        assert hint.temperature == pytest.approx(bare.temperature + float(temperature))
        assert hint.top_p == pytest.approx(bare.top_p + float(top_p))
        assert why in hint.reason


def test_hints_stay_within_what_samplers_accept() -> None:
    for zone in ZONES:
        hint = sampling_hint(zone, list(TRAITS))
        assert 0.1 <= hint.temperature <= 1 and 0.5 <= hint.top_p <= 1


def test_rows_are_explained_by_the_axes_that_they_are_far_out_on() -> None:
    classifier = Classifier.load(RUN)
    codebook = classifier.codebook
    lines = (REPO / "tests/golden/run_v1_answers.jsonl").read_text().splitlines()
    vectors = np.array([json.loads(line)["vector"] for line in lines], np.float32)
    said = explain(vectors, classifier)
    assert all(len(row) == 2 and row[0].axis != row[1].axis for row in said)
    projection = codebook.projection
    first = projection(vectors, codebook.layout)[:, 0]
    words = axes_in_words(projection.components, projection.explained, codebook.layout)[0]
    for end, row in (("high", said[first.argmax()]), ("low", said[first.argmin()])):
        (axis,) = (axis for axis in row if axis.axis == "PC1")
        assert axis.says == f"strongly {words[end]}"
        assert (axis.value > 0) == (end == "high")
    strengths = {axis.says.split(" ", 1)[0] for row in said for axis in row}
    assert strengths == {"strongly", "moderately", "weakly"}
    assert explain(vectors[:0], classifier) == []
