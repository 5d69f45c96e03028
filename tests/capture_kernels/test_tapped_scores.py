"""The kernels as SGLang's plug-in runs them for full scores (`ScoreTap`), here because they are
interpreted where no CUDA device answers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from paged import DEVICE, as_float64, assert_close  # noqa: E402
from scored import EXACT, prompt, truth  # noqa: E402

from capture_kernels.serving.step import LayerKind  # noqa: E402
from pipeline.engines.serving.full_scores import FullScores  # noqa: E402
from pipeline.engines.serving.request import CaptureRequest  # noqa: E402
from pipeline.engines.sglang.model_process.full_scores import ScoreTap  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
COMMITTED = object()


def to_host(tensor):
    """As SGLang copies, but that it has arrived at once."""
    return tensor.to("cpu", copy=True)


def taken(case, chunks, decoded, *, kind, wanted, sinks=None, on_host=False):
    """The scores of a request whose prompt comes in chunks, and then a token a step."""
    slots = torch.zeros((3, len(case.table)), dtype=torch.int32, device=DEVICE)
    slots[1] = case.table
    pool = SimpleNamespace(get_key_buffer=lambda number: case.keys)
    tap = ScoreTap(
        [kind], pool=pool, slots=slots, max_rows=4, dtype=case.query.dtype, refuse=None,
        as_keys=lambda layer, rows: rows, on_host=on_host,
    )  # fmt: skip
    collector = SimpleNamespace(
        request=wanted, prompt_len=sum(chunks), add_seconds=lambda seconds: None
    )
    scores = FullScores(wanted.scores, heads=4, hidden=wanted.mask_prefix)
    state = SimpleNamespace(scores=scores, scored=0, collector=collector)
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=1))
    layer = SimpleNamespace(
        layer_id=kind.numbers[0], k_scale=case.descale, qk_head_dim=kind.head_dim
    )  # fmt: skip
    begin = 0
    for count in [*chunks, *[1] * decoded]:
        decode, end = begin >= sum(chunks), begin + count
        tap.begin(is_decode=decode)
        # Another request of the batch, which asks for nothing, stands before it.
        tap.note(0, None, None, 0, 2 - decode)
        tap.note(1, req, state, begin, end)
        other = torch.zeros_like(case.query[: 2 - decode])
        query = torch.cat([other, case.query[begin:end]]).flatten(1)
        lengths = torch.tensor([5, end], device=DEVICE)
        tap.layer(layer, query, lengths, decode=decode, sinks=sinks)
        host = tap.end(None).copy_to_host(to_host)
        host.consume(None, [COMMITTED, COMMITTED])
        begin = end
    entries = scores.entries(begin, sum(chunks))
    from pipeline.analysis import extract_attention_from_response

    return extract_attention_from_response({"attn_capture_data": entries})


@pytest.mark.parametrize("on_host", [False, True], ids=["kernels", "plain"])
@pytest.mark.parametrize(
    ("cache", "wanted", "more", "learned"),
    [
        ({}, {}, {}, False),
        ({"dtype": torch.bfloat16}, {"heads": [1, 2], "mask_prefix": 5}, {}, False),
        ({"dtype": torch.float8_e4m3fn, "descale": 0.25}, {}, {"soft_cap": 3.0}, False),
        ({}, {"mask_prefix": 3}, {"window": 11}, True),
    ],
    ids=["plain", "heads and mask", "8-bit keys", "window and sinks"],
)
def test_chunks_and_steps_are_the_references(cache, wanted, more, learned, on_host):
    tokens, heads, dim = 80, 4, 32
    case = prompt(tokens, heads, 2, dim, **cache)
    if case.descale is not None:
        # As SGLang has it: one number.
        case = case._replace(descale=torch.tensor(0.25, device=DEVICE))
    sinks = torch.arange(4.0, device=DEVICE) - 2 if learned else None
    kind = LayerKind((6,), heads=heads, key_heads=2, head_dim=dim, scale=dim**-0.5, **more)
    request = CaptureRequest(layers=[0], scores=[6], **wanted)
    # Chunks of as many rows as a kernel is worth, and of fewer.
    found = taken(
        case, [40, 33, 3], 4, kind=kind, wanted=request, sinks=sinks, on_host=on_host
    )  # fmt: skip
    hidden = request.mask_prefix
    expected = truth(
        case, np.arange(tokens), scale=dim**-0.5, mask_prefix=hidden, chosen=request.heads,
        sinks=sinks, **more,
    )  # fmt: skip
    assert "missing_rows" not in found[6]["token_meta"]
    scores = as_float64(found[6]["scores"])
    assert_close(scores, expected[hidden:, :, hidden:], **EXACT)


@pytest.mark.parametrize("on_host", [False, True], ids=["kernels", "plain"])
def test_queries_that_no_step_kept_give_no_row(on_host):
    case = prompt(20, 2, 1, 32)
    kind = LayerKind((0,), heads=2, key_heads=1, head_dim=32, scale=1.0)
    slots = torch.zeros((2, 25), dtype=torch.int32, device=DEVICE)
    slots[1] = case.table[:25]
    tap = ScoreTap(
        [kind], pool=SimpleNamespace(get_key_buffer=lambda number: case.keys), slots=slots,
        max_rows=2, dtype=case.query.dtype, refuse=None, as_keys=lambda layer, rows: rows,
        on_host=on_host,
    )  # fmt: skip
    wanted = CaptureRequest(layers=[0], scores=[0])
    scores = FullScores([0], heads=2, hidden=0)
    collector = SimpleNamespace(request=wanted, prompt_len=10, add_seconds=lambda seconds: None)
    state = SimpleNamespace(scores=scores, scored=10, collector=collector)
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=1))
    layer = SimpleNamespace(layer_id=0, k_scale=None, qk_head_dim=32)
    for length, runs in ((11, True), (12, False), (13, True)):
        tap.begin(is_decode=True)
        tap.note(0, req, state, length - 1, length)
        if runs:
            query = case.query[length - 1 : length].flatten(1)
            tap.layer(layer, query, torch.tensor([length], device=DEVICE), decode=True, sinks=None)
        tap.end(None).copy_to_host(to_host).consume(None, [COMMITTED])
    assert scores.missing(13) == [(0, 10), (11, 12)]
