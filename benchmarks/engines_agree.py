"""Whether two engines say the same of a model's attention: fingerprints of the examples' prompts.

    python benchmarks/engines_agree.py ask --engine sglang --out SGLANG.json
    python benchmarks/engines_agree.py ask --engine vllm --out VLLM.json
    python benchmarks/engines_agree.py compare SGLANG.json VLLM.json [--json PATH]

`ask` starts the engine's server with the demo model in float16, on a GPU with CUDA graphs, and asks
for the prompts of `attn examples needle` and `codename`: a fingerprint of every row of the prompt
and of each of STEPS generated tokens. Engines whose torch differs cannot be installed together, so
each has a separate run. `compare` takes all rows, or those of the prompt alone where the generated
texts differ. Exits 1 if a number differs by more than MOST: half precision rounds hidden states.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine_process import EngineProcess
from benchmarks.sglang_process import SGLangProcess
from benchmarks.vllm_process import VllmProcess
from pipeline.examples.prompts import CODENAME, NEEDLE

MODEL = Path(__file__).resolve().parents[1] / "examples" / "demo_model"
STEPS = 32
MOST = 5e-3
CAPTURE = ("--return-attention-tokens", "--attention-capture-layers", "all", "--dtype", "float16",
           "--served-model-name", "demo")  # fmt: skip


def started(engine: str, log: Path) -> EngineProcess:
    if engine == "sglang":
        return SGLangProcess(
            MODEL, log, "--max-total-tokens", "65536", "--cuda-graph-bs-decode", "1", *CAPTURE
        )
    return VllmProcess(
        MODEL, log, "--max-model-len", "4096", "--gpu-memory-utilization", "0.3",
        "--cudagraph-capture-sizes", "1", *CAPTURE,
    )  # fmt: skip


def ask(engine: str) -> dict[str, Any]:
    """What a server of the engine says of each prompt: its text, and fingerprints by step."""
    found: dict[str, Any] = {"engine": engine, "date": datetime.now(UTC).date().isoformat()}
    with tempfile.TemporaryDirectory() as folder, started(engine, Path(folder) / "log") as server:
        server.wait()
        for example in (NEEDLE, CODENAME):
            body = {
                "model": "demo", "prompt": example.prompt, "max_tokens": STEPS, "temperature": 0,
                "ignore_eos": True, "return_attention_tokens": True,
                "attention_fingerprint_mode": True, "include_prompt_attention": 4000,
            }  # fmt: skip
            url = f"{server.url}/v1/completions"
            response = httpx.post(url, json=body, timeout=120)
            response.raise_for_status()
            answer = response.json()
            choice = answer["choices"][0]
            entries = choice["attention_tokens"]
            found[example.name] = {
                "text": choice["text"], "prompt_tokens": answer["usage"]["prompt_tokens"],
                "attention": answer["usage"]["attention"],
                "fingerprints": {str(each["step"]): each["fingerprint"] for each in entries},
            }  # fmt: skip
    return found


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of a number, by prompt, and of how many rows.

    Raises:
        ValueError: they are not of the same rows.
    """
    found: dict[str, Any] = {"engines": [first["engine"], second["engine"]]}
    for name in (NEEDLE.name, CODENAME.name):
        one, two = first[name], second[name]
        if one["prompt_tokens"] != two["prompt_tokens"]:
            raise ValueError(
                f"{name}: prompts of {one['prompt_tokens']} and {two['prompt_tokens']}"
            )
        is_same = one["text"] == two["text"]
        steps = [step for step in one["fingerprints"] if int(step) <= 0 or is_same]
        if not is_same:
            print(f"{name}: the texts differ: rows of the prompt alone")
        missing = [step for step in steps if step not in two["fingerprints"]]
        if missing or not steps:
            raise ValueError(f"{name}: {second['engine']} has no row of step {missing[:3]}")
        off = [
            float(np.abs(np.subtract(one["fingerprints"][s], two["fingerprints"][s])).max())
            for s in steps
        ]
        found[name] = {
            "rows": len(off), "same_text": is_same, "largest": max(off),
            "median": float(np.median(off)),
        }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask")
    asking.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    asking.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs=2)
    comparing.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    if asked.command == "ask":
        asked.out.write_text(json.dumps(ask(asked.engine)) + "\n", encoding="utf-8")
        return 0
    figures = compare(*(json.loads(path.read_text(encoding="utf-8")) for path in asked.files))
    worst = 0.0
    for name in (NEEDLE.name, CODENAME.name):
        print(f"{name}: {figures[name]}")
        worst = max(worst, figures[name]["largest"])
    if asked.json:
        about = {
            "command": "python benchmarks/engines_agree.py compare SGLANG.json VLLM.json",
            "date": datetime.now(UTC).date().isoformat(),
        }
        text = json.dumps({**about, **figures, "most": MOST, "passed": worst <= MOST}, indent=2)
        asked.json.write_text(text + "\n", encoding="utf-8")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
