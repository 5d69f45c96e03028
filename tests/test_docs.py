"""The documentation is complete and true.

What a user can meet (options, exit codes, events, columns, settings) is collected from the code and
must be in docs/. What the pages name (files, links, options, commands) must exist.
"""

from __future__ import annotations

import ast
import json
import re
import signal
import sqlite3
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest
from collected import (
    all_options,
    commands,
    environment_variables,
    exit_codes,
    integers,
    keys_of_dict_with,
    metrics,
    options,
    product,
)
from pages import (
    DEPLOYMENT,
    FORMATS,
    GUIDE,
    OPERATIONS,
    PAGE_IDS,
    PAGES,
    PERFORMANCE,
    README,
    anchors,
    code_in,
    inline_code,
    prose,
    section,
    shell_lines,
    table,
    text,
)
from shared import REPO

from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.algorithms.known_areas import InAreas
from discovery.artifacts.read import open_artifacts
from discovery.artifacts.schema import (
    CLUSTER_COLUMNS,
    EMBEDDING_COLUMNS,
    SHARE_COLUMNS,
    landmark_columns,
)
from discovery.artifacts.tables import projection_table, read_prototypes
from discovery.commands.metrics_file import GAUGES, PREFIX
from discovery.events.schema import COMMANDS, json_schema
from discovery.execution.stopping import Interrupted, StopRequest, stop_on_signals
from discovery.gate import QUESTIONS, GateRules
from discovery.options import DiscoverOptions
from discovery.runs.parent import references_table
from discovery.stages.registry import STAGES
from pipeline.engines.options import CaptureOptions
from pipeline.record import SCHEMA
from sidecar.watch.metrics import Metrics

# Folders that a user's commands make: what a page names inside them is not in the repository.
MADE = {"build", "discovery_outputs", ".checkpoint"}
# Vectors and cluster ids.
NO_ROWS = np.empty((0, 20), np.float32), np.empty(0, np.int32)
NAME_OF_FILE = re.compile(r"[\w.][\w.*-]*(/[\w.*-]*)+|[\w.-]+\.(py|cu|md|sql|js)")


# What a user can meet is documented ---------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_reference_has_the_options_of_each_command_with_their_defaults(name: str) -> None:
    known = options(commands()[name])
    rows = table(GUIDE, f"`{name}`")
    assert {tuple(code_in(row[0])) for row in rows} == set(known)
    for cells in rows:
        option = known[tuple(code_in(cells[0]))]
        if option.required:
            assert cells[1] == "required", cells[0]
        elif option.is_flag:
            assert cells[1] == "", cells[0]
        else:
            default = option.default if not callable(option.default) else option.default()
            shown = "-" if default is None or default == () else f"`{default}`"
            assert cells[1] == shown, cells[0]
        assert len(cells[2]) > 5, f"{cells[0]} has no meaning"


def test_every_exit_code_is_documented_and_no_other() -> None:
    found = {0}
    for _, tree, source in product():
        found |= exit_codes(tree, source)
    stop = StopRequest()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with stop_on_signals(stop):
        routed = [number for number, old in before.items() if signal.getsignal(number) != old]
    for number in routed:
        asked = StopRequest()
        asked.signalled(number)
        with pytest.raises(Interrupted) as stopped:
            asked.check()
        found.add(stopped.value.exit_code)
    # 1 is what the interpreter gives for an error that nobody expected: prose says so.
    assert {0, 2, 3, 4, 130, 143} <= found
    documented = {int(row[0]) for row in table(OPERATIONS, "Exit codes")}
    assert documented == found


def test_every_event_is_documented_with_its_fields() -> None:
    events = {}
    for message in json_schema()["$defs"].values():
        # What is tagged with one name is an event; a cluster's own `event` may have several.
        tags = message.get("properties", {}).get("event", {}).get("enum", [])
        if len(tags) == 1:
            events[tags[0]] = set(message["properties"]) - {"event", "run_id", "at"}
    assert len(events) > 10
    documented = {code_in(row[0])[0]: set(code_in(row[2])) for row in table(FORMATS, "Events")}
    assert set(documented) == set(events)
    for name, wanted in events.items():
        assert wanted <= documented[name], name


def test_every_command_of_a_client_is_documented() -> None:
    rows = table(OPERATIONS, "Progress and steering")
    documented = [json.loads(code_in(row[0])[0])["command"] for row in rows]
    assert sorted(documented) == sorted(COMMANDS)


