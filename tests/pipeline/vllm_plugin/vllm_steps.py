"""A recorder, and what vLLM's engine and its V2 model runner do around it, of small requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

torch = pytest.importorskip("torch")

from capture_kernels.fingerprint.reference import decode_statistics  # noqa: E402
from capture_kernels.fingerprint.vector import Visibility  # noqa: E402
from pipeline.engines.serving.options import ServeOptions  # noqa: E402
from pipeline.engines.serving.request import CaptureRequest, ModelFacts  # noqa: E402
from pipeline.engines.serving.responses import decoded  # noqa: E402
from pipeline.engines.serving.steps.ranks import Ranks  # noqa: E402
from pipeline.engines.vllm import scheduling  # noqa: E402
from pipeline.engines.vllm.model_process.recorder import Recorder  # noqa: E402
from pipeline.engines.vllm.replies import Report  # noqa: E402

HEADS, KEY_HEADS, DIM, LAYERS, SCALE = 4, 2, 8, 2, 0.3
MOST_RUNNING, LONGEST, WINDOW, VOCABULARY = 4, 128, 12, 50
PAGES = (8, 4)  # tokens of a page, by KV-cache group
MOST_PADDED = MOST_RUNNING + 4  # requests of a step, with those that pad it
DRAFTS = 3
FIRST_TOKEN = 100  # the first generated token of a request; the others follow
PATIENCE_MS = 10_000
# What `get_forward_context` of the stand-in for vLLM gives.
CONTEXT = SimpleNamespace(attn_metadata={})


@dataclass(eq=False)
class Req:
    """As far as the plug-in looks at vLLM's `Request`, and how far it has come. outputs: that the
    engine has; computed: tokens that are scheduled, drafts among them until the engine has read
    that they were not accepted; length: that were computed and kept; prefill: how many it had when
    it began, or began again; pages: of each group, in order; keys, queries: [layers, positions,
    ...]."""

    request_id: str
    prompt: list[int]
    sampling_params: Any
    keys: Any
    queries: Any
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    length: int = 0
    prefill: int = 0
    pages: list[list[int]] = field(default_factory=list)
    adapter: Any = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.outputs)


def cache_of(pages: int, page: int, layout: str, heads: int = KEY_HEADS, dim: int = DIM) -> Any:
    """vLLM's [pages, key heads, tokens of a page, keys and values], in a physical layout."""
    shape = (pages, page, heads, 2 * dim) if layout == "NHD" else (pages, heads, page, 2 * dim)
    cache = torch.full(shape, torch.nan)
    return cache.transpose(1, 2) if layout == "NHD" else cache


def layer_of(number: int, cache: Any, window: int | None = None, **impl: Any) -> SimpleNamespace:
    """As far as the plug-in looks at vLLM's `Attention`."""
    given = {
        "scale": SCALE, "alibi_slopes": None, "logits_soft_cap": 0, "sinks": None,
        "supports_quant_query_input": False,
    }  # fmt: skip
    return SimpleNamespace(
        layer_name=f"model.layers.{number}.self_attn.attn", num_heads=HEADS,
        num_kv_heads=KEY_HEADS, head_size=DIM, sliding_window=window, kv_cache=cache,
        query_quant=None, impl=SimpleNamespace(**given | impl),
    )  # fmt: skip


def runner_of(
    layers: list[Any], groups: list[list[Any]], parser: str = ""
) -> SimpleNamespace:  # fmt: skip
    """As far as the plug-in looks at vLLM's `GPUModelRunner`."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            served_model_name="demo", model="/none", hf_config=None, skip_tokenizer_init=True,
            hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS), dtype=torch.float32,
        ),
        structured_outputs_config=SimpleNamespace(reasoning_parser=parser),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, use_ubatching=False, data_parallel_size=2, nnodes=1,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None, additional_config={}, max_concurrent_batches=2,
    )  # fmt: skip
    names = [SimpleNamespace(layer_names=[one.layer_name for one in own]) for own in groups]
    return SimpleNamespace(
        vllm_config=config, layers=dict(enumerate(layers)), device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=names), max_num_reqs=MOST_RUNNING,
        max_model_len=LONGEST, is_pooling_model=False, is_encoder_decoder=False,
        model=torch.nn.Module(), max_num_tokens=LONGEST, vocab_size=VOCABULARY,
        execute_model_state=None, decode_query_len=1,
        input_buffers=SimpleNamespace(
            query_start_loc=torch.zeros(MOST_PADDED + 1, dtype=torch.int32),
            seq_lens=torch.zeros(MOST_PADDED, dtype=torch.int32),
        ),
    )  # fmt: skip


class Output:
    """As far as the plug-in looks at vLLM's `AsyncOutput`."""

    def __init__(self, sampled: list[list[int]]) -> None:
        self._sampled = sampled

    def get_output(self) -> SimpleNamespace:
        return SimpleNamespace(sampled_token_ids=self._sampled)


