"""`attn capture --engine sglang`: the fingerprints of the transformers engine, from a batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running_sglang import MODEL, ON_A_CPU, PATIENCE_S, PYTHON, require_sglang
from shared import REPO

from pipeline.record import vectors
from pipeline.store.open import open_store

pytestmark = pytest.mark.slow
SAMPLE = REPO / "examples/sample/prompts.jsonl"
# Both compute in float32 and add in another order: 2.4e-7 was seen in the shares of 4,170 rows.
TOLERANCE = 5e-6
# Rows every third position, a few generated ones, hidden and sink tokens, thinking, a window.
OPTIONS = (
    "--layers", "auto", "--max-new-tokens", "24", "--stride", "3", "--max-steps", "5",
    "--mask-prefix", "2", "--sink-tokens", "4", "--window", "300", "--think-tags",
    "--session-id", "both", "--device", "cpu", "--json",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The demo model in float32, and prompts: short ones, one of several chunks, one too long, and
    one twice without an id."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    require_sglang()
    made = tmp_path_factory.mktemp("offline")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.save_pretrained(made / "model")
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(made / "model")
    sample = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    text = "\n".join(row["prompt"] for row in sample)
    rows = [
        *sample[::42],
        {"id": "chunks", "prompt": text[:2500]},
        {"id": "too long", "prompt": text[:60_000]},
        {"prompt": sample[0]["prompt"]},
        {"prompt": sample[0]["prompt"]},
    ]
    (made / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return made


def capture(python: str | Path, folder: Path, engine: str, db: str) -> dict:
    command = [
        python, "-m", "cli", "capture", "--engine", engine, "--model", "model",
        "--prompts", "prompts.jsonl", "--db", db, *OPTIONS,
    ]  # fmt: skip
    run = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True,
        timeout=PATIENCE_S, env={**os.environ, **ON_A_CPU, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "warning: prompt 'too long' has" in run.stderr
    return json.loads(run.stdout)


def rows_of(path: Path) -> dict[tuple, tuple]:
    """What is stored, by key. An id that was made of the prompt and the capture is known by its
    end, as the captures differ."""
    found = {}
    with open_store(path, read_only=True) as store:
        for batch in store.scan():
            numbers = np.column_stack([vectors(batch), batch.column("sink_mass").to_numpy()])
            for row, own in zip(batch.to_pylist(), numbers, strict=True):
                name = row["request_id"]
                if name.startswith("prompt-"):
                    name = f"made{name.removeprefix('prompt-')[16:]}"
                facts = [row[n] for n in ("phase", "token_id", "prompt_len", "session_id", "model")]
                found[name, row["position"], row["layer"]] = (facts, own)
    return found


def test_a_batch_in_sglang_stores_what_transformers_does_one_by_one(folder):
    summaries = [
        capture(PYTHON, folder, "sglang", "sglang.db"),
        capture(sys.executable, folder, "transformers", "transformers.db"),
    ]
    ours, theirs = (rows_of(folder / f"{name}.db") for name in ("sglang", "transformers"))
    assert ours.keys() == theirs.keys() and len(ours) > 500
    assert {"prompt", "think", "output"} == {facts[0] for facts, _ in ours.values()}
    assert max(position for name, position, _ in ours if name == "chunks") > 2 * 512
    for key, (facts, numbers) in ours.items():
        assert facts == theirs[key][0], key
        np.testing.assert_allclose(numbers, theirs[key][1], atol=TOLERANCE, err_msg=str(key))
    for summary in summaries:
        del summary["seconds"], summary["tokens_per_second"]
        summary["refused"] = [name.split("-")[0] for name in summary["refused"]]
    assert summaries[0] == summaries[1]
    assert summaries[0]["refused"] == ["too long"]
    assert summaries[0]["rows"]["inserted"] == len(ours)