def test_environment_variables_are_documented() -> None:
    found: set[str] = set()
    for _, tree, _ in product():
        found |= environment_variables(tree)
    documented = set(code_in(section(OPERATIONS, "Environment variables")))
    assert found <= documented


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other() -> None:
    families = {
        family.name: family
        for family in Metrics().registry.collect()
        if not family.name.startswith("process_")  # of prometheus_client, as a family
    }
    suffix = {"counter": "_total", "info": "_info"}
    exported = {name + suffix.get(of.type, ""): of for name, of in families.items()}
    rows = {code_in(row[0])[0]: row for row in table(OPERATIONS, "Metrics")}
    assert set(rows) == set(exported)
    for name, family in exported.items():
        assert rows[name][1] == family.type, name
        labels = set(code_in(rows[name][2]))
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name
        assert len(rows[name][3]) > 5, name
    # Nothing else of the product exports any.
    for _, tree, _ in product():
        assert metrics(tree) <= {*families, *exported}


def test_every_metric_of_the_nightly_job_is_documented_with_its_labels_and_no_other() -> None:
    rows = {code_in(row[0])[0]: row for row in table(OPERATIONS, "Metrics of the nightly job")}
    assert {name: tuple(code_in(row[1])) for name, row in rows.items()} == {
        PREFIX + name: gauge.labels for name, gauge in GAUGES.items()
    }


def test_every_setting_of_the_nightly_script_is_documented() -> None:
    scripts = ("attn-nightly", "slurm/attn-nightly.sbatch")
    found = set().union(
        *(re.findall(r"\bATTN_[A-Z_]+\b", text(REPO / "deploy" / name)) for name in scripts)
    )
    assert {code_in(row[0])[0] for row in table(DEPLOYMENT, "Settings")} == found


def test_every_alert_is_in_the_runbook() -> None:
    rules = re.findall(r"- alert: (\w+)", text(REPO / "deploy/prometheus/alerts.yml"))
    rows = table(DEPLOYMENT, "Alerts and dashboard")
    assert sorted(name for row in rows for name in code_in(row[0])) == sorted(rules)


def test_the_runbook_has_the_exit_codes_of_a_night() -> None:
    night = {int(row[0]) for row in table(OPERATIONS, "Exit codes")} | {137}
    assert {int(row[0]) for row in table(DEPLOYMENT, "Exit codes")} == night


def test_every_field_of_the_options_is_documented() -> None:
    for kind, name in ((DiscoverOptions, "attn discover"), (CaptureOptions, "attn capture")):
        written = set(code_in(section(GUIDE, f"`{name}`") + section(GUIDE, "Capture")))
        for field in fields(kind):
            option = "--" + field.name.replace("_", "-")
            assert {option, field.name} & written, f"{kind.__name__}.{field.name}"


def test_every_limit_of_the_gate_and_of_zones_is_documented_with_its_default() -> None:
    checks = {code_in(row[0])[0]: row for row in table(OPERATIONS, "The gate")}
    assert set(checks) == {*QUESTIONS, "identity", "parent"}
    for field in fields(GateRules):
        _, passes, limit, _ = checks[field.name]
        assert float(limit) == field.default, field.name
        assert passes == ("at most" if QUESTIONS[field.name].at_most else "at least"), field.name
    zones = table(GUIDE, "Zones")
    assert [code_in(row[0])[0] for row in zones] == list(ZONES)
    written = {code_in(row[1])[0]: float(row[2]) for row in zones}
    assert written == {field.name: field.default for field in fields(ZoneRules)}
    block = re.search(r"```toml\n# zones.toml.*?\n(.*?)```", text(OPERATIONS), flags=re.DOTALL)
    assert block and tomllib.loads(block[1]) == written


@pytest.mark.parametrize(
    ("heading", "columns"),
    [
        ("The record", SCHEMA.names),
        ("`embedding.parquet`", EMBEDDING_COLUMNS.names),
        ("`clusters.parquet`", CLUSTER_COLUMNS.names),
        ("`landmarks.parquet`", landmark_columns(2).names),
        ("`references.parquet`", references_table(*NO_ROWS, InAreas.none(0)).schema.names),
        ("`shares.parquet`", SHARE_COLUMNS.names),
    ],
)  # fmt: skip
def test_every_column_is_documented(heading: str, columns: list[str]) -> None:
    documented = [name for row in table(FORMATS, heading) for name in code_in(row[0])]
    assert sorted(documented) == sorted(columns)


