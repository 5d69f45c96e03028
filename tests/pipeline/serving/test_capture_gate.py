"""The gate in front of an app, through real sockets: what it lets through, what it refuses, and
that it neither keeps a place nor holds up a stream."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from echo_app import FACTS, Served, head_and_body, served, wait_until
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.client import connect

from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CaptureRequest

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
CAPABILITIES = "/v1/attention/capabilities"
ASK = {"return_attention_tokens": True}
MESSAGES = {"messages": [{"role": "user", "content": "hello ☃"}]}
KEY, OTHER_KEY = "0123456789abcdef", "fedcba9876543210"
TEXTS = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with served() as running:
        yield running


def post(server: Served, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"content-type": "application/json"} | {k.replace("_", "-"): v
                                                   for k, v in headers.items()}  # fmt: skip
    return httpx.post(server.url + path, content=content, headers=head, timeout=30)


def error_of(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in answer.text
    return error


# what reaches the app


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_a_request_for_attention_reaches_the_app_signed_and_without_our_fields(server, path):
    sent = {**MESSAGES, **ASK, "top_k_attention": 4, "temperature": 0.5,
            "extra_body": {"attention_capture_layers": "3", "other": 1},
            "custom_params": {"own": [1]},
            "sampling_params": {"custom_params": {"own": 2}}}  # fmt: skip
    answer = post(server, path, sent)
    body, _ = server.reached(answer)
    place, own = (body["sampling_params"], 2) if path == GENERATE else (body, [1])
    request = CaptureRequest.from_custom_params(place["custom_params"], server.options.secret)
    assert request == CaptureRequest(top_k=4, layers=[3], max_steps=4096)
    assert place["custom_params"].pop("own") == own and set(place["custom_params"]) == {"attn"}
    kept = {"messages": MESSAGES["messages"], "temperature": 0.5, "extra_body": {"other": 1}}
    assert body.items() >= kept.items()
    assert not {"return_attention_tokens", "top_k_attention"} & set(body)
    headers = answer.json()["headers"]
    assert int(headers["content-length"]) == len(answer.json()["raw"].encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"[1]", b'{"a" : 1.50, "b":"\\u2603", "a":2}', b"no JSON at all", b"\xff\xfe{",
        b'{"prompt": "about attention",  "n": 1e5}', b'{"return_attention_tokens": false, "n":4}',
        b'{"custom_params": {"other": 1}, "prompt": "attn"}', b"{" + b" " * 300_000 + b"}",
        '{"prompt": "a"}'.encode("utf-16"),
    ],
)  # fmt: skip
def test_a_request_without_attention_passes_byte_for_byte(server, raw):
    answer = post(server, "/v1/completions" if raw[:1] in (b"{", b"[") else "/other", raw)
    assert answer.status_code == 200
    assert answer.json()["raw"] == raw.decode("utf-8", "replace")
    assert int(answer.json()["headers"].get("content-length", 0)) == len(raw)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/generate"])
def test_a_signed_request_of_a_client_does_not_pass(server, path):
    """It may have been read in an engine's log, and no guardrail has seen it now."""
    signed = CaptureRequest(layers=[1]).signed(server.options.secret)
    place = {"custom_params": {"attn": signed, "other": 1}}
    body = {"sampling_params": place} if path == "/generate" else place
    reached = json.loads(post(server, path, json.dumps({"a": 1, **body}).encode()).json()["raw"])
    own = reached["sampling_params"] if path == "/generate" else reached
    assert (reached["a"], own["custom_params"]) == (1, {"other": 1})


@given(body=st.dictionaries(st.text(max_size=10), JSON, max_size=5))
def test_what_is_not_ours_in_a_body_is_the_same_behind_the_gate(server, body):
    meant = ("n", "hold", "raise", "chunks", "custom_params", "best_of")
    body = {name: value for name, value in body.items() if name not in meant}
    reached, request = server.reached(post(server, CHAT, {**body, **ASK}))
    assert request is not None
    reached.pop("custom_params")
    # Also what a lone surrogate or a long number was.
    assert json.dumps(reached) == json.dumps(body)


def test_a_forged_request_is_not_one_that_passed(server):
    body = {**MESSAGES, "custom_params": {"attn": '{"layers":[3]}'}}
    assert server.reached(post(server, CHAT, body))[1] is None
    _, request = server.reached(post(server, CHAT, {**body, **ASK}))
    assert request is not None and request.layers == [1, 3, 7]


