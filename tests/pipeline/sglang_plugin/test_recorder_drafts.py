"""Speculative decoding: a step runs a request's last token and drafts of the next ones, and only
what is committed says which of its rows are kept."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from recorder_steps import DIM, HEADS, LAYERS, LONGEST, MOST_RUNNING, Steps, layer_of  # noqa: E402

from capture_kernels.fingerprint.reference import decode_statistics  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402
from pipeline.engines.serving.steps.base_recorder import GRAPH_PADDING  # noqa: E402
from pipeline.engines.serving.steps.served_model import WITH_DRAFTS  # noqa: E402
from pipeline.engines.sglang.model_process import drafts  # noqa: E402
from pipeline.store.open import open_store  # noqa: E402

TOKENS = 4  # of a request in a step: its last one, and three drafts
VERIFY = SimpleNamespace(
    is_decode=lambda: False, is_extend=lambda: True, is_idle=lambda: False,
    is_target_verify=lambda: True,
)  # fmt: skip


class DraftSteps(Steps):
    """On a server with drafts, whose host does not know how long requests are."""

    def made(self, runner):
        runner.spec_algorithm = SimpleNamespace(is_none=lambda: False)
        runner.decode_num_tokens_per_req = lambda: TOKENS

    def prompt(self, req):
        """Its prompt has run, and its first token is there."""
        self.run([req], [len(req.origin_input_ids)], [0])([commit(req, 1)])
        req.output_ids.append(100)

    def verify(self, reqs, lengths, accepted, padding=0):
        """A step of requests of so many keys; of each so many drafts are accepted. Gives what
        commits them, with how many of the tokens are the answer's."""
        count = len(reqs) + padding
        pools = [req.kv.req_pool_idx for req in reqs] + [0] * padding
        begins = torch.tensor([*lengths, *[1] * padding])
        forward = SimpleNamespace(
            forward_mode=VERIFY, seq_lens=begins, req_pool_indices=torch.tensor(pools),
            positions=(begins[:, None] + torch.arange(TOKENS)).flatten(),
        )  # fmt: skip
        batch = SimpleNamespace(reqs=reqs)
        self.recorder.prepare(forward, batch)
        for number in range(LAYERS):
            query = torch.randn((count * TOKENS, HEADS * DIM), generator=self.generator)
            query[len(reqs) * TOKENS :] = torch.nan
            rows = query.view(count, TOKENS, HEADS, DIM)
            for req, length, taken, own in zip(reqs, lengths, accepted, rows, strict=False):
                for at in range(taken + 1):
                    self.queries[number][req.rid, length + at] = own[at]
            self.recorder.layer(layer_of(number), query, forward, decode=False, sinks=None)
        step = self.recorder.after_verify()

        def commit_all(kept=None):
            ends = kept or [taken + 1 for taken in accepted]
            commits = [commit(req, end) for req, end in zip(reqs, ends, strict=True)]
            for req, end in zip(reqs, ends, strict=True):
                req.output_ids.extend(range(100, 100 + end))
            if step is not None:
                step.copy_to_host(torch.clone).consume(batch, commits)

        return commit_all

    def check(self, req, entries):
        """Raw entries are the reference's; gives the positions, which each layer has."""
        slots = req.kv.req_pool_idx * LONGEST
        of_layers = [[] for _ in range(LAYERS)]
        for entry in entries:
            number, position = entry["layer_id"], entry["position"]
            truth = decode_statistics(
                self.queries[number][req.rid, position].double().numpy(),
                self.keys[number, slots : slots + position + 1].double().numpy(),
                scale=DIM**-0.5, position=position, visibility=Visibility(), mean_top_k=32,
            )  # fmt: skip
            seen = len(entry["token_positions"])
            assert entry["token_positions"] == truth.mean_top_positions[:seen].tolist()
            assert entry["logsumexp_candidates"] == pytest.approx(truth.logsumexp.mean(), abs=1e-4)
            of_layers[number].append(position)
        assert all(each == of_layers[0] for each in of_layers)
        return of_layers[0]


def commit(req, count):
    if not count:
        return None
    return SimpleNamespace(output_index=len(req.output_ids), token_ids=(7,) * count)


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_accepted_drafts(steps, seed):
    """Steps are prepared before the tokens of the ones before are known, and some are padded."""
    random = np.random.default_rng(seed)
    some = steps(kind=DraftSteps)
    reqs = [some.request(1, 6, mode="raw"), some.request(2, 11, mode="raw", prompt_rows=3)]
    for req in reqs:
        some.prompt(req)
    lengths, under_way = [len(req.origin_input_ids) for req in reqs], []
    for _ in range(6):
        accepted = random.integers(0, TOKENS, 2).tolist()
        under_way.append(some.verify(reqs, lengths, accepted, padding=int(random.integers(3))))
        lengths = [length + taken + 1 for length, taken in zip(lengths, accepted, strict=True)]
        if len(under_way) == 2 or random.random() < 0.5:
            under_way.pop(0)()
    for one in under_way:
        one()
    for req, length, rows in zip(reqs, lengths, (0, 3), strict=True):
        req.is_over = True
        entries, usage = some.said(req)
        begin = len(req.origin_input_ids) - rows
        assert some.check(req, entries) == list(range(begin, length))
        assert usage[0]["rows"] == length - begin
        assert len(req.output_ids) == length - len(req.origin_input_ids) + 1


