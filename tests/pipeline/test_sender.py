"""The sender: every row is sent or counted as dropped, and nobody who sends ever waits."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
import zmq

from capture_kernels.errors import OptionError
from pipeline.stream import curve
from pipeline.stream.sender import Sender, Tally
from pipeline.stream.wire import Message, decode

# Nothing here takes this long, unless it never ends.
PATIENCE_MS = 20_000
# Receives until it is killed, and prints seq, rows and rows_before of each message.
RECEIVER = """
import os, sys, zmq
from pipeline.stream.wire import decode
with zmq.Context() as context, context.socket(zmq.PULL) as socket:
    socket.bind(sys.argv[1])
    print("ready", flush=True)
    while True:
        found = decode(socket.recv(), max_rows=10_000, max_bytes=1 << 24)
        # One write: print() makes several with PYTHONUNBUFFERED, and SIGKILL may come between.
        line = f"{found.seq} {found.batch.num_rows} {found.rows_before}\\n"
        os.write(sys.stdout.fileno(), line.encode())
"""


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as made:
        yield made


def receiver(
    context: zmq.Context, address: str = "tcp://127.0.0.1:*", hwm: int = 1_000
) -> zmq.Socket:
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = hwm
    socket.linger = 0
    socket.rcvtimeo = PATIENCE_MS
    socket.bind(address)
    return socket


def address_of(socket: zmq.Socket) -> str:
    return socket.last_endpoint.decode()


def received(socket: zmq.Socket) -> Message:
    return decode(socket.recv(), max_rows=10_000, max_bytes=1 << 24)


def spare_address() -> str:
    """An address that nobody listens at, nor will: a free port may be taken by another test."""
    return f"ipc://{tempfile.gettempdir()}/attn-{secrets.token_hex(8)}"


def sent_within(sender: Sender, messages: int) -> bool:
    deadline = time.monotonic() + PATIENCE_MS / 1_000
    while sender.sent.messages < messages and time.monotonic() < deadline:
        time.sleep(0.005)
    return sender.sent.messages >= messages


def test_what_is_sent_comes_in_order_and_says_what_came_before(context, records):
    batches = [records(count, first=1_000 * count) for count in (1, 7, 40, 200)]
    with receiver(context) as socket:
        before = time.time_ns() // 1_000
        with Sender(address_of(socket), sender_id="gpu-1") as sender:
            assert all(map(sender.send, batches))
            found = [received(socket) for _ in batches]
        assert sender.sent == Tally(4, 248) and sender.dropped == Tally(0, 0)
    assert [one.batch for one in found] == batches
    assert [one.seq for one in found] == [0, 1, 2, 3]
    assert [one.rows_before for one in found] == [0, 1, 8, 48]
    assert {(one.sender_id, one.started, one.dropped_total) for one in found} == {
        ("gpu-1", sender.started, 0)
    }
    assert before <= sender.started <= time.time_ns() // 1_000


def test_each_sender_has_a_name_of_its_own(context):
    address = spare_address()
    with Sender(address) as one, Sender(address) as other:
        assert str(os.getpid()) in one.sender_id
        assert one.sender_id != other.sender_id


def test_a_large_batch_goes_in_several_messages_or_not_at_all(context, records):
    with receiver(context) as socket:
        with Sender(address_of(socket), max_rows=100, max_queued=3) as sender:
            assert not sender.send(records(301))
            assert sender.dropped == Tally(4, 301)
            assert sender.send(records(250))
            found = [received(socket) for _ in range(3)]
        assert [one.batch.num_rows for one in found] == [100, 100, 50]
        assert (
            pa.Table.from_batches([one.batch for one in found])
            .combine_chunks()
            .equals(pa.Table.from_batches([records(250)]))
        )
        assert [one.rows_before for one in found] == [0, 100, 200]
        assert {one.dropped_total for one in found} == {301}
        assert sender.sent == Tally(3, 250)


def test_without_a_receiver_a_full_queue_drops_and_counts(context, records):
    sender = Sender(spare_address(), max_queued=5)
    answers = [sender.send(records(10)) for _ in range(12)]
    assert answers == [True] * 5 + [False] * 7
    assert sender.queued == 5 and not sender.wait_for_room(0.01)
    assert sender.sent == Tally(0, 0) and sender.dropped == Tally(7, 70)
    sender.close(0.1)
    assert sender.sent == Tally(0, 0) and sender.dropped == Tally(12, 120)
    assert not sender.send(records(1)) and not sender.wait_for_room(10)
    sender.close()
    assert sender.dropped == Tally(13, 121)


def test_a_batch_without_rows_is_not_sent(context, records):
    with Sender(spare_address(), max_queued=1) as sender:
        assert all(sender.send(records(0)) for _ in range(5))
        assert sender.queued == 0


def test_a_receiver_that_comes_late_learns_what_was_dropped_before_each_message(context, records):
    address = spare_address()
    with Sender(address, max_queued=3) as sender:
        for number in range(5):
            sender.send(records(10, first=number * 10))
        with receiver(context, address) as socket:
            found = [received(socket) for _ in range(3)]
            assert [one.dropped_total for one in found] == [0, 0, 0]
            assert sender.wait_for_room(10)
            sender.send(records(4))
            assert received(socket)[1:] == (sender.sender_id, sender.started, 3, 30, 20)


def test_a_receiver_that_reads_nothing_never_makes_the_sender_wait(context, records):
    batch, given = records(500), 0
    with receiver(context, hwm=1) as socket:  # buffers of ZMQ and of the kernel fill up
        sender = Sender(address_of(socket), max_queued=8)
        while sender.queued < 8 or sender.dropped.messages < 100:
            sender.send(batch)
            given += 1
            assert sender.queued <= 8
            time.sleep(0.0002)
        began = time.monotonic()
        sender.close(0.2)
        assert time.monotonic() - began < PATIENCE_MS / 1_000
        assert sender.sent.rows + sender.dropped.rows == given * 500
        assert sender.sent.messages > 0 and sender.dropped.messages >= 108
        # All that counts as sent was on its way: the receiver finds it, in order.
        messages, rows = 0, 0
        while socket.poll(500):
            found = received(socket)
            assert (found.seq, found.rows_before) == (messages, rows)
            messages, rows = messages + 1, rows + found.batch.num_rows
        assert messages >= sender.sent.messages


def start_receiver(address: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, address], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_killed_receiver_is_missed_and_the_next_one_sees_what_is_lost(context, records):
    address = spare_address()
    with Sender(address, max_queued=1_000) as sender:
        first = start_receiver(address)
        for number in range(50):
            sender.send(records(10, first=number * 10))
        assert first.stdout.readline() == "0 10 0\n"
        first.kill()
        seen = [(0, 10, 0)] + [tuple(map(int, line.split())) for line in first.stdout]
        first.wait()
        for number in range(50):
            sender.send(records(7, first=1_000 + number * 7))
        second = start_receiver(address)
        try:
            for line in second.stdout:
                seen.append(tuple(map(int, line.split())))
                if seen[-1][0] == 99:
                    break
        finally:
            second.kill()
            second.wait()
    assert sender.sent == Tally(100, 850) and sender.dropped == Tally(0, 0)
    lost = sum(after[2] - (before[2] + before[1]) for before, after in pairwise(seen))
    assert all(after[0] > before[0] for before, after in pairwise(seen))
    assert sum(rows for _, rows, _ in seen) + lost == 850


def test_threads_share_a_sender(context, records):
    batch = records(3)
    with receiver(context) as socket:
        got: list[Message] = []
        with Sender(address_of(socket), max_queued=100_000) as sender:
            threads = [
                threading.Thread(target=lambda: [sender.send(batch) for _ in range(200)])
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            got += [received(socket) for _ in range(800)]
            for thread in threads:
                thread.join()
    assert [one.seq for one in got] == list(range(800))
    assert [one.rows_before for one in got] == list(range(0, 2_400, 3))
    assert sender.sent == Tally(800, 2_400)


def test_rows_that_cannot_be_encoded_are_dropped_and_the_others_sent(context, records):
    deep = pa.int64()
    for _ in range(70):  # Arrow writes 64 levels
        deep = pa.list_(deep)
    with receiver(context) as socket, Sender(address_of(socket)) as sender:
        assert sender.send(pa.record_batch([pa.nulls(2, deep)], ["x"]))
        assert sender.send(records(3)) and sender.send(records(4))
        assert received(socket)[3:] == (0, 0, 2)
        assert received(socket)[3:] == (1, 3, 2)
        assert sender.dropped == Tally(1, 2)


def test_a_fork_does_not_send_and_ends_and_its_parent_sends_on(context, records):
    batch = records(5)
    with receiver(context) as socket, Sender(address_of(socket)) as sender:
        sender.send(batch)
        assert received(socket).seq == 0
        child = os.fork()
        if child == 0:  # only what cannot wait for a lock of the parent's threads
            answers = [sender.send(batch), sender.send(batch)]
            sender.close()
            right = answers == [False, False] and sender.dropped == Tally(2, 10)
            os._exit(0 if right else 1)
        ended, status = os.waitpid(child, 0)
        assert (ended, os.waitstatus_to_exitcode(status)) == (child, 0)
        sender.send(batch)
        assert received(socket)[3:] == (1, 5, 0)
        assert sender.dropped == Tally(0, 0)


def test_a_process_that_never_closes_its_sender_ends_all_the_same(context, tmp_path):
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/pipeline']\n"
        "from planted import planted, planted_batch\nfrom shared import START\n"
        "from pipeline.stream.sender import Sender\n"
        "sender = Sender(sys.argv[1])\n"
        "print(sender.send(planted_batch(planted(40, 0)[0], START, rows_per_request=5)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, spare_address()], capture_output=True, text=True,
        timeout=PATIENCE_MS / 1_000, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_with_curve_keys_only_a_known_sender_is_heard(context, records, tmp_path):
    curve.make_keys(tmp_path / "here")
    curve.make_keys(tmp_path / "elsewhere")
    keys = curve.server_keys(tmp_path / "here")
    authenticator = keys.authenticator(context)
    with context.socket(zmq.PULL) as socket:
        socket.rcvtimeo, socket.linger = PATIENCE_MS, 0
        keys.apply(socket)
        socket.bind("tcp://127.0.0.1:*")
        with Sender(address_of(socket), curve_keys=tmp_path / "here") as sender:
            sender.send(records(5))
            assert received(socket).batch.num_rows == 5
        for folder in (None, tmp_path / "elsewhere"):
            stranger = Sender(address_of(socket), curve_keys=folder)
            stranger.send(records(5))
            stranger.close(0.5)
            assert stranger.dropped == Tally(1, 5)
            assert not socket.poll(0)
    authenticator.stop()


def test_with_curve_keys_a_large_message_arrives_whole_though_its_sender_closes(
    context, records, tmp_path
):
    """ZMQ lets go of it once it is encrypted, which is long before all of it is written."""
    curve.make_keys(tmp_path)
    keys, batch, senders = curve.server_keys(tmp_path), records(60_000), 4
    authenticator = keys.authenticator(context)
    with context.socket(zmq.PULL) as socket:
        socket.rcvtimeo, socket.linger = PATIENCE_MS, 0
        keys.apply(socket)
        socket.bind("tcp://127.0.0.1:*")
        for _ in range(senders):
            sender = Sender(address_of(socket), curve_keys=tmp_path, max_rows=len(batch))
            sender.send(batch)
            sender.close()
            assert sender.sent == Tally(1, len(batch))
            found = decode(socket.recv(), max_rows=len(batch), max_bytes=1 << 26)
            assert found.batch.num_rows == len(batch)
    authenticator.stop()


def test_an_address_off_this_machine_needs_keys(tmp_path):
    with pytest.raises(OptionError, match="give --curve-keys DIR"):
        Sender("tcp://gpu-7:9001")
    with pytest.raises(OptionError, match="make keys with"):
        Sender("tcp://gpu-7:9001", curve_keys=tmp_path)


def test_a_receiver_that_is_paused_gets_the_rest_when_it_goes_on(context, records):
    address = spare_address()
    process = start_receiver(address)
    try:
        with Sender(address, max_queued=10_000) as sender:
            process.send_signal(signal.SIGSTOP)
            for number in range(400):
                sender.send(records(100, first=number * 100))
            process.send_signal(signal.SIGCONT)
            lines = [process.stdout.readline() for _ in range(400)]
        assert [line.split()[0] for line in lines] == [str(n) for n in range(400)]
        assert sent_within(sender, 400) and sender.dropped == Tally(0, 0)
    finally:
        process.kill()
        process.wait()
