"""A capture from a file of prompts to a store, as the command line runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from io import StringIO

import pytest
import typer
from capture_models import save_model, words
from typer.testing import CliRunner

from capture_kernels.errors import AttnError, MissingExtraError, OptionError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from pipeline.capture import (
    CaptureSummary,
    Prompt,
    read_prompts,
    request_ids,
    run_capture,
)
from pipeline.capture_command import capture
from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions
from pipeline.progress import shown_progress
from pipeline.record import vectors
from pipeline.store.open import open_store

NOON = datetime(2026, 1, 10, 12, tzinfo=UTC)
app = typer.Typer()
app.command()(capture)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def engine(model):
    return load_engine(model, CaptureOptions(max_new_tokens=4, device="cpu"))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def attn(*arguments):
    """The result of the command; errors that the root command line would print are kept."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def summary_of(engine):
    return CaptureSummary("s", engine.name, engine.capture_id, engine.layers, Layout.LOG16)


def stored(db):
    with open_store(db) as store:
        return [row for batch in store.scan() for row in batch.to_pylist()]


def test_prompts_are_json_lines_or_plain_lines(tmp_path):
    lines = write(
        tmp_path / "p.jsonl",
        '{"id": "a", "prompt": "one", "more": [1]}\n\n{"prompt": "two"}\n'
        '{"id": 7, "prompt": "three\\nlines"}\n',
    )
    assert read_prompts(lines) == [
        Prompt("a", "one"),
        Prompt(None, "two"),
        Prompt("7", "three\nlines"),
    ]
    plain = write(tmp_path / "p.txt", 'one\r\n\n  \n{"prompt": 2}\u2028same line')
    assert read_prompts(plain) == [
        Prompt(None, "one"),
        Prompt(None, '{"prompt": 2}\u2028same line'),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("\n  \n", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ('["a"]', "line 1 must be an object"),
        ('{"text": "a"}', 'line 1 must be an object with a string "prompt"'),
        ('{"prompt": 3}', 'line 1 must be an object with a string "prompt"'),
        ('{"prompt": " "}', "line 1 has an empty prompt"),
        ('{"id": "", "prompt": "a"}', "line 1 must have a string or an integer"),
        ('{"id": true, "prompt": "a"}', "line 1 must have a string or an integer"),
        ('{"id": "x", "prompt": "a"}\n\n{"id": "x", "prompt": "b"}', "line 3 has the id 'x' of"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "line 2 has the id '1' of line 1"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_by_its_line(tmp_path, text, message):
    with pytest.raises(OptionError, match=message):
        read_prompts(write(tmp_path / "p.jsonl", text))


def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path):
    with pytest.raises(OptionError, match=r"cannot read .*none\.txt: No such file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(OptionError, match="cannot read"):
        read_prompts(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(OptionError, match="is not UTF-8"):
        read_prompts(tmp_path / "latin.txt")


def test_a_prompt_without_an_id_has_the_same_one_every_time():
    prompts = [Prompt(None, "a"), Prompt("mine", "b"), Prompt(None, "b"), Prompt(None, "a")]
    ids = request_ids(prompts, "c1")
    assert len(set(ids)) == 4
    assert ids[1] == "mine" and ids[3] == f"{ids[0]}-2"
    assert ids == request_ids(prompts, "c1")
    # Another capture of the same text is another request; given ids stay.
    other = request_ids(prompts, "c2")
    assert other[1] == "mine" and not set(ids) & (set(other) - {"mine"})


def test_a_capture_ends_in_the_store(tmp_path, model):
    prompts = write(
        tmp_path / "p.jsonl",
        "".join(json.dumps({"id": f"r{i}", "prompt": words(10, i)}) + "\n" for i in range(3)),
    )
    db = tmp_path / "f.db"
    options = ("--model", model, "--prompts", prompts, "--db", db, "--device", "cpu")
    result = attn(*options, "--max-new-tokens", 5, "--session-id", "mine", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["session_id"] == "mine" and summary["model"] == model
    assert summary["prompts"] == 3 and summary["refused"] == [] and not summary["interrupted"]
    assert summary["prompt_tokens"] == 30 and summary["new_tokens"] == 15
    assert summary["rows"] == {
        "inserted": 39,
        "duplicates": 0,
        "rejected": {},
        "without_visible_key": 3,
        "missing": 0,
    }
    rows = stored(db)
    assert len(rows) == 39
    assert {row["request_id"] for row in rows} == {"r0", "r1", "r2"}
    assert {row["session_id"] for row in rows} == {"mine"}
    assert {row["capture_id"] for row in rows} == {summary["capture_id"]}
    zones = ZoneRules().classify([row["vector"] for row in rows], Layout.LOG16).names
    for phase, counts in summary["zones"].items():
        assert list(counts) == list(ZONES)
        for zone, count in counts.items():
            hits = [z for z, row in zip(zones, rows, strict=True) if row["phase"] == phase]
            assert hits.count(zone) == count
    # Again: nothing is stored twice.
    again = json.loads(attn(*options, "--max-new-tokens", 5, "--json").stdout)
    assert again["rows"]["inserted"] == 0 and again["rows"]["duplicates"] == 39
    assert len(stored(db)) == 39


def test_every_option_reaches_the_capture(tmp_path, model):
    prompts = write(tmp_path / "p.txt", words(12) + "\n")
    result = attn(
        *("--model", model, "--prompts", prompts, "--db", tmp_path / "f.db", "--device", "cpu"),
        *("--layers", "1,2", "--heads", "0,3", "--window", 6, "--mask-prefix", 2, "--stride", 2),
        *("--sink-tokens", 3, "--max-new-tokens", 9, "--max-steps", 2, "--per-layer"),
        "--think-tags",
    )
    assert result.exit_code == 0, result.output
    rows = stored(tmp_path / "f.db")
    positions = sorted(row["position"] for row in rows)
    assert positions == sorted(2 * [4, 6, 8, 10, 12, 14])
    assert {row["layer"] for row in rows} == {1, 2}
    engine = load_engine(
        model,
        CaptureOptions(
            layers="1,2",
            heads="0,3",
            window=6,
            mask_prefix=2,
            sink_tokens=3,
            stride=2,
            max_new_tokens=9,
            max_steps=2,
            per_layer=True,
            device="cpu",
        ),
    )
    expected = engine.capture(words(12), request_id="r").batch
    found = sorted(rows, key=lambda row: (row["layer"], row["position"]))
    assert [row["vector"] for row in found] == vectors(expected).tolist()
    assert {row["capture_id"] for row in rows} == {engine.capture_id}


def test_the_summary_is_readable_and_layered_is_a_layout(tmp_path, model):
    prompts = write(tmp_path / "p.txt", f"{words(12)}\n{words(20)}\n")
    result = attn(
        *("--model", model, "--prompts", prompts, "--db", tmp_path / "f.db", "--device", "cpu"),
        *("--layout", "layered", "--layers", "auto", "--max-new-tokens", 3),
    )
    assert result.exit_code == 0, result.output
    assert "2 prompts, 32 prompt and 6 new tokens" in result.stdout
    assert "34 rows stored, 0 were there already" in result.stdout
    assert "syntax_floor" in result.stdout and "prompt " in result.stdout
    assert "capture: 2/2 prompts, 34 rows" in result.stderr
    assert {row["layout"] for row in stored(tmp_path / "f.db")} == {2}


def test_a_prompt_that_is_too_long_is_counted_and_passed_over(tmp_path, model):
    lines = [{"id": "long", "prompt": words(97)}, {"id": "short", "prompt": words(5)}]
    prompts = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, lines)))
    options = ("--model", model, "--prompts", prompts, "--db", tmp_path / "f.db", "--device", "cpu")
    result = attn(*options, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["refused"] == ["long"]
    assert "warning: prompt 'long' has 97 tokens" in result.stderr
    assert {row["request_id"] for row in stored(tmp_path / "f.db")} == {"short"}
    assert "1 prompts refused: long" in attn(*options).stdout


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--layers", "9"), "no layer 9"),
        (("--layers", "some"), "layers 'some' is not supported"),
        (("--heads", "9"), "no head 9"),
        (("--layout", "wide"), "unknown layout 'wide'"),
        (("--layout", "layered"), "needs several layers"),
        (("--stride", 0), "stride must be 1 or more"),
        (("--sink-tokens", -1), "sink_tokens must be 0 or more"),
        (("--device", "toaster"), "unknown device 'toaster'"),
        (
            ("--model", "missing/model/name"),
            "cannot load model 'missing/model/name': there is no "
            "folder missing/model/name here, and ",
        ),
        (("--prompts", "missing.txt"), "cannot read missing.txt"),
    ],
    ids=str,
)
def test_errors_are_one_line_that_says_what_to_do(tmp_path, model, monkeypatch, extra, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prompts = write(tmp_path / "p.txt", words(5))
    result = attn("--model", model, "--prompts", prompts, "--db", tmp_path / "f.db", *extra)
    assert isinstance(result.exception, AttnError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.exception.exit_code == 2
    assert not (tmp_path / "f.db").exists()


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch, package):
    prompts = write(tmp_path / "p.txt", words(5))
    for name in [n for n in sys.modules if n.startswith(("pipeline.engines.", "transformers.uti"))]:
        if name != "pipeline.engines.options":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = attn("--model", "m", "--prompts", prompts)
    assert isinstance(result.exception, MissingExtraError)
    assert "pip install 'attn[capture]'" in str(result.exception)


def test_ctrl_c_keeps_the_prompts_that_are_finished(tmp_path, engine):
    prompts = [Prompt(f"r{i}", words(6, i)) for i in range(5)]
    ticks = iter(range(100))

    def clock():  # four passes a prompt: Ctrl+C comes in the middle of the third
        if next(ticks) == 10:
            raise KeyboardInterrupt
        return NOON

    summary, warnings = summary_of(engine), []
    with open_store(tmp_path / "f.db", create=True) as store:
        run_capture(engine, prompts, store, summary, clock=clock, warn=warnings.append)
        assert summary.interrupted and summary.prompts == 2
        assert store.counts().rows == summary.inserted == 16
        rest = summary_of(engine)
        run_capture(engine, prompts, store, rest, clock=lambda: NOON, warn=warnings.append)
        assert rest.prompts == 5 and rest.inserted == 24 and rest.duplicates == 16
    assert warnings == []


def test_ctrl_c_exits_with_130_and_keeps_the_finished_prompts(tmp_path, model, monkeypatch):
    ticks = iter(range(100))

    def clock():
        if next(ticks) == 10:
            signal.raise_signal(signal.SIGINT)
        return NOON

    monkeypatch.setattr("pipeline.engines.transformers.utc_now", clock)
    prompts = write(tmp_path / "p.txt", "\n".join(words(6, i) for i in range(5)))
    options = ("--model", model, "--prompts", prompts, "--db", tmp_path / "f.db", "--device", "cpu")
    result = attn(*options, "--max-new-tokens", 4, "--json")
    summary = json.loads(result.stdout)
    assert result.exit_code == 130
    assert f"interrupted: {summary['prompts']} of 5 prompts are stored" in result.stderr
    assert summary["interrupted"] and summary["prompts"] == 3
    assert len(stored(tmp_path / "f.db")) == summary["rows"]["inserted"] == 3 * 8


@pytest.mark.slow
def test_ctrl_c_in_the_terminal_exits_with_130(tmp_path, model):
    prompts = write(tmp_path / "p.txt", "\n".join(words(60, i) for i in range(3000)))
    program = (
        "import typer\nfrom pipeline.capture_command import capture\n"
        "app = typer.Typer()\napp.command()(capture)\napp()\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", program, "--model", model, "--prompts", str(prompts)),
            *("--db", str(tmp_path / "f.db"), "--device", "cpu", "--json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    first = process.stderr.readline()
    assert "capture: 1/3000 prompts" in first
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    summary = json.loads(out)
    assert process.returncode == 130
    assert f"interrupted: {summary['prompts']} of 3000 prompts are stored" in err
    assert "Traceback" not in err
    assert (
        summary["interrupted"] and len(stored(tmp_path / "f.db")) == summary["rows"]["inserted"] > 0
    )


def test_plain_progress_is_a_line_for_each_tenth():
    stream = StringIO()
    with shown_progress("capture", 10, 100, stream) as display:
        for done in range(1, 101):
            display.show(done, f"{done}/100 prompts")
    lines = stream.getvalue().splitlines()
    assert lines == [f"capture: {done}/100 prompts" for done in (1, *range(11, 100, 10), 100)]


def test_speed_is_counted_by_a_watch_that_can_be_given(tmp_path, engine):
    summary, watch = summary_of(engine), iter(range(0, 100, 2))
    with open_store(tmp_path / "f.db", create=True) as store:
        run_capture(
            engine,
            [Prompt("a", words(6))],
            store,
            summary,
            clock=lambda: NOON,
            warn=print,
            stopwatch=lambda: next(watch),
        )
    assert summary.seconds == 4
    assert summary.tokens_per_second == 10 / 4
