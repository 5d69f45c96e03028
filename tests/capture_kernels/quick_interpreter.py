"""Triton's interpreter without what it repeats: the same numbers in less time.

Before each launch and each call of a device function it looks through all of `triton.language` for
the functions that it replaces (`_patch_lang` in triton/runtime/interpreter.py of 3.9). Which they
are is the same each time, and in a device function they have been replaced already. And it takes
the xor of tiles, which `tl.sort` is made of, element by element.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

patch_language = interpreter._patch_lang
reduce_by_element = interpreter.ReduceOps.apply_impl
# What a launch has replaced so far: module, and what puts its functions back.
replaced: list[tuple[Any, Any]] = []


def use() -> None:
    """Put this in the place of what the interpreter does in this process, if it is that of 3.9."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = patch_once
    interpreter.ReduceOps.apply_impl = reduce


@cache
def builtins(package: Any) -> list[tuple[str, Any]]:
    members = inspect.getmembers(package)
    return [(name, member) for name, member in members if tl.core.is_builtin(member)]


def patch_builtins(package: Any, builder: object, scope: Any) -> None:
    for name, member in builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


def patch_once(function: Any) -> type[Launch]:
    modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
    assert modules, f"triton.language is not visible in {function}"  # as the interpreter has it
    if not all(any(module is other for other, _ in replaced) for module in modules):
        scope = patch_language(function)
        replaced.extend((module, scope) for module in modules)
    return Launch


def reduce(self: Any, values: Any) -> Any:
    if self.combine_fn is tl.standard._xor_combine:
        return self.min_max(values[0], val_reduce_op=np.bitwise_xor.reduce)
    return reduce_by_element(self, values)


class Launch:
    """The interpreter asks for this when a launch ends, and not when a device function does."""

    @staticmethod
    def restore() -> None:
        while replaced:
            replaced.pop()[1].restore()
