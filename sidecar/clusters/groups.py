"""Groups: rows of one model, layout and capture. Only vectors of one group can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats, Mask
from capture_kernels.fingerprint.vector import Layout
from pipeline.store.columns import matching_rows
from sidecar.processed import Processed

# Without a served run, another group is taken up once this many rows came and none was of the
# present one: two models that take turns must not clear what is known of either.
ROWS_BEFORE_SWITCH = 1_000


class Group(NamedTuple):
    """Model, layout number and capture_id."""

    model: str
    layout: int
    capture_id: str

    @property
    def parsed_layout(self) -> Layout:
        return Layout(self.layout)


class GroupChoice:
    """Which group is watched: the served run's, or else the newest seen.

    Args:
        served_group: gives the group of the served run, None without one.

    Attributes:
        group: the present one, None before the first row.
        other_rows: rows of other groups, which were left out.
    """

    def __init__(self, served_group: Callable[[], Group | None]) -> None:
        self._served_group = served_group
        self._since = 0  # rows of other groups since the last one of this
        self.group: Group | None = None
        self.other_rows = 0

    def rows_of(self, processed: Processed) -> Floats:
        """The vectors of the group watched, float32[m, 20]; `group` may change."""
        own, vectors = self.own(processed), processed.vectors
        return vectors if own.all() else vectors[own]

    def own(self, processed: Processed) -> Mask:
        """Which rows are of the group watched: bool[n]; `group` may change."""
        batch = processed.batch
        if not batch.num_rows:
            return np.zeros(0, bool)
        self.group = self._served_group() or self.group or last_group(batch)
        own = matching_rows(batch, **self.group._asdict())
        if not own.any() and self._served_group() is None:
            self._since += batch.num_rows
            if self._since >= ROWS_BEFORE_SWITCH:
                self.group = last_group(batch)
                own = matching_rows(batch, **self.group._asdict())
        if own.any():
            self._since = 0
        self.other_rows += int(len(own) - own.sum())
        return own


def last_group(batch: pa.RecordBatch) -> Group:
    """The group of the last row of a batch with rows."""
    model, layout, capture_id = (
        batch.column(name)[batch.num_rows - 1].as_py() for name in Group._fields
    )
    return Group(model, layout, capture_id)