def test_a_body_may_come_in_chunks(server):
    content = json.dumps({**MESSAGES, **ASK}).encode()
    pieces = (content[at : at + 7] for at in range(0, len(content), 7))
    answer = httpx.post(server.url + CHAT, content=pieces, timeout=30)
    assert server.reached(answer)[1] is not None
    headers = answer.json()["headers"]
    assert "transfer-encoding" not in headers
    assert int(headers["content-length"]) == len(answer.json()["raw"].encode())


def test_names_that_are_written_with_escapes_are_ours_too(server):
    raw = json.dumps({**MESSAGES, **ASK}).replace("return_attention", "return_\\u0061ttention")
    assert server.reached(post(server, CHAT, raw.encode()))[1] is not None


def test_other_paths_methods_websockets_and_the_lifespan_pass(server):
    assert server.echo.started == 1
    sent = json.dumps({**MESSAGES, **ASK}).encode()
    assert post(server, "/other", sent).json()["raw"].encode() == sent
    assert httpx.get(server.url + CHAT).status_code == 405
    with connect(f"ws://127.0.0.1:{server.port}/socket") as socket_:
        socket_.send("you")
        assert socket_.recv() == "hello you"
    put = httpx.put(server.url + GENERATE, content=sent, timeout=30)
    assert "sampling_params" in json.loads(put.json()["raw"])


