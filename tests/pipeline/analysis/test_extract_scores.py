"""`extract_attention_from_response`: scores as they were sent, or one clear error."""

from __future__ import annotations

import base64
import gzip
import json
import random
import subprocess
import sys
import tracemalloc
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from fuzzing import fuzz, mutated
from hypothesis import given
from hypothesis import strategies as st
from shared import REPO

from pipeline.analysis import AttentionAnalyzer, ResponseError, extract_attention_from_response


def causal(tokens: int, heads: int, seed: int = 0) -> np.ndarray:
    """Probabilities float16[T, H, T]: rows end at their query."""
    rng = np.random.default_rng(seed)
    weights = np.tril(rng.random((heads, tokens, tokens)) + 1e-3)
    return (weights / weights.sum(-1, keepdims=True)).transpose(1, 0, 2).astype(np.float16)


def packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content)).decode()


def item(scores: np.ndarray, layer: int = 2, **other) -> dict:
    meta = {"prompt_len": len(scores), "total_len": len(scores)}
    data = packed(scores.tobytes())
    return {
        "layer_idx": layer,
        "data": data,
        "shape": list(scores.shape),
        "token_meta": meta,
    } | other


def response(*items: object) -> dict:
    return {"model": "demo", "choices": [], "attn_capture_data": list(items)}


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_scores_come_back_as_they_were_sent(tokens: int, heads: int, seed: int) -> None:
    sent = {layer: causal(tokens, heads, seed + layer) for layer in (0, 7)}
    found = extract_attention_from_response(response(*(item(s, n) for n, s in sent.items())))
    assert found is not None and list(found) == [0, 7]
    for number, layer in found.items():
        assert layer["scores"].dtype == np.float32
        np.testing.assert_array_equal(layer["scores"], sent[number].astype(np.float32))
        assert (layer["layer"], layer["model"]) == (number, "demo")
        assert layer["token_meta"]["prompt_len"] == tokens


@pytest.mark.parametrize("without", [{}, {"attn_capture_data": []}, {"attn_capture_data": None}])
def test_a_response_without_scores_gives_none(without: dict) -> None:
    assert extract_attention_from_response(without) is None


def test_gzip_of_several_members_is_read() -> None:
    scores = causal(6, 2)
    halves = scores.tobytes()[:70], scores.tobytes()[70:]
    data = base64.b64encode(b"".join(map(gzip.compress, halves))).decode()
    found = extract_attention_from_response(response(item(scores, data=data)))
    assert found is not None
    np.testing.assert_array_equal(found[2]["scores"], scores.astype(np.float32))


GOOD = causal(6, 2)
BYTES = GOOD.tobytes()
BROKEN = bytearray(gzip.compress(BYTES))
BROKEN[-8] ^= 1  # of the checksum
ALONE = ("numpy", "msgspec", "pipeline", "capture_kernels")
NAN = GOOD.copy()
NAN[3, 1, 2] = np.nan


@pytest.mark.parametrize(
    ("damaged", "says"),
    {
        "no list": ({"attn_capture_data": "x"}, "attn_capture_data cannot be read"),
        "no object": (response("x"), r"attn_capture_data\[0\] cannot be read"),
        "no data": (response({"layer_idx": 2, "shape": [1, 1, 1]}), "missing required .* `data`"),
        "no base64": (response(item(GOOD, data="!!!")), "layer 2 .* is damaged"),
        "base64 cut": (response(item(GOOD, data=packed(BYTES)[:-1])), "is damaged"),
        "text beyond ASCII": (response(item(GOOD, data="é")), "is damaged"),
        "no gzip": (response(item(GOOD, data=base64.b64encode(BYTES).decode())), "is damaged"),
        "gzip cut": (
            response(item(GOOD, data=base64.b64encode(gzip.compress(BYTES)[:-20]).decode())),
            "is damaged",
        ),
        "zlib": (
            response(item(GOOD, data=base64.b64encode(zlib.compress(BYTES)).decode())),
            "is damaged",
        ),
        "checksum": (response(item(GOOD, data=base64.b64encode(BROKEN).decode())), "is damaged"),
        "too few bytes": (response(item(GOOD, data=packed(BYTES[:-2]))), "has 142 bytes where"),
        "too many": (response(item(GOOD, data=packed(BYTES + b"xx"))), "has more bytes where"),
        "not square": (response(item(GOOD, shape=[6, 3, 4])), r"expected \[T, H, T\]"),
        "two numbers": (response(item(GOOD, shape=[6, 12])), "cannot be read"),
        "zero": (response(item(GOOD, shape=[0, 2, 0])), "cannot be read"),
        "negative": (response(item(GOOD, shape=[-6, 2, -6])), "cannot be read"),
        "a fraction": (response(item(GOOD, shape=[6.5, 2, 6.5])), "cannot be read"),
        "far too large": (response(item(GOOD, shape=[10**6, 8, 10**6])), "raise max_bytes"),
        "more than it can hold": (response(item(GOOD, shape=[900, 8, 900])), "cannot hold shape"),
        "layer is a text": (response(item(GOOD, layer="2")), "cannot be read"),
        "twice": (response(item(GOOD), item(GOOD)), "layer 2 twice"),
        "not numbers": (response(item(NAN)), "not probabilities"),
        "negative values": (response(item(-GOOD)), "not probabilities"),
        "logits": (response(item(GOOD * 40)), "not probabilities"),
        "not a response": ("text", "expected a response"),
    }.values(),
)  # fmt: skip
def test_damaged_scores_are_refused_in_one_line(damaged: object, says: str) -> None:
    with pytest.raises(ResponseError, match=says) as refused:
        extract_attention_from_response(damaged)
    assert "\n" not in str(refused.value)


def test_a_gzip_bomb_is_unpacked_no_further_than_its_shape_says() -> None:
    bomb = packed(bytes(200 << 20))
    tracemalloc.start()
    with pytest.raises(ResponseError, match="has more bytes"):
        extract_attention_from_response(response(item(GOOD, data=bomb)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_layers_larger_than_the_caller_wants_are_refused() -> None:
    with pytest.raises(ResponseError, match="max_bytes"):
        extract_attention_from_response(response(item(GOOD)), max_bytes=len(BYTES) - 1)
    assert extract_attention_from_response(response(item(GOOD)), max_bytes=len(BYTES))


def test_mutated_responses_are_read_or_refused() -> None:
    text = json.dumps(response(item(GOOD, 0), item(causal(9, 1), 3))).encode()

    def one(rng: random.Random) -> int:
        try:
            message = json.loads(mutated(text, rng))
        except ValueError:
            return 1
        try:
            found = extract_attention_from_response(message) or {}
        except ResponseError as refused:
            assert "\n" not in str(refused)
            return 1
        for layer in found.values():
            AttentionAnalyzer(layer["scores"], {}).top_attended_tokens(-1, avg_heads=True)
        return 1

    fuzz(one, 1_000)


def test_the_library_needs_numpy_and_msgspec_alone() -> None:
    program = (
        "import sys; known = set(sys.modules); import numpy, msgspec, pipeline.analysis\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - known}"
        " - set(sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=REPO
    )
    foreign = {name for name in done.stdout.split() if not name.startswith("_")}
    # typing_extensions: of msgspec.
    assert foreign <= {*ALONE, "typing_extensions"}, done.stderr
    assert "pipeline" in foreign, done.stderr


def test_an_object_of_a_client_is_read_as_its_dictionary() -> None:
    answer = SimpleNamespace(model_dump=lambda: response(item(GOOD)))
    assert list(extract_attention_from_response(answer) or {}) == [2]
