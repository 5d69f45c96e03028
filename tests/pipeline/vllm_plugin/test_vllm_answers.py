"""What the plug-in adds to vLLM's answers: a server like vLLM's, and a worker that says what it
captured over a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_vllm import VLLMValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.analysis import extract_attention_from_response
from pipeline.engines.serving.answer_writer import CHAT, COMPLETIONS, CURRENT, AnswerWriter
from pipeline.engines.serving.full_scores import ScoreBlock
from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CaptureRequest, ModelFacts
from pipeline.engines.vllm import answers, hooking
from pipeline.engines.vllm import replies as replies_module
from pipeline.engines.vllm.replies import Reporter

FACTS = ModelFacts("demo", 4, (1, 3), 8, 4096, score_layers=(1, 3), capture_id="abc")
ASKING = {"return_attention_tokens": True}
STEPS = 3  # tokens of an answer: A, B, C
PATIENCE_S = 10.0
TEXT = "".join(chr(ord("A") + n) for n in range(STEPS))


class Tokenizer:
    """A token is a character; a template names roles in angle brackets."""

    def __init__(self) -> None:
        self.needs_user = False

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool,
        return_dict: bool, tag: str = "",
    ) -> list[int]:  # fmt: skip
        if self.needs_user and not any(m["role"] == "user" for m in messages):
            raise KeyError("a conversation has a user")
        text = tag + "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return list(map(ord, text + "<assistant>" * add_generation_prompt))

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


class Message:
    """As pydantic's."""

    def __init__(self, fields: dict[str, str]) -> None:
        self._fields = fields

    def model_dump(self, exclude_none: bool) -> dict[str, str]:
        return self._fields


class Chat(SimpleNamespace):
    """As far as the plug-in looks at vLLM's `ChatCompletionRequest`."""

    add_generation_prompt = True

    def model_copy(self, update: dict[str, Any]) -> Any:
        assert update["continue_final_message"] is False
        return Chat(**vars(self) | update)


class Engine:
    """As far as the plug-in looks at vLLM's `AsyncLLM` and `OnlineRenderer`, and a worker.

    Attributes:
        wanted, extra: of each request, in turn. ends: whether the worker says how they ended.
        past_end: rows that it captured of tokens that no answer has. tag: of its template. blocks:
        what it says of full scores; no_scores: why it has no more of them, after which it does not
        end; salts: of prompts.
    """

    def __init__(self, secret: str) -> None:
        self._secret, self.tokenizer, self.reporter = secret, Tokenizer(), Reporter()
        self.wanted: list[CaptureRequest | None] = []
        self.extra: list[Any] = []
        self.closed, self.ends, self.fails, self.past_end, self.tag = 0, True, False, 0, ""
        self.blocks: list[ScoreBlock] = []
        self.no_scores: str | None = None
        self.waits = 0.0  # before its last output
        self.salts: list[str | None] = []

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    async def render_chat(self, request: Any, *, skip_mm_cache: bool = False) -> Any:
        messages = [m if isinstance(m, dict) else m.model_dump(True) for m in request.messages]
        # The server's own template comes with each call, and the request's tools with it.
        arguments = {"tag": self.tag, **(request.chat_template_kwargs or {})}
        tokens = self.tokenizer.apply_chat_template(
            messages, True, request.add_generation_prompt, False, **arguments
        )
        return messages, [{"prompt_token_ids": tokens}]

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[Any]:
        assert (request_id, priority) == ("id", 1)
        wanted = CaptureRequest.from_custom_params(sampling_params.extra_args, self._secret)
        self.wanted.append(wanted)
        self.extra.append(sampling_params.extra_args)
        self.salts.append(prompt.get("cache_salt"))
        kind = sampling_params.output_kind.name
        tokens = list(map(ord, TEXT))
        to = None if wanted is None else wanted.reply
        length = len(prompt["prompt_token_ids"])

        def say(step: int) -> None:
            self.reporter.report(to, [b'{"of":%d,"step":%d}' % (length, step)], None)

        def say_end() -> None:
            for step in range(STEPS, STEPS + self.past_end):
                say(step)
            usage = {"mode": wanted.mode, "rows": STEPS - 1 + self.past_end}
            self.reporter.report(to, [], None, self.blocks)
            self.reporter.report(to, [], usage)

        try:
            for step in range(1, STEPS + 1):
                finished = step == STEPS
                if to is not None and not finished:
                    say(step)
                if finished:
                    await asyncio.sleep(self.waits)
                if finished and self.no_scores is not None:
                    self.reporter.report(to, [], None, (), self.no_scores)
                    await asyncio.sleep(2 * PATIENCE_S)
                if to is not None and finished and self.ends:
                    # The engine knows that it ended before the worker does.
                    asyncio.get_running_loop().call_later(0.005, say_end)
                while to is not None and not self.ends and not self.has_come(step):
                    await asyncio.sleep(0.001)
                if kind == "FINAL_ONLY" and not finished:
                    continue
                own = tokens[step - 1 : step] if kind == "DELTA" else tokens[:step]
                reason = "length" if finished else None
                yield SimpleNamespace(
                    finished=finished,
                    outputs=[SimpleNamespace(token_ids=own, finish_reason=reason)],
                )
                if self.fails:
                    raise RuntimeError("a fault for the test")
        finally:
            self.closed += 1

    @staticmethod
    def has_come(step: int) -> bool:
        """Whether what the worker said of the tokens before is in the process that answers."""
        (reply,) = answers.replies().waiting.values()
        return len(reply._entries) >= min(step, STEPS - 1)


