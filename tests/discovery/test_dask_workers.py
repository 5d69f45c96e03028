"""Workers that die, fail or are slow: every chunk is done, in order, or the run says why not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import numpy as np
import psutil
import pytest
from shared import NOW, REPO
from uninterrupted import OPTIONS, RUN_ID, fingerprint_of

from capture_kernels.errors import ArtifactError, RunError
from discovery.engines.gpu_memory import gpu_memory_errors
from discovery.execution.executor import AHEAD, DaskExecutor, InlineExecutor

SHARED = np.arange(1_000.0)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def workers(request) -> Iterator[DaskExecutor]:
    executor = DaskExecutor(None, request.param)
    yield executor
    executor.close()


def count(executor: DaskExecutor) -> int:
    return int(executor.description.split()[1])


def mark(folder: str, chunk: int) -> int:
    """Say that a worker began a chunk; how many have by now."""
    (Path(folder) / f"{chunk}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return len(list(Path(folder).glob(f"{chunk}-*")))


def die() -> None:
    # Not in the moment in which it starts: that is another test's.
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def slowest_first(chunk: int) -> int:
    time.sleep(0.4 if chunk % 2 == 0 else 0.0)
    return chunk


def dies_at_first(shared: np.ndarray, folder: str, chunk: int) -> float:
    if mark(folder, chunk) == 1 and chunk == 4:
        die()
    time.sleep(0.1)
    return float(shared.sum()) + chunk


def dies_always(shared: np.ndarray, folder: str, chunk: int) -> float:
    mark(folder, chunk)
    if chunk == 2:
        die()
    return float(shared.sum()) + chunk


def test_results_come_in_the_order_of_the_chunks_and_few_are_taken_ahead(workers):
    taken = 0

    def chunks() -> Iterator[int]:
        nonlocal taken
        for taken in range(1, 13):
            yield taken - 1

    found = []
    for result in workers.run(slowest_first, chunks(), ()):
        found.append(result)
        assert taken - len(found) < AHEAD * count(workers)
    assert found == list(range(12))


def test_a_dead_worker_is_replaced_and_its_chunk_done_again(workers, tmp_path):
    found = list(workers.run(dies_at_first, range(9), (SHARED, str(tmp_path))))
    assert found == [SHARED.sum() + chunk for chunk in range(9)]
    assert len(list(tmp_path.glob("4-*"))) == 2
    # The one that came in its place works as well as it did.
    assert list(workers.run(slowest_first, range(6), ())) == list(range(6))


def test_a_chunk_that_workers_die_of_ends_the_run_with_advice(workers, tmp_path):
    found = workers.run(dies_always, range(9), (SHARED, str(tmp_path)))
    assert next(found) == SHARED.sum()
    with pytest.raises(RunError, match="died of the same chunk") as refused:
        list(found)
    assert "--batch-size" in str(refused.value) and "\n" not in str(refused.value)
    assert 1 < len(list(tmp_path.glob("2-*"))) < 20
    assert list(workers.run(slowest_first, range(6), ())) == list(range(6))


@pytest.mark.slow
def test_a_worker_that_dask_gives_up_is_replaced_all_the_same():
    import dask

    executor = DaskExecutor(None, 1)
    found = executor.run(slowest_first, range(8), ())
    first = [next(found)]
    cluster = executor._cluster
    # As Dask does where a worker dies as it starts, which cannot be timed from here.
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1 s"}):
        cluster.sync(next(iter(cluster.workers.values())).close)
        assert [*first, *found] == list(range(8))
    executor.close()


def blocked_signals(folder: str, chunk: int) -> set[signal.Signals]:
    if mark(folder, chunk) == 1 and chunk == 0:
        die()
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_that_replaces_another_is_out_of_reach_of_signals_to_the_group(workers, tmp_path):
    for blocked in workers.run(blocked_signals, range(3), (str(tmp_path),)):
        assert {signal.SIGINT, signal.SIGTERM} <= blocked


def log_as_at_the_end(_: int) -> None:
    logger = logging.getLogger("distributed.worker")
    logger.error("Failed to communicate with scheduler during heartbeat.")
    logger.error("something else")


def test_a_scheduler_that_ends_before_a_worker_is_no_error(capfd):
    executor = DaskExecutor(None, 1)
    list(executor.run(log_as_at_the_end, [0], ()))
    executor.close()
    said = capfd.readouterr().err
    assert "something else" in said and "heartbeat" not in said


def fails(error: BaseException, _: int) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(2, "no such part"), ValueError("a bug"), ArtifactError("a part is damaged"),
     MemoryError(), TimeoutError("of its own")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_a_chunk_raises_is_not_taken_for_a_failure_of_the_cluster(workers, error):
    for executor in (workers, InlineExecutor()):
        with pytest.raises(type(error)) as raised:
            list(executor.run(fails, [1], (error,)))
        assert raised.value.args == error.args


def test_what_the_chunks_themselves_raise_is_not_taken_for_a_failure_of_the_cluster(workers):
    def chunks() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(workers.run(slowest_first, chunks(), ()))


# What the libraries say, word for word, where a GPU is full.
FULL = [
    MemoryError("std::bad_alloc: out_of_memory: CUDA error at: cuda_async_memory_resource.hpp:95"),
    MemoryError("Out of memory allocating 8,000,000,000 bytes (allocated so far: 0 bytes)."),
    RuntimeError("cudaErrorMemoryAllocation: out of memory"),
]


def little_gpu_memory() -> ModuleType:
    """A stand-in for CuPy, since there need be no GPU here: one with 1.5 GB left."""
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(memGetInfo=lambda: (15 * 10**8, 10**11)))
    return cupy


def fails_with_little_gpu_memory(error: Exception, _: int) -> NoReturn:
    sys.modules["cupy"] = little_gpu_memory()
    raise error


@pytest.mark.parametrize(
    "error",
    [pytest.param(FULL[0], id="RMM"),
     pytest.param(FULL[1], marks=pytest.mark.slow, id="CuPy"),
     pytest.param(FULL[2], marks=pytest.mark.slow, id="CUDA")],
)  # fmt: skip
def test_a_full_gpu_of_a_worker_is_told_with_the_options_to_lower(error, capfd):
    executor = DaskExecutor(None, 1)
    with pytest.raises(RunError, match=r"too little free memory \(1\.5 GB\)") as refused:
        list(executor.run(fails_with_little_gpu_memory, [1], (error,)))
    executor.close()
    for option in ("--umap-sample-size", "--batch-size", "--engine cpu"):
        assert option in str(refused.value)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "error",
    [MemoryError(), MemoryError("Unable to allocate 7 TiB for an array"), RuntimeError("a bug"),
     OSError("out of memory")],
    ids=["empty", "NumPy", "bug", "disk"],
)  # fmt: skip
def test_only_a_full_gpu_is_told_so(error, monkeypatch):
    with pytest.raises(MemoryError) as raised, gpu_memory_errors():
        raise FULL[0]
    assert raised.value is FULL[0]  # no GPU was used: it is something else
    monkeypatch.setitem(sys.modules, "cupy", little_gpu_memory())
    with pytest.raises(RunError, match=r"1\.5 GB"), gpu_memory_errors():
        raise FULL[0]
    with pytest.raises(type(error)) as other, gpu_memory_errors():
        raise error
    assert other.value is error


# Tries to get into a cluster as any user of the machine can: its scheduler's port comes first.
STRANGER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from http.client import HTTPException
    from urllib.request import urlopen
    from distributed import Client, Security

    if __name__ == "__main__":
        mark, *ports = sys.argv[1:]
        for protocol, security in (("tcp", None), ("tls", Security.temporary())):
            address = f"{protocol}://127.0.0.1:{ports[0]}"
            try:
                with Client(address, timeout=1, security=security) as client:
                    client.submit(Path(mark).touch).result()
            except OSError:
                print("refused")
        for port in ports:
            for page in ("health", "metrics", "info/main/workers.html", "status"):
                try:
                    print(urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5).read())
                except (OSError, HTTPException):
                    pass
    """
)


