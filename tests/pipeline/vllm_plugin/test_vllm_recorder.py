"""The recorder, step by step: what vLLM does in an order of its own."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from full_score_rows import check_scores, scored  # noqa: E402
from vllm_steps import (  # noqa: E402
    DIM,
    FIRST_TOKEN,
    HEADS,
    KEY_HEADS,
    LAYERS,
    MOST_RUNNING,
    PAGES,
    SCALE,
    Req,
    Steps,
    steps_of,
)  # fmt: skip

from capture_kernels.errors import OptionError  # noqa: E402
from capture_kernels.serving.fused import FusedCapture  # noqa: E402
from capture_kernels.serving.step import StepCapture  # noqa: E402
from pipeline.engines.serving.budget import FEWEST  # noqa: E402
from pipeline.engines.serving.facts_file import ENDED  # noqa: E402
from pipeline.engines.serving.phases import PARSERS  # noqa: E402
from pipeline.engines.serving.responses import HUBS  # noqa: E402
from pipeline.engines.serving.steps.base_recorder import GRAPH_PADDING  # noqa: E402
from pipeline.engines.serving.steps.hubs import ALL_TAKEN, ROW_TWICE  # noqa: E402
from pipeline.engines.vllm.model_process import captured_model, plans  # noqa: E402
from pipeline.engines.vllm.model_process.recorder import Recorder  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402

OFF = "capture ended with an error: see the server's log"


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("windowed", [False, True], ids=["one group", "windows in a second group"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_entries_are_the_models_attention(steps, layout, windowed):
    """Prompts in chunks beside generated tokens, rows of prompts, and padding."""
    some = steps(layout=layout, windowed=windowed)
    plain = some.request("plain", 9)
    rows = some.request("rows", 30, prompt_rows=5)
    last = some.request("last", 21, prompt_rows=1)
    some.run((plain, 9), (rows, 12))()
    some.run((plain, 1), (rows, 15))()
    some.run((plain, 1), (rows, 3), (last, 20))()
    # A step of one token of each, one of which is a prompt's.
    some.decode(plain, rows, last, padding=1)
    some.decode(rows, last, padding=2, times=3)
    for req in (rows, last):
        some.end(req)
    some.run()
    for req, prompt_rows, decoded in ((rows, 5, 4), (last, 1, 3)):
        # Of the last token that was sampled nothing is known: no step had it.
        usage = some.check_rows(req, prompt_rows, decoded)
        assert "off" not in usage and "missing_prompt_rows" not in usage
    assert some.said(plain) == ([], None)


class FusedSteps(Steps):
    """Captured layers of decode steps run in the place of vLLM's attention, with the keys, turned
    around, as values. outputs: of the layers that did, [rows, heads, dim]; left: how many did not.
    """

    def __init__(self, *given, **named):
        self.outputs, self.left = [], 0
        super().__init__(*given, **named)

    def _write(self, req: Req, number: int, position: int) -> None:
        super()._write(req, number, position)
        group = self.group_of[number]
        page, at = divmod(position, PAGES[group])
        cache = self.layers[number].kv_cache
        cache[req.pages[group][page], :, at, DIM:] = req.keys[number, position].flip(-1)

    def run_layer(self, layer, query, metadata):
        output = torch.full_like(query, torch.nan)
        if self.recorder.decodes(layer, query, metadata, output):
            self.outputs.append(output)
        else:
            assert output.isnan().all()
            self.left += 1
            super().run_layer(layer, query, metadata)

    def exact(self, req: Req, number: int, position: int):
        """The attention of one row of a layer: float64[heads, dim]."""
        first = max(0, position + 1 - (self.windows[number] or position + 1))
        keys = req.keys[number, first : position + 1].double()
        query = req.queries[number, position].double().view(KEY_HEADS, -1, DIM)
        p = torch.softmax(SCALE * torch.einsum("gmd,tgd->gmt", query, keys), -1)
        return torch.einsum("gmt,tgd->gmd", p, keys.flip(-1)).reshape(HEADS, DIM)


class HostFused(FusedCapture):
    """`FusedCapture` without a GPU, in plain torch."""

    _plan = StepCapture._plan

    def begin(self, *tables):
        super().begin(*tables)
        self.tables = tables

    def decode(self, number, query, keys, values, output, *, sinks=None):
        plan = self._plan_in_turn(number)
        if plan is None:
            return False
        plan.run(query, keys, sinks=sinks)
        index = self._plan_of[number][0]
        table, window = self.tables[index], self.kinds[index].window
        output.zero_()
        for row, length in enumerate(table.seq_lens.tolist()):
            key = torch.arange(max(0, length - (window or length)), length)
            page = table.kv_slots[row, key // table.page].long()
            slots = page * table.page_slots + key % table.page
            own = query[row].view(KEY_HEADS, -1, DIM)
            p = torch.softmax(SCALE * torch.einsum("gmd,tgd->gmt", own, keys[slots]), -1)
            if length:
                found = torch.einsum("gmt,tgd->gmd", p, values[slots])
                output[row] = found.reshape(HEADS, DIM)
        return True


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("windowed", [False, True], ids=["one group", "windows in a second group"])
def test_fused_decode_runs_layers_of_decode_steps_and_describes_them(
    steps, monkeypatch, windowed, layout
):
    """Steps of prompts are vLLM's own, with the same requests. Who asks for nothing has its
    attention as well, and rows that pad a batch get zeros."""
    monkeypatch.setattr(plans, "FusedCapture", HostFused)
    some = steps(kind=FusedSteps, layout=layout, windowed=windowed, fused_decode=True)
    plain, asking = some.request("plain", 9), some.request("asking", 20, prompt_rows=2)
    some.run((plain, 9), (asking, 20))()
    assert (some.outputs, some.left) == ([], LAYERS)
    some.decode(plain, asking, padding=1)
    assert (len(some.outputs), some.left) == (LAYERS, LAYERS)
    for number, output in enumerate(some.outputs):
        for row, req in enumerate((plain, asking)):
            exact = some.exact(req, number, len(req.prompt))
            torch.testing.assert_close(output[row].double(), exact, atol=1e-5, rtol=1e-4)
        assert not output[2].any()
    some.run((plain, 1), (asking, 1), leave_out=0)()  # out of turn: vLLM's own
    assert (len(some.outputs), some.left) == (LAYERS, LAYERS + 1)
    some.decode(asking)
    some.end(asking)
    some.run()
    entries, usage = some.said(asking)
    assert some.check(asking, entries) == [
        (position, number) for position in (18, 19, 20, 22) for number in range(LAYERS)
    ]
    assert usage["rows"] == 4
    # After a fault vLLM's attention runs every layer.
    some.recorder.fail()
    done = len(some.outputs)
    some.decode(plain)
    assert len(some.outputs) == done


def test_fused_decode_leaves_steps_that_attend_to_both_sides_to_vllm(steps, monkeypatch):
    monkeypatch.setattr(plans, "FusedCapture", HostFused)
    some = steps(kind=FusedSteps, fused_decode=True)
    req = some.request("r", 6)
    some.run((req, 6))()
    own = some.run_layer

    def run_layer(layer, query, metadata):
        metadata.causal = False
        own(layer, query, metadata)

    some.run_layer = run_layer
    some.decode(req)
    assert (some.outputs, some.left) == ([], 2 * LAYERS)
    some.run_layer = own
    some.decode(req)
    assert len(some.outputs) == LAYERS


@pytest.mark.parametrize("layers", ["all", "0"])
def test_full_scores_beside_fused_decode(steps, monkeypatch, layers):
    """Of captured layers, which decode with our kernel, and of one that does with vLLM's."""
    monkeypatch.setattr(plans, "FusedCapture", HostFused)
    some = steps(
        kind=FusedSteps, fused_decode=True, layers=layers,
        enable_attention_instrumentation=True, instrumentation_layers="all",
    )  # fmt: skip
    req = some.request("r", 7, layers=[0], scores=[0, 1])
    some.answer(req, tokens=4)
    some.run()
    check_scores(some, req, scored(some, req), range(10))


