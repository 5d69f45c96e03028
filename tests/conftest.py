"""What several test folders share: planted stores, and the `attn` command as a process."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import built_command  # noqa: F401
import pytest
import quick_layout  # noqa: F401
from hypothesis import settings
from planted import planted, planted_batch
from processes import AttnProcess
from shared import REPO, START, AttnCommand

from pipeline.store.open import open_store

# `make test` looks at a few examples of each property, `make test-all` (--hypothesis-profile=all)
# at many. Examples have no deadline: other work on a test machine would break one.
# They are the same each time, so that a change is not blamed for what another run would have found;
# `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("all", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1_000)
settings.load_profile("fast")

# Libraries and collected tests are objects that stay. To look through them for garbage, again and
# again while they come, takes a third of the time of collecting; see pytest_collection_finish.
gc.disable()

EACH_FOLDERS = {"conftest.py"}
# The files that take longest, about the longest first: one that began last would be alone with one
# core. The very first has numba compile, which other files wait for; those up to test_ranks.py do
# not. After those, files that mostly wait (for a service, a browser, a time limit) are among files
# that compute: where three that wait met, the cores would be idle.
LONGEST = (
    "test_dask_workers.py", "test_compiled.py", "test_latent.py", "test_demo_model.py",
    "test_statistics.py", "test_store.py", "test_capture_engine.py", "test_eager.py",
    "test_scores.py", "test_host.py", "test_ranks.py", "test_recipes.py",
    "test_kills.py", "test_faults_of_stores.py", "test_resume.py", "test_chat.py",
    "test_fuzz_runs.py", "test_notebooks.py", "test_store_verify.py", "test_fuzz.py",
    "test_explore.py", "test_starts.py", "test_lens.py", "test_nights.py", "test_http_live.py",
    "test_discover_command.py", "test_main_job.py", "test_score_tap_served.py", "test_memory.py",
    "test_manifold.py", "test_judged_rows.py", "test_router.py", "test_topk.py", "test_judge.py",
    "test_describe.py", "test_live_view.py", "test_recluster.py", "test_store_processes.py",
    "test_report_in_a_browser.py", "test_device_arrays.py", "test_dask.py", "test_shell.py",
    "test_profiled.py", "test_sidecar_notebook.py", "test_ingest.py", "test_regions.py",
    "test_http_limits.py", "test_continued.py", "test_client.py", "test_steering.py",
    "test_send_command.py", "test_examples_command.py", "test_faults_of_clients.py",
    "test_consensus.py", "test_live.py", "test_store_sqlite.py", "test_served_lifetimes.py",
    "test_classifier.py", "test_http_sessions.py", "test_capture_gate.py", "test_otlp.py",
    "test_damaged_runs.py", "test_record_process.py", "test_page.py", "test_http_discovery.py",
    "test_prometheus.py", "test_discovery_notebook.py", "test_end_of_service.py", "test_beside.py",
)  # fmt: skip


def pytest_configure() -> None:
    """Refuse two modules of one name, even in a run of one of them: the other would not import.
    Let processes be interrupted."""
    # What a shell has started with `&` ignores SIGINT, and so would all processes that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Modules of tests are imported by their names alone, whichever folder they are in.
    names = Counter(path.name for path in (REPO / "tests").rglob("*.py"))
    twice = sorted(name for name, times in names.items() if times > 1 and name not in EACH_FOLDERS)
    if twice:
        raise pytest.UsageError(f"rename, as another file below tests/ has its name: {twice}")
    if gone := sorted(set(LONGEST) - set(names)):
        raise pytest.UsageError(f"LONGEST in tests/conftest.py names files that are gone: {gone}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}

    def when(item: pytest.Item) -> tuple[int, int]:
        """The others are mixed, as those of a folder wait for the same things."""
        name = item.path.name
        return place.get(name, len(LONGEST)), crc32(name.encode())

    items.sort(key=when)


def pytest_collection_finish() -> None:
    """Look for garbage from here on, and only among what the tests make. What stays frozen to the
    end, some libraries would report as leaked; pytest looks for garbage before that."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="module", autouse=True)
def kept_from_before() -> None:
    """What earlier files left, libraries above all, is not looked through for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def attn() -> AttnCommand:
    """Run the `attn` command in a process of its own, which starts quickly."""

    def run(*arguments: str | Path, stdin: str = "", timeout: float = 300):
        return AttnProcess(*arguments, stdin=stdin).finish(timeout)

    return run


@pytest.fixture(scope="session")
def fresh_attn() -> AttnCommand:
    """Run `attn` in a Python that has imported nothing: its memory is its own, cli.py is run."""

    def run(*arguments: str | Path, timeout: float = 300):
        return subprocess.run(
            [sys.executable, str(REPO / "cli.py"), *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, env={**os.environ, "COLUMNS": "160"},
        )  # fmt: skip

    return run


@pytest.fixture
def planted_store(tmp_path: Path) -> Callable[..., Path]:
    """Make a store file with planted behaviours; gives its path."""

    def make(rows: int = 1_500, seed: int = 0, name: str = "fingerprints.db", **options) -> Path:
        path = tmp_path / name
        with open_store(str(path), create=True) as store:
            store.append(planted_batch(planted(rows, seed)[0], START, **options))
        return path

    return make
