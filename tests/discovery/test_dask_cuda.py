"""--long-running on GPUs: a worker for each, and what happens where one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import planted
from published import make_store
from shared import NOW
from test_dask_workers import blocked_signals, dies_always, dies_at_first, killing
from uninterrupted import RUN_ID, fingerprint_of, killed_at

from capture_kernels.errors import RunError
from discovery.engines.open import open_engine
from discovery.engines.protocol import Engine
from discovery.engines.rapids import why_not
from discovery.execution.executor import DaskExecutor

pytest.importorskip("dask_cuda", reason="Dask-CUDA is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=f"RAPIDS cannot work here: {why_not()}"),
]

ROWS = 12_000
COMMAND = ["--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", "--hours", "0", "--seed", "7", "--engine", "rapids",
           "--long-running", "--batch-size", "2048", "--umap-sample-size", "6000"]  # fmt: skip


@pytest.fixture(scope="module")
def gpus() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


@pytest.fixture(scope="module")
def workers(gpus) -> Iterator[DaskExecutor]:
    executor = DaskExecutor(None, gpus, gpus=True)
    yield executor
    executor.close()


def device_of(_: int) -> tuple[str, bool, bool]:
    """The worker's GPU, and whether RMM's asynchronous pool is its allocator, and CuPy's too."""
    import time

    import cupy
    import rmm

    time.sleep(0.5)
    held = rmm.mr.get_current_device_resource()
    allocator = cupy.cuda.get_allocator()
    return (
        cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id),
        isinstance(held, rmm.mr.CudaAsyncMemoryResource),
        getattr(allocator, "__name__", "") == "rmm_cupy_allocator",
    )


def test_each_worker_has_a_gpu_of_its_own_and_one_pool_for_all_libraries(workers, gpus):
    assert workers.shares_disk
    assert workers.description == f"Dask-CUDA, {gpus} workers on this machine"
    found = list(workers.run(device_of, range(4 * gpus), ()))
    assert len({device for device, _, _ in found}) == gpus
    assert all(pooled and shared for _, pooled, shared in found)


def search(
    engine: Engine, folder: str, fit: np.ndarray, k: int, queries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    dies_at_first(fit, folder, int(queries[0, 0]))
    return engine.neighbors(fit, queries, k)


def test_a_killed_gpu_worker_is_replaced_and_its_search_done_again(workers, tmp_path):
    rng = np.random.default_rng(0)
    fit = rng.standard_normal((20_000, 10)).astype(np.float32)
    chunks = [rng.standard_normal((500, 10)).astype(np.float32) for _ in range(9)]
    for number, chunk in enumerate(chunks):
        chunk[0, 0] = number
    engine = open_engine("rapids")
    expected = [engine.neighbors(fit, chunk, 5) for chunk in chunks]
    found = list(workers.run(search, chunks, (engine, str(tmp_path), fit, 5)))
    assert len(list(tmp_path.glob("4-*"))) == 2
    for one, other in zip(found, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_gpu_workers_and_their_successors_are_out_of_reach_of_signals(workers, tmp_path):
    import signal

    for blocked in workers.run(blocked_signals, range(3), (str(tmp_path),)):
        assert {signal.SIGINT, signal.SIGTERM} <= blocked


def test_a_chunk_that_gpu_workers_die_of_ends_the_run_with_advice(workers, tmp_path):
    with pytest.raises(RunError, match="died of the same chunk"):
        list(workers.run(dies_always, range(9), (np.ones(9), str(tmp_path))))


def takes_all(bytes_: int) -> Any:
    import cupy

    return int(cupy.zeros(bytes_, np.uint8).sum())


def test_a_full_gpu_is_told_with_the_options_to_lower_and_works_on(workers):
    with pytest.raises(RunError, match=r"too little free memory \(.* GB\)") as refused:
        list(workers.run(takes_all, [2**45], ()))
    assert "--umap-sample-size" in str(refused.value)
    assert list(workers.run(takes_all, [9], ())) == [0]


@pytest.fixture(scope="module")
def left_alone(attn, gpus, tmp_path_factory) -> tuple[Path, dict[str, object]]:
    """A store, and what a run of it whose workers live publishes."""
    base = tmp_path_factory.mktemp("left_alone")
    db = make_store(base / "fingerprints.db", planted(ROWS, 0)[0])
    done = attn("discover", "--db", db, "--output", base / "out", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert f"Dask-CUDA, {gpus} workers" in done.stderr
    return db, fingerprint_of(base / "out" / RUN_ID)


def test_a_run_in_one_process_publishes_the_same_artifacts(attn, left_alone, tmp_path):
    db, expected = left_alone
    alone = [option for option in COMMAND if option != "--long-running"]
    done = attn("discover", "--db", db, "--output", tmp_path, *alone)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(tmp_path / RUN_ID) == expected


@pytest.mark.parametrize("most", [1, 99], ids=["one", "all"])
def test_a_run_whose_gpu_workers_are_killed_publishes_the_same_artifacts(
    left_alone, gpus, tmp_path, most
):
    db, expected = left_alone
    done = killing(
        f"neighbors:2:{most}", "discover", "--db", str(db), "--output", str(tmp_path), *COMMAND
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("killed a worker") == min(most, gpus)
    assert fingerprint_of(tmp_path / RUN_ID) == expected


def test_a_run_killed_with_its_gpu_workers_is_finished_to_the_same_artifacts(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    first = ["discover", "--db", str(db), "--output", str(tmp_path)]
    again = ["--resume", RUN_ID, "--engine", "rapids", "--long-running"]
    killed_at("progress:extract:2", *first, *COMMAND)
    for point in ("progress:neighbors:2", "stage_started:umap:", "stage_finished:cluster:"):
        killed_at(point, *first, *again)
    done = attn(*first, *again)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(tmp_path / RUN_ID) == expected
