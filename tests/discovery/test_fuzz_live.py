"""A run that strangers and broken clients send anything to ends as one that was left alone."""

from __future__ import annotations

import random
import socket
from urllib.parse import urlsplit

import pytest
from fuzzing import fuzz, mutated
from processes import AttnProcess
from shared import free_port
from uninterrupted import AT_NOW, OPTIONS, RUN_ID, fingerprint_of
from watching import Client, address
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

# Commands that change nothing in a paused run; those that do are for the end.
COMMANDS = (
    b'{"command":"ping","id":"7"}',
    b'{"command":"pause","id":"caf\xc3\xa9"}',
    b'{"command":"ping"}',
    b'["ping"]',
    b'{"command":{"ping":[1,2.5e3,null]},"id":7}',
)
# Messages of one connection, which are answered one by one, 0.02 s apart.
MESSAGES = 25


def is_harmless(message: bytes) -> bool:
    """Whether no mutation has made it a command to stop or resume."""
    return b"stop" not in message and b"resume" not in message


def send_raw(port: int, data: bytes) -> None:
    """Send bytes to a port and read until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(65_536):
                pass
        except (ConnectionResetError, BrokenPipeError):  # closed before all was sent
            pass


def handshake(port: int) -> bytes:
    """A client's opening request, with the token."""
    found = address(port)
    host = urlsplit(found["uri"]).netloc
    lines = [
        "GET / HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13",
        *(f"{name}: {value}" for name, value in found["additional_headers"].items()),
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


def frames(rng: random.Random) -> bytes:
    """Some whole frames of a client."""
    kinds = [Opcode.TEXT, Opcode.BINARY, Opcode.PING, Opcode.PONG, Opcode.CONT, Opcode.CLOSE]
    made = b""
    for _ in range(rng.randrange(1, 4)):
        frame = Frame(rng.choice(kinds), rng.choice(COMMANDS), fin=rng.random() < 0.8)
        try:
            made += frame.serialize(mask=True)
        except Exception:  # noqa: BLE001 - a control frame that may not be: its bytes all the same
            made += rng.randbytes(20)
    return made


def messages(port: int, rng: random.Random) -> int:
    """One client that sends mutated messages: each is answered, in text."""
    with Client(port) as client:
        sent = 0
        for _ in range(MESSAGES):
            message = mutated(rng.choice(COMMANDS), rng)
            if rng.random() < 0.02:
                message *= 4_096 // max(len(message), 1) + 1
            if not is_harmless(message):
                continue
            too_long = len(message) > 4_096
            client.connection.send(message, text=rng.random() < 0.5)
            sent += 1
            try:
                while client.next()["event"] not in ("answer", "pong"):
                    pass
            except ConnectionClosed as closed:
                assert too_long and closed.rcvd is not None and closed.rcvd.code == 1009
                break
            assert not too_long
    return sent


@pytest.mark.parametrize("mutations", [150, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_run_that_is_sent_anything_ends_as_one_left_alone(uninterrupted, tmp_path, mutations):
    db, output = uninterrupted
    port = free_port()
    run = AttnProcess(
        "discover", "--db", db, "--output", tmp_path, "--websocket-port", port, *AT_NOW, *OPTIONS
    )
    try:
        with Client(port) as client:
            assert client.ask("pause")["ok"]
            client.until("run_paused")
            opening = handshake(port)

            def try_one(rng: random.Random) -> int:
                match rng.randrange(8):
                    case 0:
                        return messages(port, rng)
                    case 1 | 2 | 3:
                        send_raw(port, mutated(opening, rng))
                    case 4 | 5 | 6:
                        bad = mutated(frames(rng), rng)
                        send_raw(port, opening + bad)
                    case 7:
                        send_raw(port, rng.randbytes(rng.randrange(200)))
                return 1

            fuzz(try_one, mutations)
            assert client.ask("ping")
            assert client.ask("resume")["ok"]
        done = run.finish(120)
    finally:
        run.end()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "paused by a client" in done.stderr and "resumed by a client" in done.stderr
    assert fingerprint_of(tmp_path / RUN_ID) == fingerprint_of(output / RUN_ID)