class Steps:
    """Runs steps as vLLM does: scheduled, begun, prepared, run layer by layer, sampled, and later
    read by the engine. What was said of requests goes through a socket.

    Args:
        windowed: whether the second layer has a window, and its keys in a group of their own.
        parser: of --reasoning-parser.
    """

    def __init__(
        self, folder: Path, options: ServeOptions, ranks: Ranks | None = None, *,
        layout: str = "NHD", windowed: bool = False, parser: str = "",
    ) -> None:  # fmt: skip
        self.options, self.facts = options, list[ModelFacts]()
        self.windows = [0, WINDOW if windowed else 0]
        self.group_of = [0, int(windowed)]
        self.scheduler = SimpleNamespace(requests={})
        self.generator = torch.Generator().manual_seed(0)
        # Page 0 is nobody's.
        most = [MOST_RUNNING * -(-LONGEST // page) for page in PAGES]
        self.free = [(torch.randperm(n, generator=self.generator) + 1).tolist() for n in most]
        self.layers = [
            self.new_layer(number, 1 + most[group], PAGES[group], layout)
            for number, group in enumerate(self.group_of)
        ]
        groups = [[self.layers[0]], [self.layers[1]]] if windowed else [self.layers]
        self.runner = runner_of(self.layers, groups, parser)
        self.made(self.runner)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self.address = f"ipc://{folder / 'answers'}{0 if ranks is None else ranks.number}"
        self._inbox.bind(self.address)
        self._inbox.set(zmq.RCVTIMEO, PATIENCE_MS)
        self._said: list[Report] = []
        self.reports: list[Report] = []
        # Of full scores, by request: layer, position and shape, and what follows them.
        self.blocks: dict[str, list[tuple[Any, bytes]]] = {}
        self.recorder = Recorder(self.runner, options, self.facts.append, ranks)

    def new_layer(self, number: int, pages: int, page: int, layout: str) -> Any:
        return layer_of(number, cache_of(pages, page, layout), self.windows[number] or None)

    def made(self, runner: SimpleNamespace) -> None:
        """The model is there, and no recorder yet."""

    def close(self) -> None:
        self.recorder.close()
        self._context.destroy(linger=0)

    # In the engine -------------------------------------------------------------------------------

    def request(self, name: str, prompt: int, **wanted: Any) -> Req:
        """A request of so many tokens; without `wanted` it asks for nothing."""
        extra = None
        if wanted:
            given = {"layers": list(range(LAYERS)), "reply": f"{self.address} {name}"} | wanted
            extra = {"attn": CaptureRequest(**given).signed(self.options.secret)}
        shape = (LAYERS, LONGEST)
        req = Req(
            name, list(range(prompt)), SimpleNamespace(extra_args=extra),
            torch.randn((*shape, KEY_HEADS, DIM), generator=self.generator),
            torch.randn((*shape, HEADS, DIM), generator=self.generator),
        )  # fmt: skip
        self.scheduler.requests[name] = req
        return req

    def put_back(self, req: Req) -> None:
        """Preempted: its pages are others', and it begins again."""
        for group, pages in enumerate(req.pages):
            self.free[group][:0] = pages
            for number in range(LAYERS):
                if self.group_of[number] == group:
                    self.layers[number].kv_cache[pages] = torch.nan
        req.pages, req.computed, req.length = [], 0, 0

    def end(self, req: Req) -> None:
        """It has stopped, or was aborted."""
        scheduling.note_end(self.scheduler, req)
        del self.scheduler.requests[req.request_id]

    # A step --------------------------------------------------------------------------------------

    def run(
        self, *parts: tuple[Req, int], padding: int = 0, leave_out: int | None = None,
        cached: int = 0, drafts: dict[Req, tuple[int, int]] | None = None,
    ) -> Callable[..., None]:  # fmt: skip
        """A step over so many next tokens of some requests, of which the new ones have so many in
        the prefix cache; gives what has the engine read the sampled tokens, and take them unless
        they are stale, all or those of a request.

        Args:
            drafts: how many of those tokens are drafts, and how many of these are accepted.
        """
        drafts = drafts or {}
        new = [self._begun(req, cached) for req, _ in parts if not req.computed]
        scheduled = SimpleNamespace(
            scheduled_new_reqs=new, num_scheduled_tokens={r.request_id: n for r, n in parts}
        )
        self.recorder.begin(scheduling.decide(scheduled, self.scheduler))
        if not parts:
            return lambda: None
        reqs, counts = zip(*sorted(parts, key=lambda part: part[1]), strict=True)
        firsts = [req.length for req in reqs]
        lengths = np.add(firsts, counts).tolist()
        starts = np.cumsum([0, *counts, *[0] * padding])
        drafted = [drafts.get(req, (0, 0)) for req in reqs]
        buffers = self.runner.input_buffers
        buffers.query_start_loc[:] = sum(counts)
        buffers.query_start_loc[: len(starts)] = torch.from_numpy(starts)
        buffers.seq_lens.zero_()[: len(reqs)] = torch.tensor(lengths)
        self.recorder.prepare(SimpleNamespace(
            req_ids=[req.request_id for req in reqs], num_reqs=len(reqs),
            num_computed_tokens_np=np.array([req.computed for req in reqs]),
            num_scheduled_tokens=np.array(counts), query_start_loc_np=starts,
            num_draft_tokens_per_req=np.array([n for n, _ in drafted]) if drafts else None,
            is_prefilling_np=np.array([req.length < req.prefill for req in reqs]),
        ))  # fmt: skip
        kept = [n - d + accepted for n, (d, accepted) in zip(counts, drafted, strict=True)]
        for req, length, count, own in zip(reqs, lengths, counts, kept, strict=True):
            req.computed += count
            req.length += own
            self._give_pages(req, length)
        at = [(r, p) for r, a, b in zip(reqs, firsts, lengths, strict=True) for p in range(a, b)]
        CONTEXT.attn_metadata = {
            layer.layer_name: self.metadata(
                [*counts, *[0] * padding], self._table(reqs, group, padding),
                torch.tensor(lengths + [0] * padding, dtype=torch.int32),
            )
            for layer, group in zip(self.layers, self.group_of, strict=True)
        }  # fmt: skip
        for number, layer in enumerate(self.layers):
            for req, position in at:
                self._write(req, number, position)
            query = torch.stack([
                req.queries[number, position] if position < req.length
                else torch.randn((HEADS, DIM), generator=self.generator)
                for req, position in at
            ])  # fmt: skip
            pad = padding * self.runner.decode_query_len
            query = torch.cat([query, torch.full((pad, HEADS, DIM), torch.nan)])
            if number != leave_out:
                self.run_layer(layer, query, CONTEXT.attn_metadata[layer.layer_name])
        sampled = [
            [
                FIRST_TOKEN + req.length - len(req.prompt) - behind
                for behind in reversed(range(accepted + 1))
            ]
            if req.length >= req.prefill
            else []
            for req, (_, accepted) in zip(reqs, drafted, strict=True)
        ]
        output = Output(sampled)
        self.recorder.results(output, self.ran(at, padding))

        def read(*, stale: bool = False, stale_of: Req | None = None) -> None:
            found = output.get_output().sampled_token_ids
            for req, tokens, count, own in zip(reqs, found, counts, kept, strict=True):
                is_stale = stale or req is stale_of
                if req.request_id in self.scheduler.requests and not is_stale:
                    req.outputs += tokens
                    req.computed -= count - own

        return read

    def metadata(self, counts: list[int], table: Any, lengths: Any) -> SimpleNamespace:
        """Of a layer, of requests with so many tokens in the step."""
        return SimpleNamespace(
            max_query_len=max(counts), block_table=table, seq_lens=lengths,
            query_start_loc=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int(),
        )  # fmt: skip

    def ran(self, at: list[tuple[Req, int]], padding: int) -> SimpleNamespace:
        """What vLLM keeps of a step over some positions until it has sampled."""
        return SimpleNamespace(attn_metadata=CONTEXT.attn_metadata)

    def run_layer(self, layer: Any, query: Any, metadata: Any) -> None:
        if self.number_of(layer) not in self.recorder.model.tapped:
            return
        self.recorder.layer(layer, query, metadata)

    def number_of(self, layer: Any) -> int:
        return next(number for number, one in enumerate(self.layers) if one is layer)

    def decode(self, *reqs: Req, times: int = 1, **given: Any) -> None:
        """Steps of a token of each, whose tokens are read at once."""
        for _ in range(times):
            self.run(*[(req, 1) for req in reqs], **given)()

    def answer(self, *reqs: Req, tokens: int) -> None:
        """Whole requests, with so many generated tokens; they have ended, but no step has begun
        since."""
        self.run(*[(req, len(req.prompt)) for req in reqs])()
        self.decode(*reqs, times=tokens - 1)
        for req in reqs:
            self.end(req)

    def _begun(self, req: Req, cached: int) -> SimpleNamespace:
        tokens = req.prompt + req.outputs
        req.prefill, req.pages = len(tokens), [[] for _ in set(self.group_of)]
        req.computed = req.length = cached
        self._give_pages(req, cached)
        for position in range(cached):
            for number in range(LAYERS):
                self._write(req, number, position)
        return SimpleNamespace(
            req_id=req.request_id, prompt_token_ids=req.prompt, prefill_token_ids=tokens,
            sampling_params=req.sampling_params, lora_request=req.adapter,
        )  # fmt: skip

    def _give_pages(self, req: Req, length: int) -> None:
        for group, pages in enumerate(req.pages):
            while len(pages) * PAGES[group] < length:
                pages.append(self.free[group].pop())

    def _table(self, reqs: Any, group: int, padding: int) -> Any:
        table = torch.zeros((len(reqs) + padding, LONGEST // PAGES[group]), dtype=torch.int32)
        for row, req in enumerate(reqs):
            pages = req.pages[group]
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table

    def _write(self, req: Req, number: int, position: int) -> None:
        group = self.group_of[number]
        page, at = divmod(position, PAGES[group])
        cache = self.layers[number].kv_cache
        cache[req.pages[group][page], :, at, :DIM] = self._key(req, number, position)

    def _key(self, req: Req, number: int, position: int) -> Any:
        """Of a draft that is not accepted any, which the next step writes over."""
        key = req.keys[number, position]
        return key if position < req.length else torch.randn(key.shape, generator=self.generator)

    # What became of it ---------------------------------------------------------------------------

    def said(self, req: Req) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Entries and usage of a request since the last time. An end is said once."""
        # What one socket is sent arrives in order.
        self.recorder._reporter.report(f"{self.address} mark", [], None)
        decoder = msgspec.msgpack.Decoder(Report)
        while True:
            head, *parts = self._inbox.recv_multipart()
            if (one := decoder.decode(head)).key == "mark":
                break
            self._said.append(one)
            self.reports.append(one)
            self.blocks.setdefault(one.key, []).extend(zip(one.blocks, parts, strict=True))
        own = [one for one in self._said if one.key == req.request_id]
        self._said = [one for one in self._said if one.key != req.request_id]
        ends = [one.usage for one in own if one.usage is not None]
        assert len(ends) < 2
        return [entry for one in own for entry in decoded(one.entries)], ends[0] if ends else None

    def check_rows(self, req: Req, prompt_rows: int, decoded: int) -> dict[str, Any]:
        """Of a request that has ended, raw entries of its prompt's last rows and of generated ones
        say what the reference does in each layer, and no others are there; gives its usage."""
        entries, usage = self.said(req)
        begin, rows = len(req.prompt) - prompt_rows, prompt_rows + decoded
        assert self.check(req, entries) == [
            (position, number)
            for position in range(begin, begin + rows)
            for number in range(LAYERS)
        ]
        assert usage is not None and usage["rows"] == rows
        return usage

    def ended(self, req: Req) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The same of a request that has ended, at the engine's next step."""
        self.run()
        entries, usage = self.said(req)
        assert usage is not None
        return entries, usage

    def truth(
        self, req: Req, number: int, position: int, mask: int = 0, heads: list[int] | None = None
    ) -> Any:
        """The reference of one row of a layer."""
        options = self.options
        return decode_statistics(
            req.queries[number, position].double().numpy(),
            req.keys[number, : position + 1].double().numpy(),
            scale=SCALE, position=position, window=self.windows[number], mean_top_k=32,
            visibility=Visibility(options.sink_tokens, mask, options.tokens_window),
            mean_heads=heads,
        )  # fmt: skip

    def check(
        self, req: Req, entries: list[dict[str, Any]], mask: int = 0,
        heads: list[int] | None = None,
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Raw entries say what the reference does; gives their positions and layers."""
        of_heads = slice(None) if heads is None else heads
        found = []
        for entry in entries:
            number, position = entry["layer_id"], entry["position"] + mask
            truth = self.truth(req, number, position, mask, heads)
            seen = int((truth.mean_top_positions >= 0).sum())
            assert entry["token_positions"] == truth.mean_top_positions[:seen].tolist()
            masses = truth.mean_top_mass[:seen]
            np.testing.assert_allclose(entry["attention_scores"], masses / masses.sum(), atol=1e-4)
            logsumexp = truth.logsumexp[of_heads].mean()
            assert entry["logsumexp_candidates"] == pytest.approx(logsumexp, abs=1e-4)
            found.append((position, number))
        return found


class DraftSteps(Steps):
    """On a server with drafts of DRAFTS tokens."""

    def made(self, runner: SimpleNamespace) -> None:
        runner.decode_query_len = 1 + DRAFTS

    def verify(self, *accepted: tuple[Req, int], padding: int = 0) -> Callable[..., None]:
        """A step of each request's last token and drafts, of which so many are accepted."""
        return self.run(
            *[(req, 1 + DRAFTS) for req, _ in accepted], padding=padding,
            drafts={req: (DRAFTS, count) for req, count in accepted},
        )  # fmt: skip


def steps_of(entries: list[dict[str, Any]]) -> list[int]:
    return [entry.get("decode_step", entry.get("step")) for entry in entries]
