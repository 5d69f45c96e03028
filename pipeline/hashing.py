"""Hashes of request ids and row keys: the same in every process, on every machine and version."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# 2**64 divided by the golden ratio: the increment of SplitMix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output of SplitMix64 for each state: a bijection of 64-bit numbers.

    Args:
        values: uint64[n], on any device.

    Returns:
        uint64[n], on the same device.

    Source: Steele, Lea & Flood 2014, Fast Splittable Pseudorandom Number Generators.
    """
    with np.errstate(over="ignore"):
        z = values + GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def string_hashes(strings: pa.Array) -> NDArray[np.uint64]:
    """The first 64 bits of BLAKE2b of each string's UTF-8 bytes: uint64[n].

    Args:
        strings: n strings, none of them null; distinct ones, for the loop is in Python.
    """
    digests = (hashlib.blake2b(s.encode(), digest_size=8).digest() for s in strings.to_pylist())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
