"""Bytes of a step on the wire, measured: of JSON as it is sent, and of records as Arrow has them.

The context is of 1,000 tokens, and attention is so spread that none of the k shares is 0. Seen:
a fingerprint 230 bytes of JSON, a sketch 652 a layer, raw at k = 16 451; on a connection that
compresses 74, 200 and 168.
"""

from __future__ import annotations

import base64
import zlib

import msgspec
import numpy as np
import pyarrow as pa
from collected_rows import random_row

from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.request import CaptureRequest
from pipeline.stream.wire import encode

PROMPT = 1_000
STEPS = 64


def steps(mode: str, k: int) -> tuple[list[bytes], pa.RecordBatch]:
    """JSON of each step's entries, and the records of all steps."""
    request = CaptureRequest(mode=mode, layers=[31], top_k=k)
    rows = RequestCollector(
        request, request_id="chatcmpl-" + "0" * 32, model="Qwen/Qwen3-8B", capture_id="0" * 12,
        layout=Layout.LOG16, prompt_len=PROMPT, response_id="chatcmpl-" + "0" * 32,
    )  # fmt: skip
    said = []
    for step in range(STEPS):
        rows.feed(17)
        (entry,) = rows.add(random_row(PROMPT + step, [31], k=k))
        said.append(msgspec.json.encode(entry))
    return said, rows.records()


def packed_size(said: list[bytes]) -> float:
    """Bytes that a connection which compresses has left of each step after the first ones."""
    packer = zlib.compressobj(6, wbits=-15)
    sizes = [len(packer.compress(one) + packer.flush(zlib.Z_SYNC_FLUSH)) for one in said]
    return float(np.mean(sizes[8:]))


def test_a_fingerprint_is_80_bytes_of_a_record():
    said, batch = steps("fingerprint", 32)
    vector = batch.column("vector").flatten()
    assert vector.nbytes == 80 * STEPS
    # In JSON: the same 80 bytes as base64, and as the rounded numbers that are sent.
    assert len(base64.b64encode(np.zeros(20, np.float32))) == 108
    assert np.mean([len(one) for one in said]) <= 260
    assert packed_size(said) <= 100
    # A message of the stream, all columns and its schema: what is left of the rest at 512 rows.
    many = pa.concat_batches([batch] * (512 // STEPS))
    message = encode(many, sender_id="a", started=0, seq=0, rows_before=0, dropped_total=0)
    assert 80 < len(message) / many.num_rows <= 320


def test_a_sketch_is_about_600_bytes_a_layer():
    said, _ = steps("sketch", 32)
    assert 400 <= np.mean([len(one) for one in said]) <= 700
    assert packed_size(said) <= 260


def test_a_raw_entry_of_16_positions():
    said, _ = steps("raw", 16)
    sizes = [len(one) for one in said]
    assert np.mean(sizes) <= 520
    assert packed_size(said) <= 220
