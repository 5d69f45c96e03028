"""What responses say next of their requests' attention, as SGLang takes it for `meta_info`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.engines.serving.answer_writer import ENTRIES, SCORES
from pipeline.engines.serving.steps.states import RequestState

from ..recorder_keys import USAGE
from .full_scores import answer_of

# Where a request's state is kept on SGLang's own object, and so freed with it.
ATTRIBUTE = "_attn_capture"


def outputs_of(reqs: Sequence[Any], off: str | None) -> dict[str, list[list[Any]]]:
    """By key, what is new of each request; nothing if none has a state.

    Args:
        off: why capture is off, in words.
    """
    if all(getattr(req, ATTRIBUTE, None) is None for req in reqs):
        return {}
    entries, usage, scores = zip(*(_said(req, off) for req in reqs), strict=True)
    found = {ENTRIES: list(entries), USAGE: list(usage)}
    return found | ({SCORES: list(scores)} if any(scores) else {})


def _said(req: Any, off: str | None) -> tuple[list[Any], list[Any], list[Any]]:
    """Entries, usage and full scores of a request that no response has yet."""
    state: RequestState | None = getattr(req, ATTRIBUTE, None)
    if state is None:
        return [], [], []
    ends = req.finished() and not state.ended
    scores, missing = answer_of(req, state) if ends else ([], {})
    usage = [state.usage(off) | missing] if ends and state.is_asked else []
    entries, state.entries = state.entries, []
    state.ended = state.ended or ends
    return entries, usage, scores