@pytest.mark.parametrize(
    ("cache", "says"),
    [("auto", "fused decode needs a GPU"), ("fp8", "--kv-cache-dtype fp8 was not tried")],
)
def test_fused_decode_is_refused_where_it_is_not_possible(steps, cache, says):
    some = steps()
    some.runner.vllm_config.cache_config.cache_dtype = cache
    with pytest.raises(OptionError, match=f"^--attention-fused-decode: {says}$"):
        Recorder(some.runner, replace(some.options, fused_decode=True), some.facts.append)


def hubs_of(some, req: Req, positions, mask=0, heads=None):
    """What a request's rows at these positions attended to, by position: float64[n], of the mean
    layer."""
    total = np.zeros(max(positions) + 1)
    for number in range(LAYERS):
        for position in positions:
            total[: position + 1] += some.truth(req, number, position, mask, heads).mean / LAYERS
    return total[mask:]


def check_hubs(usage, exact):
    found = dict(map(tuple, usage["hubs"]))
    assert len(found) == min(HUBS, np.count_nonzero(exact))
    for position, mass in found.items():
        assert mass == pytest.approx(exact[int(position)], abs=1e-3)
    assert min(found.values()) >= np.sort(exact)[-len(found)] - 1e-3


@pytest.mark.parametrize("fused", [False, True], ids=["beside", "fused"])
@pytest.mark.parametrize("windowed", [False, True], ids=["one group", "windows in a second group"])
def test_hubs_are_of_the_rows_whose_tokens_are_kept(steps, monkeypatch, windowed, fused):
    """Of rows of prompts and of generated tokens, of which the last is one too many."""
    monkeypatch.setattr(plans, "FusedCapture", HostFused)
    kind = FusedSteps if fused else Steps
    some = steps(kind=kind, windowed=windowed, fused_decode=fused, hub_slots=2)
    plain = some.request("plain", 9)
    one = some.request("one", 20, hubs=True, prompt_rows=2, mask_prefix=3)
    two = some.request("two", 30, hubs=True, heads=[1])
    third = some.request("third", 9, hubs=True)
    some.run((plain, 9), (one, 12))()
    some.run((one, 8), (two, 30), (third, 9))()
    some.decode(plain, one, two, third, padding=1, times=4)
    late = some.run((one, 1), (two, 1))
    for req in (one, two, third):
        some.end(req)
    late()
    del late  # as vLLM keeps no step that it has read
    some.run()
    usage = {req.request_id: some.said(req)[1] for req in (one, two, third)}
    check_hubs(usage["one"], hubs_of(some, one, range(18, 24), mask=3))
    check_hubs(usage["two"], hubs_of(some, two, range(30, 34), heads=[1]))
    assert (usage["third"].get("hubs"), usage["third"]["hubs_missing"]) == (None, ALL_TAKEN)
    # The slots are given again, and begin empty.
    again = some.request("again", 7, hubs=True)
    some.answer(again, tokens=3)
    check_hubs(some.ended(again)[1], hubs_of(some, again, [7, 8]))


