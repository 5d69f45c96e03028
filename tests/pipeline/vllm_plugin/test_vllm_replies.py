"""What a worker says of requests reaches the process that answers them, over a real socket."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from pipeline.engines.vllm import replies as module
from pipeline.engines.vllm.replies import Replies, Reply, Reporter

PATIENCE_S = 10.0
USAGE = {"mode": "raw", "rows": 2}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path: Path) -> Path:
    """Of the facts, which nobody has made yet."""
    made = tmp_path / "attn"
    monkeypatch.setenv("ATTN_ENGINE_FACTS", str(made))
    return made


@pytest.fixture
def reporter():
    made = Reporter()
    yield made
    made.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Replies]:
    replies = Replies()
    try:
        yield replies
    finally:
        replies._task.cancel()
        replies._socket.close(0)


def with_replies(test: Callable[[Replies], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with listening() as replies:
            return await asyncio.wait_for(test(replies), PATIENCE_S)

    return asyncio.run(main())


async def all_of(reply: Reply) -> list[dict[str, Any]]:
    """What was said until its end."""
    await reply.end()
    return reply.take(99)


def test_each_request_hears_its_own_and_each_entry_once(reporter, folder):
    async def test(replies: Replies) -> None:
        made = [replies.expect() for _ in range(20)]
        assert len({reply.to for reply in made}) == 20
        for step in range(3):
            for number, reply in enumerate(made):
                reporter.report(reply.to, [b'{"of":%d,"step":%d}' % (number, step)] * 2, None)
        for number, reply in enumerate(made):
            reporter.report(reply.to, [], USAGE | {"rows": number})
        found = await asyncio.gather(*map(all_of, made))
        for number, (entries, reply) in enumerate(zip(found, made, strict=True)):
            assert entries == [{"of": number, "step": step // 2} for step in range(6)]
            assert reply.usage == USAGE | {"rows": number}
            assert reply.take(99) == []
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in folder.iterdir()] == [f"answers-{os.getpid()}"]

    with_replies(test)


def test_entries_come_before_the_end(reporter):
    async def test(replies: Replies) -> None:
        reply = replies.expect()
        reporter.report(reply.to, [b'{"step":1}'], None)
        while not (entries := reply.take(99)):
            await asyncio.sleep(0.001)
        assert entries == [{"step": 1}] and reply.usage is None
        reporter.report(reply.to, [b'{"step":2}'], USAGE)
        assert await all_of(reply) == [{"step": 2}]

    with_replies(test)


def test_an_end_that_does_not_come_is_logged_and_what_came_is_there(reporter, monkeypatch, caplog):
    async def test(replies: Replies) -> None:
        reply, other = replies.expect(), replies.expect()
        reporter.report(reply.to, [b'{"step":1}'], None)
        reporter.report(other.to, [], USAGE)
        await other.end()
        # What came over one socket before is there.
        monkeypatch.setattr(module, "WAIT_S", 0.05)
        assert await all_of(reply) == [{"step": 1}]
        assert reply.usage is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "without the end of its attention" in caplog.text

    with_replies(test)


def test_what_is_said_of_nobody_is_ignored(reporter):
    async def test(replies: Replies) -> None:
        gone, reply = replies.expect(), replies.expect()
        gone.close()
        gone.close()
        reporter.report(gone.to, [b'{"step":1}'], USAGE)
        reporter.report(f"{replies.address} nobody", [b'{"step":1}'], USAGE)
        reporter.report(reply.to, [b'{"step":2}'], USAGE)
        assert await all_of(reply) == [{"step": 2}]
        assert (gone.take(99), gone.usage) == ([], None)
        assert len(replies.waiting) == 1

    with_replies(test)


def test_two_workers_and_several_processes_that_answer(reporter, monkeypatch):
    """Each process has a socket of its own, which its name says."""

    async def test(replies: Replies) -> None:
        monkeypatch.setattr(os, "getpid", lambda: 7)
        async with listening() as others:
            assert others.address != replies.address
            one, other = replies.expect(), others.expect()
            for name, say in (("a", reporter.report), ("b", second.report)):
                say(one.to, [b'{"to":"one","of":"%s","step":1}' % name.encode()], None)
                say(other.to, [b'{"to":"other","step":1}'], None)
            reporter.close()
            second.close()
            for reply, to in ((one, "one"), (other, "other")):
                found: list[dict[str, Any]] = []
                while len(found) < 2:
                    await asyncio.sleep(0.001)
                    found += reply.take(99)
                assert [entry["to"] for entry in found] == [to, to]

    second = Reporter()
    with_replies(test)


@pytest.mark.parametrize("full", [False, True], ids=["room", "no room"])
def test_a_worker_waits_for_nobody(reporter, tmp_path, monkeypatch, caplog, full):
    if full:
        own = zmq.Socket.set
        monkeypatch.setattr(
            zmq.Socket, "set", lambda s, o, v: own(s, o, 10 if o == zmq.SNDHWM else v)
        )
    began = time.perf_counter()
    for _ in range(1_000):
        reporter.report(f"ipc://{tmp_path / 'nobody'} key", [b"{}"], None)
    assert time.perf_counter() - began < 1
    assert (reporter.dropped > 0) == full
    assert caplog.text.count("reports of attention are dropped") == full


def test_what_was_said_before_anybody_listened_arrives(reporter, folder):
    """As when a worker is faster than the socket of a new process."""
    folder.mkdir(mode=0o700)
    address = f"ipc://{folder / f'answers-{os.getpid()}'}"
    reporter.report(f"{address} key", [b'{"step":1}'], USAGE)

    async def test(replies: Replies) -> None:
        reply = replies.expect()
        replies.waiting["key"] = reply
        assert await all_of(reply) == [{"step": 1}]

    with_replies(test)


def test_a_message_that_is_no_report_is_logged_and_others_are_read(reporter, caplog):
    async def test(replies: Replies) -> None:
        reply, other = replies.expect(), replies.expect()
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(replies.address)
            stranger.send(b"\xff")
            reporter.report(other.to, [b"{no json"], None)
            reporter.report(reply.to, [b'{"step":1}'], USAGE)
            assert await all_of(reply) == [{"step": 1}]
            while len(caplog.records) < 2:
                await asyncio.sleep(0.001)
        assert {record.message for record in caplog.records} == {
            "a report of attention cannot be read"
        }

    with_replies(test)
