"""What the plug-in adds to SGLang's answers, on an app that answers as SGLang does."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.engines.serving.answer_writer import CURRENT, AnswerWriter
from pipeline.engines.serving.full_scores import FullScores, check_room
from pipeline.engines.serving.request import CaptureRequest, RequestError
from pipeline.engines.sglang.answers import (
    check_scores,
    decode_entries,
    heard,
)

FIRST, SECOND = {"step": 1}, {"step": 2}
USAGE = {"mode": "raw", "rows": 2}
JSON, EVENTS = b"application/json", b"text/event-stream; charset=utf-8"


def asked(
    app: Any, path: str = "/v1/chat/completions"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The start and the bodies that a client is sent."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("the writer reads nothing")

    asyncio.run(AnswerWriter(app)({"type": "http", "path": path}, receive, send))
    return sent[0], sent[1:]


SECRET = "of these tests"


def asking(**wanted: Any) -> Any:
    """A `GenerateReqInput`, as far as the plug-in looks at it."""
    request = CaptureRequest(**{"layers": [1], "stream_entries": False} | wanted)
    params = {"custom_params": {"attn": request.signed(SECRET)}}
    return SimpleNamespace(sampling_params=params, cache_salt=None)


def scores() -> FullScores:
    """Of one layer, two heads and three tokens."""
    found = FullScores([1], heads=2, hidden=0)
    found.add(1, 0, np.tril(np.ones((2, 3, 3), np.float16)).transpose(1, 0, 2))
    return found


async def outputs(
    *meta_infos: dict[str, Any], incremental: bool = False, obj: Any = None
) -> list[Any]:  # fmt: skip
    """SGLang says these of a request, one after the other; gives what is passed on."""

    async def generate_request(self: Any, obj: Any) -> Any:
        for meta_info in meta_infos:
            yield {"text": "", "meta_info": meta_info}

    manager = SimpleNamespace(incremental_streaming_output=incremental)
    return [one async for one in heard(generate_request, manager, obj)]


def starting(kind: bytes, *more: tuple[bytes, bytes]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", kind), *more],
    }


def body(content: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def events_of(bodies: list[dict[str, Any]]) -> list[Any]:
    lines = b"".join(message["body"] for message in bodies).split(b"\n\n")
    assert lines.pop() == b""
    contents = [line.removeprefix(b"data: ") for line in lines]
    return [json.loads(one) if one != b"[DONE]" else "DONE" for one in contents]


@pytest.mark.parametrize("incremental", [False, True])
def test_entries_go_into_the_next_event_and_each_once(incremental):
    async def app(scope, receive, send):
        await send(starting(EVENTS))
        await outputs({"attention_tokens": [FIRST]}, incremental=incremental)
        delta = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
        # Two events in a chunk: only the first is new.
        await send(body(event({**delta, "id": "x"}) + event(delta), more=True))
        new = [SECOND] if incremental else [FIRST, SECOND]
        await outputs(
            {"attention_tokens": new, "attention_usage": [USAGE]}, incremental=incremental
        )
        # SGLang has no more text: what is left comes before the end.
        await send(body(event({"choices": [], "usage": {"total_tokens": 3}}), more=True))
        await send(body(b"data: [DONE]\n\n", more=True))
        await send(body(b""))

    start, bodies = asked(app)
    assert start == starting(EVENTS)
    first, again, usage, last, done = events_of(bodies)
    assert first["choices"][0]["delta"] == {"content": "a", "attention_tokens": [FIRST]}
    assert "attention_tokens" not in again["choices"][0]["delta"]
    assert usage["usage"] == {"total_tokens": 3, "attention": USAGE}
    assert last["choices"][0]["delta"] == {"attention_tokens": [SECOND]}
    assert done == "DONE"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_whole_answer_has_them_and_its_new_length(path):
    chat = path.endswith("chat/completions")
    content = {"choices": [{"message": {"content": "ä"}} if chat else {"text": "ä"}], "usage": {}}

    async def app(scope, receive, send):
        await outputs({"attention_tokens": [FIRST, SECOND], "attention_usage": [USAGE]})
        raw = json.dumps(content).encode()
        await send(starting(JSON, (b"content-length", str(len(raw)).encode())))
        await send(body(raw[:9], more=True))
        await send(body(raw[9:]))

    start, bodies = asked(app, path)
    raw = b"".join(message["body"] for message in bodies)
    assert dict(start["headers"])[b"content-length"] == str(len(raw)).encode()
    answer = json.loads(raw)
    choice = answer["choices"][0]
    assert choice["attention_tokens"] == [FIRST, SECOND]
    if chat:
        assert choice["message"] == {"content": "ä", "attention_tokens": [FIRST, SECOND]}
    assert answer["usage"] == {"attention": USAGE}


@pytest.mark.parametrize("kind", [JSON, EVENTS])
@pytest.mark.parametrize("content", [b'{ "choices":[] }', b"data: {not json\n\n", b"\xff"])
def test_answers_without_attention_stay_as_they_are(kind, content):
    async def app(scope, receive, send):
        await outputs({"attention_tokens": [], "attention_usage": []})
        await send(starting(kind, (b"Content-Length", b"9")))
        await send(body(content))

    start, bodies = asked(app)
    assert start == starting(kind, (b"Content-Length", b"9"))
    assert b"".join(message["body"] for message in bodies) == content


@pytest.mark.parametrize("content", [b"not json", b'{"error": {"message": "no"}}', b"[]"])
def test_an_error_after_entries_stays_what_it_is(content):
    async def app(scope, receive, send):
        await outputs({"attention_tokens": [FIRST]})
        await send(starting(JSON))
        await send(body(content))

    assert asked(app)[1][0]["body"] == content


def test_what_is_said_of_nobody_is_left_out_of_the_native_answer():
    async def outputs_of(*found: Any) -> list[Any]:
        async def generate_request(self: Any, obj: Any) -> Any:
            for one in found:
                yield one

        manager = SimpleNamespace(incremental_streaming_output=False)
        return [one async for one in heard(generate_request, manager, None)]

    def output(entries: list[Any]) -> dict[str, Any]:
        return {"meta_info": {"id": "x", "attention_tokens": entries, "attention_usage": []}}

    plain, asking, many = asyncio.run(
        outputs_of(output([]), output([FIRST]), [output([]), output([FIRST])])
    )
    assert plain == {"meta_info": {"id": "x"}}
    assert asking == {"meta_info": {"id": "x", "attention_tokens": [FIRST]}}
    assert many == [plain, asking]
    assert CURRENT.get() is None


def test_requests_at_once_keep_their_entries_apart():
    async def main() -> list[Any]:
        async def one(n: int) -> Any:
            sent = []

            async def send(message):
                sent.append(message)

            async def app(scope, receive, send):
                await outputs({"attention_tokens": [{"step": n}]})
                await asyncio.sleep(0.001 * (n % 3))
                await send(starting(JSON))
                await send(body(b'{"choices": [{}]}'))

            scope = {"type": "http", "path": "/v1/completions"}
            await AnswerWriter(app)(scope, None, send)
            return json.loads(sent[1]["body"])["choices"][0]["attention_tokens"][0]["step"]

        return await asyncio.gather(*map(one, range(20)))

    assert asyncio.run(main()) == list(range(20))


@pytest.fixture
def secret(monkeypatch) -> None:
    monkeypatch.setenv("ATTN_CAPTURE_SECRET", SECRET)


@pytest.mark.parametrize("entries", [False, True])
def test_full_scores_are_at_the_top_of_a_whole_answer(secret, entries):
    async def app(scope, receive, send):
        meta_info = {"attention_usage": [USAGE], "attn_capture_data": [(scores(), 4, 2)]}
        obj = asking(scores=[1], stream_entries=entries)
        (passed_on,) = await outputs(meta_info, obj=obj)
        assert "attn_capture_data" not in passed_on["meta_info"]
        await send(starting(JSON))
        await send(body(b'{"choices": [{"message": {}}], "usage": {}}'))

    answer = json.loads(asked(app)[1][0]["body"])
    (layer,) = answer["attn_capture_data"]
    assert (layer["layer_idx"], layer["shape"]) == (1, [3, 2, 3])
    assert layer["token_meta"]["prompt_len"] == 2
    # The fourth token was fed, but its row never came.
    assert layer["token_meta"]["missing_rows"] == [{"start": 3, "end": 4}]
    # Only who asked for entries has a place for them.
    assert ("attention_tokens" in answer["choices"][0]) == entries
    assert answer["usage"]["attention"] == USAGE


def test_full_scores_are_at_the_top_of_the_native_answer(secret):
    for obj in (asking(scores=[1]), None):
        meta_info = {"id": "x", "attn_capture_data": [(scores(), 3, 2)] if obj else []}
        (answer,) = asyncio.run(outputs(meta_info, obj=obj))
        assert answer["meta_info"] == {"id": "x"}
        assert [layer["shape"] for layer in answer.get("attn_capture_data", [])] == (
            [[3, 2, 3]] if obj else []
        )


def test_only_who_wants_full_scores_has_a_cache_apart(secret):
    def salt_of(obj: Any, salt: Any = None) -> Any:
        obj.cache_salt = salt
        asyncio.run(outputs({}, obj=obj))
        return obj.cache_salt

    ones = [salt_of(asking(scores=[1])) for _ in range(3)]
    assert len(set(ones)) == 3 and min(map(len, ones)) >= 32
    assert salt_of(asking(scores=[1]), "tenant").startswith("tenant")
    assert [one[:1] for one in salt_of(asking(scores=[1]), ["a", "b"])] == ["a", "b"]
    assert salt_of(asking(), "tenant") == "tenant"
    forged = asking(scores=[1])
    forged.sampling_params["custom_params"]["attn"] = "0" * 32 + '{"layers":[1],"scores":[1]}'
    assert salt_of(forged) is None


def test_a_prompt_whose_scores_are_too_large_is_refused_before_it_runs(secret):
    # 256 MiB are 8 heads of 4,096 tokens.
    check_scores(None, asking(scores=[1], score_heads=8), [0] * 4096)
    check_scores(None, asking(), [0] * 9999)
    check_scores(None, None, None)
    with pytest.raises(ValueError, match="attn_capture of 4097 tokens takes more than 256 MiB"):
        check_scores(None, asking(scores=[1], score_heads=8), [0] * 4097)


@pytest.mark.parametrize("ours", [True, False])
def test_the_error_of_scores_that_are_too_large_names_the_field(secret, ours):
    try:
        check_room(100_000, 8)
    except RequestError as error:
        message = error.message if ours else "the prompt is bad"
    content = {"object": "error", "message": message, "param": None}

    async def app(scope, receive, send):
        async def generate_request(self: Any, obj: Any) -> Any:
            raise ValueError(message)
            yield

        with pytest.raises(ValueError, match=message[:12]):
            async for _ in heard(generate_request, None, asking(scores=[1])):
                pass
        await send({**starting(JSON, (b"content-length", b"9")), "status": 400})
        await send(body(json.dumps(content).encode()))

    start, bodies = asked(app)
    answer = json.loads(bodies[0]["body"])
    assert start["status"] == 400
    if ours:
        assert answer["error"]["param"] == "attn_capture"
        assert answer["error"]["message"] == message
        assert dict(start["headers"])[b"content-length"] == str(len(bodies[0]["body"])).encode()
    else:
        assert answer == content


def test_a_prompt_in_a_list_of_one_is_heard_as_well():
    async def app(scope, receive, send):
        async def generate_request(self: Any, obj: Any) -> Any:
            yield [{"meta_info": {"attention_tokens": [FIRST], "attention_usage": [USAGE]}}]

        manager = SimpleNamespace(incremental_streaming_output=False)
        async for _ in heard(generate_request, manager, None):
            pass
        await send(starting(JSON))
        await send(body(b'{"choices": [{}], "usage": {}}'))

    answer = json.loads(asked(app, "/v1/completions")[1][0]["body"])
    assert answer["choices"][0]["attention_tokens"] == [FIRST]


class Spelling:
    """A tokenizer without a fast one behind it: token i is the i-th letter."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token) for token in tokens)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_named_once_and_none_that_is_hidden(stream, incremental):
    wanted = CaptureRequest(layers=[0], mask_prefix=2, name_tokens=True)

    async def said(*outputs: list[int]) -> None:
        async def generate_request(self: Any, obj: Any) -> Any:
            for output in outputs:
                yield {"text": "", "meta_info": {}, "output_ids": output}

        manager = SimpleNamespace(incremental_streaming_output=incremental, tokenizer=Spelling())
        params = {"custom_params": {"attn": wanted.signed("")}}
        obj = SimpleNamespace(sampling_params=params, input_ids=None, text="abcd")
        async for _ in heard(generate_request, manager, obj):
            pass

    async def app(scope, receive, send):
        await said([4], [5] if incremental else [4, 5])
        await send(starting(EVENTS if stream else JSON))
        if stream:
            await send(body(event({"choices": [{"delta": {}}]}), more=True))
            await send(body(event({"choices": [{"delta": {}}]}), more=True))
            await send(body(b"data: [DONE]\n\n"))
        else:
            await send(body(b'{"choices": [{}]}'))

    _, bodies = asked(app)
    if stream:
        first, second, done = events_of(bodies)
        assert "prompt_tokens" not in second and done == "DONE"
    else:
        first = json.loads(bodies[0]["body"])
    assert first["prompt_tokens"] == [{"id": 2, "text": "c"}, {"id": 3, "text": "d"}]
    assert first["output_tokens"] == [
        {"id": 4, "text": "e", "step": 1}, {"id": 5, "text": "f", "step": 2}
    ]  # fmt: skip


def test_new_entries_are_decoded_in_the_list_that_sglang_adds_to():
    entries: list[Any] = [b'{"step":1}']
    meta_info = {"attention_tokens": entries}
    decode_entries(meta_info)
    first = entries[0]
    entries.append(b'{"step":2}')
    decode_entries(meta_info)
    assert entries == [{"step": 1}, {"step": 2}]
    assert entries[0] is first and meta_info["attention_tokens"] is entries
    decode_entries({})
