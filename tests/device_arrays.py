"""A device that is none: arrays that behave as CuPy's do where that matters, over NumPy's.

`DeviceArray` never meets a NumPy array, and never becomes one but through `get`; this module has
those of NumPy's functions that are asked of CuPy 14, under the same names, and no others. What
runs on it needs no copy that nobody sees; what CuPy rounds otherwise it cannot tell.
"""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from capture_kernels.arrays import DEVICE_PACKAGES
from discovery.engines.cpu import CpuEngine

DEVICE_PACKAGES.add(__name__)

# No reduceat, no `at`: CuPy has neither as exact sums in a fixed order.
FUNCTIONS = set(
    """
    abs arange argmax argmin argpartition argsort array_split bincount ceil clip concatenate cumsum
    diff empty exp flatnonzero floor full log log2 matmul maximum mean minimum nonzero ones
    ones_like repeat searchsorted sort sqrt square stack sum take_along_axis unique where zeros
    zeros_like
    """.split()
)
METHODS = set(
    """
    all any argmax argmin astype copy cumsum max mean min prod ravel repeat reshape std sum
    swapaxes take transpose var view
    """.split()
)
ATTRIBUTES = {"dtype", "itemsize", "nbytes", "ndim", "shape", "size"}


def _inside(value: Any) -> Any:
    """What an argument of a function on the device holds."""
    if isinstance(value, DeviceArray):
        return value._held
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(map(_inside, value))
    return value


def _outside(value: Any) -> Any:
    """A result as the device has it: numbers are arrays of no dimensions there."""
    if isinstance(value, np.ndarray | np.generic):
        return DeviceArray(np.asarray(value))
    if isinstance(value, tuple | list):
        return type(value)(map(_outside, value))
    return value


def _on_device(function: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        inside = {name: _inside(value) for name, value in named.items()}
        found = function(*map(_inside, arguments), **inside)
        # What was written into an array given as `out` is that array.
        return named["out"] if "out" in named else _outside(found)

    return call


class DeviceArray(NDArrayOperatorsMixin):
    """An array on the device that is none."""

    def __init__(self, held: np.ndarray) -> None:
        self._held = held

    def get(self) -> np.ndarray:
        """A copy on the host."""
        return self._held.copy()

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed: use `.get()`")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        if method != "__call__":
            raise TypeError(f"no ufunc.{method} on the device")
        # In-place operators hand their array on as a tuple.
        out = named.pop("out", (None,))[0]
        found = ufunc(*map(_inside, inputs), **{k: _inside(v) for k, v in named.items()})
        if out is None:
            return _outside(found)
        if not np.can_cast(found.dtype, out.dtype, "same_kind"):
            raise TypeError(f"cannot cast {found.dtype} to {out.dtype}")
        _inside(out)[...] = found
        return out

    def __array_function__(self, function: Any, _: Any, arguments: Any, named: Any) -> Any:
        if function.__name__ not in FUNCTIONS:
            raise TypeError(f"no {function.__name__} on the device")
        return _on_device(function)(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return _on_device(getattr(self._held, name))
        if name in ATTRIBUTES:
            return getattr(self._held, name)
        raise AttributeError(name)

    @property
    def T(self) -> DeviceArray:  # noqa: N802
        return DeviceArray(self._held.T)

    def __getitem__(self, index: Any) -> DeviceArray:
        return _outside(self._held[_inside(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._held[_inside(index)] = _inside(value)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Any:
        raise TypeError("a loop over the numbers of a device array copies them one by one")

    def __bool__(self) -> bool:
        return bool(self._held)

    def __int__(self) -> int:
        return int(self._held)

    def __float__(self) -> float:
        return float(self._held)

    def __index__(self) -> int:
        return operator.index(self._held)


def asarray(values: Any, dtype: Any = None) -> DeviceArray:
    """On the device: from the host copied, from the device as it is."""
    if isinstance(values, DeviceArray):
        return values if dtype is None else values.astype(dtype, copy=False)
    return DeviceArray(np.array(values, dtype))


linalg = SimpleNamespace(norm=_on_device(np.linalg.norm))


def __getattr__(name: str) -> Any:
    if name in FUNCTIONS:
        return _on_device(getattr(np, name))
    raise AttributeError(f"no {name} on the device")


class DeviceEngine(CpuEngine):
    """The CPU engine with its rows on the device that is none."""

    def array(self, values: np.ndarray) -> Any:
        if not isinstance(values, np.ndarray):
            raise TypeError("what goes to the device comes from the host")
        return asarray(values)

    def host(self, array: Any) -> np.ndarray:
        if not isinstance(array, DeviceArray):
            raise TypeError("what comes from the device is an array there")
        return array.get()
