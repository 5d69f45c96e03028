"""What the plug-in adds to SGLang's answers, on an app that answers as SGLang does."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.engines.serving.request import CaptureRequest
from pipeline.engines.sglang.answers import CURRENT, AnswerWriter, heard

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


async def outputs(*meta_infos: dict[str, Any], incremental: bool = False) -> None:
    """SGLang says these of a request, one after the other."""

    async def generate_request(self: Any, obj: Any) -> Any:
        for meta_info in meta_infos:
            yield {"text": "", "meta_info": meta_info}

    manager = SimpleNamespace(incremental_streaming_output=incremental)
    async for _ in heard(generate_request, manager, None):
        pass


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