def test_an_answer_ends_within_accepted_drafts_or_before_the_step(steps):
    some = steps(kind=DraftSteps)
    req, late = some.request(1, 6, mode="raw"), some.request(2, 6, mode="raw")
    for one in (req, late):
        some.prompt(one)
    some.verify([req, late], [6, 6], [3, 1])([2, 0])
    for one, kept in ((req, [6, 7]), (late, [])):
        one.is_over = True
        assert some.check(one, some.said(one)[0]) == kept


def test_strides_and_ends_hold_for_true_positions(steps):
    some = steps(kind=DraftSteps)
    req = some.request(1, 8, mode="raw", stride=3, max_steps=2)
    some.prompt(req)
    length = 8
    for taken in (1, 0, 3, 2, 3):
        some.verify([req], [length], [taken])()
        length += taken + 1
    assert some.check(req, some.said(req)[0]) == [9, 12]
    # All that it wants is there.
    some.verify([req], [length], [0])
    assert not some.recorder.capture.requests.enabled.any()


def test_a_request_that_is_put_back_has_each_row_once(steps):
    some = steps(kind=DraftSteps)
    req = some.request(1, 6, mode="raw")
    some.prompt(req)
    some.verify([req], [6], [2])()
    # The next step has run when it is put back: none of its tokens is taken.
    some.verify([req], [9], [3])([0])
    assert some.check(req, some.said(req)[0]) == [6, 7, 8]
    some.run([req], [10], [0])([commit(req, 1)])
    req.output_ids.append(100)
    some.verify([req], [10], [1])()
    assert some.check(req, some.said(req)[0]) == [9, 10, 11]


@pytest.mark.parametrize("is_known", [False, True])
def test_the_first_drafts_are_prepared_whether_or_not_the_prompts_token_is_known(steps, is_known):
    some = steps(kind=DraftSteps)
    req = some.request(1, 6, mode="raw", max_steps=1)
    if is_known:
        some.prompt(req)
        first = some.verify([req], [6], [2])
    else:
        prompt = some.run([req], [6], [0])
        first = some.verify([req], [6], [2])
        prompt([commit(req, 1)])
        req.output_ids.append(100)
    first()
    assert some.check(req, some.said(req)[0]) == [6]


def test_what_a_stride_wants_may_lie_behind_a_step_under_way(steps):
    some = steps(kind=DraftSteps)
    req = some.request(1, 6, mode="raw", stride=13)
    some.prompt(req)
    first = some.verify([req], [6], [3])
    # Position 13 is its last row. As far as the host knows, its rows are at 6 to 9.
    second = some.verify([req], [10], [3])
    first()
    second()
    assert some.check(req, some.said(req)[0]) == [13]


def test_a_graph_that_was_captured_before_gives_rows(steps):
    """Its layers do not run where the host sees it: they ran before, over other requests."""
    some = steps(kind=DraftSteps)
    req = some.request(1, 6, mode="raw")
    some.prompt(req)
    some.verify([req], [6], [3])()
    assert some.check(req, some.said(req)[0]) == [6, 7, 8, 9]
    some.recorder.on_gpu = True
    some.recorder.prepare(SimpleNamespace(forward_mode=VERIFY), SimpleNamespace(reqs=[req]))
    found = some.recorder.after_verify()
    assert [note.row for note in found.noted] == [0, 1, 2, 3]
    some.recorder.on_gpu = False
    assert some.recorder.after_verify() is None


def test_records_are_of_kept_rows(steps, tmp_path):
    some = steps(tmp_path / "store", kind=DraftSteps)
    req = some.request(1, 7, mode="fingerprint")
    some.prompt(req)
    length = 7
    for taken in (3, 0, 2):
        some.verify([req], [length], [taken])()
        length += taken + 1
    some.recorder.close()
    with open_store(tmp_path / "store") as store:
        rows = [row for batch in store.scan() for row in batch.to_pylist()]
    assert sorted(row["position"] for row in rows) == list(range(7, length))


def test_plans_have_room_for_drafts_and_what_is_not_offered_is_named(steps):
    some = steps(kind=DraftSteps, enable_attention_instrumentation=True, hub_slots=1,
                 logit_lens=True)  # fmt: skip
    assert some.recorder.capture.max_rows == (MOST_RUNNING + GRAPH_PADDING) * TOKENS
    facts = some.recorder.model.facts
    for name in ("attention_hubs", "attn_capture", "logit_lens"):
        assert facts.reasons[name] == WITH_DRAFTS
    assert facts.score_layers == ()
    assert some.recorder.capture.hubs.numel() == 0


def test_each_verification_hands_its_results_on_once(monkeypatch):
    class EAGLEWorkerV2:
        def __init__(self, runner):
            self.target_worker = SimpleNamespace(model_runner=runner)

        def verify(self, batch, grammar_barrier=None):
            return SimpleNamespace(logits_output=batch)

    module = SimpleNamespace(EAGLEWorkerV2=EAGLEWorkerV2)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.eagle_worker_v2", module)
    for _ in range(2):
        drafts.wrap_verify("_recorder")
    runner, output = SimpleNamespace(), SimpleNamespace(auxiliary_device_output="another's")
    worker = EAGLEWorkerV2(runner)
    assert worker.verify(output).logits_output.auxiliary_device_output == "another's"
    found = [None, "results"]
    runner._recorder = SimpleNamespace(after_verify=found.pop)
    assert worker.verify(output, grammar_barrier=1).logits_output.auxiliary_device_output == (
        "results"
    )
    assert worker.verify(output).logits_output.auxiliary_device_output is None
    assert worker.verify(None).logits_output is None and found == []
