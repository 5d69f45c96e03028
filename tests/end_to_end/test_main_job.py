"""The whole slice, as a user runs it: a model, its fingerprints, its behaviours, their names."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from shared import REPO

from discovery.artifacts.read import open_artifacts

MODEL = REPO / "examples" / "demo_model"
PROMPTS = REPO / "examples" / "sample" / "prompts.jsonl"


@pytest.mark.parametrize(
    ("count", "least", "options"),
    [(12, 400, []), pytest.param(24, 500, ["--long-running"], marks=pytest.mark.slow)],
)
def test_from_a_model_to_named_behaviours(attn, tmp_path, count, least, options):
    prompts = tmp_path / "prompts.jsonl"
    lines = PROMPTS.read_text().splitlines()
    prompts.write_text("\n".join(sorted(lines, key=len)[:count]))
    db, output, exported = tmp_path / "f.db", tmp_path / "runs", tmp_path / "rows.jsonl"

    captured = attn(
        "capture", "--model", MODEL, "--prompts", prompts, "--db", db, "--layers", "auto",
        "--max-new-tokens", "24", "--think-tags", "--device", "cpu", "--json",
    )  # fmt: skip
    assert captured.returncode == 0, captured.stderr
    rows = json.loads(captured.stdout)["rows"]["inserted"]

    found = attn("discover", "--db", db, "--output", output, *options, "--json")
    assert found.returncode == 0, found.stderr
    manifest = json.loads(found.stdout)
    assert manifest["counts"]["rows"] == rows > least
    assert manifest["counts"]["clusters"] >= 2

    assert attn("db", "export", exported, "--db", db).returncode == 0
    named = attn("classify", exported, "--artifacts", output)
    assert named.returncode == 0, named.stderr
    answers = [json.loads(line) for line in named.stdout.splitlines()]
    assert len(answers) == rows
    table = open_artifacts(output).table("embedding").to_pylist()
    own = {(row["request_id"], row["position"]): row for row in table}
    pairs = [(own[a["request_id"], a["position"]], a["manifold"]) for a in answers]
    assert all(row["zone"] == said["zone"] for row, said in pairs)
    inside = [(row["cluster_id"], said["cluster_id"]) for row, said in pairs
              if row["cluster_id"] >= 0]  # fmt: skip
    assert sum(a == b for a, b in inside) >= 0.9 * len(inside)
    assert {"prompt", "output"} <= set(Counter(row["phase"] for row in table))


@pytest.mark.slow
def test_the_shipped_sample_is_what_the_shipped_model_and_prompts_give(attn, tmp_path):
    import numpy as np
    import pyarrow.parquet as pq

    from pipeline.record import vectors
    from pipeline.store.open import open_store

    prompts = tmp_path / "prompts.jsonl"
    chosen = [json.loads(line) for line in PROMPTS.read_text().splitlines()][::60]
    prompts.write_text("\n".join(map(json.dumps, chosen)))
    db = tmp_path / "f.db"
    done = attn(
        "capture", "--model", MODEL, "--prompts", prompts, "--db", db, "--layers", "auto",
        "--stride", "5", "--max-new-tokens", "64", "--think-tags", "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shipped = pq.read_table(REPO / "examples" / "sample" / "fingerprints.parquet")
    wanted = dict(
        zip(
            zip(shipped["request_id"].to_pylist(), shipped["position"].to_pylist(), strict=True),
            vectors(shipped),
            strict=True,
        )
    )
    with open_store(str(db)) as store:
        batches = list(store.scan())
    # The prompts' own rows: which tokens are generated may hang on a machine's last bit.
    seen = 0
    for batch in batches:
        keys = zip(batch["request_id"].to_pylist(), batch["position"].to_pylist(), strict=True)
        phases = batch["phase"].to_pylist()
        for key, vector, phase in zip(keys, vectors(batch), phases, strict=True):
            if phase == "prompt":
                np.testing.assert_allclose(vector, wanted[key], atol=2e-3)
                seen += 1
    ids = {row["id"] for row in chosen}
    prompt_rows = zip(shipped["request_id"].to_pylist(), shipped["phase"].to_pylist(), strict=True)
    assert seen == sum(name in ids and phase == "prompt" for name, phase in prompt_rows) > 100
