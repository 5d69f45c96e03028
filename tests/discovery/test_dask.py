"""--long-running on a cluster of somebody else's, and what is said when a cluster cannot do it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from shared import NOW, REPO

from capture_kernels.errors import OptionError
from discovery.execution.executor import DaskExecutor

OPTIONS = ["--hours", "0", "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}", "--long-running", "--engine", "cpu"]


@pytest.fixture
def cluster():
    """Start a cluster with so many workers; gives the scheduler's address."""
    from distributed import LocalCluster

    started = []

    def start(workers: int, **options: object) -> str:
        started.append(
            LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, host="127.0.0.1",
                **options,
            )
        )  # fmt: skip
        return started[-1].scheduler_address

    yield start
    for one in started:
        one.close()


@pytest.mark.slow
def test_an_existing_cluster_does_the_work_and_stays_up(attn, planted_store, tmp_path, cluster):
    address, db = cluster(2), planted_store(700)
    for output in ("first", "second"):
        done = attn(
            "discover", "--db", db, "--output", tmp_path / output, *OPTIONS, "--scheduler", address
        )
        assert done.returncode == 0, done.stderr
        assert f"2 workers at {address}" in done.stderr
    first, second = (
        pq.read_table(tmp_path / output / "latest" / "embedding.parquet")
        for output in ("first", "second")
    )
    assert first.equals(second)


WORKS = """
import sys
from discovery.execution.executor import DaskExecutor
executor = DaskExecutor(sys.argv[1])
print(list(executor.run(int, [1, 2], ())))
executor.close()
"""


def test_an_existing_cluster_with_tls_takes_the_keys_of_dasks_own_configuration(cluster, tmp_path):
    from distributed import Security

    security = Security.temporary()
    address = cluster(1, security=security)
    with pytest.raises(OptionError, match=r"check --scheduler, and .*distributed\.comm\.tls"):
        DaskExecutor(address)
    keys = {
        "CA_FILE": security.tls_ca_file,
        "CLIENT__CERT": security.tls_client_cert,
        "CLIENT__KEY": security.tls_client_key,
    }
    for name, pem in keys.items():
        (tmp_path / name).write_text(pem)
    files = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": str(tmp_path / name) for name in keys}
    done = subprocess.run(
        [sys.executable, "-c", WORKS, address], capture_output=True, text=True,
        env={**os.environ, **files, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.stdout.strip() == "[1, 2]", done.stderr


def test_a_cluster_that_cannot_help_is_refused_before_a_run_begins(
    attn, planted_store, tmp_path, cluster
):
    db, output = planted_store(300), tmp_path / "out"
    empty = cluster(0)
    for extra, said in (
        (["--scheduler", empty], f"{empty} has no workers"),
        (["--max-memory-gb", "0.1"], "--max-memory-gb must be 0."),
        (["--scheduler", empty, "--max-memory-gb", "4"], "that the job starts"),
    ):
        done = attn("discover", "--db", db, "--output", output, *OPTIONS, *extra)
        assert done.returncode == 2
        assert said in done.stderr and "Traceback" not in done.stderr
    assert not any(path.is_dir() for path in output.glob("*"))


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("0.7", "no room for Dask"),
        pytest.param("1.1", "Dask, 1 workers on this machine", marks=pytest.mark.slow),
    ],
)
def test_a_small_memory_limit_takes_fewer_workers(fresh_attn, planted_store, tmp_path, limit, says):
    done = fresh_attn(
        "discover", "--db", planted_store(300), "--output", tmp_path / "out", *OPTIONS,
        "--max-memory-gb", limit,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert says in done.stderr


def test_a_latest_that_is_no_link_is_refused_before_a_run_begins(
    attn, planted_store, tmp_path: Path
):
    output = tmp_path / "copied"
    (output / "latest").mkdir(parents=True)
    done = attn("discover", "--db", planted_store(300), "--output", output, "--hours", "0")
    assert done.returncode == 2
    assert "latest is not a symlink to a run" in done.stderr
    assert sorted(p.name for p in output.iterdir()) == [".lock", "latest"]
