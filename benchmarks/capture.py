"""What offline capture costs: a model's speed without it, with it, and with the usual way.

    python -m benchmarks.capture                      # a random Llama, on what device there is
    python -m benchmarks.capture --size 8b --device cuda --dtype bfloat16
    python -m benchmarks.capture --model DIR --json benchmarks/results/capture.json

Timed in one run, on one prompt of random tokens, medians of `--repeats`:
  off          the model alone, in a plain greedy loop
  last, auto, all   `TransformersEngine` on the last layer, on 4 layers, on all, every row captured
  attentions   the peer: eager attention with output_attentions=True, and the numpy reference on
               each row of the last layer (and of all layers, with --peer-all)
Checked as it times: every way generates the same tokens as `off`, and captures the vectors of the
peer.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from capture_kernels.fingerprint.vector import fingerprint
from pipeline.engines.options import CaptureOptions
from pipeline.engines.transformers import TransformersEngine
from pipeline.record import vectors

SIZES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
}


class Numbers:
    """A tokenizer for prompts that are token ids in decimal."""

    eos_token_id = None

    def __call__(self, prompt: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in prompt.split()]}


def make_model(arguments: argparse.Namespace) -> Any:
    """The model of --model, or a random Llama of --size, with no end token."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    else:
        shape: dict[str, Any] = SIZES[arguments.size]
        config = LlamaConfig(
            **shape,
            intermediate_size=int(shape["hidden_size"] * 3.5),
            num_key_value_heads=shape["num_attention_heads"] // 4,
            vocab_size=32_000,
            max_position_embeddings=131_072,
        )
        torch.manual_seed(0)
        with torch.device(arguments.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.to(arguments.device).eval()


def plain_loop(model: Any, tokens: list[int], new_tokens: int) -> list[int]:
    """The greedy loop without capture: the generated tokens."""
    cache, feed, new = DynamicCache(config=model.config), tokens, list[int]()
    with torch.inference_mode():
        while True:
            ids = torch.tensor([feed], device=model.device)
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
            if len(new) == new_tokens:
                return new
            new.append(token)
            if len(new) == new_tokens:
                return new
            feed = [token]


def attentions_loop(
    model: Any, tokens: list[int], new_tokens: int, layers: slice
) -> tuple[list[int], NDArray[np.float32]]:
    """The peer: the generated tokens, and float32[rows, 20] of every row but the first."""
    cache, feed, new, begin = DynamicCache(config=model.config), tokens, list[int](), 0
    found: list[NDArray[np.float32]] = []
    with torch.inference_mode():
        while True:
            ids = torch.tensor([feed], device=model.device)
            out = model(input_ids=ids, past_key_values=cache, output_attentions=True)
            rows = [layer[0].float().cpu().numpy() for layer in out.attentions[layers]]
            for i in range(len(feed)):
                t = begin + i
                row = fingerprint([layer[:, i, : t + 1] for layer in rows], t)
                if row is not None:
                    found.append(row.vector)
            token = int(out.logits[0, -1].argmax())
            begin += len(feed)
            if len(new) < new_tokens:
                new.append(token)
            if len(new) == new_tokens:
                return new, np.stack(found)
            feed = [token]


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of `work`, after one run that is not counted."""
    times = []
    for i in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every way's seconds for the prompt, tokens per second after it, and check."""
    model = make_model(arguments)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (arguments.prompt_tokens,), generator=random)
    tokens, prompt = ids.tolist(), " ".join(map(str, ids.tolist()))
    results: dict[str, Any] = {}

    def note(way: str, run: Callable[[int], object], repeats: int) -> None:
        prefill = seconds(lambda: run(0), repeats)
        whole = seconds(lambda: run(arguments.new_tokens), repeats)
        # The last new token is never fed.
        rate = (arguments.new_tokens - 1) / max(whole - prefill, 1e-9)
        base = results.get("off", {"prefill_seconds": prefill, "decode_tokens_per_second": rate})
        results[way] = {
            "prefill_seconds": prefill,
            "decode_tokens_per_second": rate,
            "prefill_times_off": prefill / base["prefill_seconds"],
            "decode_times_off": base["decode_tokens_per_second"] / rate,
        }

    expected = plain_loop(model, tokens, arguments.new_tokens)
    # In half precision a GPU's own answers may differ from run to run, capture or not.
    repeatable = all(plain_loop(model, tokens, arguments.new_tokens) == expected for _ in range(3))
    note("off", lambda new: plain_loop(model, tokens, new), arguments.repeats)
    results["off"]["repeatable"] = repeatable
    captured: dict[str, NDArray[np.float32]] = {}
    for way in ("last", "auto", "all"):
        engines = {
            new: TransformersEngine(
                model,
                Numbers(),
                CaptureOptions(layers=way, max_new_tokens=new),
                name="benchmark",
                revision="none",
            )
            for new in (0, arguments.new_tokens)
        }
        note(
            way,
            lambda new, engines=engines: engines[new].capture(prompt, request_id="r"),  # type: ignore[misc]
            arguments.repeats,
        )
        answer = engines[arguments.new_tokens].capture(prompt, request_id="r")
        results[way]["same_tokens"] = answer.new_tokens == expected
        captured[way] = vectors(answer.batch)

    base = model.config._attn_implementation
    model.set_attn_implementation("eager")
    for way, layers in [("last", slice(-1, None)), ("all", slice(None))]:
        if way == "all" and not arguments.peer_all:
            continue
        note(
            f"attentions_{way}",
            lambda new, layers=layers: attentions_loop(model, tokens, new, layers),  # type: ignore[misc]
            1,
        )
        new, rows = attentions_loop(model, tokens, arguments.new_tokens, layers)
        same = new == expected and results[way]["same_tokens"]
        # Other tokens have other rows: only the prompt's can be compared then.
        rows = rows if same else rows[: len(tokens) - 1]
        error = np.abs(rows - captured[way][: len(rows)])
        results[f"attentions_{way}"]["same_tokens"] = new == expected
        results[way]["largest_difference_from_peer"] = float(error.max())
    model.set_attn_implementation(base)
    return results


def report(results: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Print the table; False where an answer was wrong."""
    print(f"{'way':<16}{'prompt s':>10}{'x off':>8}{'new tok/s':>11}{'x off':>8}")
    for way, row in results.items():
        print(
            f"{way:<16}{row['prefill_seconds']:>10.3f}{row['prefill_times_off']:>8.2f}"
            f"{row['decode_tokens_per_second']:>11.1f}{row['decode_times_off']:>8.2f}"
        )
    # In half precision the peer rounds its weights; in float32 both are exact to rounding.
    bound = 1e-4 if arguments.dtype == "float32" else 0.05
    good = True
    print(f"off gives the same tokens every time: {results['off']['repeatable']}")
    for way in ("last", "auto", "all"):
        row = results[way]
        difference = row.get("largest_difference_from_peer")
        good &= (row["same_tokens"] or not results["off"]["repeatable"]) and (
            difference is None or difference <= bound
        )
        told = "" if difference is None else f", largest difference from the peer {difference:.1e}"
        print(f"{way}: same tokens as off: {row['same_tokens']}{told}")
    return bool(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a model folder; default: a random Llama")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the random Llama")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-all", action="store_true", help="the peer on all layers too")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    if arguments.new_tokens < 2:
        parser.error("--new-tokens must be 2 or more")
    results = measure(arguments)
    good = report(results, arguments)
    if arguments.json:
        device = arguments.device
        about = {
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "arguments": {k: str(v) for k, v in vars(arguments).items()},
        }
        arguments.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