@pytest.mark.parametrize("late", [False, True], ids=["another is put back", "past its end"])
def test_a_slot_is_free_once_its_request_is_over(steps, late):
    """Also while a row of another request of its last step waits, as that was put back, and where a
    step that was begun before is read after its end."""
    gc.collect()
    gc.disable()
    try:
        some = steps(hub_slots=1)
        one, other = some.request("one", 6, hubs=True), some.request("other", 6, mode="raw")
        some.run((one, 6), (other, 6))()
        some.decode(one, other, times=2)
        read = some.run((one, 1), (other, 1))
        if not late:
            read(stale=True)
            some.put_back(other)
        some.end(one)
        some.run((other, 8 if other.computed == 0 else 1))
        if late:
            read()
        del read
        again = some.request("again", 7, hubs=True)
        some.answer(again, tokens=3)
        assert "hubs_missing" not in some.ended(again)[1]
    finally:
        gc.enable()


def test_a_request_that_is_put_back_has_no_hubs(steps):
    some = steps(hub_slots=1)
    req = some.request("r", 6, hubs=True)
    some.run((req, 6))()
    some.decode(req, times=2)
    some.put_back(req)
    some.run((req, 9))()
    some.decode(req)
    some.end(req)
    usage = some.ended(req)[1]
    assert (usage.get("hubs"), usage["hubs_missing"]) == (None, ROW_TWICE)


