"""--max-memory-gb: what is planned, what is refused, and what comes out in little memory."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from planted import planted
from published import make_store
from shared import NOW, REPO

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.zones import ZONES
from discovery.engines.cpu import CpuEngine
from discovery.execution.memory import EXCEEDED, SCRATCH_MOST, MemoryPlan, MemoryWatch, plan_memory
from discovery.options import DiscoverOptions
from discovery.stages.zones import MICROS, MOST_BINS, bin_seconds

RUN_ID = "2026-01-10T04-02-11"
OPTIONS = ["--hours", "0", "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", "--batch-size", "256",
           "--umap-sample-size", "700", "--seed", "7", "--max-per-request", "60",
           "--engine", "cpu"]  # fmt: skip
CPU = CpuEngine()


def gpu_engine(gpus: int) -> Any:
    """What a plan asks of an engine, as that of so many GPUs answers; there need be none here."""
    return SimpleNamespace(
        gpus=gpus, fit_rows=1_000_000, chunk_rows=1_048_576, at_rest_bytes=3_000_000_000
    )


def options(limit: float | None, **given) -> DiscoverOptions:
    return DiscoverOptions(db="", max_memory_gb=limit, **given)


def plan(limit: float | None, rows: int, cores: int, engine: Any = CPU, **given) -> MemoryPlan:
    return plan_memory(options(limit, **given).resolved(engine), engine, rows, cores)


def published(folder: Path) -> dict[str, object]:
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.parquet")}
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["stage_seconds"]
    return {"files": files, "manifest": manifest}


@pytest.fixture(scope="module")
def without_limit(attn, tmp_path_factory) -> tuple[Path, Path]:
    """A store of 1,501 rows, and the folder of a run of it that has all the memory there is."""
    base = tmp_path_factory.mktemp("without_limit")
    db = make_store(base / "fingerprints.db", planted(1_501, 0)[0])
    done = attn("discover", "--db", db, "--output", base / "out", *OPTIONS)
    assert done.returncode == 0, done.stderr
    return db, base / "out" / RUN_ID


@pytest.mark.slow
def test_any_limit_gives_the_same_artifacts(fresh_attn, without_limit, tmp_path):
    db, folder = without_limit
    found = {}
    for name, extra in {
        "little": ["--max-memory-gb", "0.7"],
        "no room for Dask": ["--max-memory-gb", "0.7", "--long-running"],
        "Dask": ["--max-memory-gb", "3", "--long-running"],
    }.items():
        done = fresh_attn("discover", "--db", db, "--output", tmp_path / name, *OPTIONS, *extra)
        assert done.returncode == 0, done.stderr
        found[name] = published(tmp_path / name / RUN_ID)
    expected = published(folder)
    assert all(one == expected for one in found.values())
    counts = json.loads((folder / "manifest.json").read_text())["counts"]
    assert counts["over_request_limit"] > 0 and counts["sampled"]


@pytest.mark.slow
def test_a_limit_that_is_too_small_is_refused_and_the_one_it_names_is_enough(
    fresh_attn, planted_store, tmp_path
):
    db, output = planted_store(300), tmp_path / "out"
    command = ["discover", "--db", db, "--output", output, *OPTIONS]
    refused = fresh_attn(*command, "--max-memory-gb", "0.05")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and "--umap-sample-size" in refused.stderr
    assert not any(path.is_dir() for path in output.glob("*"))
    enough = refused.stderr.split("must be ")[1].split()[0]
    done = fresh_attn(*command, "--max-memory-gb", enough)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("rows", "engine", "given", "apart"),
    [
        (200_000, gpu_engine(1), {}, True),
        (199_999, gpu_engine(2), {}, False),
        (900_000, gpu_engine(1), {"umap_sample_size": 199_999}, False),
        (900_000, gpu_engine(1), {"clustering": "hdbscan"}, False),
        (900_000, CPU, {"umap_sample_size": 900_000}, False),
    ],
)
def test_a_process_searches_beside_a_large_map_on_a_gpu_alone(rows, engine, given, apart):
    assert plan(None, rows, 4, engine, **given).searches_apart == apart
    assert plan(100, rows, 4, engine, **given).searches_apart == apart


def test_a_limit_has_room_for_the_process_that_searches_or_there_is_none():
    engine, rows = gpu_engine(1), 1_000_000
    with pytest.raises(OptionError) as refused:
        plan(0.01, rows, 4, engine)
    least = float(str(refused.value).split("must be ")[1].split()[0])
    assert not plan(least, rows, 4, engine).searches_apart
    more = plan(least + 0.8, rows, 4, engine)
    assert more.searches_apart
    # What it takes is no more for sorting.
    assert more.scratch_bytes <= plan(least + 0.1, rows, 4, engine).scratch_bytes


@pytest.mark.parametrize("engine", [CPU, gpu_engine(4)], ids=["cpu", "gpus"])
@pytest.mark.parametrize("rows", [1, 100_000, 5_000_000, 100_000_000])
@pytest.mark.parametrize("sample", [100, 50_000, 200_000])
def test_the_limit_that_a_refusal_names_is_the_least_in_steps_of_a_tenth(engine, rows, sample):
    given = {"engine": engine, "umap_sample_size": sample, "long_running": True}
    with pytest.raises(OptionError, match="--max-memory-gb must be") as refused:
        plan(0.01, rows, 4, **given)
    enough = float(str(refused.value).split("must be ")[1].split()[0])
    plan(enough, rows, 4, **given)
    with pytest.raises(OptionError):
        plan(enough - 0.1, rows, 4, **given)


def test_what_was_promised_fits():
    for rows, limit in ((500_000, 4.0), (5_000_000, 8.0), (100_000_000, 8.0)):
        for long_running in (False, True):
            workers = plan(limit, rows, 2, long_running=long_running).workers
            assert workers == (2 if long_running else 0)


@pytest.mark.parametrize(
    ("engine", "most", "limits"),
    [(CPU, 16, np.arange(1.2, 12, 0.1)), (gpu_engine(8), 8, np.arange(12.0, 60, 0.5))],
    ids=["cpu", "gpus"],
)
def test_more_memory_never_means_fewer_workers_and_all_of_it_stays_within_the_limit(
    engine, most, limits
):
    before = 0
    for limit in limits:
        found = plan(float(limit), 1_000_000, 16, engine, long_running=True)
        assert found.workers >= before
        assert found.workers * (found.worker_bytes or 0) + found.scratch_bytes < limit * 1e9
        before = found.workers
    assert before == most


def test_without_a_limit_a_cluster_of_ones_own_has_a_worker_for_each_core_or_gpu():
    assert plan(None, 10, 6, long_running=True) == (6, None, SCRATCH_MOST, False)
    assert plan(None, 10, 6, gpu_engine(2), long_running=True) == (2, None, SCRATCH_MOST, False)
    for engine in (CPU, gpu_engine(2)):
        assert plan(None, 10, 6, engine).workers == 0
        elsewhere = {"long_running": True, "scheduler": "tcp://127.0.0.1:1"}
        assert plan(None, 10, 6, engine, **elsewhere).workers == 0


def test_a_worker_with_a_gpu_is_given_room_for_its_libraries():
    for limit in range(12, 60):
        found = plan(float(limit), 10_000_000, 64, gpu_engine(8), long_running=True)
        assert found.workers == 0 or (found.worker_bytes or 0) > 2.5e9
    assert found.workers == 8


def test_a_limit_without_long_running_is_taken_and_with_a_scheduler_refused():
    assert options(4.0).max_memory_gb == 4.0
    with pytest.raises(OptionError, match="--scheduler"):
        options(4.0, long_running=True, scheduler="tcp://127.0.0.1:1")


def resident_gb() -> float:
    """Of this process and its children: the fork server of the `attn` fixture is one."""
    own = psutil.Process()
    return sum(one.memory_info().rss for one in (own, *own.children(recursive=True))) / 1e9


def wait_until(happened, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_watch_asks_once_to_stop_when_the_limit_is_passed():
    asked: list[tuple[str, int]] = []
    with MemoryWatch(resident_gb() + 0.2, lambda *said: asked.append(said)) as watch:
        time.sleep(0.5)
        assert not asked
        held = np.ones(60_000_000)  # 480 MB
        wait_until(lambda: asked)
        time.sleep(0.5)
        assert len(held) == 60_000_000
    assert len(asked) == 1
    reason, code = asked[0]
    assert code == EXCEEDED == 2
    assert "--max-memory-gb" in reason and "resume with more" in reason and "\n" not in reason
    assert watch.peak_gb > 0.4


def test_the_watch_counts_children_and_survives_those_that_end():
    take = "import time; held = b'x' * 300_000_000; print(flush=True); time.sleep(60)"
    with MemoryWatch(None, lambda *_: None) as watch:
        wait_until(lambda: watch.peak_gb > 0)
        before = watch.peak_gb
        child = subprocess.Popen([sys.executable, "-c", take], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        wait_until(lambda: watch.peak_gb > before + 0.28)
        child.kill()
        child.wait()
        child.stdout.close()
        # Looked at once more after it is gone, and found to be.
        time.sleep(1.5)
        assert "memory" in [thread.name for thread in threading.enumerate()]


# Takes 400 MB for a moment between two looks, which are two seconds apart.
SPIKE = textwrap.dedent(
    """
    import sys, time
    import numpy as np
    import discovery.execution.memory
    from discovery.execution.memory import MemoryWatch

    discovery.execution.memory.LOOK_EVERY = 2.0
    with MemoryWatch(None, print) as watch:
        while not watch.peak_gb:
            time.sleep(0.01)
        before = watch.peak_gb
        held = np.ones(50_000_000)
        del held
        time.sleep(2.5)
        print(watch.peak_gb - before)
    """
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux keeps the mark")
def test_memory_that_was_taken_between_two_looks_is_seen_all_the_same():
    done = subprocess.run(
        [sys.executable, "-c", SPIKE], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.35


# Runs `attn discover` with a plan that promises too much: the constants are a tenth of the truth.
OPTIMIST = textwrap.dedent(
    """
    import sys
    import discovery.engines.cpu, discovery.execution.memory
    from cli import app

    discovery.engines.cpu.CpuEngine.at_rest_bytes //= 10
    discovery.execution.memory.SCRATCH_LEAST //= 10
    app(sys.argv[1:])
    """
)


def test_a_run_that_takes_more_than_its_limit_stops_at_a_checkpoint_and_can_be_finished(
    attn, without_limit, tmp_path
):
    (db, alone), output = without_limit, tmp_path / "out"
    command = ["discover", "--db", str(db), "--output", str(output), *OPTIONS]
    stopped = subprocess.run(
        [sys.executable, "-c", OPTIMIST, *command, "--max-memory-gb", "0.1"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert stopped.returncode == 2, stopped.stderr
    assert "--max-memory-gb 0.1 was passed" in stopped.stderr
    assert "Traceback" not in stopped.stderr and f"--resume {RUN_ID}" in stopped.stderr
    done = attn(
        "discover", "--db", db, "--output", output, "--resume", RUN_ID, "--max-memory-gb", "2"
    )
    assert done.returncode == 0, done.stderr
    assert published(output / RUN_ID) == published(alone)


def test_a_run_says_in_its_log_what_memory_it_took(without_limit):
    _, folder = without_limit
    last = json.loads((folder / "progress.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "run_finished"
    assert 0.1 < last["peak_memory_gb"] < 2.0
    assert "peak_memory_gb" not in (folder / "manifest.json").read_text()


def test_a_row_group_of_the_embedding_is_a_part_and_all_know_the_same_words(without_limit):
    _, folder = without_limit
    with pq.ParquetFile(folder / "embedding.parquet") as file:
        groups = [file.read_row_group(i) for i in range(file.metadata.num_row_groups)]
    assert len(groups) > 2
    assert [group.num_rows for group in groups[:-1]] == [256] * (len(groups) - 1)
    for name in ("phase", "zone"):
        words = {tuple(g.column(name).chunk(0).dictionary.to_pylist()) for g in groups}
        assert len(words) == 1


def test_the_zones_over_time_are_those_of_the_rows(without_limit):
    _, folder = without_limit
    found = json.loads((folder / "manifest.json").read_text())["stages"]["zones"]
    over_time = found["over_time"]
    # 1,501 rows a second apart from 06:00 on.
    assert (over_time["start"], over_time["step_seconds"]) == ("2026-01-09T06:00:00+00:00", 30)
    rows = pq.read_table(folder / "embedding.parquet").to_pylist()
    expected = {zone: [0] * 51 for zone in ZONES}
    for row in rows:
        second = int(row["request_id"].rsplit("-", 1)[1]) * 100 + row["position"]
        expected[row["zone"]][second // 30] += 1
    assert over_time["counts"] == expected
    for zone, counts in expected.items():
        assert found["shares"][zone] == pytest.approx(sum(counts) / len(rows))


@pytest.mark.parametrize("first", [0, 1, -(10**15), 1_767_000_000_123_456])
@pytest.mark.parametrize("span", [0, 1, 95, 96, 3_600, 86_399, 604_800, 10**9, 3 * 10**11])
def test_bins_of_time_are_as_short_as_there_may_be_of_them(first, span):
    last = first + span * MICROS
    step = bin_seconds(first, last)
    bins = last // (step * MICROS) - first // (step * MICROS) + 1
    assert 1 <= bins <= MOST_BINS
    assert step == 1 or bins > 20
