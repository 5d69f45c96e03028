"""Arrays of NumPy and CuPy: names for their types, and one formula for both."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Of arrays on the host, and of those on a device.
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Int32s = NDArray[np.int32]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Packages whose arrays live on a device; each has NumPy's functions under NumPy's names.
DEVICE_PACKAGES = {"cupy"}
# Rows that a device works through at a time where a formula needs many numbers for each.
DEVICE_BLOCK_ROWS = 1 << 17


def array_module(array: Any) -> Any:
    """CuPy for an array on a GPU, NumPy for everything else.

    Nothing is imported: an array of CuPy's means that CuPy is there.
    """
    package = type(array).__module__.partition(".")[0]
    return sys.modules[package] if package in DEVICE_PACKAGES else np


def on_host(array: Any) -> NDArray[Any]:
    """The array as NumPy's, copied from a device where it lies on one."""
    return np.asarray(array) if array_module(array) is np else array.get()


def block_rows(array: Any, host: int, device: int = DEVICE_BLOCK_ROWS) -> int:
    """How many rows of the array to work through at a time: `host` keeps NumPy in a core's caches,
    `device` gives a device enough to do within its memory."""
    return host if array_module(array) is np else device


def dots(a: Any, b: Any) -> Any:
    """Sums over the last axis of the products of two arrays of one device and type.

    CuPy's einsum makes of it as many products of matrices as there are sums.
    """
    if array_module(a) is np:
        return np.einsum("...d,...d->...", a, b)
    return (a * b).sum(axis=-1)