def test_every_column_of_the_projection_is_documented() -> None:
    documented = {
        name for row in table(FORMATS, "`projection.parquet`") for name in code_in(row[0])
    }
    golden = open_artifacts(REPO / "tests" / "golden" / "run_v1")
    codebook, *_ = read_prototypes(golden)
    assert documented == set(projection_table(codebook, np.zeros(1)).schema.names)


def test_every_column_of_the_sqlite_store_is_documented() -> None:
    database = sqlite3.connect(":memory:")
    database.executescript((REPO / "pipeline/store/sqlite/schema.sql").read_text(encoding="utf-8"))
    tables = database.execute(
        "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')"
    )
    found = {
        name: {row[1] for row in database.execute(f"PRAGMA table_info({name})")}
        for name, kind in tables.fetchall()
        if not name.startswith("sqlite_")
    }
    database.close()
    documented = {
        code_in(row[0])[0]: set(code_in(row[1])) for row in table(FORMATS, "SQLite store")
    }
    assert set(documented) == set(found)
    for name, columns in found.items():
        if name != "records":  # the columns of the record
            assert columns <= documented[name], name


def test_every_key_of_the_manifest_is_documented() -> None:
    golden = json.loads((REPO / "tests/golden/run_v1/manifest.json").read_text(encoding="utf-8"))
    quality, lineage = golden["quality"], golden["lineage"]
    keys = {*golden, *golden["counts"], *golden["parameters"], *quality, *quality["gate"], *lineage}
    # The version that published the golden run may not have all of today's.
    keys |= keys_of_dict_with("stage_seconds") | keys_of_dict_with("classifier_held_out_rows")
    rows = [row[:2] for row in table(FORMATS, "Manifest")]
    documented = {name for row in rows for cell in row for name in code_in(cell)}
    assert keys <= documented


def test_every_stage_is_documented_in_its_order() -> None:
    names = [stage.name for stage in STAGES]
    for page, heading in ((GUIDE, "Discovery, step by step"), (OPERATIONS, "Stop and resume")):
        assert [code_in(row[0])[0] for row in table(page, heading)] == names


def test_every_version_of_a_format_is_documented() -> None:
    found = {
        (path, value)
        for path, tree, _ in product()
        for name, (value, _) in integers(tree).items()
        if name.endswith("_VERSION") or name == "PROTOCOL"
    }
    documented = {(code_in(row[2])[0], int(row[1])) for row in table(FORMATS, "Versions")}
    assert documented == found


def test_every_results_file_is_quoted_with_its_command_and_date() -> None:
    page = " ".join(text(PERFORMANCE).split())
    results = sorted((REPO / "benchmarks/results").glob("*.json"))
    assert results
    for path in results:
        measured = json.loads(path.read_text(encoding="utf-8"))
        # The command stands before the file, and the date between them.
        at = page.find(f"`{path.relative_to(REPO)}`")
        assert at >= 0, f"{path.name} is not quoted"
        command = page.rfind(f"`{measured['command']}`", max(0, at - 300), at)
        assert command >= 0 and measured["date"] in page[command:at], path.name


def test_every_benchmark_is_listed() -> None:
    listed = set(re.findall(r"benchmarks/(\w+\.py)", text(REPO / "benchmarks/README.md")))
    programs = {
        path.name
        for path in (REPO / "benchmarks").glob("*.py")
        if "ArgumentParser(" in path.read_text(encoding="utf-8")
    }
    assert programs <= listed


# What the pages name exists -----------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(text(README).splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not fragment or fragment in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for name in inline_code(page):
        if not NAME_OF_FILE.fullmatch(name) or name.split("/")[0] in MADE:
            continue
        below = page.parent.rglob(name) if page.parent != REPO else ()
        assert [*REPO.glob(name), *below], f"{name} does not exist"


