"""What an engine hands back of one prompt."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class CapturedPrompt(NamedTuple):
    """One prompt's records, and what its run did."""

    batch: pa.RecordBatch
    prompt_tokens: int
    new_tokens: list[int]
    blind_rows: int  # rows to capture that see no key: they have no record
