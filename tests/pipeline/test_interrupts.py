"""Interrupts that come while a callback from C, or a finaliser, is at work."""

import ctypes
import signal
import sys
import time

import pytest

from discovery.execution.stopping import StopRequest, stop_on_signals
from pipeline.capture import first_interrupt_deferred
from pipeline.interrupts import lost_interrupts_raised_again


def press(*_):
    signal.raise_signal(signal.SIGINT)
    return 0


def in_a_callback_from_c():
    library = ctypes.CDLL(None)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(press)
    library.qsort((ctypes.c_int * 2)(), 2, ctypes.sizeof(ctypes.c_int), compare)


def in_a_finaliser():
    class Finalised:
        __del__ = press

    Finalised()


def impatient():
    """What `attn discover` runs in, after its first Ctrl+C."""
    stop = StopRequest()
    stop.signalled(signal.SIGINT)
    return stop_on_signals(stop)


@pytest.mark.parametrize("lose", [in_a_callback_from_c, in_a_finaliser])
def test_a_second_interrupt_of_a_job_is_never_lost(lose, capfd):
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), impatient():
        lose()
        time.sleep(30)
    assert time.monotonic() - began < 20
    assert "KeyboardInterrupt" not in capfd.readouterr().err
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == (hook, handler)


@pytest.mark.parametrize("lose", [in_a_callback_from_c, in_a_finaliser])
def test_a_second_interrupt_of_a_capture_is_never_lost(lose):
    with pytest.raises(KeyboardInterrupt), first_interrupt_deferred() as noted:
        press()
        assert noted == [signal.SIGINT]
        lose()
        time.sleep(30)


def test_an_interrupt_that_is_lost_twice_comes_a_third_time():
    def end_within(callback):
        ctypes.CFUNCTYPE(None)(callback)()

    def raise_interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), lost_interrupts_raised_again():
        end_within(raise_interrupt)
        end_within(lambda: time.sleep(30))  # the alarm ends this, and is lost as well
        time.sleep(30)


def test_other_errors_of_a_callback_are_still_told(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Broken:
        def __del__(self):
            raise ValueError("broken")

    with lost_interrupts_raised_again():
        Broken()
    assert [lost.exc_type for lost in told] == [ValueError]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
