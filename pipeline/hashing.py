"""64-bit hashes of request ids and keys: the same in every process, version and package.

The Parquet store writes them into footers and discovery draws its samples by them, so none of
the functions may ever change.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def string_hashes(strings: pa.Array) -> Hashes:
    """BLAKE2b-64 of the bytes of each string of a column without nulls: uint64[n]."""
    values = strings.cast(pa.binary()).to_pylist()
    digests = [hashlib.blake2b(value, digest_size=8).digest() for value in values]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def request_hashes(batch: pa.RecordBatch) -> Hashes:
    """A hash of each row's request_id: uint64[n]."""
    encoded = batch.column("request_id").dictionary_encode()
    return string_hashes(encoded.dictionary)[encoded.indices.to_numpy()]


def string_hash(text: str) -> int:
    """`string_hashes` of one string, without an array of Arrow, which takes a hundred times as
    long."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(values: Hashes) -> Hashes:
    """A fixed bijective scramble of 64-bit numbers, uint64[n] (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
