"""Speculative decoding: the rows of a step that verifies drafts.

SGLang drafts as many tokens of each request, and runs the request's last token and the drafts of it
in one step (`ForwardMode.TARGET_VERIFY`). Drafts of one chain, which `--speculative-eagle-topk 1`
makes, attend as any generated tokens would. How many of them are accepted is known once the step
has run, and the next one is prepared before.

Source: SGLang 0.5.23, srt/speculative/eagle_worker_v2.py, eagle_worker_common.py (run_eagle_verify)
and eagle_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from capture_kernels.decode.step.page_table import PageTable

# Of a function that is hooked.
HOOKED = "_attn_hooked"
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")


def draft_refusal(runner: Any) -> str | None:
    """Why steps that verify drafts cannot be captured, in words; None if they can, or there are
    none."""
    algorithm = runner.spec_algorithm
    if algorithm.is_none():
        return None
    from sglang.srt.runtime_context import get_parallel, get_spec

    # What SGLang makes of its arguments, which it does not write back to them.
    spec = get_spec()
    reasons = {
        f"--speculative-algorithm {algorithm.name} was not tried: use {', '.join(ALGORITHMS)}": (
            algorithm.name not in ALGORITHMS
        ),
        "speculative decoding by several layers of a model (multi-layer EAGLE) was not tried": (
            spec.enable_multi_layer_eagle
        ),
        "drafts in a tree attend to some of the others: use --speculative-eagle-topk 1": (
            spec.speculative_eagle_topk != 1
        ),
        "--speculative-adaptive changes how many drafts there are": spec.speculative_adaptive,
        "speculative decoding with data-parallel attention was not tried": (
            get_parallel().attn_dp_size > 1
        ),
        "this SGLang verifies drafts in another way": (
            algorithm.name in ALGORITHMS and not _can_be_hooked(runner)
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def tokens_of_request(runner: Any) -> int:
    """How many tokens of each request a step of generated tokens runs."""
    return 1 if runner.spec_algorithm.is_none() else int(runner.decode_num_tokens_per_req())


def draft_table(slots: Tensor, forward_batch: Any, tokens: int) -> PageTable:
    """Where the rows of a step that verifies drafts have their keys. It neither copies nor waits,
    so that a CUDA graph can hold it.

    Args:
        slots: SGLang's `req_to_token`; tokens: `tokens_of_request`.
    """
    requests = forward_batch.req_pool_indices.repeat_interleave(tokens)
    return PageTable.of_requests(slots, requests, forward_batch.positions[: len(requests)] + 1)


def wrap_verify(attribute: str) -> None:
    """Have each step that verifies drafts hand its results to the recorder of its model.

    Args:
        attribute: of the model's `ModelRunner`, where that is.
    """
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    if not hasattr(EAGLEWorkerV2.verify, HOOKED):
        EAGLEWorkerV2.verify = _recorded(EAGLEWorkerV2.verify, attribute)


def _can_be_hooked(runner: Any) -> bool:
    """Whether the worker that will draft and verify is one whose `verify` can be hooked."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    worker = runner.spec_algorithm.create_worker(runner.server_args)
    return getattr(worker, "verify", None) is EAGLEWorkerV2.verify


def _recorded(original: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    @wraps(original)
    def verify(worker: Any, *given: Any, **named: Any) -> Any:
        found = original(worker, *given, **named)
        recorder = getattr(worker.target_worker.model_runner, attribute, None)
        if recorder is not None and found.logits_output is not None:
            # As SGLang's sampler does with what its observer gives it.
            found.logits_output.auxiliary_device_output = recorder.after_verify()
        return found

    setattr(verify, HOOKED, True)
    return verify
