"""Traces as files, made here, and their import into a page."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from playwright.sync_api import Page
from served_runs import GOLDEN


def lines_of(*records: dict[str, Any] | str) -> bytes:
    texts = (one if isinstance(one, str) else json.dumps(one) for one in records)
    return "".join(f"{text}\n" for text in texts).encode()


def header(**more: Any) -> dict[str, Any]:
    return {"record_type": "header", "version": "1.0", "trace_id": "t-1", "model": "m", **more}


def entry(step: int, prompt: int, links: dict[int, float], layer: int = 3) -> dict[str, Any]:
    """A raw entry of the row of a generated token."""
    return {
        "token_positions": list(links), "attention_scores": list(links.values()),
        "topk_logits": [float(np.log(p)) for p in links.values()], "logsumexp_candidates": 0.0,
        "layer_id": layer, "decode_step": step, "position": prompt + step - 1,
        "think_phase": "output",
    }  # fmt: skip


def trace_of(
    texts: list[str], prompt: int, steps: dict[int, dict[int, float]],
    vectors: dict[int, list[float]] | None = None,
) -> list[dict]:  # fmt: skip
    """Records of a trace: `steps` has the links of rows by the index of their token, `vectors`
    their fingerprints."""
    measured = {
        i: {"fingerprint": {"fingerprint": vector, "manifold": "diffuse"}}
        for i, vector in (vectors or {}).items()
    }
    question = "".join(texts[:prompt])
    segments = [
        {"id": "user-1", "type": "user", "startIndex": 0, "endIndex": prompt - 1},
        {"id": "a-1", "type": "assistant_final", "startIndex": prompt},
    ]
    metrics = {"avgEntropy": 0.4, "dominantZone": "diffuse", "tokenCount": len(texts)}
    return [
        header(),
        {"record_type": "message", "id": "user-1", "role": "user", "content": question},
        *({"record_type": "segment", **one} for one in segments),
        *(
            {"record_type": "token", "index": i, "text": text,
             "segmentId": segments[i >= prompt]["id"]}
            for i, text in enumerate(texts)
        ),
        *(
            {"record_type": "step", "tokenIndex": i,
             "attention": entry(i - prompt + 1, prompt, links), **measured.get(i, {})}
            for i, links in steps.items()
        ),
        {"record_type": "metrics", **metrics},
    ]  # fmt: skip


def import_file(page: Page, content: bytes, name: str = "trace.jsonl") -> None:
    page.locator("[data-import]").first.set_input_files(
        {"name": name, "mimeType": "application/x-ndjson", "buffer": content}
    )
    page.wait_for_selector(".file-note", timeout=60_000)
    is_chat = page.locator("main[data-view=chat]").count()
    if is_chat and page.locator(".file-note.bad[role=alert]").count() == 0:
        page.wait_for_selector(".flow:not([data-lines='0'])")


def kept_of_the_run(count: int) -> list[list[float]]:
    """Fingerprints that the served run kept, so that it places them among its clusters."""
    kept = pq.read_table(GOLDEN / "run_v1" / "references.parquet").column("vector").to_pylist()
    return kept[:: len(kept) // count][:count]


def measured_trace(vectors: list[list[float]]) -> bytes:
    """A trace of two prompt tokens and an answer, each of whose rows has a fingerprint."""
    texts = ["Say ", "it: ", *(f"word{i} " for i in range(len(vectors)))]
    rows = range(1, len(vectors) + 1)
    records = trace_of(texts, 2, {i: {0: 0.5} for i in rows}, dict(zip(rows, vectors, strict=True)))
    return lines_of(*records)