def test_hidden_tokens_chosen_heads_and_chosen_layers(steps):
    some = steps(head_lists=True)
    one = some.request("one", 20, mask_prefix=7, heads=[1, 3], layers=[1])
    two = some.request("two", 20, mask_prefix=20, heads=[0])
    some.answer(one, two, tokens=3)
    some.run()
    entries, _ = some.said(one)
    assert some.check(one, entries, mask=7, heads=[1, 3]) == [(20, 1), (21, 1)]
    for entry in entries:
        truth = some.truth(one, 1, entry["position"] + 7, mask=7)
        assert list(entry["heads"]) == ["1", "3"]
        for head, own in entry["heads"].items():
            assert own["logsumexp_candidates"] == pytest.approx(
                truth.logsumexp[int(head)], abs=1e-4
            )
    # Of its keys one is a sink at first, and the second row sees another.
    entries, _ = some.said(two)
    assert some.check(two, entries, mask=20, heads=[0]) == [
        (at, number) for at in (20, 21) for number in range(LAYERS)
    ]


@pytest.mark.parametrize(
    ("wanted", "positions"),
    [
        ({"stride": 3}, [12, 15, 18]),
        ({"stride": 2, "max_steps": 2}, [10, 12]),
        ({"max_steps": 1}, [10]),
        ({"prompt_rows": 4, "prompt_stride": 3, "max_steps": 1}, [6, 9, 10]),
        ({"mask_prefix": 14}, [14, 15, 16, 17, 18]),
    ],
)
def test_only_the_wanted_rows_are_captured(steps, wanted, positions):
    some = steps()
    req = some.request("r", 10, layers=[0], **wanted)
    some.answer(req, tokens=10)
    entries, usage = some.ended(req)
    mask = wanted.get("mask_prefix", 0)
    assert [position for position, _ in some.check(req, entries, mask)] == positions
    assert usage["rows"] == len(positions)


@pytest.mark.parametrize("mode", ["sketch", "fingerprint"])
def test_other_modes(steps, mode):
    some = steps()
    req = some.request("r", 10, mode=mode)
    some.answer(req, tokens=4)
    entries, usage = some.ended(req)
    assert steps_of(entries) == [1, 2, 3]
    assert usage["mode"] == mode


# Which rows --------------------------------------------------------------------------------------


def test_a_step_is_prepared_before_the_tokens_of_the_one_before_are_known(steps):
    some = steps()
    req = some.request("r", 6, layers=[0])
    first = some.run((req, 6))
    second = some.run((req, 1))
    first()
    assert some.said(req) == ([], None)
    third = some.run((req, 1))
    # Its first row's token is not known to the engine yet.
    assert some.said(req) == ([], None)
    second()
    fourth = some.run((req, 1))
    assert some.check(req, some.said(req)[0]) == [(6, 0)]
    third()
    # It stopped with that token, when the fourth step was under way.
    some.end(req)
    fourth()
    entries, usage = some.ended(req)
    assert some.check(req, entries) == [(7, 0)]
    assert usage["rows"] == 2
    some.run()
    assert some.said(req) == ([], None)


def test_rows_past_the_end_are_dropped_though_their_step_is_over(steps):
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req, times=2)
    # As when a stop is found in the tokens of the step before, and one more has run.
    req.outputs.pop()
    some.end(req)
    entries, usage = some.ended(req)
    assert some.check(req, entries) == [(6, 0)]
    assert usage["rows"] == 1


def test_a_request_that_is_put_back_has_each_row_once(steps):
    some = steps()
    req = some.request("r", 6, layers=[1], prompt_rows=2)
    other = some.request("other", 6, layers=[1])
    some.run((req, 6), (other, 6))()
    some.decode(req, other, times=3)
    some.put_back(req)
    some.decode(other, times=2)
    # It begins again with all its tokens, in chunks, and its rows are taken as those of a prompt.
    some.run((req, 7), (other, 1))()
    some.run((req, 3), (other, 1))()
    some.decode(req, other, times=2)
    for one in (req, other):
        some.end(one)
    some.run()
    entries, usage = some.said(req)
    assert some.check(req, entries) == [(position, 1) for position in range(4, 12)]
    assert (usage["rows"], "missing_prompt_rows" in usage) == (8, False)
    assert [position for position, _ in some.check(other, some.said(other)[0])] == list(
        range(6, 15)
    )


