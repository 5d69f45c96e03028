"""Options on SGLang's command line, and the facts that one process gives to another."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shared import REPO

from capture_kernels.errors import AttnError
from pipeline.engines.serving import facts_file
from pipeline.engines.serving.options import TABLE, ServeOptions
from pipeline.engines.serving.request import ModelFacts
from pipeline.engines.sglang.command_line import add_options, read_options

FACTS = ModelFacts("demo", 4, (1, 3), 8, 4096, {"raw": "no"}, capture_id="abc")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"TMPDIR": str(tmp_path)})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def started(*words: str) -> ServeOptions:
    """What another process makes of a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    add_options(None, parser)
    arguments = parser.parse_args(["--model-path", "demo", *words])
    assert read_options(lambda cls, given: given.model_path, object, arguments) == "demo"
    return ServeOptions.from_environment(os.environ)


def test_every_option_is_on_sglangs_command_line_and_reaches_other_processes(tmp_path):
    assert not started().is_on
    options = started(
        "--return-attention-tokens", "--attention-tokens-top-k", "7",
        "--attention-capture-stride=3", "--attention-store", str(tmp_path / "f.db"),
        "--attention-cors-origins", "https://a.example", "https://b.example", "--attention-layout",
        "layered", "--attention-capture-layers", "all",
        "--attention-sample-rate", "0.5",
    )  # fmt: skip
    assert options.return_attention_tokens
    assert (options.tokens_top_k, options.tokens_stride, options.sample_rate) == (7, 3, 0.5)
    assert options.store == tmp_path / "f.db"
    assert options.cors_origins == ("https://a.example", "https://b.example")
    assert options.layout.label == "layered"
    parser = argparse.ArgumentParser()
    add_options(None, parser)
    known = set(parser._option_string_actions)
    assert {name for option in TABLE for name in option.names} <= known


def test_the_secret_is_the_same_in_all_processes():
    first = started("--return-attention-tokens")
    assert ServeOptions.from_environment(dict(os.environ)).secret == first.secret


@pytest.mark.parametrize(
    "words",
    [
        ["--attention-tokens-stride", "0"],
        ["--attention-tokens-stride", "two"],
        ["--attention-sketch-mode", "--attention-fingerprint-mode"],
        ["--attention-api-key", "short"],
        ["--attention-store", "/proc/no/such.db"],
    ],
)
def test_what_cannot_be_used_ends_the_program_with_one_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        started(*words)
    assert ended.value.code == 2
    says = capsys.readouterr().err
    assert says.count("\n") == 1
    assert says.startswith("attn: ")


def test_facts_reach_the_other_process_and_change_when_capture_is_off(tmp_path):
    facts_file.choose_folder()
    assert list(tmp_path.iterdir()) == []
    facts_file.write(FACTS)
    live = facts_file.LiveFacts()
    assert live() == FACTS
    off = replace(FACTS, reasons={"capture": "it failed"})
    facts_file.write(off)
    assert live() == off
    facts_file.remove()
    assert list(tmp_path.iterdir()) == []
    # As when somebody clears the folder for temporary files.
    assert live() == off


def test_facts_of_several_processes_are_those_of_one_server():
    """As with data parallelism: requests of one may still be captured while another is off."""
    off, ended = ({"capture": why} for why in ("it failed", facts_file.ENDED))
    lensless = {"logit_lens": "that head was not tried"}

    def reasons(*found: dict[str, str]) -> dict[str, str]:
        return facts_file.of_all([replace(FACTS, reasons=each) for each in found]).reasons

    assert reasons({}, {}) == {}
    assert reasons({}, off) == reasons(ended, {}) == {}
    assert reasons(off, off) == reasons(off, ended) == reasons(ended, off) == off
    assert reasons(ended, ended) == ended
    assert reasons(lensless, off) == lensless


def test_each_process_writes_its_own_facts():
    facts_file.choose_folder()
    code = "from pipeline.engines.serving import facts_file; facts_file.write('not here')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=dict(os.environ))
    assert done.returncode == 0
    facts_file.write(FACTS)
    with pytest.raises(AttnError, match="not here"):
        facts_file.LiveFacts()


def test_why_nothing_can_be_captured_reaches_it_too():
    facts_file.choose_folder()
    with pytest.raises(AttnError, match="did not take"):
        facts_file.LiveFacts()
    facts_file.write("that backend was not tried")
    with pytest.raises(AttnError, match="that backend was not tried"):
        facts_file.LiveFacts()