def test_other_users_of_the_machine_can_neither_use_nor_watch_the_cluster(workers, tmp_path):
    first = workers._cluster.scheduler_address.rpartition(":")[2]
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {
        str(one.laddr.port)
        for process in processes for one in process.net_connections()
        if one.status == psutil.CONN_LISTEN
    }  # fmt: skip
    # The scheduler has two, a nanny one, a worker two; one worker may be on its way back.
    assert first in listening and len(listening) >= 5
    known = workers._client.scheduler_info(n_workers=-1)["workers"]
    for address, worker in known.items():
        assert address.startswith("tls://") and worker["nanny"].startswith("tls://")
    found = workers.run(slowest_first, range(6), ())
    assert next(found) == 0
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(tmp_path / "mark"), first, *(listening - {first})],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["refused", "refused"], done.stdout + done.stderr
    assert not (tmp_path / "mark").exists()
    assert list(found) == [1, 2, 3, 4, 5]


# A cluster in a process of its own, as another user's is: says its address.
ELSEWHERE = textwrap.dedent(
    """
    import time
    from distributed import LocalCluster

    if __name__ == "__main__":
        with LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
        ) as cluster:
            print(cluster.scheduler_address, flush=True)
            time.sleep(600)
    """
)


@pytest.fixture
def elsewhere(tmp_path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a cluster that is not the run's own, and its process."""
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    folders = os.pathsep.join([str(REPO), str(REPO / "tests"), str(Path(__file__).parent)])
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": folders},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
        kill_all(psutil.Process(process.pid))


def kill_all(process: psutil.Process) -> None:
    for one in [*process.children(recursive=True), process]:
        one.kill()


@pytest.mark.slow
def test_a_cluster_elsewhere_whose_workers_all_restart_finishes_the_work(elsewhere, tmp_path):
    from distributed import Client

    address, process = elsewhere
    executor = DaskExecutor(address)
    assert not executor.shares_disk
    found = executor.run(slowest_first, range(16), ())
    first = [next(found), next(found)]
    with Client(address, set_as_default=False) as somebody:
        somebody.restart()
    assert [*first, *found] == list(range(16))
    found = executor.run(dies_at_first, range(9), (SHARED, str(tmp_path)))
    first = [next(found)]
    for worker in process.children(recursive=True):
        if "spawn_main" in " ".join(worker.cmdline()):
            worker.kill()
    assert [*first, *found] == [SHARED.sum() + chunk for chunk in range(9)]
    executor.close()


@pytest.mark.slow
def test_a_cluster_elsewhere_that_is_gone_ends_the_run(elsewhere):
    address, process = elsewhere
    executor = DaskExecutor(address)
    found = executor.run(slowest_first, range(16), ())
    next(found)
    kill_all(process)
    with pytest.raises(RunError, match=r"the Dask cluster failed .*: resume"):
        list(found)
    executor.close()


# A script that a user wrote, which workers import as they start.
WITHOUT_GUARD = "from cli import app\n\napp()\n"


def test_the_cause_why_workers_cannot_start_is_reported_within_seconds(planted_store, tmp_path):
    script, output = tmp_path / "nightly.py", tmp_path / "out"
    script.write_text(WITHOUT_GUARD)
    done = subprocess.run(
        [sys.executable, str(script), "discover", "--db", str(planted_store(300)), "--output",
         str(output), *COMMAND, "--long-running", "--max-memory-gb", "1.1"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"the Dask workers cannot start: each first imports {script}" in last
    assert 'guard the call with `if __name__ == "__main__":`' in last
    assert "Traceback" not in done.stderr
    assert not any(path.is_dir() for path in output.glob("*"))


# One that does a run without workers first.
TWO_RUNS = textwrap.dedent(
    """
    import sys
    from cli import main

    for output, more in (("one", []), ("two", ["--long-running", "--max-memory-gb", "2"])):
        try:
            main([*sys.argv[1:], "--output", output, *more])
        except SystemExit as end:
            if end.code:
                raise
    """
)


@pytest.mark.slow
def test_no_worker_does_the_other_runs_of_a_script_without_a_guard_again(planted_store, tmp_path):
    script = tmp_path / "nightly.py"
    script.write_text(TWO_RUNS)
    done = subprocess.run(
        [sys.executable, str(script), "discover", "--db", str(planted_store(300)), *COMMAND],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"error: the Dask workers cannot start: each first imports {script}, which fails with "
        "'error: a worker that imports the script must not start a run'; if it starts the run, "
        'guard the call with `if __name__ == "__main__":`'
    )
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "one").glob("2*")] == [RUN_ID]
    assert not list((tmp_path / "two").glob("2*"))


# One that is damaged while its run is under way, in which the only worker dies.
DAMAGED_LATER = textwrap.dedent(
    """
    import os
    from pathlib import Path
    from capture_kernels.errors import RunError
    from discovery.execution.executor import DaskExecutor

    if __name__ == "__main__":
        executor = DaskExecutor(None, 1)
        Path(__file__).write_text("raise ValueError('damaged')")
        try:
            list(executor.run(os._exit, [1], ()))
        except RunError as error:
            print(error)
        executor.close()
    """
)


@pytest.mark.slow
def test_the_cause_why_no_worker_can_be_replaced_is_reported_within_seconds(tmp_path):
    script = tmp_path / "nightly.py"
    script.write_text(DAMAGED_LATER)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert f"imports {script}, which fails with 'ValueError: damaged'" in done.stdout, done.stderr


# Runs `attn discover`, its chunks made slow, and kills some of its workers when the event says so.
KILLER = textwrap.dedent(
    """
    import sys, time
    import msgspec, psutil
    import discovery.commands.discover, discovery.execution.dask_retry, discovery.job
    from cli import app

    stage, done, most = sys.argv[1].split(":")
    at_once = discovery.execution.dask_retry.on_worker
    listener = discovery.commands.discover.listener_for_terminal

    def slowly(function, *arguments):
        time.sleep(0.3)
        return at_once(function, *arguments)

    def killer():
        inner = listener()
        def listen(event):
            inner(event)
            event = msgspec.to_builtins(event)
            if (event["event"], event.get("stage"), event.get("done")) == (
                "progress", stage, int(done)
            ):
                children = psutil.Process().children(recursive=True)
                # Where setproctitle is installed, Dask gives them a title in place of the command.
                lines = {one: " ".join(one.cmdline()) for one in children}
                workers = [one for one, line in lines.items()
                           if "spawn_main" in line or "Dask Worker" in line]
                for worker in workers[:int(most)]:
                    worker.kill()
                    print("killed a worker", file=sys.stderr)
        return listen

    if __name__ == "__main__":
        discovery.commands.discover.listener_for_terminal = killer
        discovery.execution.dask_retry.on_worker = slowly
        app(sys.argv[2:])
    """
)


def killing(point: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; at `stage:done:workers`, so many of its workers die by SIGKILL."""
    return subprocess.run(
        [sys.executable, "-c", KILLER, point, *arguments],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip


COMMAND = ["--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", "--engine", "cpu", *OPTIONS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "limit"),
    [("neighbors:2:1", "3"), ("neighbors:3:2", "3"), ("neighbors:2:1", "1.1")],
    ids=["one of two", "both", "the only one"],
)
def test_a_run_whose_workers_are_killed_publishes_the_same_artifacts(
    uninterrupted, tmp_path, point, limit
):
    db, output = uninterrupted
    done = killing(
        point, "discover", "--db", str(db), "--output", str(tmp_path), *COMMAND,
        "--long-running", "--max-memory-gb", limit,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("killed a worker") == int(point[-1])
    assert done.stderr.count("Restarting worker") >= int(point[-1])
    assert "Traceback" not in done.stderr
    assert f"{1 if limit == '1.1' else 2} workers on this machine" in done.stderr
    assert fingerprint_of(tmp_path / RUN_ID) == fingerprint_of(output / RUN_ID)
