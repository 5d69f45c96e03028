"""Numbers of entries that are made for many rows at once are those of each row."""

from __future__ import annotations

import numpy as np
from collected_rows import random_row
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules
from pipeline.engines.serving.entry_numbers import EntryNumbers, Statistics
from pipeline.engines.serving.rows import Row

# Up to 40 keys, of which up to 9 are hidden: rows with fewer keys than are asked for, or with none.
ROWS = st.lists(
    st.tuples(st.integers(0, 39), st.integers(0, 9), st.sampled_from([0.0, 1.0, 30.0])),
    min_size=1, max_size=7,
)  # fmt: skip


def statistics_of(rows: list[Row]) -> Statistics:
    """Of rows in the same layers."""
    singles = [Statistics.of_row(row.layers) for row in rows]
    return Statistics(*(np.concatenate(each, axis=1) for each in zip(*singles, strict=True)))


@given(
    mode=st.sampled_from(["raw", "sketch", "fingerprint"]), k=st.integers(1, 32), drawn=ROWS,
    layers=st.sampled_from([[3], [0, 2]]), layout=st.sampled_from(Layout),
)  # fmt: skip
def test_numbers_of_many_rows_are_those_of_each(mode, k, drawn, layers, layout):
    rows = [
        random_row(position, layers, mask=mask, sharpness=sharpness, seed=number)
        for number, (position, mask, sharpness) in enumerate(drawn)
    ]
    numbers = EntryNumbers(mode, k, layout, ZoneRules())
    found = numbers.of_rows(statistics_of(rows))
    assert found == [numbers.of_rows(Statistics.of_row(row.layers))[0] for row in rows]
    for own, (position, mask, _) in zip(found, drawn, strict=True):
        if mode == "fingerprint":
            # The first token is a sink, which a fingerprint does not describe.
            assert len(own) == (position >= max(mask, 1))
            continue
        sees = position >= mask
        assert [each is not None for each in own] == [sees] * len(layers)
        for each in own if sees else ():
            assert len(each[0]) <= min(k, position + 1 - mask)