@pytest.mark.parametrize("stale", [False, True], ids=["token taken", "token dropped"])
def test_a_step_in_flight_when_a_request_is_put_back(steps, stale):
    """vLLM takes the token of that step, or samples it again."""
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req)
    in_flight = some.run((req, 1))
    some.put_back(req)
    if not stale:
        in_flight()
    again = some.run((req, 6 + len(req.outputs)))
    if stale:
        in_flight(stale=True)
    again()
    some.decode(req, times=2)
    some.end(req)
    entries, usage = some.ended(req)
    rows = 5 - stale
    assert some.check(req, entries) == [(6 + n, 0) for n in range(rows)]
    assert usage["rows"] == rows


def test_a_request_that_is_put_back_within_its_prompt(steps):
    some = steps()
    req = some.request("r", 20, layers=[0], prompt_rows=12)
    some.run((req, 14))()
    some.put_back(req)
    some.run((req, 20))()
    some.decode(req)
    some.end(req)
    entries, usage = some.ended(req)
    assert some.check(req, entries) == [(position, 0) for position in range(8, 21)]
    assert "missing_prompt_rows" not in usage


def test_rows_from_the_prefix_cache_are_missing(steps):
    some = steps()
    req = some.request("r", 20, prompt_rows=12, mode="fingerprint")
    some.run((req, 4), cached=16)()
    some.decode(req)
    some.end(req)
    entries, usage = some.ended(req)
    assert steps_of(entries) == [-3, -2, -1, 0, 1]
    assert usage["missing_prompt_rows"] == 8


