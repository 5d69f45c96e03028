"""What a server sends to a store or a sidecar: every row once, or counted as lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zmq
from live_server import NEEDLE, entries_of, running, wait_until

from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.sinks import RecordSink, SidecarTarget, StoreTarget
from pipeline.record import vectors
from pipeline.store.open import open_store
from pipeline.stream.wire import decode


def test_records_in_a_store_are_the_fingerprints_of_the_responses(demo, tmp_path: Path):
    path = tmp_path / "fingerprints.db"
    options = ServeOptions(return_attention_tokens=True, layers="all", store=path)
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with RecordSink(StoreTarget(path), batch_s=0.05) as sink:
        with running(demo, options, sink=sink, reasoning_parser="qwen3") as live:
            live.client.headers["traceparent"] = trace
            live.client.headers["x-session-id"] = "s1"
            prompt = "Q: 2\n<think>"
            asked = [
                live.complete(prompt, max_tokens=12, ignore_eos=True, return_attention_tokens=True,
                              attention_fingerprint_mode=True, include_prompt_attention=3, **more)
                for more in ({}, {"attention_mask_prefix": 2}, {"attention_capture_layers": [1]})
            ]  # fmt: skip
            # Of requests that asked for nothing, all are recorded at the default sample rate.
            live.complete()
        wait_until(lambda: sink.counts.queued == 0)
        counts = sink.counts
    with open_store(path) as store:
        rows = [
            row
            for batch in store.scan()
            for row in zip(batch.to_pylist(), vectors(batch), strict=True)
        ]
    assert counts.given == counts.delivered == len(rows)
    assert counts.dropped == counts.duplicates == counts.rejected == 0
    ids = set()
    for found in asked:
        own = {row["position"]: (row, vector) for row, vector in rows
               if row["request_id"] == found["id"]}  # fmt: skip
        entries = entries_of(found)
        assert len(own) == len(entries) == 14
        for entry in entries:
            row, vector = own[entry["step"] + found["usage"]["prompt_tokens"] - 1]
            np.testing.assert_allclose(entry["fingerprint"], vector, atol=5.1e-6)
            assert row["phase"] == entry["think_phase"]
            assert row["response_id"] == found["id"]
            assert row["session_id"] == "s1"
            assert row["traceparent"] == trace
            assert row["model"] == "demo"
            ids.add(row["capture_id"])
    assert len(ids) == 3
    # What `attn capture` gives the same layers and masks: one map serves both.
    for given in ({"layers": "all"}, {"layers": "all", "mask_prefix": 2}, {"layers": "1"}):
        assert load_engine(str(demo), CaptureOptions(**given)).capture_id in ids
    assert len({row["request_id"] for row, _ in rows}) == 4


def test_a_sidecar_receives_the_records_and_its_end_stops_nobody(demo):
    options = ServeOptions(return_attention_tokens=True, sidecar_url="tcp://127.0.0.1:1")
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        sink = RecordSink(SidecarTarget(f"tcp://127.0.0.1:{port}"), batch_s=0.02)
        with sink, running(demo, options, sink=sink) as live:
            found = live.complete(max_tokens=20, ignore_eos=True)
            received = 0
            while received < 19:
                assert receiver.poll(10_000)
                message = decode(receiver.recv(), max_rows=10_000, max_bytes=1 << 20)
                received += message.batch.num_rows
                assert set(message.batch.column("response_id").to_pylist()) == {found["id"]}
            wait_until(lambda: sink.counts.delivered == received == 19)
            receiver.close()
            for _ in range(3):
                again = live.complete(max_tokens=20, ignore_eos=True)
                assert again["choices"] == found["choices"]
        counts = sink.close(0.2)
    assert counts.given == 4 * 19
    assert counts.queued == 0
    assert counts.delivered + counts.dropped == counts.given
    assert counts.dropped >= 1


def test_what_is_turned_off_or_hidden_leaves_no_record(demo, tmp_path: Path):
    path = tmp_path / "fingerprints.db"
    options = ServeOptions(return_attention_tokens=True, store=path, sample_rate=0)
    with RecordSink(StoreTarget(path)) as sink, running(demo, options, sink=sink) as live:
        live.complete()
        assert sink.counts.given == 0
        # All but the prompt's last token and the first generated one are hidden.
        hidden = len(live.model.prompt_tokens(NEEDLE)) + 1
        found = live.complete(
            return_attention_tokens=True,
            attention_mask_prefix=hidden,
            attention_fingerprint_mode=True,
            include_prompt_attention=9,
        )
        assert [entry["step"] for entry in entries_of(found)] == [2, 3, 4, 5]
        wait_until(lambda: sink.counts.given == 4)
