"""A recorder, and what SGLang's scheduler hands it, made of SGLang's small objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pipeline.engines.serving.options import ServeOptions  # noqa: E402
from pipeline.engines.serving.request import CaptureRequest, ModelFacts  # noqa: E402
from pipeline.engines.serving.responses import decoded  # noqa: E402
from pipeline.engines.serving.steps.ranks import Ranks  # noqa: E402
from pipeline.engines.sglang.model_process.recorder import Recorder  # noqa: E402

HEADS, KEY_HEADS, DIM, LAYERS = 4, 2, 8, 2
MOST_RUNNING, LONGEST = 4, 128


@dataclass
class Req:
    """As far as the recorder looks at SGLang's `Req`."""

    rid: str
    origin_input_ids: list[int]
    sampling_params: Any
    kv: Any
    output_ids: list[int] = field(default_factory=list)
    require_reasoning: bool = False
    is_over: bool = False

    def finished(self) -> bool:
        return self.is_over


def layer_of(number: int) -> Any:
    """As far as the recorder looks at SGLang's `RadixAttention`."""
    layer = torch.nn.Module()
    layer.layer_id, layer.k_scale = number, None
    layer.tp_q_head_num, layer.qk_head_dim = HEADS, DIM
    return layer


class Steps:
    """Runs steps as SGLang does: prepared, run layer by layer, sampled, and later consumed."""

    def __init__(
        self, options: ServeOptions, ranks: Ranks | None = None, most_running: int = MOST_RUNNING
    ) -> None:
        self.options, self.facts = options, list[ModelFacts]()
        slots = (1 + most_running) * LONGEST
        rows = torch.arange(slots, dtype=torch.int32).reshape(1 + most_running, LONGEST)
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn((LAYERS, slots, KEY_HEADS, DIM), generator=generator)
        self.runner = SimpleNamespace(
            server_args=SimpleNamespace(
                served_model_name="demo", model_path="/none", reasoning_parser=None, tp_size=1
            ),
            model_config=SimpleNamespace(
                num_hidden_layers=LAYERS,
                context_len=LONGEST,
                hf_config=None,
                num_attention_heads=HEADS * (1 if ranks is None else ranks.count),
                dtype=torch.float32,
                hf_text_config=SimpleNamespace(),
            ),
            model=torch.nn.Module(),
            token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda n: self.keys[n]),
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
            max_running_requests=most_running,
            is_hybrid_swa=False,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )
        self.made(self.runner)
        self.recorder = Recorder(self.runner, options, self.facts.append, ranks)
        # Of each layer, by request and position: the query float32[H, D].
        self.queries: dict[int, dict[tuple[str, int], Any]] = {n: {} for n in range(LAYERS)}
        self.generator = generator

    def made(self, runner: SimpleNamespace) -> None:
        """The model is there, and no recorder yet."""

    def request(self, row: int, prompt: int, **wanted: Any) -> Req:
        """A request in a row of `req_to_token`; without `wanted` it asks for nothing."""
        params = None
        if wanted:
            asked = CaptureRequest(**{"layers": list(range(LAYERS))} | wanted)
            params = {"attn": asked.signed(self.options.secret)}
        kv = SimpleNamespace(req_pool_idx=row)
        return Req(f"r{row}", list(range(prompt)), SimpleNamespace(custom_params=params), kv)

    def run(
        self, reqs: list[Req], lengths: list[int], prefixes: list[int] | None = None,
        leave_out: int | None = None, padding: int = 0, as_prompts: bool = False,
    ) -> Callable[[list[Any]], None]:  # fmt: skip
        """A step over rows of so many keys: a decode, or with prefixes an extend. Gives what
        consumes it, with what was committed of each request.

        Args:
            padding: rows more, as with data-parallel attention.
            as_prompts: whether a decode runs as prompts of a token each, as it may do there.
        """
        decode = prefixes is None
        batch = SimpleNamespace(reqs=reqs)
        mode = SimpleNamespace(
            is_decode=lambda: decode, is_extend=lambda: not decode, is_idle=lambda: False,
            is_target_verify=lambda: False,
        )  # fmt: skip
        pools = [req.kv.req_pool_idx for req in reqs]
        forward = SimpleNamespace(
            forward_mode=mode, seq_lens_cpu=torch.tensor(lengths), extend_prefix_lens_cpu=prefixes,
            seq_lens=torch.tensor(lengths), req_pool_indices=torch.tensor(pools),
        )  # fmt: skip
        self.recorder.prepare(forward, batch)
        if not as_prompts:
            filled = torch.ones(padding, dtype=torch.int64)
            forward.seq_lens = torch.cat([forward.seq_lens, filled])
            forward.req_pool_indices = torch.cat([forward.req_pool_indices, 0 * filled])
        queries = len(reqs) if decode else sum(lengths) - sum(prefixes or ())
        for number in range(LAYERS):
            if number == leave_out:
                continue
            layer = layer_of(number)
            query = torch.randn((queries, HEADS * DIM), generator=self.generator)
            firsts = [length - 1 for length in lengths] if decode else prefixes
            at = [(r.rid, p) for r, a, b in zip(reqs, firsts, lengths, strict=True)
                  for p in range(a, b)]  # fmt: skip
            self.queries[number] |= zip(at, query.view(-1, HEADS, DIM), strict=True)
            query = torch.cat([query, torch.full((padding, HEADS * DIM), torch.nan)])
            ran_as = decode and not as_prompts
            self.recorder.layer(layer, query, forward, decode=ran_as, sinks=None)
        step = None
        if self.recorder.is_active(None):
            step = self.recorder.after_sample(True, torch.zeros(len(reqs)))

        def consume(commits: list[Any]) -> None:
            if step is not None:
                step.copy_to_host(torch.clone).consume(batch, commits)

        return consume

    def said(self, req: Req) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Entries and usage of a request since the last time."""
        found = self.recorder.outputs([req])
        if not found:
            return [], []
        entries, usage = (values[0] for values in list(found.values())[:2])
        return decoded(entries), usage