class Server:
    """vLLM's routes, with the plug-in around what it hooks."""

    def __init__(self, **options: Any) -> None:
        self.options = ServeOptions(**ASKING | options)
        self.engine = Engine(self.options.secret)
        self.stream_kind, self.whole_kind = "DELTA", "FINAL_ONLY"
        self.generate = hooking.around_generator(answers.heard)(Engine.generate)
        self.render = hooking.around_coroutine(answers.rendered_chat)(Engine.render_chat)
        paths = (CHAT, COMPLETIONS)
        self.plain = Starlette(
            routes=[Route(path, self.answer, methods=["POST"]) for path in paths],
            exception_handlers={VLLMValidationError: self.refuse},
        )
        writer = AnswerWriter(self.plain, secret=self.options.secret)
        self.app = CaptureGate(writer, self.options, lambda: FACTS, place="vllm_xargs")

    @staticmethod
    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, 400)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        assert body.keys() <= {
            "messages", "prompt", "stream", "vllm_xargs", "chat_template_kwargs", "cache_salt"
        }, "our fields do not reach vLLM"  # fmt: skip
        chat, stream = request.url.path == CHAT, body.get("stream", False)
        prompt = {"prompt_token_ids": body.get("prompt"), "cache_salt": body.get("cache_salt")}
        if chat:
            messages = [Message(body["messages"][0]), *body["messages"][1:]]
            arguments = body.get("chat_template_kwargs")
            extra = body.get("vllm_xargs")
            given = Chat(messages=messages, chat_template_kwargs=arguments, vllm_xargs=extra)
            _, (prompt,) = await self.render(self.engine, given)
        kind = self.stream_kind if stream else self.whole_kind
        params = SimpleNamespace(
            extra_args=body.get("vllm_xargs"), output_kind=SimpleNamespace(name=kind)
        )
        outputs = self.generate(self.engine, prompt, params, "id", priority=1)
        if stream:
            return StreamingResponse(self.events(outputs, chat), media_type="text/event-stream")
        async for output in outputs:
            tokens = output.outputs[0].token_ids
        text = self.engine.tokenizer.decode(tokens, True)
        choice = {"message": {"content": text}} if chat else {"text": text}
        return JSONResponse({"id": "x", "choices": [choice], "usage": {"total_tokens": 9}})

    async def events(self, outputs: AsyncIterator[Any], chat: bool) -> AsyncIterator[str]:
        async for _ in outputs:
            choice = {"delta": {"content": "t"}} if chat else {"text": "t"}
            yield f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({'id': 'x', 'choices': [], 'usage': {}})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def serve(monkeypatch, tmp_path: Path, vllm) -> Iterator[Callable[..., Server]]:
    monkeypatch.setenv("ATTN_ENGINE_FACTS", str(tmp_path / "attn"))
    answers.replies.cache_clear()
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(**options))
        return made[-1]

    yield make
    for server in made:
        server.engine.reporter.close()


