"""In the engine's process: how many tokens of each captured request are kept.

vLLM prepares a step before the tokens of the one before are known, so that a request may be run one
step past its end. Workers are told of each of their steps what was decided by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from pipeline.engines.serving.request import CUSTOM_PARAM

LOG = logging.getLogger("attn.capture")

# Of a `Scheduler`, what has ended since its last step; of a `SchedulerOutput`, its `Decided`.
ATTRIBUTE = "attn_decided"
# Of a `GPUModelRunner`, and of a layer that is captured, its recorder.
RECORDER = "_attn_recorder"


@dataclass
class Decided:
    """Generated tokens, by request. kept: of those of the step, so far; ended: of those that are
    over, for good."""

    kept: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)


def is_captured(request: Any) -> bool:
    """Whether vLLM's `Request` brings what our gate has signed."""
    parameters = request.sampling_params
    return parameters is not None and CUSTOM_PARAM in (parameters.extra_args or {})


def harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook whose faults are logged: they are not to end the engine. Capture then has no end of a
    request, and nothing is reported of it."""

    @wraps(hook)
    def guarded(*given: Any, **named: Any) -> Any:
        try:
            return hook(*given, **named)
        except Exception:
            LOG.exception("what is kept of captured requests is not known")
            return given[0]

    return guarded


@harmless
def note_end(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler._free_request`."""
    if is_captured(request):
        _decided(scheduler).ended[request.request_id] = request.num_output_tokens


@harmless
def decide(output: Any, scheduler: Any) -> Any:
    """After `Scheduler.schedule`: put it on the `SchedulerOutput`, which is sent as it is."""
    decided = _decided(scheduler)
    setattr(scheduler, ATTRIBUTE, Decided())
    for name in output.num_scheduled_tokens:
        request = scheduler.requests.get(name)
        if request is not None and is_captured(request):
            decided.kept[name] = request.num_output_tokens
    setattr(output, ATTRIBUTE, decided)
    return output


def _decided(scheduler: Any) -> Decided:
    found: Decided | None = getattr(scheduler, ATTRIBUTE, None)
    if found is None:
        found = Decided()
        setattr(scheduler, ATTRIBUTE, found)
    return found
