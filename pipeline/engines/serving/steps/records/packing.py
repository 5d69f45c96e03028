"""In the model's process: the rows of steps as bytes for the process that makes their records.

It shares the interpreter with the thread that launches the model's steps, so that nearly all of it
is calls into C over all rows of a step.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import msgspec

from capture_kernels.arrays import Floats
from pipeline.engines.serving.collect import RequestCollector

from .messages import Packed, RowGroup, Rows, encode, packed
from .rows import RecordRow, StepRows

LOG = logging.getLogger("attn.capture")
_NUMBER, _LAYERS = attrgetter("collector.number"), attrgetter("layers")


class Packer:
    """Packs steps for one worker, in their order.

    What never changes of a request is sent with its first row. A request is over when nothing holds
    its collector any more, so that no row of it can come: both sides forget it then. One thread
    packs; a collector may end in any.

    Attributes:
        known: the requests that were sent and are not over, by number.
    """

    def __init__(self) -> None:
        self.known: dict[int, weakref.ref[RequestCollector]] = {}
        self._unsendable: set[int] = set()  # known ones, whose rows have no record
        self._over: deque[int] = deque()  # numbers of known ones that are over

    def pack(self, steps: Iterable[StepRows]) -> Packed:
        """A message with the rows of some steps. Whatever it raises, later ones can be packed."""
        over = self._forget()
        begun: dict[int, msgspec.Raw] = {}
        try:
            return self._pack(steps, over, begun)
        except BaseException:  # neither is sent
            self._over.extend(over)
            for number in begun:
                self.known.pop(number, None)
            raise

    def _pack(
        self, steps: Iterable[StepRows], over: list[int], begun: dict[int, msgspec.Raw]
    ) -> Packed:
        groups: list[RowGroup] = []
        columns: list[Floats] = []
        rows = unsendable = 0
        for step in steps:
            if not self.known.keys() >= set(map(_NUMBER, step.rows)):
                self._begin(step.rows, begun)
            wanted = step.rows
            if self._unsendable:
                wanted = [row for row in wanted if row.collector.number not in self._unsendable]
                unsendable += len(step.rows) - len(wanted)
            rows += len(wanted)
            for own in _by_layers(wanted):
                group, numbers = _group(own, step)
                groups.append(group)
                columns.append(numbers)
        return Packed(packed(Rows(over, begun, groups), columns), rows, unsendable)

    def _forget(self) -> list[int]:
        # No row of these is still to be packed: it would hold its collector.
        over = [self._over.popleft() for _ in range(len(self._over))]
        for number in over:
            self.known.pop(number, None)
            self._unsendable.discard(number)
        return over

    def _begin(self, rows: Sequence[RecordRow], begun: dict[int, msgspec.Raw]) -> None:
        for row in rows:
            collector = row.collector
            number = collector.number
            if number in self.known:
                continue
            self.known[number] = weakref.ref(collector, _adds(number, self._over))
            try:
                begun[number] = msgspec.Raw(encode(collector.common))
            except (ValueError, TypeError, OverflowError) as error:
                # Such as text that is not UTF-8. Rows of other requests are not lost with it.
                self._unsendable.add(number)
                LOG.error("a request has no records: %s", str(error))


def _adds(number: int, over: deque[int]) -> Callable[[object], None]:
    return lambda _: over.append(number)


def _by_layers(rows: list[RecordRow]) -> Iterable[list[RecordRow]]:
    """The rows of each choice of layers."""
    if len(set(map(_LAYERS, rows))) == 1:
        return [rows]
    found: dict[tuple[int, ...], list[RecordRow]] = defaultdict(list)
    for row in rows:
        found[row.layers].append(row)
    return found.values()


def _group(rows: list[RecordRow], step: StepRows) -> tuple[RowGroup, Floats]:
    """Rows with the same layers, and their columns float32[L, R, 32], contiguous."""
    _, at, _, position, token, phase, experts, entropy = zip(*rows, strict=True)
    layers, request, columns = rows[0].layers, list(map(_NUMBER, rows)), step.columns
    if layers != tuple(range(len(columns))):
        columns = columns.take(layers, axis=0)
    # A copy in any case: it is the step's own memory otherwise.
    columns = columns.take(at, axis=1)
    group = RowGroup(len(layers), step.at, request, position, token, phase, experts, entropy)
    return group, columns
