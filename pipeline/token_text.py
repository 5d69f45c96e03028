"""Token texts: a model's tokens as people read them, from its tokenizer.json."""

from __future__ import annotations

import string
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from capture_kernels.errors import MissingExtraError, OptionError

from .durable import Facts, facts_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TokenText = Callable[[int], str | None]
FILE = "tokenizer.json"
BLANK, LINE_BREAK, TAB = "␣", "⏎", "⇥"
MOST_CHARACTERS = 24
_REPLACED = "\ufffd"


def open_tokens(path: Path | None, model: str) -> TokenText:
    """A function from a token id to its text as `visible` shows it; None for an unknown id.

    Args:
        path: a tokenizer.json, or a folder that holds one. With None, the folder that `model` names
            is searched; if it holds none that can be read, every text is None.
        model: the model's name in the store: a local folder or a hub name.

    Raises:
        OptionError: `path` holds no tokenizer that can be read.
        MissingExtraError: `path` is given and the library `tokenizers` is not installed.
    """
    if path is not None:
        return _texts(tokenizer_file(path))
    own = own_tokenizer(model)
    return _texts(own) if own else lambda token_id: None


def own_tokenizer(model: str) -> Path | None:
    """The absolute path of the tokenizer.json in a model's own folder; None if `model` names no
    folder with one that can be read."""
    path = (Path(model) / FILE).absolute()
    with suppress(OptionError, MissingExtraError, OSError):
        # An empty name would be the working folder.
        if model and path.is_file():
            _texts(path)
            return path
    return None


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json itself, of a path to it or to its folder."""
    return path / FILE if path.is_dir() else path


def tokenizer_facts(path: str | None) -> Facts | None:
    """Identifies a tokenizer file wherever it is stored; None if no tokenizer can be read."""
    return facts_of([tokenizer_file(Path(path))])[0] if path else None


def visible(text: str) -> str:
    """At most 24 characters of `text`, with blanks and line breaks as ␣, ⇥ and ⏎, and with other
    invisible characters escaped."""
    names = {" ": BLANK, "\n": LINE_BREAK, "\t": TAB}
    shown = [
        names.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode("ascii"))
        for c in text[: MOST_CHARACTERS + 1]
    ]
    lengths = list(accumulate(map(len, shown)))
    if bisect_right(lengths, MOST_CHARACTERS) == len(text):
        return "".join(shown)
    return "".join(shown[: bisect_right(lengths, MOST_CHARACTERS - 1)]) + "…"


def _texts(path: Path) -> TokenText:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(
            f"cannot read the tokenizer {path}: {error.strerror}: give a {FILE} or its folder"
        ) from None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        missing = "token texts need the library tokenizers: pip install 'attn[texts]'"
        raise MissingExtraError(missing) from None
    try:
        # From a file or a str, the library raises a bare Exception.
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError:
        raise OptionError(f"{path} is not a tokenizer: give the model's own {FILE}") from None
    added = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
    before = _anchor(tokenizer)
    prefix = tokenizer.decode(before, skip_special_tokens=False)

    @cache
    def text(token_id: int) -> str | None:
        token = tokenizer.id_to_token(token_id) if 0 <= token_id < 2**31 else None
        if token is None:
            return None
        if token_id in added:
            return visible(added[token_id])
        decoded = tokenizer.decode([*before, token_id], skip_special_tokens=False)
        own = decoded[len(prefix) :] if decoded.startswith(prefix) else decoded
        if _REPLACED in own:
            return visible(_as_bytes(token))
        return visible(own or token)

    return text


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """A token to decode others after: many decoders drop the blank that a text begins with."""
    for letter in string.ascii_letters + string.digits:
        found = tokenizer.token_to_id(letter)
        if found is not None and tokenizer.decode([found]).strip() == letter:
            return [found]
    return []


@cache
def _byte_characters() -> dict[str, int]:
    """The byte behind each printable character of a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in plain]
    characters = [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(moved))]
    return dict(zip(characters, plain + moved, strict=True))


def _as_bytes(token: str) -> str:
    """A token that is not a whole character, as its bytes: `\\xe2\\x80`."""
    table = _byte_characters()
    if token.startswith("<0x") or not all(character in table for character in token):
        return token
    return bytes(table[character] for character in token).decode("utf-8", "backslashreplace")
