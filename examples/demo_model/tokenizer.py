"""Trains the demo model's tokenizer: a small byte-level BPE that keeps every digit apart."""

import json
from collections.abc import Iterable
from pathlib import Path

from names import GREEK
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
THINK, END_THINK = "<think>", "</think>"
# One digit with the space before it (so the row at `name:` predicts the first digit of the value,
# not a space), one newline, a word, a run of punctuation, white space short of the last blank
# (which goes with the word after it).
_PIECES = r" ?\p{N}|\n| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, special tokens included.

    <|bos|>, <|eos|> and <|pad|> are special and have the ids 0, 1 and 2. <think> and </think> are
    plain added tokens, so that they show in decoded text. Encoding puts <|bos|> first.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    thoughts = [AddedToken(token, special=False, normalized=False) for token in (THINK, END_THINK)]
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(thoughts),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *_kept_whole()], trainer)
    tokenizer.add_tokens(thoughts)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def _kept_whole() -> Iterable[str]:
    """Digits after a space and Greek letters, often enough that each becomes one token."""
    return [" 0 1 2 3 4 5 6 7 8 9" * 2000, "\n".join(GREEK * 1500)]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as `AutoTokenizer` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
