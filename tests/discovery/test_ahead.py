"""Clusters that are searched for while the map is laid out."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from planted import planted
from published import make_store
from shared import NOW
from threadpoolctl import threadpool_info

from discovery.algorithms.consensus import clusters
from discovery.algorithms.threads import one_thread
from discovery.engines.cpu import CpuEngine
from discovery.execution.ahead import Ahead
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.job import discover
from discovery.options import DiscoverOptions

PATIENCE_S = 30.0


def threads_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("attn-ahead")]


def until_asked(check):
    """Work that goes on until it is not wanted."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        check()
        time.sleep(0.001)
    return "forgotten"


def test_what_was_begun_is_given_and_what_it_raises_is_raised():
    done = Ahead(lambda check: 7, StopRequest())
    assert done.result() == done.result() == 7
    failed = Ahead(lambda check: 1 / 0, StopRequest())
    with pytest.raises(ZeroDivisionError):
        failed.result()
    done.drop()
    failed.drop()
    assert not threads_ahead()


def test_dropped_work_ends_at_once():
    work = Ahead(until_asked, StopRequest())
    began = time.monotonic()
    work.drop()
    assert time.monotonic() - began < PATIENCE_S / 3 and not threads_ahead()


def test_work_ends_where_the_run_is_stopped():
    stop = StopRequest()
    work = Ahead(until_asked, stop)
    stop.ask("a client asked for it")
    with pytest.raises(Interrupted, match="a client asked for it"):
        work.result()
    work.drop()


def test_blocks_of_several_threads_keep_blas_at_one_thread_until_the_last_ends():
    with one_thread():  # the libraries are loaded
        pass

    def most() -> int:
        found = (one for one in threadpool_info() if one["user_api"] == "blas")
        return max(one["num_threads"] for one in found)

    before = most()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_thread():
            inside.set()
            assert leave.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        with one_thread():
            running = pool.submit(other)
            assert inside.wait(PATIENCE_S)
        assert most() == 1
        leave.set()
        running.result()
    assert most() == before


def test_a_run_that_fails_at_its_map_leaves_no_search_behind(tmp_path, monkeypatch):
    """And what it kept by then gives the same run as an undisturbed one."""
    db = make_store(tmp_path / "rows.db", planted(1_501, 2)[0])
    options = DiscoverOptions(db=str(db), output=str(tmp_path / "out"), hours=0, engine="cpu")
    begun = threading.Event()
    trees = clusters.trees_of_halves

    def slow_trees(*given):
        begun.set()
        return trees(*given[:-1], lambda: until_asked(given[-1]))

    def full(*_: object) -> None:
        assert begun.wait(PATIENCE_S) and threads_ahead()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(clusters, "trees_of_halves", slow_trees)
        patched.setattr(CpuEngine, "layout", full)
        with pytest.raises(Exception, match="No space left"):
            discover(options, now=NOW)
    assert not threads_ahead()
    done = discover(options, resume="auto", now=NOW)
    whole = DiscoverOptions(db=str(db), output=str(tmp_path / "whole"), hours=0, engine="cpu")
    again = discover(whole, now=NOW)
    assert done["counts"] == again["counts"]
    files = ["embedding.parquet", "clusters.parquet"]
    for name in files:
        one, other = (run / done["run_id"] / name for run in (tmp_path / "out", tmp_path / "whole"))
        assert one.read_bytes() == other.read_bytes(), name
    assert np.isfinite(done["stages"]["cluster"]["stability"])
