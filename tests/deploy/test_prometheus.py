"""deploy/prometheus and deploy/grafana: every query is of metrics that exist."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deploy_files import DEPLOY, tool
from planted import planted
from prometheus_client.parser import text_string_to_metric_families
from published import make_store
from running import Sidecar, post_rows, running
from served_runs import publish, rows_of
from shared import free_port

RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "attn.json"
PATIENCE_S = 90.0
# What Prometheus adds to each target.
OWN = {"up", "ALERTS"}
# No sample without traffic that drifts, is refused or fails.
SILENT = {
    "attn_sidecar_drift_psi", "attn_sidecar_drift_psi_low", "attn_sidecar_drift_psi_high",
    "attn_sidecar_drift_psi_limit", "attn_sidecar_http_refused_total",
    "attn_sidecar_observer_errors_total", "attn_sidecar_spans_total",
}  # fmt: skip


@cache
def rule_queries() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


@cache
def panel_queries() -> dict[str, str]:
    """The queries of the dashboard by panel, with its variables as Grafana fills them in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$instance", ".*")
        .replace("$__rate_interval", "1m")
        for panel in panels
        for target in panel.get("targets", [])
    }


def names_in(query: str) -> set[str]:
    """The metrics that a query selects: not its labels, and nothing that is quoted."""
    plain = re.sub(r'"[^"]*"', "", query)
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|on)\s*\([^)]*\)", "", plain)
    return set(re.findall(r"\b(?:attn_|process_|up\b)\w*", plain))


@dataclass
class Watched:
    """What a job and a sidecar export."""

    textfile: Path
    sidecar: Sidecar
    names: set[str]


@pytest.fixture(scope="module")
def watched(attn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    textfile = folder / "textfile" / "attn.prom"
    textfile.parent.mkdir()
    db = make_store(folder / "job.db", planted(200, 1)[0])
    done = attn("discover", "--db", db, "--output", folder / "out", "--hours", "0",
                "--metrics-file", textfile)  # fmt: skip
    assert done.returncode == 0, done.stderr
    publish(folder / "runs")
    with running(folder, runs=folder / "runs") as sidecar:
        assert post_rows(sidecar, rows_of(250, "t")).status_code == 200
        text = sidecar.client.get("/metrics").text + textfile.read_text()
        names = set()
        for family in text_string_to_metric_families(text):
            names |= {family.name, *(sample.name for sample in family.samples)}
            if family.type == "counter":
                names.add(f"{family.name}_total")
        yield Watched(textfile, sidecar, names)


@pytest.mark.parametrize("where", ["alerts", "dashboard"])
def test_every_metric_that_is_asked_for_is_exported(watched, where):
    queries = rule_queries() if where == "alerts" else panel_queries()
    for name, query in queries.items():
        asked = names_in(query)
        assert asked, name
        assert asked - OWN <= watched.names, name


def test_the_names_of_a_query_are_found():
    found = names_in('sum by (attn_label, le) (rate(attn_a_total{attn_b="attn_c"}[5m])) > up')
    assert found == {"attn_a_total", "up"}


def test_the_dashboard_shows_what_is_watched(watched):
    """Every figure of the job and of its runs is on it, but what is a part of another."""
    shown = set().union(*map(names_in, panel_queries().values()))
    asked = shown | set().union(*map(names_in, rule_queries().values()))
    left_out = {"last_start", "last_end", "last_duration", "last_resumed", "run_served"}
    job = {name for name in watched.names if name.startswith("attn_discover_")}
    missing = {name for name in job - shown if not any(part in name for part in left_out)}
    assert missing == {"attn_discover_last_success_timestamp_seconds"} - shown
    assert {name for name in watched.names if "nightly" in name} <= asked


def test_promtool_accepts_the_rules_and_their_tests_pass():
    promtool = tool("promtool", "prometheus")
    folder = RULES.parent
    for words in (
        ("check", "rules", RULES.name), ("test", "rules", "alerts_test.yml"),
        ("check", "config", "--syntax-only", "scrape.yml"),
    ):  # fmt: skip
        done = subprocess.run(
            [promtool, *words], cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


class Textfiles(http.server.SimpleHTTPRequestHandler):
    """/metrics of a node-exporter that has a textfile collector alone."""

    def do_GET(self) -> None:
        text = b"".join(path.read_bytes() for path in Path(self.directory).glob("*.prom"))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    handler = partial(Textfiles, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(watched: Watched, tmp_path_factory) -> Iterator[httpx.Client]:
    """A Prometheus with the rules, which has scraped the sidecar and the textfile."""
    program = tool("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(RULES, folder)
    config = yaml.safe_load((RULES.parent / "scrape.yml").read_text())
    port = free_port()
    with serving(watched.textfile.parent) as node:
        targets = {"node": node, "attn-sidecar": watched.sidecar.url.removeprefix("http://")}
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
            job.pop("authorization", None)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", "--log.level=warn",
             f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"],
            stderr=(folder / "log").open("wb"),
        )  # fmt: skip
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30) as client:
                deadline = time.monotonic() + PATIENCE_S
                while not has_scraped(client):
                    assert time.monotonic() < deadline, (folder / "log").read_text()
                    time.sleep(0.2)
                yield client
        finally:
            process.terminate()
            process.wait(30)


def has_scraped(client: httpx.Client) -> bool:
    """Whether both targets were scraped twice: a rate needs two samples."""
    try:
        # As it starts it answers 503, which is no JSON.
        if not client.get("/status/runtimeinfo").is_success:
            return False
        return len(answer(client, "count_over_time(up[5m]) >= 3")) == 2 and len(rules(client)) > 0
    except (httpx.TransportError, AssertionError):
        return False


def answer(client: httpx.Client, query: str) -> list[Any]:
    response = client.get("/query", params={"query": query})
    assert response.status_code != 503, "it is starting"
    found = response.json()
    assert found["status"] == "success", (query, found)
    return found["data"]["result"]


def rules(client: httpx.Client) -> list[dict[str, Any]]:
    groups = client.get("/rules").json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_prometheus_answers_every_panel(prometheus, watched):
    for name, query in panel_queries().items():
        found = answer(prometheus, query)
        assert found or names_in(query) & SILENT, f"{name}: no series of {query}"


def test_prometheus_evaluates_every_rule_and_a_good_night_raises_no_alert(prometheus, watched):
    deadline = time.monotonic() + PATIENCE_S
    while any(rule["health"] == "unknown" for rule in rules(prometheus)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    found = {rule["name"]: rule for rule in rules(prometheus)}
    assert set(found) == set(rule_queries())
    assert {name: rule["lastError"] for name, rule in found.items() if rule.get("lastError")} == {}
    raised = {name for name, rule in found.items() if rule["alerts"]}
    # The golden run is of long ago.
    assert raised <= {"AttnSidecarSeesNoNewRun"}