@pytest.mark.parametrize("row", table(GUIDE, "Where is it?"), ids=lambda row: row[0])
def test_what_is_looked_for_is_in_the_file_that_the_table_names(row: list[str]) -> None:
    _, files, names = (*row, "")[:3]
    sources = "\n".join((REPO / name).read_text(encoding="utf-8") for name in code_in(files))
    assert code_in(files)
    for name in code_in(names):
        defined = rf"^ *(?:(?:class|def) {name}\b|{name}\b.*? = )"
        assert re.search(defined, sources, flags=re.MULTILINE), f"{files} does not define {name}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    known = all_options()
    for code in inline_code(page):
        for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code):
            assert name in known, f"`{code}`: no command has {name}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_attn_command_that_a_page_names_exists(page: Path) -> None:
    groups = {name.rpartition(" ")[0] for name in commands()}
    for code in inline_code(page):
        words = code.split()
        if words[0] != "attn":
            continue
        name, rest = longest_command(words)
        assert name in commands() or (name in groups and not rest), f"`{code}`"
        taken = (
            {n for names in options(commands()[name]) for n in names}
            if name in commands()
            else set()
        )
        assert {word for word in rest if word.startswith("--")} <= {*taken, "--help"}, f"`{code}`"


def longest_command(words: list[str]) -> tuple[str, list[str]]:
    """The command that a line begins with, and its arguments."""
    known = {*commands(), *(name.rpartition(" ")[0] for name in commands())}
    count = max(n for n in range(1, len(words) + 1) if n == 1 or " ".join(words[:n]) in known)
    return " ".join(words[:count]), words[count:]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_command_line_of_a_page_would_be_understood(page: Path) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = set(re.findall(r"^([a-z][\w-]*):", (REPO / "Makefile").read_text(), re.MULTILINE))
    for words in shell_lines(page):
        line = " ".join(words)
        if words[0] == "attn":
            name, rest = longest_command(words)
            # Parses as the command line does: unknown and missing options are errors.
            commands()[name].make_context(name, rest)
        elif words[0] == "make":
            assert words[1] in targets, line
        elif words[0] == "python":
            known = all_options()
            assert (REPO / words[1]).is_file(), line
            assert {word for word in words if word.startswith("--")} <= known, line
        elif words[0] == "pip":
            extras = re.findall(r"\[([\w,]+)\]", line)
            wanted = {extra for found in extras for extra in found.split(",")}
            assert wanted <= set(project["optional-dependencies"]), line
        else:
            raise AssertionError(f"{line}: this test does not know the command {words[0]}")


def test_the_installed_command_is_the_one_that_is_documented() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"attn": "cli:main"}
    for extra in ("capture", "gpu", "texts", "otlp", "dev"):
        assert f"'.[{extra}]'" in text(README), f"README has no install line for {extra}"


# The collectors find what they look for -----------------------------------------------------------


def test_collectors_find_what_is_there_to_document() -> None:
    read = (
        "import os\nfrom os import environ, getenv\n"
        "a = os.environ['A']\nb = os.environ.get('B', '')\nc = getenv('C')\nd = 'D' in environ\n"
        "e = typer.Option(envvar='E')\nf = os.environ.get(name)\n"
    )
    assert environment_variables(ast.parse(read)) == {"A", "B", "C", "D", "E", "name"}
    exported = (
        "from prometheus_client import Counter as C, Gauge\nimport prometheus_client\n"
        "x = C('a_total', 'help')\ny = Gauge('b', 'help')\nz = prometheus_client.Summary('c', '')\n"
        "t = '# TYPE d counter\\nd 1\\n'\n"
    )
    assert metrics(ast.parse(exported)) == {"a_total", "b", "c", "d"}
    assert metrics(ast.parse("from collections import Counter\nx = Counter('a')")) == set()
    ends = (
        "# Exit code of a run\n# that waits.\nWAITS = 7\nOTHER = 8\nFULL = 9\n"
        "class E(Exception):\n    exit_code = 11\n"
        "def ask(reason, exit_code=FULL):\n    raise typer.Exit(12)\n"
        "stop('x', exit_code=13)\nstop('y', 128 + signal.SIGTERM)\n"
    )
    assert exit_codes(ast.parse(ends), ends) == {7, 9, 11, 12, 13, 143}


def test_options_of_the_dataclasses_have_the_defaults_of_the_command_line() -> None:
    for kind, name in ((DiscoverOptions, "attn discover"), (CaptureOptions, "attn capture")):
        parameters = {p.name: p.default for p in commands()[name].params}
        for field in fields(kind):
            if field.name in parameters and field.default is not MISSING and field.name != "layout":
                given = parameters[field.name]
                assert (str(given) if isinstance(given, Path) else given) == field.default, (
                    field.name
                )
