"""Token texts, as people read them."""

from __future__ import annotations

import sys

import pytest
from shared import REPO
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from capture_kernels.errors import MissingExtraError, OptionError
from pipeline.token_text import MOST_CHARACTERS, open_tokens, visible

DEMO = REPO / "examples" / "demo_model"


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def byte_level(vocabulary):
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("path", [DEMO, DEMO / "tokenizer.json"])
def test_texts_of_a_folder_or_a_file_show_blanks(path):
    text = open_tokens(path, "some/hub-model")
    ids = {text(i): i for i in range(2048)}
    for shown in ("⏎", "␣the", ":", "␣1", "1", "<|bos|>", "</think>", "␣␣"):
        assert shown in ids
    assert text(0) == "<|bos|>"


def test_without_a_path_the_models_own_folder_is_looked_in(tmp_path, monkeypatch):
    assert open_tokens(None, str(DEMO))(0) == "<|bos|>"
    for model in (str(tmp_path), "some/hub-model", "a\0b", "a" * 300):
        assert open_tokens(None, model)(0) is None
    # A model without a name is no model of the working folder.
    monkeypatch.chdir(DEMO)
    assert open_tokens(None, "")(0) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_tokens(None, str(tmp_path))(0) is None


@pytest.mark.parametrize("token_id", [-1, 2048, 2**31 - 1, 2**31, 2**40])
def test_ids_outside_the_vocabulary_have_no_text(token_id):
    assert open_tokens(DEMO, "")(token_id) is None


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_wrong_file_is_one_line_that_says_what_to_give(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    for given in (path, *([tmp_path] if content is not None else [])):
        with pytest.raises(OptionError) as error:
            open_tokens(given, "")
        assert "tokenizer.json" in str(error.value) and "give" in str(error.value)
        assert "\n" not in str(error.value)


def test_the_missing_library_is_named_only_where_texts_were_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'attn\[texts\]'"):
        open_tokens(DEMO, "")
    assert open_tokens(None, str(DEMO))(0) is None


def test_blanks_before_a_word_show_where_the_decoder_drops_them(tmp_path):
    tokenizer = Tokenizer(models.Unigram([("▁the", -1.0), ("the", -2.0), ("a", -3.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([0]) == "the"
    text = open_tokens(saved(tokenizer, tmp_path), "")
    assert [text(i) for i in range(3)] == ["␣the", "the", "a"]


def test_word_pieces_show_which_start_a_word(tmp_path):
    vocabulary = {"[UNK]": 0, "a": 1, "walk": 2, "##ing": 3}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[UNK]", special=True)])
    text = open_tokens(saved(tokenizer, tmp_path), "")
    assert [text(i) for i in range(4)] == ["[UNK]", "␣a", "␣walk", "ing"]


def test_parts_of_a_character_show_their_bytes(tmp_path):
    # GPT-2's signs for the bytes e2 80, and for the three of a whole character.
    text = open_tokens(saved(byte_level({"a": 0, "âĢ": 1, "âĤ¬": 2, "Ġé": 3}), tmp_path), "")
    assert text(1) == r"\xe2\x80"
    assert text(2) == "€"
    assert text(3) == r"␣\xe9"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (" the", "␣the"),
        ("\n\n\t", "⏎⏎⇥"),
        ("\x1b[31m", r"\x1b[31m"),
        ("a\u202eb", r"a\u202eb"),
        ("\x00\r", r"\x00\r"),
        ("é漢", "é漢"),
        ("", ""),
    ],
)
def test_what_cannot_be_seen_is_shown(raw, shown):
    assert visible(raw) == shown


@pytest.mark.parametrize("sign", ["=", " ", "\x00", "漢", "\U000e0001"])
@pytest.mark.parametrize("count", [1, 23, 24, 25, 5_000])
def test_texts_are_bounded(sign, count):
    shown = visible(sign * count)
    whole = count * len(visible(sign))
    assert len(shown) <= MOST_CHARACTERS
    assert shown.endswith("…") == (whole > MOST_CHARACTERS)
