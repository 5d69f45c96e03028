"""The page of a running sidecar in Chromium."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from shared import REPO, free_port

# Runs to serve and sidecars that run are those of the sidecar's own tests.
sys.path.insert(0, str(REPO / "tests" / "sidecar"))

from browsing import Watched, chromium
from map_runs import Night, publish_map
from page_engine import Engine
from running import Sidecar, post_rows, running
from served_runs import publish, rows_of

# What `make test` has of the page: that each view opens, and what its files hold.
EVERYDAY = {"test_page_files.py", "test_shell.py", "test_router.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(str(item.fspath))
        if path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(180))
            if path.name not in EVERYDAY:
                item.add_marker(pytest.mark.slow)


# Of a file, as that of the report's tests is: one process may only have one Playwright at a time.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder of one published run."""
    output = tmp_path_factory.mktemp("runs")
    publish(output)
    return output


@pytest.fixture(scope="module")
def sidecar(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that serves that run and holds 500 rows of 50 requests."""
    with running(tmp_path_factory.mktemp("sidecar"), "--page", runs=runs) as found:
        assert post_rows(found, rows_of(500, "stored")).status_code == 200
        yield found


@pytest.fixture(scope="module")
def site(sidecar: Sidecar) -> str:
    """The address of that sidecar's page."""
    return sidecar.url


@pytest.fixture(scope="module")
def with_engine(
    runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Sidecar, Engine]]:
    """A sidecar that serves the page, and the engine that it relays to and gets records from."""
    port, folder = free_port(), tmp_path_factory.mktemp("asked")
    engine_url = f"http://127.0.0.1:{port}"
    with running(folder, "--page", "--engine-url", engine_url, runs=runs) as sidecar:
        engine = Engine(port, sidecar.stream)
        try:
            yield sidecar, engine
        finally:
            engine.stop()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """Opens pages; at the end of the test none may have had an error or a foreign request."""
    found = Watched(browser)
    yield found
    found.close()


@pytest.fixture
def show(watched: Watched, site: str) -> Callable[..., Page]:
    """Open a view of the page by its path and query."""

    def opened(path: str = "/", **options: Any) -> Page:
        return watched.open(f"{site}{path}", **options)

    return opened


@pytest.fixture
def chat(watched: Watched, with_engine: tuple[Sidecar, Engine]) -> Callable[..., Page]:
    """Open a view of the page that has an engine, once the page knows of it."""

    def opened(path: str = "/chat", **options: Any) -> Page:
        page = watched.open(f"{with_engine[0].url}{path}", **options)
        page.wait_for_selector("[data-connection=open]")
        if path.startswith("/chat"):
            page.wait_for_selector(".view-head .says bdi")
        return page

    return opened


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Night]]:
    """An output folder with three runs that follow one another; the last one has a new cluster."""
    output = tmp_path_factory.mktemp("nights")
    made: list[Night] = []
    for number, count in enumerate((6, 5, 7)):
        parent = made[-1] if made else None
        made.append(publish_map(output, number, count=count, parent=parent, seed=number))
    return output, made


@pytest.fixture(scope="module")
def lineage_site(
    nights: tuple[Path, list[Night]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Sidecar]]:
    with running(tmp_path_factory.mktemp("sidecar"), "--page", runs=nights[0]) as sidecar:
        yield sidecar.url, sidecar


@pytest.fixture
def manifold(watched: Any, lineage_site: tuple[str, Sidecar]) -> Callable[..., Page]:
    """Open the view with a query, its map drawn."""

    def opened(query: str = "", **options: Any) -> Page:
        page = watched.open(f"{lineage_site[0]}/manifold{query}", **options)
        page.wait_for_selector("[data-map][data-frames]")
        return page

    return opened
