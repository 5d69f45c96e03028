"""A client that watches and steers a run; every message that it gets must fit the schema."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from discovery.events.schema import json_schema
from discovery.events.websocket import client_file

SCHEMA = json_schema()
MESSAGE = Draft202012Validator(SCHEMA)
COMMAND = Draft202012Validator({**SCHEMA, "oneOf": [{"$ref": "#/$defs/Command"}]})


def logged(folder: Path) -> list[dict]:
    """The lines of a run's progress.jsonl."""
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    for line in lines:
        MESSAGE.validate(line)
    return lines


def address(port: int) -> dict[str, Any]:
    """What `connect` takes to reach the run that serves on a port."""
    found = json.loads(client_file(port).read_text())
    headers = {"Authorization": f"Bearer {found['token']}"}
    return {"uri": found["url"], "additional_headers": headers, "compression": None}


class Client:
    """A connection to a run that may not have come up yet; `seen` is all that it was sent."""

    def __init__(self, port: int, patience: float = 60.0) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                self._opened = connect(**address(port))
                self.connection = self._opened.__enter__()
                break
            except OSError:
                assert time.monotonic() < deadline, "no server came up"
                time.sleep(0.02)
        self.seen: list[dict] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def next(self, timeout: float = 60.0) -> dict:
        message = json.loads(self.connection.recv(timeout=timeout))
        MESSAGE.validate(message)
        self.seen.append(message)
        return message

    def until(self, event: str, timeout: float = 60.0, **fields: object) -> dict:
        """The next message of this kind with these fields."""
        while True:
            message = self.next(timeout)
            if message["event"] == event and fields.items() <= message.items():
                return message

    def ask(self, command: str, given: str = "1") -> dict:
        """Send a command; gives its answer."""
        asked = {"command": command, "id": given}
        COMMAND.validate(asked)
        self.connection.send(json.dumps(asked))
        return self.until("pong" if command == "ping" else "answer", id=given)

    def rest(self) -> list[dict]:
        """All that was sent until the server said goodbye."""
        try:
            while True:
                self.next()
        except ConnectionClosed as closed:
            assert closed.rcvd is not None and closed.rcvd.code == 1000, closed
        return self.seen
