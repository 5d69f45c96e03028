"""Functions in a process beside this one, and a search for clusters in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
from planted import planted
from published import make_store
from shared import NOW, REPO

from discovery.algorithms.consensus.clusters import load
from discovery.engines.cpu import CpuEngine
from discovery.execution.beside import Beside, Ended
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.job import discover
from discovery.options import DiscoverOptions
from discovery.stages import fit_clusters

PATIENCE_S = 60.0


def nothing() -> None:
    pass


@pytest.fixture
def beside():
    process = Beside(nothing)
    yield process
    process.close()


def pid_of(process: Beside) -> int:
    return process.call(nothing, os.getpid)


def test_functions_run_in_another_process_and_what_they_raise_is_raised(beside):
    own = pid_of(beside)
    assert own != os.getpid() and psutil.Process(own).ppid() == os.getpid()
    # What is printed there is no answer.
    assert beside.call(nothing, print, "said by a test") is None
    large = np.arange(3_000_017)
    np.testing.assert_array_equal(beside.call(nothing, np.negative, large), -large)
    with pytest.raises(ValueError, match="invalid literal"):
        beside.call(nothing, int, "seven")
    assert pid_of(beside) == own


def test_it_imports_before_it_is_asked():
    process = Beside(load)
    try:
        assert process.call(nothing, partial(eval, "'sklearn' in __import__('sys').modules"))
    finally:
        process.close()


def test_an_answer_that_is_not_wanted_any_more_ends_the_process(beside):
    stop, own = StopRequest(), pid_of(beside)
    stop.ask("a client asked for it")
    began = time.monotonic()
    with pytest.raises(Interrupted, match="a client asked for it"):
        beside.call(stop.check, time.sleep, PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 3 and not psutil.pid_exists(own)
    with pytest.raises((Ended, RuntimeError)):
        beside.call(nothing, os.getpid)


def test_a_process_that_is_killed_has_ended(beside):
    own = pid_of(beside)
    killed = []

    def kill() -> None:
        if not killed:
            os.kill(own, signal.SIGKILL)
            killed.append(own)

    with pytest.raises(Ended, match="the process was ended by SIGKILL"):
        beside.call(kill, time.sleep, PATIENCE_S)
    with pytest.raises(Ended):
        beside.call(nothing, os.getpid)


def test_closing_ends_it_while_it_works():
    process = Beside(partial(time.sleep, PATIENCE_S))
    began = time.monotonic()
    process.close()
    process.close()
    assert time.monotonic() - began < PATIENCE_S / 3


def test_it_ends_with_a_process_that_is_killed(tmp_path):
    """Once it has nothing to do; it is not a child that anybody else waits for."""
    script = (
        "import os, time\nfrom discovery.execution.beside import Beside\n"
        "process = Beside(os.getpid)\n"
        "print(process.call(lambda: None, os.getpid), flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=REPO)
    assert parent.stdout is not None
    with parent.stdout:
        own = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    until = time.monotonic() + PATIENCE_S
    while own.is_running() and own.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_a_run_whose_search_is_in_a_process_is_the_same(tmp_path, monkeypatch, caplog, dies):
    db = make_store(tmp_path / "rows.db", planted(1_501, 2)[0])

    def run(name: str) -> dict:
        return discover(
            DiscoverOptions(db=str(db), output=str(tmp_path / name), hours=0, engine="cpu"), now=NOW
        )

    one = run("one")
    started: list[Beside] = []

    def begin(context) -> None:
        context.beside = Beside(load)
        started.append(context.beside)

    monkeypatch.setattr("discovery.job.begin_process", begin)
    if dies:
        layout = CpuEngine.layout

        def killed(*given):
            started[0]._process.kill()
            return layout(*given)

        monkeypatch.setattr(CpuEngine, "layout", killed)
    other = run("other")
    assert started[0]._process.poll() is not None
    assert ("clusters are looked for again, in this process" in caplog.text) == dies
    assert one["counts"] == other["counts"]
    for file in ("embedding.parquet", "clusters.parquet"):
        first, second = (
            (tmp_path / name / of["run_id"] / file).read_bytes()
            for name, of in (("one", one), ("other", other))
        )
        assert first == second, file


@pytest.mark.parametrize(
    ("gpus", "clustering", "rows", "begins"),
    [(1, "consensus", 200_000, True), (1, "consensus", 199_999, False),
     (0, "consensus", 900_000, False), (2, "hdbscan", 900_000, False)],
)  # fmt: skip
def test_a_process_is_for_large_maps_on_gpus_alone(monkeypatch, gpus, clustering, rows, begins):
    from types import SimpleNamespace

    made: list[object] = []
    monkeypatch.setattr(fit_clusters, "Beside", made.append)
    context = SimpleNamespace(
        options=SimpleNamespace(fit_rows=1_000_000, clustering=clustering),
        window={"rows": rows}, engine=SimpleNamespace(gpus=gpus),
    )  # fmt: skip
    fit_clusters.begin_process(context)
    assert made == ([load] if begins else [])
