"""A capture of many prompts at once, with an engine that stores by itself.

SGLang takes 20 s to start and a virtual environment of its own, so its place is taken by an engine
that makes up attention, and writes it into the store through a connection of its own and later than
it answers, as SGLang's plug-in does. `tests/sglang/test_offline_capture.py` has SGLang itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.capture import CaptureSummary, Prompt
from pipeline.capture_batches import BatchedCapture
from pipeline.engines.options import CaptureOptions, PromptError
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.request import CaptureRequest
from pipeline.record import make_batch
from pipeline.store.open import open_store

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.sglang.offline import (
    Generated,
    OfflineEngine,
    put_options,
    recorded_positions,
    serve_options,
)

PROMPTS = [Prompt(f"p{i}", "x" * (3 + i % 7)) for i in range(40)]


class LateEngine:
    """Stores a prompt's rows after it answered. lost: ids of prompts without their last two rows;
    refused: ids that it does not take; interrupted_by: the id at which Ctrl+C is pressed."""

    capture_id = "a" * 12

    def __init__(self, db, *, lost=(), refused=(), interrupted_by=None, new_tokens=4) -> None:
        self.store = open_store(db, create=True)
        self.lost, self.refused, self.interrupted_by = lost, refused, interrupted_by
        self.options = CaptureOptions(max_new_tokens=new_tokens)
        self.started: list[str] = []
        self.writes: list[asyncio.Task] = []
        self.most_at_once = self.at_once = 0

    def run(self, work):
        return asyncio.run(work)

    def tokens(self, prompt, request_id):
        if request_id in self.refused:
            raise PromptError(f"prompt {request_id!r} has too many tokens")
        return list(range(len(prompt)))

    def most_rows(self, tokens):
        return OfflineEngine.most_rows(self, tokens)

    async def generate(self, tokens, *, request_id, session_id):
        self.started.append(request_id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01)
        if request_id == self.interrupted_by:
            os.kill(os.getpid(), signal.SIGINT)
        self.at_once -= 1
        new = list(range(self.options.max_new_tokens))
        positions, blind = recorded_positions(self.options, len(tokens), len(new))
        kept = positions[:-2] if request_id in self.lost else positions
        self.writes.append(
            asyncio.ensure_future(self.write(request_id, session_id, kept, len(tokens)))
        )
        return Generated(len(tokens), new, positions, blind)

    async def write(self, request_id, session_id, positions, prompt_len):
        await asyncio.sleep(0.1)
        vector = np.zeros((len(positions), 20), np.float32)
        vector[:, 0] = vector[:, 4] = 1
        columns = {
            "request_id": request_id, "session_id": session_id, "position": positions,
            "prompt_len": prompt_len, "layer": -1, "model": "m", "capture_id": self.capture_id,
            "captured_at": datetime(2026, 1, 1, tzinfo=UTC), "layout": int(Layout.LOG16),
            "phase": ["prompt" if p < prompt_len else "output" for p in positions],
            "vector": vector,
        }  # fmt: skip
        self.store.append(make_batch(columns, len(positions)))


def captured(db, engine, prompts=PROMPTS, **given) -> tuple[CaptureSummary, list[str]]:
    warnings: list[str] = []
    summary = CaptureSummary("s", "m", engine.capture_id, (0,), Layout.LOG16)
    with open_store(db, create=True) as store, engine.store:
        BatchedCapture(engine, store, summary, warn=warnings.append, **given).run(prompts)
    return summary, warnings


@pytest.mark.parametrize("name", ["f.db", "folder"])
def test_every_prompt_is_counted_when_its_rows_are_stored_and_again_as_duplicates(tmp_path, name):
    db = tmp_path / name
    refused = ("p3", "p39")
    wanted = [p for p in PROMPTS if p.id not in refused]
    # All of the prompt but its sink token, and all generated tokens but the last.
    rows = sum(len(p.text) - 1 + 3 for p in wanted)
    engine = LateEngine(db, refused=refused)
    summary, warnings = captured(db, engine)
    assert engine.most_at_once > 10
    assert (summary.prompts, summary.refused) == (38, list(refused))
    assert warnings == [f"prompt {name!r} has too many tokens" for name in refused]
    assert (summary.inserted, summary.duplicates, summary.missing) == (rows, 0, 0)
    assert summary.blind_rows == len(wanted) and not summary.interrupted
    assert sum(summary.zones["prompt"].values()) == sum(len(p.text) - 1 for p in wanted)
    assert sum(summary.zones["output"].values()) == 3 * len(wanted)
    # The rest of a store that had some prompts already.
    more = [*PROMPTS[:5], Prompt("new", "xxxx")]
    summary, _ = captured(db, LateEngine(db), more)
    assert summary.inserted == sum(len(p.text) + 2 for p in (PROMPTS[3], more[-1]))
    assert summary.duplicates == sum(len(PROMPTS[i].text) + 2 for i in (0, 1, 2, 4))


def test_rows_that_never_come_are_counted_and_no_further_prompt_is_started(tmp_path, monkeypatch):
    # So few rows may be under way that the two leave no room for a third.
    monkeypatch.setattr("pipeline.capture_batches.MOST_ROWS", 16)
    db = tmp_path / "f.db"
    engine = LateEngine(db, lost=("p1", "p2"))
    summary, warnings = captured(db, engine, patience_s=1.0)
    assert summary.missing == 4
    assert warnings == [f"prompt {n!r}: 2 rows did not reach the store" for n in ("p1", "p2")]
    assert (summary.prompts, engine.started) == (1, ["p0", "p1", "p2"])
    assert "4 rows did not reach the store" in summary.lines()
    assert summary.as_dict()["rows"]["missing"] == 4


def test_ctrl_c_starts_no_further_prompt_and_counts_those_that_run(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.capture_batches.MOST_RUNNING", 3)
    db = tmp_path / "f.db"
    engine = LateEngine(db, interrupted_by="p4")
    summary, _ = captured(db, engine)
    assert summary.interrupted and summary.missing == 0
    assert summary.prompts == len(engine.started) < len(PROMPTS)
    with open_store(db, read_only=True) as store:
        assert store.counts().rows == summary.inserted > 0


@given(
    prompt=st.integers(1, 60), new=st.integers(0, 40), stride=st.integers(1, 9),
    most=st.integers(0, 12), mask=st.integers(0, 20), sinks=st.integers(0, 20),
)  # fmt: skip
def test_the_rows_waited_for_are_those_that_the_plug_in_records(
    prompt, new, stride, most, mask, sinks
):
    options = CaptureOptions(stride=stride, max_steps=most, mask_prefix=mask, sink_tokens=sinks)
    request = CaptureRequest(
        layers=[0], mask_prefix=mask, prompt_rows=prompt, prompt_stride=stride, stride=stride,
        max_steps=most, stream_entries=False,
    )  # fmt: skip
    collector = RequestCollector(
        request, request_id="r", model="m", capture_id="c", layout=Layout.LOG16, prompt_len=prompt
    )
    fed = prompt + max(0, new - 1)
    recorded = [p for p in range(fed) if collector.wants(p) and p >= sinks]
    positions, blind = recorded_positions(options, prompt, new)
    assert positions.tolist() == recorded
    assert blind == len([p for p in range(0, prompt, stride) if p < max(mask, sinks)]) + len(
        [p for p in range(prompt, fed) if p % stride == 0 and p < max(mask, sinks)][: most or None]
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heads": "0"}, "--heads is not available with --engine sglang"),
        ({"per_layer": True}, "--per-layer is not available with --engine sglang"),
        ({"layout": Layout.LAYERED}, "layout layered needs several layers: try --layers auto"),
        ({"layers": "2,x"}, "layers '2,x' is not supported"),
    ],
)
def test_what_sglang_cannot_do_is_refused_by_its_name(tmp_path, given, says):
    with pytest.raises(OptionError, match=says):
        serve_options(CaptureOptions(**given), tmp_path / "f.db")


def test_the_plug_in_is_given_the_capture_s_options_and_none_of_a_server(tmp_path):
    options = CaptureOptions(layers="0, 2", window=50, mask_prefix=3, sink_tokens=2)
    chosen = serve_options(options, tmp_path / "f.db")
    variables = {"ATTN_CAPTURE_SIDECAR_URL": "tcp://127.0.0.1:9", "PATH": "/bin"}
    put_options(chosen, variables)
    assert ServeOptions.from_environment(variables) == chosen
    assert variables["PATH"] == "/bin" and chosen.sidecar_url is None
    assert (chosen.layers, chosen.store) == ("0,2", tmp_path / "f.db")
    assert (chosen.tokens_window, chosen.mask_prefix, chosen.sink_tokens) == (50, 3, 2)
