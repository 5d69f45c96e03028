"""Which engine a run uses."""

from __future__ import annotations

from capture_kernels.errors import OptionError

from .protocol import Engine, check_engine


def open_engine(name: str) -> Engine:
    """The engine called `name`; "auto" is RAPIDS where a GPU answers, and the CPU where none does.

    Raises:
        OptionError: no such engine, or RAPIDS was asked for and cannot work here.
    """
    check_engine(name)
    if name != "cpu":
        from .rapids import why_not

        reason = why_not()
        if reason is None:
            from discovery.engines.rapids.engine import RapidsEngine

            return RapidsEngine()
        if name == "rapids":
            raise OptionError(f"--engine rapids cannot work here: {reason}")
    from .cpu import CpuEngine

    return CpuEngine()
