"""Trains the demo model, from nothing to the files that transformers loads, within a time budget.

    python examples/demo_model/train.py --out OUT --minutes 7

The learning rate follows the share of the budget that is spent, so it has fallen to nothing when
the time is up, whatever the machine's speed. Give --steps as well, or instead, to end earlier.
"""

import argparse
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import corpus
import evaluate
import numpy as np
import torch
from names import Draw
from packing import LEVELS, Chunk, Recipe, Workers, encode_stream
from tasks import GENERATORS
from tokenizer import BOS, EOS, PAD, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

_LONGEST = 4096
_LARGEST_FILE = 8_000_000
_REPORT_EVERY_S = 10.0
_NEEDLE_EVERY_S = 60.0
_RESERVE_S = 12.0


class Pool:
    """The newest rows of one length, kept on the device; batches are drawn from it at random."""

    def __init__(self, length: int, rows: int, device: torch.device) -> None:
        self._tokens = torch.zeros(rows, length + 1, dtype=torch.int16, device=device)
        self._levels = torch.zeros(rows, length + 1, dtype=torch.uint8, device=device)
        self._added = 0

    @property
    def filled(self) -> int:
        return min(self._added, len(self._tokens))

    def add(self, chunk: Chunk) -> None:
        """Put a chunk's rows in the place of the oldest ones."""
        device = self._tokens.device
        place = torch.arange(self._added, self._added + len(chunk.tokens), device=device)
        place %= len(self._tokens)
        tokens = torch.from_numpy(chunk.tokens.astype(np.int16))  # ids stay far below 32,768
        levels = torch.from_numpy(chunk.levels)
        if device.type == "cuda":  # from pinned memory the copy does not wait for the device
            tokens, levels = tokens.pin_memory(), levels.pin_memory()
        self._tokens[place] = tokens.to(device, non_blocking=True)
        self._levels[place] = levels.to(device, non_blocking=True)
        self._added += len(chunk.tokens)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and levels, int64 [rows, length + 1] each."""
        chosen = torch.randint(self.filled, (rows,), device=self._tokens.device)
        return self._tokens[chosen].long(), self._levels[chosen].long()


def make_config(options: argparse.Namespace, tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
        max_position_embeddings=_LONGEST,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def optimizer_of(model: torch.nn.Module, rate: float, fused: bool) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' gains alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def rate_at(progress: float, step: int, warm_up: int) -> float:
    """Share of the peak learning rate: linear over `warm_up` steps, then a cosine to zero."""
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def weighted_loss(
    model: Callable[..., CausalLMOutputWithPast],
    tokens: torch.Tensor,
    levels: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Mean cross-entropy of the next tokens, in nats, weighted by their levels."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    assert logits is not None  # a causal model given token ids has logits
    loss = functional.cross_entropy(
        logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    weight = weights[levels[:, 1:].flatten()]
    return (loss * weight).sum() / weight.sum()


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights in float16, config, generation config and tokenizer to `out`."""
    half = LlamaForCausalLM(model.config).half()
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    half.save_pretrained(out)
    save_tokenizer(tokenizer, out, _LONGEST)
    weights = out / "model.safetensors"
    weights.chmod(0o644)  # it is written for its owner alone
    size = weights.stat().st_size
    if size > _LARGEST_FILE:
        raise RuntimeError(f"model.safetensors has {size} bytes, more than {_LARGEST_FILE}")
    print(f"saved {out}: {sum(p.numel() for p in half.parameters())} parameters, {size} bytes")


def prepare(options: argparse.Namespace, folder: Path) -> tuple[Tokenizer, list[str]]:
    """Train the tokenizer, write the library's text as token streams to `folder`; give prose."""
    text = corpus.load(held_out=False)
    prose = text.prose_lines()
    rng = random.Random(options.seed)
    draw = Draw(rng, prose=prose)
    makers = [make for make in GENERATORS.values() for _ in range(200)]
    shown = [make(draw, rng.randint(20, 300)).text for make in makers]
    code = rng.sample(text.code, min(300, len(text.code)))
    tokenizer = train_tokenizer([*code, *text.docstrings, *shown], options.vocab)
    save_tokenizer(tokenizer, folder, _LONGEST)
    if options.quick_text:
        text.code = code[:40]
    for name, documents in (("code", text.code), ("prose", text.docstrings)):
        np.save(folder / f"{name}.npy", encode_stream(tokenizer, documents))
    return tokenizer, prose


