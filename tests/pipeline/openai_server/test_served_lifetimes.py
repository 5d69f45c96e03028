"""What many clients at once rely on: turns, aborts, bounds, ends."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live_server import NEEDLE, LiveServer, running, wait_until
from processes import AttnProcess

from capture_kernels.errors import OptionError
from pipeline.engines.openai_server.app import create_app
from pipeline.engines.openai_server.loop import Job
from pipeline.engines.openai_server.sequence import Work
from pipeline.engines.openai_server.server import serve
from pipeline.engines.serving import full_scores
from pipeline.engines.serving.options import ServeOptions
from pipeline.store.open import open_store

ON = ServeOptions(return_attention_tokens=True, layers="all", enable_attention_instrumentation=True)
LONG = {"prompt": NEEDLE, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


def open_request(server: LiveServer, **body: object) -> socket.socket:
    """A request on a plain socket, of which nothing has been read."""
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def held(server: LiveServer) -> list[weakref.ref[object]]:
    """What the requests that run hold."""
    return [
        weakref.ref(thing)
        for job in server.loop._active
        if job.sequence is not None
        for thing in (job.sequence, job.sequence._cache, job.sequence._capture)
        if thing is not None
    ]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_ends_its_request_and_frees_what_it_held(server, stream):
    connection = open_request(
        server, **LONG, stream=stream, return_attention_tokens=True, attention_hubs=True
    )
    if stream:
        assert b"200 OK" in connection.recv(4096)
    wait_until(lambda: len(held(server)) == 3)
    buffers = held(server)
    connection.close()
    wait_until(lambda: server.loop.counts == {"active": 0, "waiting": 0})

    def freed() -> bool:
        gc.collect()
        return not any(buffer() for buffer in buffers)

    wait_until(freed)
    assert server.complete()["choices"][0]["text"].startswith(" 1729")


def test_a_client_that_goes_away_before_the_first_event_ends_its_request(server):
    """Driven as an ASGI server does it, as no real client can be so exact."""

    async def talk() -> None:
        asked = json.dumps({**LONG, "stream": True}).encode()
        messages = [{"type": "http.request", "body": asked, "more_body": False}]
        begun = asyncio.Event()

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            assert message["type"] == "http.response.start"
            begun.set()
            await asyncio.sleep(30)  # cut off by the end of the client

        app = create_app(server.model, server.loop, None, 1 << 20)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        await app(scope, receive, send)

    asyncio.run(talk())
    wait_until(lambda: server.loop.counts == {"active": 0, "waiting": 0})


def test_a_client_that_goes_away_while_it_waits_is_never_run(demo):
    with running(demo, ON, most_active=1) as live:
        first = open_request(live, **LONG, stream=True)
        assert b"200 OK" in first.recv(4096)
        second = open_request(live, **LONG)
        wait_until(lambda: live.loop.counts["waiting"] == 1)
        second.close()
        wait_until(lambda: live.loop.counts["waiting"] == 0)
        assert live.loop.counts["active"] == 1
        first.close()
        wait_until(lambda: live.loop.counts["active"] == 0)


def test_a_long_answer_does_not_keep_a_short_one_waiting(server):
    with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as long:
        lines = long.iter_lines()
        next(lines)
        short = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": NEEDLE, "temperature": 0, "max_tokens": 4},
            timeout=30,
        )
        assert short.json()["choices"][0]["text"] == " 1729"
        # It has not ended: there is still a chunk of it to come.
        assert server.loop.counts["active"] == 1
        assert next(line for line in lines if line).startswith("data: {")
    wait_until(lambda: server.loop.counts["active"] == 0)


def test_twenty_requests_at_once_are_each_answered_as_alone(server):
    bodies = [
        {"prompt": f"{NEEDLE[:-6]}key{n}: {n}{n}7\nalpha:", "max_tokens": 5,
         "return_attention_tokens": n % 4 != 3, "include_prompt_attention": n % 3,
         "attention_fingerprint_mode": n % 4 == 1, "attention_sketch_mode": n % 4 == 2}
        for n in range(20)
    ]  # fmt: skip
    for body in bodies:
        if not body["return_attention_tokens"]:
            del body["include_prompt_attention"]
    alone = [server.complete(**body)["choices"] for body in bodies]
    barrier = threading.Barrier(20)

    def ask(body: dict) -> object:
        barrier.wait()
        response = httpx.post(
            f"{server.url}/v1/completions", json={"temperature": 0, **body}, timeout=60
        )
        return response.json()["choices"]

    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(ask, bodies))
    assert together == alone
    assert sum("attention_tokens" in choices[0] for choices in together) == 15


def test_more_than_can_wait_is_refused_and_the_others_are_answered(demo):
    with running(demo, ON, most_active=1, most_waiting=1) as live:
        first = open_request(live, **LONG, stream=True)
        assert b"200 OK" in first.recv(4096)
        second = open_request(live, **LONG | {"max_tokens": 2})
        wait_until(lambda: live.loop.counts == {"active": 1, "waiting": 1})
        status, error = live.refused(prompt=NEEDLE)
        assert status == 503
        assert error["code"] == "server_busy"
        first.close()
        answer = second.recv(65536)
        assert b"200 OK" in answer and b" 17" in answer


def test_a_client_that_does_not_read_is_left_behind_and_the_others_go_on(demo):
    with running(demo, ON, most_behind=8) as live:
        sleepy: list[object] = []
        job = Job(work_of(live), sleepy.append)
        live.loop.submit(job)
        wait_until(lambda: len(sleepy) == 8)
        assert live.complete()["choices"][0]["text"].startswith(" 1729")
        assert len(sleepy) == 8
        for _ in range(5):
            live.loop.taken(job)
        wait_until(lambda: len(sleepy) == 13)
        live.loop.cancel(job)
        wait_until(lambda: live.loop.counts["active"] == 0)


def work_of(live: LiveServer) -> Work:
    return Work(id="a", tokens=live.model.prompt_tokens(NEEDLE), limit=100, ignore_eos=True)


def test_a_fault_in_one_request_ends_it_alone(demo, monkeypatch):
    with running(demo, ON) as live:
        forward = live.model.forward

        def faulty(tokens: list[int], cache: object) -> object:
            if len(tokens) == 3:
                raise RuntimeError("no such kernel")
            return forward(tokens, cache)

        monkeypatch.setattr(live.model, "forward", faulty)
        status, error = live.refused(prompt=[5, 6, 7])
        assert (status, error["type"]) == (500, "server_error")
        assert "no such kernel" not in error["message"]
        assert live.complete()["choices"][0]["text"].startswith(" 1729")


def test_scores_that_take_too_much_memory_are_refused_with_what_to_do(demo, monkeypatch):
    monkeypatch.setattr(full_scores, "SCORES_BYTES", 2 * 4 * 40 * 40)
    with running(demo, ON) as live:
        status, error = live.refused(prompt=NEEDLE, attn_capture=1, max_tokens=100, ignore_eos=True)
        assert status == 400
        assert error["param"] == "attn_capture" and "max_tokens" in error["message"]
        assert live.loop.counts["active"] == 0


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=["term", "int"],
)
def test_a_signal_ends_the_server_and_records_of_a_request_cut_off_are_kept(demo, tmp_path, number):
    store = tmp_path / "fingerprints.db"
    process = AttnProcess(
        "serve", demo, "--engine", "transformers", "--port", "0", "--device", "cpu",
        "--return-attention-tokens", "--attention-store", store, "--reasoning-parser", "qwen3",
    )  # fmt: skip
    try:
        line = next(line for line in process.lines() if line.startswith("serving"))
        url = re.search(r"http://\S+?(?=;)", line).group()
        body = {**LONG, "stream": True, "return_attention_tokens": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            said = [next(lines) for _ in range(30)]
            process.signal(number)
            said += list(lines)
        last = [line for line in said if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"] == {
            "message": "the server is ending", "type": "server_error", "param": None,
            "code": "server_busy",
        }  # fmt: skip
        ended = process.finish(30)
        assert ended.returncode == 0, ended.stderr
    finally:
        process.end()
    with open_store(store) as opened:
        rows = opened.counts().rows
    assert rows >= 14
    # Nothing else is said, such as a traceback.
    assert ended.stderr.splitlines()[-2:] == [
        line.strip(), f"stopped; {rows:,} records handed on, 0 dropped"
    ]  # fmt: skip


def test_a_port_in_use_or_a_model_that_is_not_there_is_one_line(demo, tmp_path):
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(OptionError, match="choose another --port"):
        serve(str(demo), ON, port=taken.getsockname()[1])
    with pytest.raises(OptionError, match="cannot load model"):
        serve(str(tmp_path / "nothing"), ON, port=0)


def test_capture_that_costs_more_than_its_budget_is_switched_off_and_it_is_said(demo):
    options = ServeOptions(return_attention_tokens=True, overhead_budget=0.01)
    with running(demo, options) as live:
        asked = {"return_attention_tokens": True, "max_tokens": 40, "ignore_eos": True}
        assert live.complete(**asked)["choices"][0]["attention_tokens"]
        status, error = live.refused(prompt=NEEDLE, **asked)
        assert status == 400
        assert "--attention-overhead-budget 0.01" in error["message"]
        known = live.client.get("/v1/attention/capabilities").json()
        assert "decode time" in known["reasons"]["capture"]
        assert live.complete()["choices"][0]["text"].startswith(" 1729")
