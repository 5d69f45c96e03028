"""One request's rows: which are wanted, its entries, its records, its usage."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from collected_rows import NOON, random_row
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.fingerprint.vector import Layout, broken_invariants
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.phases import PARSERS, PhaseTracker, ThinkTags
from pipeline.engines.serving.request import CaptureRequest
from pipeline.record import SCHEMA, conform, vectors


def collector(request: CaptureRequest, prompt_len: int = 10, **options) -> RequestCollector:
    known = {"request_id": "r", "model": "m", "capture_id": "c", "layout": Layout.LOG16}
    return RequestCollector(request, prompt_len=prompt_len, **known | options)


@given(
    prompt_len=st.integers(1, 40),
    stride=st.integers(1, 7),
    max_steps=st.integers(0, 9),
    prompt_rows=st.integers(0, 50),
    mask=st.integers(0, 50),
)
def test_wanted_rows_are_the_last_of_the_prompt_and_each_stride_up_to_the_limit(
    prompt_len, stride, max_steps, prompt_rows, mask
):
    request = CaptureRequest(
        layers=[0], stride=stride, max_steps=max_steps, prompt_rows=prompt_rows, mask_prefix=mask
    )
    rows = collector(request, prompt_len)
    found = [position for position in range(100) if rows.wants(position)]
    prompt = list(range(prompt_len))[-prompt_rows:] if prompt_rows else []
    generated = [position for position in range(prompt_len, 100) if position % stride == 0]
    generated = generated[:max_steps] if max_steps else generated
    assert found == [position for position in prompt + generated if position >= mask]


@given(
    position=st.integers(1, 300),
    layout=st.sampled_from(Layout),
    sharpness=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    seed=st.integers(0, 5),
)
def test_a_rounded_fingerprint_keeps_the_invariants_that_a_sidecar_checks(
    position, layout, sharpness, seed
):
    request = CaptureRequest(mode="fingerprint", layers=[1, 2])
    rows = collector(request, 0, layout=layout)
    for _ in range(position + 1):
        rows.feed(5)
    (entry,) = rows.add(random_row(position, [1, 2], sharpness=sharpness, seed=seed))
    vector = np.array([entry["fingerprint"]], np.float32)
    assert not broken_invariants(vector, np.array([int(layout)]))
    (kept,) = vectors(rows.records())
    np.testing.assert_allclose(vector[0], kept, atol=5.1e-6)


def test_records_are_what_the_store_takes_and_are_taken_once():
    request = CaptureRequest(
        mode="fingerprint", layers=[0, 3], prompt_rows=1, session_id="s",
        traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    )  # fmt: skip
    tags = ThinkTags(PARSERS["deepseek-r1"], ((1,),), ((11,),), ())
    rows = collector(request, response_id="chatcmpl-1", phases=PhaseTracker(tags, inside=True))
    entries = rows.add(random_row(9, [0, 3]))
    for position in (10, 11, 12):
        rows.feed(position)
        entries += rows.add(random_row(position, [0, 3]))
    assert rows.waiting == 4
    batch = rows.records()
    assert batch.schema == SCHEMA
    conformed = conform(batch)
    assert conformed.batch.num_rows == 4 and not conformed.rejected
    found = batch.to_pylist()
    phases = ["prompt", "think", "think", "output"]
    assert [row["phase"] for row in found] == phases
    assert [entry["think_phase"] for entry in entries] == phases
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3]
    for row, position in zip(found, range(9, 13), strict=True):
        assert (row["position"], row["token_id"], row["layer"]) == (position, position, -1)
        assert row["captured_at"] == NOON
        assert (row["response_id"], row["session_id"]) == ("chatcmpl-1", "s")
        assert row["traceparent"] == request.traceparent
        assert (row["model"], row["capture_id"], row["prompt_len"]) == ("m", "c", 10)
    assert rows.records().num_rows == rows.waiting == 0


def test_a_row_that_sees_no_key_to_describe_has_no_fingerprint_and_no_record():
    rows = collector(CaptureRequest(mode="fingerprint", layers=[0], prompt_rows=10))
    assert rows.add(random_row(0, [0])) == []  # its only key is the sink
    assert rows.add(random_row(1, [0])) != []
    assert rows.records().column("position").to_pylist() == [1]
    raw = collector(CaptureRequest(layers=[0], prompt_rows=10))
    assert raw.add(random_row(0, [0]))[0]["token_positions"] == [0]


@pytest.mark.parametrize("mode", ["raw", "sketch", "fingerprint"])
def test_nothing_of_a_masked_prefix_is_told_in_any_mode(mode):
    """The same attention, with other tokens hidden before it: the entries are the same."""
    said = []
    for mask in (0, 70):
        request = CaptureRequest(mode=mode, layers=[2], heads=[1, 3], mask_prefix=mask)
        rows = collector(request, 20 + mask)
        rows.feed(7)
        row = random_row(20 + mask, [2], heads=[1, 3], mask=mask)
        if mask:
            shown = random_row(20, [2], heads=[1, 3])
            row = row._replace(layers=shown.layers)
        said.append(rows.add(row))
    assert said[0] == said[1] != []


def test_what_asked_for_records_alone_gets_no_entries():
    rows = collector(CaptureRequest(mode="fingerprint", layers=[0], stream_entries=False))
    rows.feed(1)
    assert rows.add(random_row(10, [0])) == []
    assert rows.records().num_rows == 1
    usage = rows.finish()
    assert (usage["rows"], usage["bytes"]) == (1, 0)


def test_rows_of_which_nobody_gets_anything_are_not_wanted():
    def wanted(keep_records: bool, **asked) -> bool:
        request = CaptureRequest(layers=[0], scores=[0], stream_entries=False, **asked)
        return collector(request, keep_records=keep_records).wants(10)

    assert not wanted(False)
    assert wanted(True) and wanted(False, hubs=True)


def test_records_that_nobody_takes_are_not_kept():
    rows = collector(CaptureRequest(layers=[0]), keep_records=False)
    rows.feed(1)
    assert rows.add(random_row(10, [0]))
    assert rows.waiting == 0


def test_usage_counts_rows_bytes_and_time():
    rows = collector(CaptureRequest(layers=[0, 1], hubs=True))
    entries = []
    for position in range(10, 15):
        rows.feed(1)
        entries += rows.add(random_row(position, [0, 1]))
    rows.add_seconds(0.25)
    hubs = np.zeros(40, np.float32)
    hubs[[3, 7]] = 4.0, 6.0
    usage = rows.finish(hubs)
    assert usage["mode"] == "raw"
    assert usage["rows"] == 5
    assert usage["bytes"] == sum(len(msgspec.json.encode(entry)) for entry in entries)
    assert usage["overhead_ms"] >= 250
    assert usage["hubs"] == [[7, 3.0], [3, 2.0]]