def served(test: Callable[[httpx.AsyncClient], Awaitable[Any]], app: Any) -> Any:
    """Run a client of an app. What listens for replies ends with it."""

    async def main() -> Any:
        try:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
                return await asyncio.wait_for(test(client), PATIENCE_S)
        finally:
            if answers.replies.cache_info().currsize:
                assert answers.replies().waiting == {}, "a request is listened for no longer"
                answers.replies()._task.cancel()
                answers.replies()._socket.close(0)
                answers.replies.cache_clear()

    return asyncio.run(main())


def asked(server: Server, path: str, body: dict[str, Any], app: Any = None) -> httpx.Response:
    return served(lambda client: client.post(path, json=body), app or server.app)


def prompt_of(path: str, **fields: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {
        "prompt": [1, 2, 3]}  # fmt: skip
    return content | fields


def events_of(answer: httpx.Response) -> list[Any]:
    lines = answer.text.split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def entries_of(events: list[Any]) -> list[Any]:
    choices = [choice for event in events for choice in event["choices"]]
    places = [choice.get("delta", choice.get("message", choice)) for choice in choices]
    return [entry for place in places for entry in place.get("attention_tokens", [])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_have_all_entries_once_and_usage_at_the_end(serve, path, stream):
    server = serve()
    answer = asked(server, path, prompt_of(path, stream=stream, top_k_attention=5, **ASKING))
    assert answer.status_code == 200
    events = events_of(answer) if stream else [answer.json()]
    length = len("<user>hi<assistant>") if path == CHAT else 3
    assert entries_of(events) == [{"of": length, "step": step} for step in (1, 2)]
    assert events[-1]["usage"]["attention"] == {"mode": "raw", "rows": STEPS - 1}
    if not stream:
        choice = events[0]["choices"][0]
        assert choice["attention_tokens"] == entries_of(events)
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == TEXT
        assert int(answer.headers["content-length"]) <= len(answer.content)
    (wanted,) = server.engine.wanted
    assert (wanted.top_k, wanted.layers) == (5, [1, 3])
    assert CURRENT.get() is None


def test_requests_at_once_keep_their_entries_apart(serve):
    server = serve()

    async def test(client: httpx.AsyncClient) -> list[Any]:
        bodies = [prompt_of(COMPLETIONS, prompt=[0] * n, **ASKING) for n in range(1, 20)]
        return await asyncio.gather(*[client.post(COMPLETIONS, json=body) for body in bodies])

    for length, answer in enumerate(served(test, server.app), 1):
        assert entries_of([answer.json()]) == [{"of": length, "step": step} for step in (1, 2)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_who_asks_for_nothing_is_answered_as_without_the_plug_in(serve, path, stream):
    server = serve()
    body = prompt_of(path, stream=stream, vllm_xargs={"other": "x"})
    with_it, without = (asked(server, path, body, app) for app in (server.app, server.plain))
    assert with_it.content == without.content
    assert with_it.headers == without.headers
    assert server.engine.extra == [{"other": "x"}] * 2
    assert server.engine.wanted == [None, None]


@pytest.mark.parametrize(
    "forged", [CaptureRequest(layers=[1]).signed("another"), "0" * 32 + '{"layers":[1]}', 7, None]
)
def test_what_a_client_made_itself_captures_nothing(serve, forged):
    server = serve()
    answer = asked(server, COMPLETIONS, prompt_of(COMPLETIONS, vllm_xargs={"attn": forged}))
    assert answer.json() == {
        "id": "x", "choices": [{"text": TEXT}], "usage": {"total_tokens": 9}
    }  # fmt: skip
    assert server.engine.wanted == [None]


def test_what_a_client_made_itself_does_not_replace_what_it_asks_for(serve):
    server = serve()
    forged = CaptureRequest(layers=[0, 1, 2, 3], reply="ipc:///tmp/elsewhere key").signed("another")
    body = prompt_of(COMPLETIONS, vllm_xargs={"attn": forged, "other": "x"}, **ASKING)
    asked(server, COMPLETIONS, body)
    (wanted,), (extra,) = server.engine.wanted, server.engine.extra
    assert wanted.layers == [1, 3] and "elsewhere" not in wanted.reply
    assert extra.keys() == {"attn", "other"} and extra["other"] == "x"


def test_requests_that_are_only_recorded_are_answered_as_they_are(serve, tmp_path):
    server = serve(store=tmp_path / "f.db")
    body = prompt_of(COMPLETIONS)
    with_it, without = (asked(server, COMPLETIONS, body, app) for app in (server.app, server.plain))
    assert with_it.content == without.content
    recorded, nothing = server.engine.wanted
    assert (recorded.mode, recorded.stream_entries, recorded.reply) == ("fingerprint", False, None)
    assert nothing is None


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE", "FINAL_ONLY"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_named_once_and_none_that_is_hidden(serve, stream, kind):
    server = serve()
    server.stream_kind = server.whole_kind = kind
    fields = {"return_prompt_tokens": True, "attention_mask_prefix": 2, "stream": stream}
    body = prompt_of(COMPLETIONS, prompt=[97, 98, 99, 100], **ASKING, **fields)
    answer = asked(server, COMPLETIONS, body)
    events = events_of(answer) if stream else [answer.json()]
    assert events[0]["prompt_tokens"] == [{"id": 99, "text": "c"}, {"id": 100, "text": "d"}]
    assert not any("prompt_tokens" in event for event in events[1:])
    named = [token for event in events for token in event.get("output_tokens", [])]
    assert named == [
        {"id": ord(text), "text": text, "step": step} for step, text in enumerate(TEXT, 1)
    ]
    assert entries_of(events)


def chat(*messages: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": r, "content": c} for r, c in messages], **ASKING, **fields}


SYSTEM = ("system", "be brief")


@pytest.mark.parametrize(
    ("body", "hidden"),
    [
        (chat(SYSTEM, ("user", "hi")), "<system>be brief"),
        (chat(SYSTEM, ("user", "hi"), attention_mask_prefix=20), "<system>be brief<use"),
        (chat(SYSTEM, ("user", "hi"), chat_template_kwargs={"tag": "!!"}), "!!<system>be brief"),
        (chat(("user", "hi")), "<user>"),
        ({"prompt": [1, 2, 3], **ASKING}, ""),
    ],
)
def test_the_system_prompt_of_chats_is_hidden(serve, body, hidden):
    server = serve(mask_system_prompt=True)
    path = CHAT if "messages" in body else COMPLETIONS
    answer = asked(server, path, body)
    (wanted,) = server.engine.wanted
    assert (wanted.mask_prefix, wanted.mask_system) == (len(hidden), False)
    assert entries_of([answer.json()])


def test_named_tokens_of_a_chat_have_roles_and_its_system_prompt_is_not_among_them(serve):
    server = serve(mask_system_prompt=True)
    answer = asked(server, CHAT, chat(SYSTEM, ("user", "hi"), return_prompt_tokens=True))
    named = answer.json()["prompt_tokens"]
    assert "".join(token["text"] for token in named) == "<user>hi<assistant>"
    assert [token["role"] for token in named] == ["user"] * 8 + ["assistant"] * 11


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((SYSTEM, ("user", "hi")), "does not allow the system prompt to be hidden"),
        ((("user", "hi"), SYSTEM), "a system message after the others cannot be hidden"),
    ],
)
def test_a_system_prompt_that_cannot_be_hidden_is_refused(serve, messages, reason, stream):
    """With 400, before a stream begins."""
    server = serve(mask_system_prompt=True)
    server.engine.tokenizer.needs_user = True
    answer = asked(server, CHAT, chat(*messages, stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert reason in error["message"]
    assert (error["param"], error["type"]) == ("messages", "invalid_request_error")
    assert server.engine.wanted == []


def test_who_asked_for_nothing_is_answered_though_nothing_can_be_hidden(serve, tmp_path):
    server = serve(mask_system_prompt=True, store=tmp_path / "f.db")
    server.engine.tokenizer.needs_user = True
    fields = {"messages": [{"role": "system", "content": "be brief"},
                           {"role": "user", "content": "hi"}]}  # fmt: skip
    assert asked(server, CHAT, fields).status_code == 200
    assert server.engine.wanted == [None]


def test_the_servers_own_template_says_what_is_hidden(serve):
    """It may put a system prompt of its own before the first message."""
    server = serve(mask_system_prompt=True)
    server.engine.tag = "[secret]"
    asked(server, CHAT, chat(("user", "hi")))
    (wanted,) = server.engine.wanted
    assert wanted.mask_prefix == len("[secret]<user>")


def test_rows_past_a_stop_string_are_not_in_the_answer(serve):
    """The process that answers finds it in the text; until the engine hears of that, it goes on,
    and keeps the tokens."""
    server = serve()
    server.engine.past_end = 2
    answer = asked(server, COMPLETIONS, prompt_of(COMPLETIONS, **ASKING)).json()
    assert [entry["step"] for entry in entries_of([answer])] == list(range(1, STEPS))


def test_an_answer_goes_without_the_end_of_its_attention(serve, monkeypatch, caplog):
    monkeypatch.setattr(replies_module, "WAIT_S", 0.05)
    server = serve()
    server.engine.ends = False
    answer = asked(server, COMPLETIONS, prompt_of(COMPLETIONS, **ASKING)).json()
    assert (len(entries_of([answer])), answer["usage"]) == (2, {"total_tokens": 9})
    assert "it did not come" in caplog.text


def test_a_request_that_fails_is_listened_for_no_longer(serve):
    server = serve()
    server.engine.fails = True

    async def test(client: httpx.AsyncClient) -> None:
        with pytest.raises(RuntimeError, match="a fault for the test"):
            await client.post(COMPLETIONS, json=prompt_of(COMPLETIONS, stream=True, **ASKING))

    served(test, server.app)


@pytest.mark.parametrize("scores", [{}, {"scores": [1], "score_heads": 8}], ids=["", "scores"])
@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_client_that_goes_away_ends_what_the_engine_does_for_it(serve, scores, how):
    """vLLM closes the generator then, or cancels the task that waits for it."""
    server = serve()
    server.engine.waits = 2 * PATIENCE_S

    async def test(client: httpx.AsyncClient) -> None:
        current = answers.Heard(secret=server.options.secret)
        token = CURRENT.set(current)
        wanted = CaptureRequest(layers=[1], **scores).signed(server.options.secret)
        params = SimpleNamespace(
            extra_args={"attn": wanted}, output_kind=SimpleNamespace(name="DELTA")
        )
        outputs = server.generate(
            server.engine, {"prompt_token_ids": [1]}, params, "id", priority=1
        )
        await anext(outputs)
        assert len(answers.replies().waiting) == 1
        if how == "cancelled":
            waiting = asyncio.create_task(rest_of(outputs))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait({waiting})
        await outputs.aclose()
        CURRENT.reset(token)
        # At once, and not when Python finds that nobody holds them.
        assert answers.replies().waiting == {} and server.engine.closed == 1

    served(test, server.app)


async def rest_of(outputs: AsyncIterator[Any]) -> list[Any]:
    return [output async for output in outputs]


async def heard_of(
    server: Server, request_id: str, *outputs: tuple[bool, str | None]
) -> list[CaptureRequest]:
    """What the engine is given of a request that asks, whose outputs are (finished, reason)."""
    given: list[CaptureRequest] = []

    async def generate(engine: Any, prompt: Any, params: Any, request_id: str) -> Any:
        wanted = CaptureRequest.from_custom_params(params.extra_args, server.options.secret)
        given.append(wanted)
        for finished, reason in outputs:
            choice = SimpleNamespace(token_ids=[65], finish_reason=reason)
            yield SimpleNamespace(finished=finished, outputs=[choice])

    token = CURRENT.set(answers.Heard(secret=server.options.secret))
    extra = {"attn": CaptureRequest(layers=[1]).signed(server.options.secret)}
    kind = SimpleNamespace(name="DELTA")
    params = SimpleNamespace(extra_args=extra, output_kind=kind)
    prompt = {"prompt_token_ids": [1]}
    async for _ in answers.heard(generate, server.engine, prompt, params, request_id):
        pass
    CURRENT.reset(token)
    return given


@pytest.mark.parametrize(
    ("request_id", "response_id"),
    [
        ("cmpl-0f-0", "cmpl-0f"), ("cmpl-a-b-0", "cmpl-a-b"), ("chatcmpl-0f", "chatcmpl-0f"),
        ("chatcmpl-a-b", "chatcmpl-a-b"),
    ],
)  # fmt: skip
def test_the_worker_is_told_the_id_of_the_response(serve, request_id, response_id):
    server = serve()
    (wanted,) = served(lambda _: heard_of(server, request_id, (False, None)), server.app)
    assert wanted.response_id == response_id


def test_a_request_that_the_engine_dropped_is_not_waited_for(serve, caplog):
    """Its worker may never have seen it."""
    server = serve()

    async def test(client: httpx.AsyncClient) -> None:
        async with asyncio.timeout(replies_module.WAIT_S / 2):
            await heard_of(server, "cmpl-0f-0", (False, None), (True, "abort"))

    served(test, server.app)
    assert caplog.text == ""


@pytest.fixture
def score_server(serve) -> Server:
    return serve(enable_attention_instrumentation=True)


def blocks_of(*ranges: tuple[int, int], layers: tuple[int, ...] = (1, 3)) -> list[ScoreBlock]:
    """Scores of some rows, of as many heads as the layer's number says."""
    random = np.random.default_rng(2)
    return [
        ScoreBlock(layer, begin, random.random((end - begin, layer, end)).astype(np.float16))
        for begin, end in ranges for layer in layers
    ]  # fmt: skip


FULL = {"attn_capture": 1}


def test_full_scores_come_whole_with_the_answer(score_server):
    blocks = blocks_of((0, 2), (2, 4), (4, 5))
    # The engine went on past what ended the answer.
    score_server.engine.blocks = [*blocks, *blocks_of((5, 7))]
    answer = asked(score_server, COMPLETIONS, prompt_of(COMPLETIONS, **FULL)).json()
    assert "attention_tokens" not in answer["choices"][0]
    assert answer["usage"]["attention"] == {"mode": "fingerprint", "rows": STEPS - 1}
    found = extract_attention_from_response(answer)
    assert found is not None and list(found) == [1, 3]
    for block in blocks:
        assert found[block.layer]["scores"].shape[::2] == (5, 5)
        rows = found[block.layer]["scores"][block.begin : block.begin + len(block.rows)]
        np.testing.assert_array_equal(rows[:, :, : block.rows.shape[2]], block.rows)
        assert not rows[:, :, block.rows.shape[2] :].any()


def test_rows_of_full_scores_that_did_not_come_are_named(score_server):
    score_server.engine.blocks = [*blocks_of((0, 3)), *blocks_of((3, 5), layers=(1,))]
    answer = asked(score_server, COMPLETIONS, prompt_of(COMPLETIONS, **FULL)).json()
    assert answer["usage"]["attention"]["missing_score_rows"] == 2
    meta = [layer["token_meta"]["missing_rows"] for layer in answer["attn_capture_data"]]
    assert meta[0] == meta[1] and len(meta[0]) == 1


def test_requests_of_full_scores_share_no_prefix_cache(score_server):
    score_server.engine.blocks = blocks_of((0, 5))
    salted = {"cache_salt": "tenant"}

    # By one listener: a reply may be lost to one that has just ended.
    async def all_of_them(client: httpx.AsyncClient) -> None:
        for fields in (FULL, FULL, FULL | salted, ASKING | salted):
            answer = await client.post(COMPLETIONS, json=prompt_of(COMPLETIONS, **fields))
            assert answer.status_code == 200

    served(all_of_them, score_server.app)
    first, second, third, other = score_server.engine.salts
    assert len({first, second, third}) == 3 and all((first, second, third))
    assert third.startswith("tenant") and other == "tenant"


def test_full_scores_that_are_too_large_are_refused_before_and_as_they_grow(score_server):
    body = prompt_of(COMPLETIONS, prompt=[1] * 5000, **FULL)
    answer = asked(score_server, COMPLETIONS, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "attn_capture"
    assert "attn_capture of 5000 tokens takes more than" in answer.json()["error"]["message"]
    assert score_server.engine.salts == []
    score_server.engine.no_scores = "too many"
    answer = asked(score_server, COMPLETIONS, prompt_of(COMPLETIONS, **FULL))
    assert answer.status_code == 400
    assert answer.json()["error"] | {"message": "", "type": ""} == {
        "message": "", "type": "", "param": "attn_capture", "code": answer.json()["error"]["code"]
    }  # fmt: skip
    assert answer.json()["error"]["message"] == "too many"
    assert score_server.engine.closed == 1, "it is ended at once"
