"""`attn db`: in this process, but for one command that runs as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cli import app
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
    assert "rejected 1: not JSON, first on line 301" in imported.stdout
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


def test_an_error_of_a_real_process_is_one_line_and_exit_code_2(attn):
    done = attn("db", "info", "--db", "s3://bucket/store")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: object storage (s3://) is not supported: give a local path\n"
