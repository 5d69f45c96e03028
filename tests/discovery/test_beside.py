"""Functions in a process beside this one, and a search for clusters in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import numpy as np
import psutil
import pytest
from planted import planted
from published import make_store
from shared import NOW, REPO

from discovery.algorithms.consensus.clusters import load
from discovery.engines.cpu import CpuEngine
from discovery.execution.beside import Beside, Ended
from discovery.execution.memory import plan_memory
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.job import discover
from discovery.options import DiscoverOptions
from discovery.stages import fit_clusters

PATIENCE_S = 60.0


def nothing() -> None:
    pass


class TwoArguments(Exception):
    """As many libraries have them: pickle does not make it again."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")


def raise_two() -> None:
    raise TwoArguments("rows", 7)


@pytest.fixture
def beside():
    process = Beside(nothing)
    yield process
    process.close()


def test_functions_run_in_another_process_and_what_they_raise_is_raised(beside):
    assert beside.call(nothing, os.getpid) == beside.pid != os.getpid()
    # It shows none of this process's GPUs, and what is printed there is no part of an answer.
    assert beside.call(nothing, os.getenv, "CUDA_VISIBLE_DEVICES") == ""
    assert beside.call(nothing, print, "said by a test") is None
    large = np.arange(3_000_017)
    np.testing.assert_array_equal(beside.call(nothing, np.negative, large), -large)
    with pytest.raises(ValueError, match="invalid literal"):
        beside.call(nothing, int, "seven")
    with pytest.raises(RuntimeError, match="TwoArguments: rows 7"):
        beside.call(nothing, raise_two)
    with pytest.raises((TypeError, RuntimeError), match="pickle"):
        beside.call(nothing, threading.Lock)
    assert beside.call(nothing, os.getpid) == beside.pid


def test_it_imports_before_it_is_asked():
    process = Beside(load)
    try:
        assert process.call(nothing, partial(eval, "'sklearn' in __import__('sys').modules"))
    finally:
        process.close()


def test_an_answer_that_is_not_wanted_any_more_is_not_waited_for(beside):
    stop = StopRequest()
    stop.ask("a client asked for it")
    began = time.monotonic()
    with pytest.raises(Interrupted, match="a client asked for it"):
        beside.call(stop.check, time.sleep, PATIENCE_S)
    beside.close()
    assert time.monotonic() - began < PATIENCE_S / 3 and not psutil.pid_exists(beside.pid)


def test_how_it_ended_is_said(beside):
    killed = []

    def kill() -> None:
        if not killed:
            os.kill(beside.pid, signal.SIGKILL)
            killed.append(beside.pid)

    with pytest.raises(Ended, match="the process was ended by SIGKILL"):
        beside.call(kill, time.sleep, PATIENCE_S)
    for _ in range(2):  # also where it had ended before
        with pytest.raises(Ended, match="SIGKILL"):
            beside.call(nothing, os.getpid)


@pytest.mark.parametrize("load", [partial(sys.exit, 3), partial(int, "seven")])
def test_one_that_cannot_load_has_ended(load):
    process = Beside(load)
    with pytest.raises(Ended, match=r"the process ended with exit code [13]"):
        process.call(nothing, os.getpid)
    process.close()


def test_signals_of_all_processes_of_a_job_do_not_end_it(beside):
    beside.call(nothing, nothing)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(beside.pid, number)
    assert beside.call(nothing, os.getpid) == beside.pid


@pytest.mark.parametrize("given", [b"", bytes(1 << 24)], ids=["waiting", "full pipe"])
def test_closing_ends_a_call_and_leaves_nothing(given):
    """Also while what is asked does not fit into the pipe, as the process still loads."""
    own = psutil.Process()
    files, threads = own.num_fds(), threading.active_count()
    process = Beside(partial(time.sleep, PATIENCE_S if given else 0))
    if not given:
        process.call(nothing, nothing)
    begun = threading.Event()

    def call() -> None:
        begun.set()
        process.call(nothing, partial(time.sleep, PATIENCE_S), *([given] if given else []))

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(call)
        assert begun.wait(PATIENCE_S)
        time.sleep(0.2)
        process.close()
        process.close()
        with pytest.raises(Ended):
            asked.result(PATIENCE_S / 3)
    with pytest.raises(Ended):
        process.call(nothing, os.getpid)
    assert not psutil.pid_exists(process.pid)
    assert (own.num_fds(), threading.active_count()) == (files, threads)


def test_it_ends_with_a_process_that_is_killed():
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


# A run -------------------------------------------------------------------------------------------


class Watched(Beside):
    """made: all of them; asked: how often they were."""

    made: ClassVar[list[Watched]] = []
    asked = 0

    def __init__(self, load) -> None:
        super().__init__(load)
        self.made.append(self)

    def call(self, *given):
        Watched.asked += 1
        return super().call(*given)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A run of a name whose search is in a process, but for one called alone."""
    db = make_store(tmp_path / "rows.db", planted(701, 2)[0])
    monkeypatch.setattr(Watched, "made", [])
    monkeypatch.setattr(Watched, "asked", 0)
    monkeypatch.setattr(fit_clusters, "Beside", Watched)

    def run(name: str) -> dict:
        def plan(*given):
            return plan_memory(*given)._replace(searches_apart=name != "alone")

        monkeypatch.setattr("discovery.job.plan_memory", plan)
        return discover(
            DiscoverOptions(db=str(db), output=str(tmp_path / name), hours=0, engine="cpu"), now=NOW
        )

    run.folder = tmp_path
    return run


def check_same(runs, *names: str) -> None:
    manifests = [runs(name) for name in names]
    assert manifests[0]["counts"] == manifests[1]["counts"]
    for file in ("embedding.parquet", "clusters.parquet"):
        first, second = (
            (runs.folder / name / of["run_id"] / file).read_bytes()
            for name, of in zip(names, manifests, strict=True)
        )
        assert first == second, file


def test_a_run_whose_search_is_in_a_process_is_the_same(runs, caplog):
    check_same(runs, "alone", "apart")
    assert len(Watched.made) == Watched.asked == 1
    assert not psutil.pid_exists(Watched.made[0].pid) and not caplog.records


@pytest.mark.slow
def test_a_run_whose_process_dies_searches_again(runs, caplog, monkeypatch):
    layout = CpuEngine.layout

    def killed(*given):
        for process in Watched.made:
            os.kill(process.pid, signal.SIGKILL)
        return layout(*given)

    monkeypatch.setattr(CpuEngine, "layout", killed)
    check_same(runs, "alone", "apart")
    assert "clusters are searched for again, in this process: the process was ended by" in (
        caplog.text
    )


@pytest.mark.slow
def test_a_run_that_cannot_start_one_searches_itself(runs, caplog, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(runs.folder / "no python"))
    assert runs("apart")["counts"]["clusters"] > 1
    assert "clusters are searched for in this process, which takes longer" in caplog.text
    assert Watched.asked == 0


def test_a_run_that_fails_leaves_no_process(runs, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CpuEngine, "layout", full)
    with pytest.raises(Exception, match="No space left"):
        runs("apart")
    (process,) = Watched.made
    assert not psutil.pid_exists(process.pid)