def test_more_rows_of_prompts_than_a_step_has_room_for(steps):
    some = steps()
    room = MOST_RUNNING + GRAPH_PADDING
    reqs = [some.request(name, 30, mode="fingerprint", prompt_rows=15) for name in "ab"]
    some.answer(*reqs, tokens=1)
    some.run()
    for req in reqs:
        entries, usage = some.said(req)
        # Those nearest to the answers, of each request as many.
        assert steps_of(entries) == list(range(1 - room // 2, 1))
        assert usage["missing_prompt_rows"] == 15 - room // 2


def test_who_does_not_ask_is_not_captured_wherever_it_is_in_the_batch(steps):
    some = steps()
    flags = some.recorder.capture.requests
    asks = some.request("asks", 6, mask_prefix=3)
    silent = some.request("silent", 6)
    some.answer(asks, tokens=2)
    assert (int(flags.enabled[0]), int(flags.mask[0])) == (1, 3)
    # The next one is in its place.
    some.run((silent, 6))()
    assert (int(flags.enabled[0]), int(flags.mask[0])) == (0, 0)
    other = some.request("other", 9)
    some.run((silent, 1), (other, 9))()
    some.decode(other, silent)
    assert not flags.enabled.any()
    assert [some.said(req) for req in (silent, other)] == [([], None)] * 2
    assert len(some.said(asks)[0]) == LAYERS


def test_what_a_client_signed_itself_is_not_captured(steps):
    some = steps()
    req = some.request("r", 6, layers=[0])
    text = req.sampling_params.extra_args["attn"]
    req.sampling_params.extra_args["attn"] = "0" * 32 + text[32:]
    some.answer(req, tokens=3)
    some.run()
    assert some.said(req) == ([], None)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_without_a_layer_says_nothing_instead_of_the_last_ones_numbers(steps, layer):
    some = steps()
    req = some.request("r", 6, layers=[0])
    some.run((req, 6))()
    some.decode(req)
    some.decode(req, leave_out=layer)
    some.decode(req, times=2)
    some.end(req)
    entries, _ = some.ended(req)
    assert some.check(req, entries) == [(6, 0), (8, 0), (9, 0)]


def test_a_dummy_step_between_two_is_not_captured(steps):
    """As vLLM runs them beside other ranks of data parallelism."""
    some = steps()
    req = some.request("r", 6, layers=[0], prompt_rows=1)
    some.run((req, 6))()
    some.recorder.prepare_dummy()
    # Nor does a CUDA graph of such a step, in which capture runs by these.
    assert not some.recorder.capture.requests.enabled.any()
    layer = some.layers[0]
    metadata = SimpleNamespace(max_query_len=6, seq_lens=torch.zeros(1), block_table=None)
    some.run_layer(layer, req.queries[0, :6], metadata)
    output = SimpleNamespace(get_output=None)
    some.recorder.results(output, None)
    assert output.get_output is None
    some.decode(req)
    some.end(req)
    entries, _ = some.ended(req)
    assert some.check(req, entries) == [(5, 0), (6, 0)]


# Records -----------------------------------------------------------------------------------------


def test_records_are_in_the_store_by_the_ids_of_responses(steps, tmp_path):
    path = tmp_path / "f.db"
    some = steps(path)
    # The engine has other names for them.
    names = {"cmpl-1-0-0a1b2c3d": "cmpl-1", "chatcmpl-2-0a1b2c3d": "chatcmpl-2"}
    asked = {"mode": "fingerprint", "session_id": "s", "prompt_rows": 1}
    reqs = [
        some.request(name, 6, stream_entries=False, response_id=own, **asked)
        for name, own in names.items()
    ]
    some.run(*[(req, 6) for req in reqs])()
    some.decode(*reqs, times=2)
    some.put_back(reqs[0])
    some.run((reqs[0], 9), (reqs[1], 1))()
    some.decode(*reqs, times=2)
    for req in reqs:
        some.end(req)
        # Its client asked for nothing, so it is told no entries.
        assert some.ended(req)[0] == []
    some.recorder.close()
    with open_store(path) as store:
        rows = [row for batch in store.scan() for row in batch.to_pylist()]
    found = sorted((r["request_id"], r["position"], r["token_id"], r["phase"]) for r in rows)
    assert found == [
        (name, position, *((FIRST_TOKEN + position - 6, "output") if position > 5
                           else (position, "prompt")))
        for name in sorted(names.values()) for position in range(5, 11)
    ]  # fmt: skip
    assert {(row["response_id"] == row["request_id"], row["prompt_len"]) for row in rows} == {
        (True, 6)
    }
    assert {(row["session_id"], row["model"]) for row in rows} == {("s", "demo")}


def test_requests_of_an_adapter_are_not_captured_and_say_why(steps):
    some = steps()
    req = some.request("r", 6, layers=[0])
    req.adapter = object()
    some.answer(req, tokens=3)
    entries, usage = some.ended(req)
    assert entries == [] and usage["off"] == "the attention of an adapter (LoRA) is not captured"


def test_closing_says_that_the_server_ends_once(steps):
    some = steps()
    some.recorder.close()
    some.recorder.close()
    assert [facts.reasons["capture"] for facts in some.facts] == [ENDED]


# Switched off ------------------------------------------------------------------------------------


def test_a_budget_that_is_passed_ends_capture(steps):
    some = steps(overhead_budget=0.01)
    req = some.request("r", 6, layers=[0], prompt_rows=1)
    some.run((req, 6))()
    assert some.recorder.off is None
    some.decode(req, times=2 * FEWEST)
    reason = some.recorder.off
    assert "--attention-overhead-budget 0.01" in reason
    assert [facts.reasons["capture"] for facts in some.facts] == [reason]
    some.end(req)
    entries, usage = some.ended(req)
    # All of them up to the step that was begun when it was passed.
    assert steps_of(entries) == list(range(len(entries)))
    assert FEWEST <= len(entries) <= FEWEST + 1
    assert usage["off"] == reason


def owner_of(some: Steps, where: str):
    recorder = some.recorder
    return {"recorder": recorder, "notes": recorder._notes, "capture": recorder.capture}[where]


def broken(*given, **named):
    raise RuntimeError("a fault for the test")


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("recorder", "_begin_request"), ("notes", "_note"), ("recorder", "_settle"),
        ("capture", "begin"), ("capture", "layer"), ("capture", "results"),
    ],
)  # fmt: skip
def test_a_fault_is_logged_once_and_all_who_wait_are_told(steps, caplog, monkeypatch, where, name):
    some = steps()
    reqs = [some.request(name, 6, layers=[0]) for name in "ab"]
    silent = some.request("silent", 6)
    some.run(*[(req, 6) for req in reqs])()
    some.decode(*reqs)
    monkeypatch.setattr(owner_of(some, where), name, broken)
    late = some.request("late", 6, layers=[0])
    some.run((reqs[0], 1), (reqs[1], 1), (silent, 6), (late, 6))()
    # Serving goes on.
    some.decode(*reqs, silent, late, times=3)
    assert all(len(req.outputs) >= 4 for req in (*reqs, silent, late))
    for req in reqs:
        some.end(req)
        entries, usage = some.said(req)
        # Of the step before it all is known, unless the fault came first.
        assert steps_of(entries) == [1] * (name not in ("_settle", "_begin_request"))
        assert usage["off"] == OFF
    some.run()
    assert [some.said(req) for req in (*reqs, silent)] == [([], None)] * 3
    assert [facts.reasons["capture"] for facts in some.facts] == [OFF]
    assert [record.message for record in caplog.records] == [
        "capture is switched off for good, after an error"
    ]
    assert "a fault for the test" in caplog.text


