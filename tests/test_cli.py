"""What `attn` itself says: help, and words that it does not know."""

from __future__ import annotations

import inspect

import pytest
import typer.main
from typer.testing import CliRunner

import cli


@pytest.fixture(autouse=True)
def built_anew(monkeypatch):
    """As in a separate process, whatever other tests have parsed (`built_command.py`)."""
    monkeypatch.setattr("typer.testing._get_command", inspect.unwrap(typer.main.get_command))


def said(*words: str, columns: int = 80) -> tuple[int, str, str]:
    done = CliRunner(env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)}).invoke(
        cli.app, list(words), prog_name="attn"
    )
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nope"], "No such option: --nope (see attn --help)"),
        (["nope"], "No such command 'nope'. (see attn --help)"),
        (["runs", "--nope"], "No such option: --nope (see attn runs --help)"),
        (["runs", "show", "--nope"], "No such option: --nope (see attn runs show --help)"),
    ],
)
def test_words_that_it_does_not_know_are_one_line(words, says):
    assert said(*words) == (2, "", f"error: {says}\n")


@pytest.mark.parametrize("words", [[], ["discover"], ["runs"], ["runs", "show"], ["serve"]])
def test_help_has_a_short_form(words):
    short, long = (said(*words, option) for option in ("-h", "--help"))
    assert short == long and short[0] == 0 and "Usage: attn" in short[1]


def test_the_names_of_options_are_whole_in_80_columns():
    code, help_text, _ = said("serve", "--help")
    assert code == 0 and "…" not in help_text
    assert "--attention-disable-in-production" in help_text
    assert max(map(len, help_text.splitlines())) <= 80
