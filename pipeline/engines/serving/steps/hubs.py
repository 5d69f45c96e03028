"""Slots in which requests add up, by position, where they attended to (`attention_hubs`)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from capture_kernels.arrays import Floats
from capture_kernels.serving.step import StepCapture

from .states import HostRows, NotedRow, RequestState

ALL_TAKEN = "all --attention-hub-slots were taken"
# A row was computed for a token that was not kept, and is computed again.
ROW_TWICE = "the request was put back while it ran"


class HubSlots:
    """Gives the slots of a `StepCapture` to requests, and takes each back once its request's state
    is gone."""

    def __init__(self, capture: StepCapture) -> None:
        self._hubs = capture.hubs
        self._free = list(range(len(self._hubs)))

    def give(self, state: RequestState) -> None:
        """A slot for a request that wants one, if there is one."""
        if not state.collector.request.hubs:
            return
        if not self._free:
            state.no_hubs = ALL_TAKEN
            return
        state.hub = self._free.pop()
        # Steps that were queued before may still write to it; this comes after them.
        self._hubs[state.hub].zero_()
        weakref.finalize(state, self._free.append, state.hub)


def asked_slots(noted: Sequence[NotedRow]) -> list[tuple[int, int]]:
    """The slots of a step's requests, and how many positions each has by now: for
    `StepCapture.results`."""
    return [(state.hub, length) for state, length in _lengths(noted).items()]


def take_hubs(noted: Sequence[NotedRow], found: HostRows) -> None:
    """Give each request what its slot held after this step, if the step's last row of it was
    taken. A later step may have added a row whose token no answer has."""
    for (state, position), hubs in hubs_after(noted, found).items():
        if state.last == position:
            state.hubs = hubs.copy()
        else:
            state.no_hubs = ROW_TWICE


def hubs_after(
    noted: Sequence[NotedRow], found: HostRows
) -> dict[tuple[RequestState, int], Floats]:
    """What the slots of a step's requests held after it, float32[n] by position, by request and the
    position of the last of its rows."""
    after, begin = {}, 0
    for state, length in _lengths(noted).items():
        last = length - 1 + state.collector.request.mask_prefix
        after[state, last] = found.hubs[begin : begin + length]
        begin += length
    return after


def _lengths(noted: Sequence[NotedRow]) -> dict[RequestState, int]:
    """Of requests with a slot: positions up to the last of their rows."""
    found: dict[RequestState, int] = {}
    for note in noted:
        if note.state.hub >= 0:
            length = note.position + 1 - note.state.collector.request.mask_prefix
            found[note.state] = max(length, found.get(note.state, 0))
    return found
