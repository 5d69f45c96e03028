"""`attn db`: in this process, but for one command that runs as a user runs it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from shared import REPO
from typer.testing import CliRunner, Result

from cli import app
from pipeline.store import commands, sources
from pipeline.store.open import open_store
from pipeline.store.transfer import export_file


def db(command: str, *arguments: object) -> Result:
    """The result of `attn db command`."""
    return CliRunner().invoke(app, ["db", command, *map(str, arguments)])


@pytest.fixture
def exported(records, tmp_path: Path) -> Path:
    """A file of 300 records from 2026-01-09 22:00:00 on, a second apart."""
    path = tmp_path / "records.jsonl"
    with open_store(tmp_path / "source.db", create=True) as store:
        store.append(records(300))
        export_file(store, path)
    return path


def test_a_store_from_init_to_prune(store_path, exported, tmp_path):
    store = ("--db", store_path)
    made = db("init", *store)
    assert made.exit_code == 0 and "is ready, with 0 fingerprints" in made.stdout
    with exported.open("a") as file:
        file.write("not a record\n")
    imported = db("import", exported, *store)
    assert imported.exit_code == 0, imported.stderr
    assert "301 rows, 300 stored, 0 duplicates, 1 rejected" in imported.stdout
    assert "rejected 1: not JSON, first on line 301" in imported.stderr
    again = json.loads(db("import", exported, *store, "--json").stdout)
    assert again[str(exported)]["rejected"] == {"not JSON": 1}
    assert again[str(exported)]["first_lines"] == {"not JSON": 301}

    plain = db("info", *store)
    assert plain.exit_code == 0, plain.stderr
    assert "fingerprints\t300\n" in plain.stdout and "\tlayered\t" in plain.stdout
    info = json.loads(db("info", *store, "--json").stdout)
    assert (info["rows"], info["requests"], info["first"]) == (300, 8, "2026-01-09T22:00:00+00:00")
    assert info["last"] == max(g["last"] for g in info["groups"]) == "2026-01-09T22:04:59+00:00"
    assert sum(group["rows"] for group in info["groups"]) == 300 and info["runs"] == []

    out = tmp_path / "out.parquet"
    done = db("export", out, *store, "--model", "small", "--layout", "layered",
                "--end", "2026-01-09T22:02:00")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}: 40 fingerprints\n"

    until = ("--before", "2026-01-09T22:01:40")
    assert "100 fingerprints" in db("prune", *store, *until, "--dry-run").stdout
    asked = db("prune", *store, *until)
    assert asked.exit_code == 2 and asked.stderr.startswith("error: nothing was deleted: add --yes")
    assert "deleted 100 fingerprints" in db("prune", *store, *until, "--yes").stdout
    aged = db("prune", *store, "--older-than-days", "1", "--now", "2026-01-10T22:03:20", "-y")
    assert "deleted 100 fingerprints" in aged.stdout
    assert json.loads(db("info", *store, "--json").stdout)["rows"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "--db", "none.db"), "does not exist"),
        (("init", "--db", "s3://bucket/store"), "object storage (s3://) is not supported"),
        (("export", "x.csv", "--db", "there.db"), "use a name that ends in"),
        (("export", "x.jsonl", "--db", "there.db", "--layout", "round"), "unknown layout 'round'"),
        (("import", "none.jsonl", "--db", "there.db"), "none.jsonl does not exist"),
        (("prune", "--db", "there.db"), "either --before TIME or --older-than-days DAYS"),
        (
            ("prune", "--db", "there.db", "--before", "2026-01-01", "--older-than-days", "1"),
            "either",
        ),
        (("prune", "--db", "there.db", "--older-than-days", "1e300", "-y"), "out of range"),
        (("prune", "--db", "there.db", "--older-than-days", "-1", "-y"), "equal to 0"),
        (("prune", "--db", "there.db", "--older-than-days", "nan", "-y"), "equal to 0"),
        (("prune", "--db", "there.db", "--older-than-days", "inf", "-y"), "out of range"),
        (("prune", "--db", "there.db", "--before", "0001-01-01T00:00:00+14:00"), "out of range"),
        (("import", ".", "--format", "jsonl", "--db", "there.db"), "is a folder: give the files"),
        (("export", ".", "--format", "jsonl", "--db", "there.db"), "is a folder: give the name"),
        (("import", "x.jsonl", "--format", "csv", "--db", "there.db"), "unknown format 'csv'"),
        (("init", "--db", "no/where.db"), "does not exist: make it"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    open_store("there.db", create=True).close()
    done = db(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


def test_a_model_whose_name_looks_like_markup_is_shown_as_it_is(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    commands._show("a [b] c", ("model", ""), [("[bold]m[/bold]", "[/nothing]")])
    shown = capsys.readouterr().out
    assert "a [b] c" in shown and "[bold]m[/bold]" in shown and "[/nothing]" in shown


def test_an_error_of_a_real_process_is_one_line_and_exit_code_2(attn):
    done = attn("db", "info", "--db", "s3://bucket/store")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: object storage (s3://) is not supported: give a local path\n"


def test_an_error_in_a_later_file_leaves_the_counts_of_all(store_path, exported, tmp_path):
    missing = tmp_path / "none.jsonl"
    done = db("import", exported, missing, "--db", store_path)
    assert (done.exit_code, done.stderr) == (2, f"error: {missing} does not exist\n")
    assert done.stdout == f"{exported}: 300 rows, 300 stored, 0 duplicates, 0 rejected\n"


def test_an_error_within_a_file_says_what_is_stored_of_it(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_LINES", 100)
    packed = gzip.compress(exported.read_bytes())
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(packed[: len(packed) * 3 // 4])
    store = tmp_path / "fingerprints.db"
    done = db("import", cut, "--db", store, "--json")
    stored = json.loads(done.stdout)[str(cut)]["inserted"]
    assert 100 <= stored < 300 and done.exit_code == 2
    assert f"{stored} rows of {cut} are stored, and importing it again adds the rest" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_import_without_a_record_fails_and_makes_no_store(store_path, tmp_path):
    path = tmp_path / "f.jsonl"
    wrong = {
        "request_id": "r",
        "position": 0,
        "layer": -1,
        "captured_at": "2026-01-10T00:00:00Z",
        "model": "m",
        "capture_id": "c",
        "layout": 9,
        "phase": "output",
        "vector": [0] * 20,
    }
    path.write_text(f"junk\n{json.dumps(wrong)}\n")  # fmt: skip
    done = db("import", path, "--db", store_path)
    assert done.exit_code == 2
    assert done.stderr.endswith(f"error: {path}: none of the 2 rows is a record\n")
    assert "rejected 1: unknown layout, first on line 2" in done.stderr
    assert db("import", tmp_path / "none.jsonl", "--db", store_path).exit_code == 2
    assert not store_path.exists()


def test_an_import_ends_when_too_many_rows_are_rejected(exported, tmp_path, store_path):
    with exported.open("a") as file:
        file.write("junk\n" * 3)
    done = db("import", exported, "--db", store_path, "--max-rejected", "2")
    assert done.exit_code == 2
    assert "3 of 303 rows are not records: more than --max-rejected 2; 300 rows" in done.stderr
    assert db("import", exported, "--db", store_path, "--max-rejected", "3").exit_code == 0


def test_a_second_import_stores_nothing_and_says_so(store_path, exported):
    db("import", exported, "--db", store_path)
    done = db("import", exported, "--db", store_path)
    assert done.stdout == f"{exported}: 300 rows, 0 stored, 300 duplicates, 0 rejected\n"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_an_export_to_standard_output_can_be_imported_from_standard_input(
    store_path, exported, tmp_path, kind
):
    db("import", exported, "--db", store_path)
    out = db("export", "-", "--format", kind, "--db", store_path)
    assert (out.exit_code, out.stderr) == (0, "-: 300 fingerprints\n")
    again = ["db", "import", "-", "--format", kind, "--db", str(tmp_path / "again.db")]
    done = CliRunner().invoke(app, again, input=out.stdout_bytes)
    assert done.stdout == "-: 300 rows, 300 stored, 0 duplicates, 0 rejected\n", done.stderr


def test_init_export_and_prune_print_json(store_path, exported, tmp_path):
    store = ("--db", store_path)
    assert json.loads(db("init", *store, "--json").stdout) == {"db": str(store_path), "rows": 0}
    db("import", exported, *store)
    out = tmp_path / "out.parquet"
    done = db("export", out, *store, "--json")
    assert json.loads(done.stdout) == {"file": str(out), "rows": 300}
    prune = ("prune", *store, "--before", "2026-01-09T22:01:40", "--json")
    expected = {"db": str(store_path), "before": "2026-01-09T22:01:40+00:00", "rows": 100}
    assert json.loads(db(*prune, "--dry-run").stdout) == expected | {"deleted": 0}
    assert json.loads(db(*prune, "--yes").stdout) == expected | {"deleted": 100}


def test_the_version_is_that_of_the_installed_package():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"attn {version('attn')}\n")


def test_any_text_is_shown_in_an_ascii_locale(records, tmp_path, monkeypatch, fresh_attn):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    path = tmp_path / "f.db"
    with open_store(path, create=True) as store:
        store.append(records(1, model="modèle"))
    done = fresh_attn("db", "info", "--db", path)
    assert (done.returncode, done.stderr) == (0, "") and "mod\\xe8le\t" in done.stdout


def test_an_export_that_is_read_in_part_does_not_report_all(records, tmp_path):
    path = tmp_path / "f.db"
    with open_store(path, create=True) as store:
        store.append(records(3_000))
    export = subprocess.Popen(
        [sys.executable, REPO / "cli.py", "db", "export", "-", "--db", path],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert export.stdout.read(100_000).count(b"\n") > 50
    export.stdout.close()
    assert b"3,000" not in export.stderr.read()
    assert export.wait() == 0
    export.stderr.close()