# hostile bodies


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**ASK, "top_k_attention": 65}, "top_k_attention"),
        ({**ASK, "top_k_attention": True}, "top_k_attention"),
        ({**ASK, "custom_params": 5}, "custom_params"),
        ({**ASK, "n": 2}, "n"),
        ({"attn_capture": 1}, "attn_capture"),
        (b'{"return_attention_tokens": true, "top_k_attention": NaN}', "top_k_attention"),
        (b'{"return_attention_tokens": true, "return_attention_tokens": true}',
         "return_attention_tokens"),
        (b'{"return_attention_tokens": true, "top_k_attention": 1' + b"0" * 5000 + b"}", None),
        (b'{"return_attention_tokens": true, "x": ' + b"[" * 200_000, None),
        (b'{"return_attention_tokens": true', None),
        (b'{"attention_capture_layers": "' + b"1," * 5_000_000 + b'"}', "attention_capture_layers"),
        (b'{"return_attention_tokens": true, "attention_capture_layers": ['
         + b"1," * 5_000_000 + b"1]}", "attention_capture_layers"),
        (b'{"return_attention_tokens": true, "x": ' + b"{}," * 3 + b"}", None),
    ],
)  # fmt: skip
def test_a_hostile_body_is_a_400_that_names_the_field(server, body, param):
    error = error_of(post(server, CHAT, body), 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert len(error["message"]) < 2_000


def test_params_of_generate_are_refused_by_their_place(server):
    for params, param in ((3, "sampling_params"), ({"custom_params": [1]},
                                                   "sampling_params.custom_params")):  # fmt: skip
        sent = {"text": "a", **ASK, "sampling_params": params}
        assert error_of(post(server, GENERATE, sent), 400)["param"] == param


def test_nesting_that_can_be_read_but_not_written_is_no_error_of_the_server(server):
    # The limits of reading and of writing need not be the same.
    for depth in range(100, 1_100, 50):
        raw = b'{"return_attention_tokens": true, "x": ' + b"[" * depth + b"]" * depth + b"}"
        assert post(server, "/v1/completions", raw).status_code in (200, 400)


def test_a_body_past_the_limit_is_413_whether_or_not_its_length_is_given():
    content = b'{"prompt": "' + b"x" * (3 << 20) + b'"}'
    with served(max_body_mb=1) as server:
        for sent in (content, (content[at : at + 65_536] for at in range(0, len(content), 65_536))):
            answer = httpx.post(server.url + COMPLETIONS, content=sent, timeout=30)
            assert "--attention-max-body-mb" in error_of(answer, 413)["message"]
        lying = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {10**30}\r\n\r\n".encode()
        with server.connect() as client:
            client.sendall(lying)
            assert head_and_body(client)[0] in (400, 413)
        fits = b'{"prompt": "' + b"x" * (1 << 19) + b'"}'
        assert post(server, COMPLETIONS, fits).status_code == 200


# guardrails


def test_a_key_is_needed_for_attention_and_for_nothing_else(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{OTHER_KEY}\n{KEY}\n")
    file.chmod(0o600)
    for options in ({"api_key": KEY}, {"api_key_file": file}):
        with served(**options) as server:
            asking = {**MESSAGES, **ASK}
            answer = post(server, CHAT, asking)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"].startswith("Bearer")
            # Said before the fields are looked at.
            error_of(post(server, CHAT, {**ASK, "top_k_attention": 99}), 401)
            for head in ({"authorization": "Bearer " + KEY[:-1]}, {"x_api_key": ""},
                         {"authorization": "Basic " + KEY}, {"x_api_key": KEY + "0"}):  # fmt: skip
                error_of(post(server, CHAT, asking, **head), 401)
            for head in ({"authorization": "Bearer " + KEY}, {"authorization": "bearer  " + KEY},
                         {"x_api_key": KEY}, {"x_attention_api_key": KEY},
                         {"authorization": "Bearer of-the-engine", "x_api_key": KEY}):  # fmt: skip
                assert server.reached(post(server, CHAT, asking, **head))[1] is not None
            assert server.reached(post(server, CHAT, MESSAGES))[1] is None
            assert httpx.get(server.url + CAPABILITIES).json()["guardrails"]["requires_api_key"]


def test_capture_that_is_off_in_production_is_403_and_other_requests_pass():
    with served(disable_in_production=True, deployment="production") as server:
        error = error_of(post(server, CHAT, {**MESSAGES, **ASK}), 403)
        assert "ATTN_ENV" in error["message"]
        assert server.reached(post(server, CHAT, MESSAGES))[1] is None
        told = httpx.get(server.url + CAPABILITIES).json()
        assert not told["supported"] and "ATTN_ENV" in told["reasons"]["capture"]
    with served(disable_in_production=True, deployment="development") as server:
        assert server.reached(post(server, CHAT, {**MESSAGES, **ASK}))[1] is not None


def test_pages_of_other_origins_may_not_ask_and_those_of_the_list_may_read():
    page, other = "https://a.example", "https://b.example"
    question = {"access-control-request-method": "POST",
                "access-control-request-headers": "content-type,x-api-key"}  # fmt: skip
    with served(cors_origins=(page,)) as server:
        asking = {**MESSAGES, **ASK}
        error = error_of(post(server, CHAT, asking, origin=other), 403)
        assert other in error["message"] and error["code"] == "origin_not_allowed"
        assert post(server, CHAT, MESSAGES, origin=other).status_code == 200
        assert post(server, CHAT, asking, origin=server.url).status_code == 200
        for path in (CHAT, CAPABILITIES):
            may = httpx.options(server.url + path, headers={"origin": page, **question})
            assert may.status_code == 204 and may.headers["access-control-allow-origin"] == page
            assert may.headers["access-control-allow-headers"] == "content-type,x-api-key"
            may_not = httpx.options(server.url + path, headers={"origin": other, **question})
            assert "access-control-allow-origin" not in may_not.headers
        for sent, status in ((asking, 200), ({**ASK, "top_k_attention": 0}, 400)):
            answer = post(server, CHAT, sent, origin=page)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == page
            assert answer.headers["vary"] == "Origin"
        told = httpx.get(server.url + CAPABILITIES, headers={"origin": other})
        assert "access-control-allow-origin" not in told.headers
    with served() as server:
        answer = post(server, CHAT, asking, origin=other)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


def test_fifty_clients_get_as_many_places_as_there_are_and_a_429():
    with served(max_concurrent_capture=8) as server, ThreadPoolExecutor(50) as pool:
        asking = {**MESSAGES, **ASK, "hold": True}
        answers = [pool.submit(post, server, CHAT, asking) for _ in range(50)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 42)
        refused = [answer.result() for answer in answers if answer.done()]
        for answer in refused:
            assert error_of(answer, 429)["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) > 0
        assert server.gate.active == server.echo.holding == 8
        # Who asks for nothing, or wrongly, needs no place.
        assert post(server, CHAT, MESSAGES).status_code == 200
        error_of(post(server, CHAT, {**ASK, "top_k_attention": 0}), 400)
        server.echo.release.set()
        assert sorted(answer.result().status_code for answer in answers) == [200] * 8 + [429] * 42
        wait_until(lambda: server.gate.active == 0)
        assert post(server, CHAT, asking).status_code == 200


def test_no_place_is_lost_when_the_app_raises():
    with served(max_concurrent_capture=1) as server:
        for _ in range(3):
            assert post(server, CHAT, {**MESSAGES, **ASK, "raise": True}).status_code == 500
        assert post(server, CHAT, {**MESSAGES, **ASK}).status_code == 200
        wait_until(lambda: server.gate.active == 0)


def test_a_place_is_free_as_soon_as_the_client_has_gone():
    content = json.dumps({**MESSAGES, **ASK, "hold": True}).encode()
    sent = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with served(max_concurrent_capture=1) as server:
        for number in range(3):
            with server.connect() as client:
                client.sendall(sent + content)
                wait_until(lambda: server.echo.holding == 1)
                assert server.gate.active == 1
                if number == 2:  # a reset
                    linger = struct.pack("ii", 1, 0)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            wait_until(lambda: server.gate.active == 0)
            # The app sees it as without the gate.
            wait_until(lambda number=number: server.echo.closed == number + 1)
        server.echo.release.set()
        assert post(server, CHAT, {**MESSAGES, **ASK}).status_code == 200


def test_a_client_that_goes_before_its_body_is_whole_takes_no_place():
    with served(max_concurrent_capture=1) as server:
        for _ in range(3):
            with server.connect() as client:
                client.sendall(
                    f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{".encode()
                )
        assert post(server, CHAT, {**MESSAGES, **ASK}).status_code == 200
        wait_until(lambda: server.gate.active == 0)


@pytest.mark.parametrize("asking", [ASK, {}])
def test_a_stream_is_passed_on_chunk_by_chunk(asking):
    body = {**MESSAGES, **asking, "chunks": 3}
    with (
        served(max_concurrent_capture=1) as server,
        httpx.stream("POST", server.url + CHAT, json=body, timeout=30) as answer,
    ):
        lines = answer.iter_lines()
        for number in range(3):
            # The next chunk is made only after this one was read.
            server.echo.next_chunk.release()
            assert next(line for line in lines if line) == f"data: {number}"
            if number < 2:
                assert server.gate.active == len(asking)
        assert not any(lines)
        wait_until(lambda: server.gate.active == 0)


# what leaves it


LONG = {**MESSAGES, "other": "attention " * 100}


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip, deflate", True), ("br;q=1.0, gzip ; q=0.2", True), ("gzip;q=0", False),
        ("gzip; q=0.000, deflate", False), ("identity", False), ("", False), ("xgzip", False),
    ],
)  # fmt: skip
def test_answers_with_attention_are_compressed_for_clients_that_take_it(server, accepted, packed):
    plain = post(server, CHAT, {**LONG, **ASK}, accept_encoding="identity")
    answer = post(server, CHAT, {**LONG, **ASK}, accept_encoding=accepted)
    assert server.reached(answer)[0] == server.reached(plain)[0] | {
        "custom_params": server.reached(answer)[0]["custom_params"]
    }
    assert answer.headers.get("content-encoding") == ("gzip" if packed else None)
    assert ("Accept-Encoding" in answer.headers.get("vary", "")) == packed
    assert int(answer.headers["content-length"]) == answer.num_bytes_downloaded
    assert (answer.num_bytes_downloaded < len(answer.content)) == packed


def test_nothing_else_is_compressed(server):
    for path, body in ((CHAT, LONG), ("/other", {**LONG, **ASK}), (CHAT, {**ASK, "n": 4})):
        answer = post(server, path, body, accept_encoding="gzip")
        assert "content-encoding" not in answer.headers, (path, body)
        assert answer.num_bytes_downloaded == len(answer.content)


def test_an_event_leaves_at_once_though_the_stream_is_compressed():
    body = {**MESSAGES, **ASK, "chunks": 40}
    sizes = []
    with (
        served() as server,
        httpx.stream("POST", server.url + CHAT, json=body, timeout=30) as answer,
    ):
        assert answer.headers["content-encoding"] == "gzip"
        events = answer.iter_bytes()
        for number in range(40):
            # The next one is made only after this one was read.
            server.echo.next_chunk.release()
            event = b""
            while not event.endswith(b"\n\n"):
                event += next(events)
            assert event == b"data: %d\n\n" % number
            sizes.append(answer.num_bytes_downloaded)
    # Those that came before help to say the next.
    assert sizes[-1] - sizes[-2] < 40


def test_a_place_is_free_when_its_client_has_gone_though_the_app_does_not_notice():
    content = json.dumps({**MESSAGES, **ASK, "hold": True, "deaf": True}).encode()
    sent = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with served(max_concurrent_capture=1) as server:
        with server.connect() as client:
            client.sendall(sent + content)
            wait_until(lambda: server.echo.holding == 1)
        wait_until(lambda: server.gate.active == 0)
        assert server.echo.holding == 1
        assert post(server, CHAT, {**MESSAGES, **ASK}).status_code == 200


def test_a_place_is_free_when_the_answer_ended_or_the_app_raised():
    active = []

    async def works_on(scope, receive, send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        active.append(gate.active)
        await send({"type": "http.response.body", "body": b""})
        active.append(gate.active)

    async def raises(scope, receive, send) -> None:
        active.append(gate.active)
        raise ZeroDivisionError

    async def ask(gate: CaptureGate) -> None:
        asked = [{"type": "http.request", "body": json.dumps(ASK).encode()}]

        async def receive():
            return asked.pop() if asked else await asyncio.Future()

        async def send(message) -> None:
            pass

        await gate({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)

    options = ServeOptions(return_attention_tokens=True)
    gate = CaptureGate(works_on, options, lambda: FACTS)
    asyncio.run(ask(gate))
    assert [*active, gate.active] == [1, 0, 0]
    active.clear()
    gate = CaptureGate(raises, options, lambda: FACTS)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(ask(gate))
    assert [*active, gate.active] == [1, 0]


# sampling


def test_a_share_of_the_other_requests_is_recorded_and_the_rest_is_untouched(tmp_path):
    draws = iter([0.1, 0.3, 0.24, 0.9])
    options = {"return_attention_tokens": False, "store": tmp_path / "x.db", "sample_rate": 0.25}
    raw = b'{"prompt" : "a"}'
    with served(draw=lambda: next(draws), **options) as server:
        answers = [post(server, COMPLETIONS, raw) for _ in range(4)]
        taken = [server.reached(answer)[1] is not None for answer in answers]
        untouched = [answer.json()["raw"].encode() == raw for answer in answers]
    assert taken == [True, False, True, False] and untouched == [not one for one in taken]


def test_sampling_refuses_nobody(tmp_path):
    with served(store=tmp_path / "x.db", max_concurrent_capture=1, api_key=KEY) as server:
        body, request = server.reached(post(server, CHAT, {**MESSAGES, "attn_capture": 0}))
        assert request is not None and not request.stream_entries and "attn_capture" not in body
        several = b'{"prompt": ["a", "b"]}'
        for raw in (b"[1]", b" no", b'{"n": 3}', b'{"custom_params": 4}', several):
            assert post(server, COMPLETIONS, raw).json()["raw"].encode() == raw
        assert server.gate.active == 0


# capabilities


def test_capabilities_say_what_may_be_asked_and_why_the_rest_may_not():
    with served(tokens_top_k=5, max_concurrent_capture=10, mask_system_prompt=True) as server:
        answer = httpx.get(server.url + CAPABILITIES)
        assert answer.status_code == 200
        told = answer.json()
        # The fields and names that clients of earlier servers read.
        assert told["supported"] is True and told["modes"] == ["raw", "sketch", "fingerprint"]
        assert (told["max_top_k"], told["max_layers"]) == (64, 3)
        assert told["features"].items() >= {
            "include_prompt_attention": True, "head_filtering": True, "moe_routing": False,
        }.items()  # fmt: skip
        assert "logit_lens" in told["features"]
        assert told["guardrails"].items() >= {
            "max_concurrent_capture": 10, "requires_api_key": False, "system_prompt_masked": True,
        }.items()  # fmt: skip
        assert (told["layers"], told["heads"]) == ([1, 3, 7], 4)
        assert (told["layout"], told["capture_id"]) == ("log16", "0123456789ab")
        assert "--enable-attention-instrumentation" in told["reasons"]["attn_capture"]
        assert httpx.head(server.url + CAPABILITIES).status_code == 200
        refused = httpx.post(server.url + CAPABILITIES)
        assert error_of(refused, 405) and refused.headers["allow"] == "GET, HEAD"


def test_what_capabilities_promise_is_what_requests_get():
    reasons = {"sketch": "no top k here", "head_filtering": "tensor parallelism"}
    with served(facts=replace(FACTS, reasons=reasons)) as server:
        told = httpx.get(server.url + CAPABILITIES).json()
        assert told["modes"] == ["raw", "fingerprint"] and not told["features"]["head_filtering"]
        assert told["reasons"].items() >= reasons.items()
        for mode in ("sketch", "fingerprint"):
            answer = post(server, CHAT, {**MESSAGES, **ASK, f"attention_{mode}_mode": True})
            assert (answer.status_code == 200) == (mode in told["modes"])
    with served(return_attention_tokens=False) as server:
        told = httpx.get(server.url + CAPABILITIES).json()
        assert not told["supported"] and not told["modes"] and not any(told["features"].values())
        assert error_of(post(server, CHAT, ASK), 400)["code"] == "attention_unavailable"
