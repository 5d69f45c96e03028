"""Which engine a machine gets, and what is said where the one asked for cannot work."""

from __future__ import annotations

import sys

import pytest

from capture_kernels.errors import OptionError
from discovery.engines.open import open_engine
from discovery.engines.rapids import why_not

without_gpu = pytest.mark.skipif(why_not() is None, reason="a GPU answers here")


@without_gpu
def test_auto_is_the_cpu_where_no_gpu_answers():
    assert open_engine("auto").name == "cpu"


@without_gpu
def test_rapids_is_refused_before_a_run_begins(attn, planted_store, tmp_path):
    output = tmp_path / "out"
    done = attn("discover", "--db", planted_store(300), "--output", output, "--engine", "rapids")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "--engine rapids cannot work here: " in done.stderr
    assert not output.exists() or not any(path.is_dir() for path in output.iterdir())


def test_an_unknown_engine_is_refused_with_those_there_are():
    with pytest.raises(OptionError, match="unknown engine 'tpu': use auto or cpu or rapids"):
        open_engine("tpu")


def test_what_is_installed_but_sees_no_gpu_says_so(monkeypatch, tmp_path):
    # CuPy imports without a driver, and fails where a device is first used.
    (tmp_path / "cupy.py").write_text(
        "class cuda:\n"
        "    class runtime:\n        class CUDARuntimeError(RuntimeError): pass\n"
        "    class driver:\n        class CUDADriverError(RuntimeError): pass\n"
        "    class compiler:\n        class CompileException(Exception): pass\n"
        "    def Device():\n"
        "        raise cuda.runtime.CUDARuntimeError('cudaErrorNoDevice: none is detected')\n"
    )
    unseen = "raise AssertionError('imported before a GPU was seen')"
    for name in ("rmm", "cuvs", "cuml"):
        (tmp_path / f"{name}.py").write_text(unseen)
    monkeypatch.syspath_prepend(str(tmp_path))
    # So that what is imported in its place is forgotten afterwards.
    monkeypatch.setitem(sys.modules, "cupy", None)
    del sys.modules["cupy"]
    assert why_not() == "no GPU answers (cudaErrorNoDevice: none is detected)"
