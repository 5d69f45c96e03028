"""The recipes run, and their pages say what the committed runs found."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
from pages import shell_lines, text
from shared import REPO

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kit.pages import BEGIN, END, PAGES, RESULTS, figures, overview, refreshed
from kit.report import Kind, markdown
from kit.services import Services, make_run, open_services

PROGRAMS = sorted((REPO / "examples/recipes").glob("*.py"))
NAMES = [path.stem for path in PROGRAMS]
# Run as a process, which starts a separate engine and sidecar.
ALONE = "ghost_context"
BOUNDED = ("AUROC", "accuracy", "share", "recall")


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def check(found: dict[str, Any], name: str) -> None:
    """What holds of the JSON of any run of a recipe."""
    assert found["recipe"] == name and found["anchor"] and found["requests"] > 0
    assert {row["kind"] for row in found["rows"]} <= set(get_args(Kind))
    assert {"20 numbers", "baseline"} <= {row["kind"] for row in found["rows"]}
    names = [(row["kind"], row["name"]) for row in found["rows"]]
    assert len(set(names)) == len(names)
    for row in found["rows"]:
        for figure in filter(None, (row["held_out"], row["left_out"])):
            assert figure["requests"] > 1
            if figure["low"] is not None:
                assert figure["low"] <= figure["high"], row
            if any(word in found["measure"] for word in BOUNDED):
                assert 0 <= figure["value"] <= 1, row


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    make_run(folder, requests_per_task=9)
    return folder


@pytest.fixture(scope="module")
def services(data: Path) -> Iterator[Services]:
    """One engine and one sidecar for all recipes: they take longer to start than most recipes."""
    with open_services(data, "shared.db") as running:
        yield running


def run_here(program: Path, *arguments: str | Path) -> Any:
    """The exit code of a recipe in this process, which has its libraries imported."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [str(program), *map(str, arguments)])
        runpy.run_path(str(program), run_name="__main__")
    return ended.value.code


def check_quick(name: str, out: Path, stdout: str) -> None:
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["quick"]
    check(found, name)
    assert markdown(found) in stdout
    # It asks for the same rows as the committed run.
    whole = committed(name)
    assert [(r["kind"], r["name"]) for r in found["rows"]] == [
        (r["kind"], r["name"]) for r in whole["rows"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != ALONE])
def test_a_recipe_runs_through_engine_and_sidecar(
    name, services, data, tmp_path, monkeypatch, capsys
):
    out, program = tmp_path / "found.json", REPO / f"examples/recipes/{name}.py"
    asked: list[Path] = []

    def shared(folder: Path, _: str) -> nullcontext[Services]:
        asked.append(folder)
        return nullcontext(services)

    monkeypatch.setattr("kit.command.open_services", shared)
    assert run_here(program, "--quick", "--data", data, "--json", out) == 0
    assert asked == [data]
    check_quick(name, out, capsys.readouterr().out)


@pytest.mark.slow
def test_a_recipe_starts_engine_and_sidecar_itself(data, tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, str(REPO / f"examples/recipes/{ALONE}.py"), "--quick"]
    done = subprocess.run(
        [*command, "--data", str(data), "--json", str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_quick(ALONE, out, done.stdout)


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_here(PROGRAMS[0], "--data", tmp_path / "file" / "data") == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "cannot make" in said


def test_every_recipe_has_a_page_and_a_committed_run() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*NAMES, "README"}
    assert {path.stem for path in RESULTS.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_quotes_the_committed_run(name: str) -> None:
    found = committed(name)
    check(found, name)
    assert not found["quick"]
    page = text(PAGES / f"{name}.md")
    assert refreshed(page, figures(found)) == page
    assert found["command"] in [" ".join(words) for words in shell_lines(PAGES / f"{name}.md")]
    # A figure in a sentence is one of the run or of the publication.
    known = {f"{value:.2f}" for value in numbers(found)} | set(DECIMAL.findall(found["anchor"]))
    measured = page[page.index("\n## Measured\n") :]
    prose = measured[: measured.index(BEGIN)] + measured[measured.index(END) :]
    assert set(DECIMAL.findall(prose)) <= known


DECIMAL = re.compile(r"(?<![\d.])\d\.\d+(?![\d.])")


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        return [n for one in value.values() for n in numbers(one)]
    if isinstance(value, list):
        return [n for one in value for n in numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


def test_the_table_of_all_recipes_quotes_their_committed_runs_and_verdicts() -> None:
    page = text(PAGES / "README.md")
    assert refreshed(page, overview()) == page
    assert len(overview().splitlines()) == 2 + len(NAMES)