def train(options: argparse.Namespace, began: float) -> None:
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer, prose = prepare(options, folder)
        print(f"{time.monotonic() - began:6.1f} s  text and tokenizer ready", flush=True)
        shares = tuple(0.7 if length < 2048 else 0.3 for length in options.lengths)
        recipe = Recipe(tuple(options.lengths), shares)
        saved = folder / "tokenizer.json"
        with Workers(options.workers, saved, folder, prose, recipe, options.seed) as workers:
            model = LlamaForCausalLM(make_config(options, tokenizer))
            model.to(device)  # type: ignore[arg-type]  # the stub takes the wrapped function's self
            fast = AutoTokenizer.from_pretrained(folder)
            fit(options, began, workers, model, fast)
            save(model, tokenizer, options.out)
    print(f"{time.monotonic() - began:6.1f} s  done", flush=True)


def fit(
    options: argparse.Namespace,
    began: float,
    workers: Workers,
    model: LlamaForCausalLM,
    fast: PreTrainedTokenizerBase,
) -> None:
    """Train `model` in place until the budget, less what saving takes, or the steps are spent."""
    device = model.device
    cuda = device.type == "cuda"
    deadline = began + options.minutes * 60 - _RESERVE_S if options.minutes else None
    run = torch.compile(model, dynamic=False) if options.compile else model
    optimizer = optimizer_of(model, options.lr, cuda)
    weights = torch.tensor(LEVELS, device=device)
    pools = {
        length: Pool(length, max(8, options.pool_tokens // length), device)
        for length in options.lengths
    }
    choose = random.Random(options.seed)
    needles = evaluate.fresh_needles(200, seed=options.seed + 1)
    few = evaluate.fresh_needles(100, seed=options.seed + 2, lines=3)
    needed = {length: min(512, options.pool_tokens // length // 2) for length in options.lengths}
    while any(pools[length].filled < needed[length] for length in options.lengths):
        for chunk in workers.take(8, wait=60.0):
            pools[chunk.length].add(chunk)
    start = time.monotonic()
    reported = measured = start
    step = seen = since = 0
    while True:
        now = time.monotonic()
        progress = step / options.steps if options.steps else 0.0
        if deadline:
            progress = max(progress, (now - start) / (deadline - start))
        if progress >= 1:
            break
        # Never wait for new rows: those of a batch may have been drawn before.
        if cuda or step % 4 == 0:
            for chunk in workers.take(3):
                pools[chunk.length].add(chunk)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate_at(progress, step, options.warm_up)
        # Short rows first: looking up is learnt there sooner.
        length = choose.choice(options.lengths) if progress > 0.1 else min(options.lengths)
        tokens, levels = pools[length].batch(max(1, options.batch_tokens // length))
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = weighted_loss(run, tokens, levels, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        since += tokens.numel()
        if now - reported >= _REPORT_EVERY_S:
            value = loss.item()  # waits for the device, so that the speed is a true one
            elapsed = time.monotonic() - reported
            seen += since
            done = f"{time.monotonic() - began:6.1f} s  step {step:6d}"
            speed = f"{since / elapsed:9.0f} tokens/s  {seen / 1e6:7.1f} M tokens"
            print(f"{done}  {speed}  loss {value:.4f}", flush=True)
            reported, since = time.monotonic(), 0
        if now - measured >= _NEEDLE_EVERY_S:
            model.eval()
            accuracy = evaluate.needle_accuracy(model, fast, needles)
            easier = evaluate.needle_accuracy(model, fast, few)
            model.train()
            print(
                f"          needle accuracy {accuracy:.3f}  of three lines {easier:.3f}", flush=True
            )
            measured = time.monotonic()
    print(f"          {step} steps, {(seen + since) / 1e6:.1f} M tokens", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, help="time budget, from start to saved files")
    parser.add_argument("--steps", type=int, help="steps at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=max(1, cores - 2), help="packing processes")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--pool-tokens", type=int, default=32_000_000, help="kept a row length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048], help="row lengths")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--intermediate", type=int, default=704)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=300, help="steps")
    parser.add_argument("--compile", action="store_true", help="compile the model (needs gcc)")
    parser.add_argument("--quick-text", action="store_true", help="little text, for a trial run")
    parser.add_argument("--evaluate", action="store_true", help="run evaluate.py on the result")
    options = parser.parse_args(arguments)
    if not (options.minutes or options.steps):
        parser.error("give --minutes or --steps")
    train(options, began)
    if options.evaluate:
        evaluate.main(["--model", str(options.out), "--device", options.device])


if __name__ == "__main__":
    main()