@pytest.mark.parametrize(("where", "name"), [("recorder", "_begin_request"), ("notes", "_note")])
def test_who_begins_when_capture_has_failed_is_told_too(steps, monkeypatch, where, name):
    """Its request had passed the gate, and waited in vLLM's queue."""
    some = steps()
    first, late = (some.request(name, 6, layers=[0]) for name in ("first", "late"))
    monkeypatch.setattr(owner_of(some, where), name, broken)
    some.run((first, 6))()
    some.run((first, 1), (late, 6))()
    some.decode(first, late)
    for req in (first, late):
        some.end(req)
    some.run()
    assert [(some.said(req)[1] or {}).get("off") for req in (first, late)] == [OFF, OFF]


# The model ---------------------------------------------------------------------------------------


class Tags:
    """A tokenizer of two tags. Other tokens are letters."""

    def __init__(self) -> None:
        self.names = {FIRST_TOKEN + 1: "<think>", FIRST_TOKEN + 3: "</think>"}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [token for token, name in self.names.items() if text.startswith(name)]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.names.get(token, "a") for token in tokens)


@pytest.mark.parametrize(
    ("parser", "phases"),
    [
        ("qwen3", ["output", "think", "think", "think", "output"]),
        ("unknown", ["output"] * 5),
        ("", ["output"] * 5),
        ("deepseek_r1", ["think"] * 4 + ["output"]),
        ("minimax_m2", ["think"] * 4 + ["output"]),
        ("kimi_k2", ["output", "think", "think", "think", "output"]),
        ("glm47", ["output", "think", "think", "think", "output"]),
    ],
)  # fmt: skip
def test_thinking_is_found_by_the_tags_of_the_reasoning_parser(steps, parser, phases):
    some = steps(parser=parser)
    some.recorder.model.use_tokenizer(Tags())
    req = some.request("r", 6, layers=[0])
    some.answer(req, tokens=6)
    entries, _ = some.ended(req)
    assert [entry["think_phase"] for entry in entries] == phases


def test_every_other_name_of_a_parser_stands_for_one_that_is_known():
    assert set(captured_model.SAME_TAGS.values()) <= set(PARSERS)


def test_what_requests_may_know_of_the_model(steps):
    facts = steps(layers="1").recorder.model.facts
    assert (facts.name, facts.num_layers, facts.layers, facts.heads) == ("demo", 2, (1,), 4)
    assert facts.max_context == 128
    lens = {"logit_lens": "start the server with --attention-logit-lens"}
    hubs = {"attention_hubs": "start the server with --attention-hub-slots"}
    assert facts.reasons == lens | hubs
    assert steps(hub_slots=1).recorder.model.facts.reasons == lens


def test_a_model_without_attention_to_capture_is_refused(steps, monkeypatch):
    monkeypatch.setattr(captured_model, "attention_layers", lambda runner: {})
    with pytest.raises(OptionError, match="no layer has attention to capture"):
        steps()
