"""How functions of vLLM are hooked: it offers no hooks on them."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from contextlib import aclosing
from functools import wraps
from typing import Any

SEEN = "vLLM 0.33.0 was seen to work"
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def hook(target: str, wrapper: Wrapper) -> None:
    """Put a wrapper around what `module:owner.name` names, once."""
    owner, name = owner_of(target)
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, staticmethod | classmethod) else None
    function = found.__func__ if kind else found
    if getattr(function, "_is_hooked_by_attn", False):
        return
    wrapped = wrapper(function)
    wrapped._is_hooked_by_attn = True  # type: ignore[attr-defined]
    setattr(owner, name, kind(wrapped) if kind else wrapped)


def owner_of(target: str) -> tuple[Any, str]:
    """The module or class of a target, and the name in it. ImportError, AttributeError: nothing."""
    module, _, path = target.partition(":")
    owner, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{owner}" if owner else module), name


def is_hooked(target: str) -> bool:
    owner, name = owner_of(target)
    return hasattr(getattr(owner, name), "_is_hooked_by_attn")


def before(function: Callable[..., None]) -> Wrapper:
    """A hook that is given what the function is given."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wrapped(*given: Any, **named: Any) -> Any:
            function(*given, **named)
            return original(*given, **named)

        return wrapped

    return wrapper


def after(function: Callable[..., Any]) -> Wrapper:
    """A hook that is given the result, and what the function was given by place; it returns the
    result."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wrapped(*given: Any, **named: Any) -> Any:
            return function(original(*given, **named), given[0])

        return wrapped

    return wrapper


def around_generator(function: Callable[..., Any]) -> Wrapper:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        async def wrapped(*given: Any, **named: Any) -> Any:
            async with aclosing(function(original, *given, **named)) as outputs:
                async for output in outputs:
                    yield output

        return wrapped

    return wrapper


def around_coroutine(function: Callable[..., Any]) -> Wrapper:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        async def wrapped(*given: Any, **named: Any) -> Any:
            return await function(original, *given, **named)

        return wrapped

    return wrapper


def misfits(parameters: dict[str, tuple[str, ...]]) -> list[str]:
    """What of vLLM is not as the hooks need it, in words."""
    found = []
    for target, wanted in parameters.items():
        name = target.replace(":", ".")
        try:
            owner, own = owner_of(target)
            function = inspect.unwrap(getattr(owner, own))
            names = [name for name in inspect.signature(function).parameters if name != "cls"]
        except (ImportError, AttributeError, ValueError) as error:
            found.append(f"this vLLM has no {name} ({error}): {SEEN}")
            continue
        if tuple(names[: len(wanted)]) != wanted:
            found.append(f"{name} takes {', '.join(names)}, not {', '.join(wanted)}: {SEEN}")
        elif not is_hooked(target):
            found.append(f"the hook on {name} did not take: see the log above")
    return found
