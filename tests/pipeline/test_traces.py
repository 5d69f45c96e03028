"""Traces: what is written is read again, and what is malformed is refused by its number."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.traces import MOST_LINE_BYTES, Trace, TraceError, read_lines, read_trace, write_trace

HEADER = {"record_type": "header", "version": "1.0", "trace_id": "trace-123", "model": "m"}
RAW = {"token_positions": [0, 7], "topk_logits": [1.5, -2], "logsumexp_candidates": 2.25}
SKETCH = {"mode": "sketch", "layer_sketches": {"3": {"top_hubs": [[4, 0.5]], "entropy": 0.1}}}
# As the page exports them.
LINES = [
    HEADER | {"run_id": None, "response_id": "chatcmpl-1"},
    {"record_type": "message", "id": "user-1", "role": "user", "content": "Hello"},
    {"record_type": "token", "index": 0, "text": "Hi", "segmentId": "assistant-1-main"},
    {"record_type": "step", "tokenIndex": 0, "attention": RAW,
     "fingerprint": [0.5] * 20},
    {"record_type": "segment", "id": "assistant-1-think", "type": "assistant_think",
     "startIndex": 0, "endIndex": 0},
    {"record_type": "metrics", "avgEntropy": 0.45, "dominantZone": "semantic_bridge"},
]  # fmt: skip

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**63 - 1)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
# Fields that nobody knows are kept.
others = st.dictionaries(texts.map(lambda name: f"x{name}"), values, max_size=2)
counts = st.integers(0, 10_000)
finite = st.floats(allow_nan=False, allow_infinity=False)
vectors = st.lists(finite, min_size=20, max_size=20)
raw = st.lists(st.tuples(counts, finite), max_size=4).map(
    lambda found: {
        "token_positions": [at for at, _ in found], "topk_logits": [one for _, one in found],
        "logsumexp_candidates": 1,
    }
)  # fmt: skip
hubs = st.lists(st.tuples(counts, finite).map(list), max_size=3)
entries = (
    raw
    | st.builds(lambda one, heads: {**one, "heads": heads}, raw, st.dictionaries(texts, raw))
    | st.dictionaries(texts, st.fixed_dictionaries({"top_hubs": hubs})).map(
        lambda layers: {"layer_sketches": layers}
    )
)


def lines(**fields: st.SearchStrategy) -> st.SearchStrategy[list[dict]]:
    known = st.fixed_dictionaries(fields)
    return st.lists(st.builds(lambda one, more: {**more, **one}, known, others), max_size=4)


traces = st.builds(
    Trace,
    header=st.builds(
        lambda one, more: {**more, **one},
        st.fixed_dictionaries(
            {"version": st.just("1.0"), "trace_id": texts, "model": texts},
            optional={"run_id": st.none() | texts, "response_id": st.none() | texts},
        ),
        others,
    ),
    messages=lines(id=texts, role=texts, content=texts),
    tokens=st.lists(counts, unique=True, max_size=4).flatmap(
        lambda found: st.tuples(
            *(
                st.fixed_dictionaries(
                    {"index": st.just(i), "text": texts}, optional={"segmentId": texts}
                )
                for i in found
            )
        ).map(list)
    ),
    steps=lines(tokenIndex=counts, attention=entries | st.lists(entries, max_size=3) | st.none(),
                fingerprint=st.none() | vectors | st.fixed_dictionaries({"fingerprint": vectors})),
    segments=lines(id=texts, type=texts),
    metrics=lines(),
)  # fmt: skip


@given(trace=traces)
def test_what_is_written_is_read_again(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    count = write_trace(path, trace)
    assert read_trace(path) == trace
    assert count == len(list(trace.lines())) == len(path.read_bytes().splitlines())
    # The same line by line, and again from what was read.
    again = path.with_name("again.jsonl")
    assert write_trace(again, read_lines(path)) == count
    assert again.read_bytes() == path.read_bytes()


def saved(path: Path, *lines: object) -> Path:
    content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(content) + b"\n")
    return path


def test_a_trace_of_the_page_is_read(tmp_path):
    trace = read_trace(saved(tmp_path / "t.jsonl", *LINES))
    assert trace.header["response_id"] == "chatcmpl-1" and trace.header["run_id"] is None
    assert trace.messages == [{"id": "user-1", "role": "user", "content": "Hello"}]
    assert trace.tokens[0]["segmentId"] == "assistant-1-main"
    assert trace.steps[0]["attention"] == RAW
    assert trace.segments[0]["type"] == "assistant_think"
    assert trace.metrics[0]["dominantZone"] == "semantic_bridge"


def test_lines_come_in_any_order_with_blanks_and_a_byte_order_mark(tmp_path):
    path = saved(tmp_path / "t.jsonl", b"\xef\xbb\xbf" + json.dumps(HEADER).encode(), b"",
                 *reversed(LINES[1:]), b"   \r")  # fmt: skip
    assert len(list(read_lines(path))) == 6


BAD = [
    b"not json", b"{\"record_type\": \"token\", \"index\": 1", b"[1, 2]", b"null", b"\xff\xfe",
    b"[" * 5000,
    {"record_type": "tocen", "index": 1, "text": "a"}, {"index": 1, "text": "a"},
    {"record_type": ["token"], "index": 1, "text": "a"},
    {"record_type": "token", "text": "a"}, {"record_type": "token", "index": "1", "text": "a"},
    {"record_type": "token", "index": True, "text": "a"},
    {"record_type": "token", "index": -1, "text": "a"},
    {"record_type": "token", "index": 1.5, "text": "a"},
    {"record_type": "token", "index": 1, "text": None},
    {"record_type": "token", "index": 0, "text": "twice"},
    {"record_type": "message", "id": "a", "role": "user", "content": ["a"]},
    {"record_type": "step", "tokenIndex": 0, "attention": "all"},
    {"record_type": "step", "tokenIndex": 0, "attention": [RAW, 1]},
    {"record_type": "step", "tokenIndex": 0, "attention": {}},
    {"record_type": "step", "tokenIndex": 0, "attention": RAW | {"token_positions": [0]}},
    {"record_type": "step", "tokenIndex": 0, "attention": RAW | {"token_positions": [0, -1]}},
    {"record_type": "step", "tokenIndex": 0, "attention": RAW | {"logsumexp_candidates": None}},
    {"record_type": "step", "tokenIndex": 0, "attention": RAW | {"heads": {"0": {}}}},
    {"record_type": "step", "tokenIndex": 0, "attention": {"layer_sketches": {"0": [1]}}},
    {"record_type": "step", "tokenIndex": 0, "attention": {"layer_sketches": [1]}},
    {"record_type": "step", "tokenIndex": 0, "fingerprint": [0.5] * 19},
    {"record_type": "step", "tokenIndex": 0, "fingerprint": {"fingerprint": "x"}},
    {"record_type": "segment", "id": "a", "type": "b", "base": -3},
    HEADER,
    b'{"record_type": "metrics", "avgEntropy": NaN}',
    b'{"record_type": "token", "index": 9, "text": "\\ud800"}',
    b'{"record_type": "metrics", "a": "' + b"a" * MOST_LINE_BYTES + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:40])
def test_a_malformed_line_is_refused_by_its_number(tmp_path, bad):
    path = saved(tmp_path / "t.jsonl", *LINES[:4], bad, *LINES[4:])
    with pytest.raises(TraceError, match=r"line 5: ") as refused:
        read_trace(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    # Asked to, the others are read.
    told: list[tuple[int, str]] = []
    trace = read_trace(path, refused=lambda number, why: told.append((number, why)))
    assert [number for number, _ in told] == [5]
    assert trace == read_trace(saved(tmp_path / "good.jsonl", *LINES))


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b'{"record_type": "token", "index": 0, "text": "a"}\n', b"PK\x03\x04",
     json.dumps(HEADER | {"version": "2.0"}).encode()],
)  # fmt: skip
def test_a_file_without_a_header_is_no_trace(tmp_path, content):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    for refused in (None, lambda number, why: None):
        with pytest.raises(TraceError):
            read_trace(path, refused)
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "line", [{"avgEntropy": math.nan}, {"a": {1, 2}}, {"a": "\ud800"}, {1: "a"}]
)
def test_what_json_does_not_keep_is_not_written(tmp_path, line):
    trace = Trace({"version": "1.0", "trace_id": "t", "model": "m"}, metrics=[line])
    with pytest.raises(TraceError, match="line 2"):
        write_trace(tmp_path / "t.jsonl", trace)
    assert list(tmp_path.iterdir()) == []


def test_a_long_trace_is_read_in_little_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    raw = {"token_positions": list(range(64)), "topk_logits": [0.5] * 64, "logsumexp_candidates": 1}
    step = {"tokenIndex": 0, "attention": raw}

    def lines():
        yield "header", {"version": "1.0", "trace_id": "t", "model": "m"}
        for index in range(20_000):
            yield "token", {"index": index, "text": "a", "segmentId": None}
            yield "step", {**step, "tokenIndex": index}

    assert write_trace(path, lines()) == 40_001
    import tracemalloc

    tracemalloc.start()
    assert sum(1 for _ in read_lines(path)) == 40_001
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2
