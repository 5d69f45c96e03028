"""The discovery job that is at work: what it does now, its events, and commands to it.

A job is found by the lock of its output folder, and followed by its progress.jsonl, so that it need
not know of the service.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from capture_kernels.errors import RunError
from discovery.artifacts.schema import RUN_ID
from discovery.events.schema import STAGE_NAMES
from discovery.runs.lock import LOCK, Holder, lock_holder

from ..reads import FILES, LOGS
from ..streams import Events, event

PROGRESS = "progress.jsonl"
# An event is at most some 30 KB; what is read of a log at a time, and to know where a run is.
READ_BYTES = 1 << 18
MOST_LINE_BYTES = 1 << 20
# Seconds between two looks at a log.
LOOK_EVERY_S = 0.25
# Seconds that a job has to answer a command, and bytes of its client file.
ANSWER_S = 5.0
MOST_CLIENT_FILE_BYTES = 4_096
EVENT_ID = re.compile(rf"({RUN_ID}):(\d{{1,15}})", re.ASCII)
# Nothing is sent but to the job's own machine.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Line(msgspec.Struct):
    """What is read of an event here."""

    event: str
    at: str | None = None
    stage: str | None = None
    done: int | None = None
    total: int | None = None
    resumed: bool | None = None
    model: str | None = None
    rows: int | None = None


LINE = msgspec.json.Decoder(Line)


def running_job(output: Path) -> Holder | None:
    """The job that computes a run in `output` now.

    Raises:
        RunError: the lock cannot be read.
    """
    holder = lock_holder(output)
    # Deleting old runs takes the lock as well, but has no run.
    known = holder is not None and holder.run_id is not None
    return holder if known and re.fullmatch(RUN_ID, str(holder and holder.run_id)) else None


def progress_of(output: Path, holder: Holder) -> dict[str, Any]:
    """Where a running job is, as JSON values."""
    first, recent = _ends_of(output / str(holder.run_id) / PROGRESS)
    found: dict[str, Any] = {
        "run_id": holder.run_id, "pid": holder.pid, "started_at": first and first.at,
        "model": first and first.model, "rows": first and first.rows, "stage": None,
        "number": None, "of": len(STAGE_NAMES), "done": None, "total": None, "paused": False,
        "last_event_at": None,
        "commands": ["pause", "resume", "stop"] if holder.client_file else ["stop"],
    }  # fmt: skip
    for line in recent:
        found["last_event_at"] = line.at
        found["paused"] = line.event == "run_paused"
        if line.event in ("run_started", "stage_started", "stage_finished"):
            found |= {"stage": line.stage, "done": None, "total": None}
        elif line.event == "progress":
            found |= {"stage": line.stage, "done": line.done, "total": line.total}
    if found["stage"] in STAGE_NAMES:
        found["number"] = STAGE_NAMES.index(found["stage"]) + 1
    return found


def _ends_of(log: Path) -> tuple[Line | None, list[Line]]:
    """The first event of a log, and its last ones."""
    try:
        with log.open("rb") as file:
            head = file.readline(MOST_LINE_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - READ_BYTES))
            tail = file.read(READ_BYTES)
    except OSError:
        return None, []
    lines = tail.split(b"\n")
    # The last one is not finished; the first one may have begun before.
    return _parsed(head), [one for line in lines[:-1] if (one := _parsed(line))]


def _parsed(line: bytes) -> Line | None:
    try:
        return LINE.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Follower:
    """Reads the events of whichever job is at work, one run after another.

    Args:
        output: the output folder.
        last_id: the id of the last event that the client has, to go on from there.
    """

    def __init__(self, output: Path, last_id: str | None = None) -> None:
        self._output = output
        self._run_id: str | None = None
        self._offset = 0
        if last_id and (found := EVENT_ID.fullmatch(last_id)):
            self._run_id, self._offset = found[1], int(found[3])
            self._resumes = True
        else:
            self._resumes = False

    def read(self) -> list[bytes]:
        """The events since the last call, as server-sent events; some of them if there are many."""
        try:
            holder = running_job(self._output)
        except RunError:
            holder = None
        # What the run before wrote comes first: it has ended, as another holds the lock.
        if found := self._lines():
            return found
        if holder is None or holder.run_id == self._run_id:
            return []
        self._run_id, self._offset, self._resumes = holder.run_id, 0, False
        return self._lines()

    def _lines(self) -> list[bytes]:
        if self._run_id is None:
            return []
        try:
            with (self._output / self._run_id / PROGRESS).open("rb") as file:
                self._check(file.fileno())
                file.seek(self._offset)
                content = file.read(READ_BYTES)
                if b"\n" not in content and len(content) == READ_BYTES:
                    content += file.read(MOST_LINE_BYTES)
        except OSError:
            return []  # not begun yet, or deleted
        end = content.rfind(b"\n") + 1
        if not end and len(content) >= MOST_LINE_BYTES:
            end = len(content)  # not a log: nobody waits for its end
        events = []
        for line in content[:end].removesuffix(b"\n").split(b"\n") if end else ():
            self._offset += len(line) + 1
            if one := _parsed(line):
                mark = f"{self._run_id}:{self._offset}"
                # JSON that is not on one line for everybody would end the event.
                events.append(event(_word(one.event), line.replace(b"\r", b" "), mark))
        return events

    def _check(self, log: int) -> None:
        """Begin anew if the client's last event is not of this log."""
        if not self._resumes:
            return
        self._resumes = False
        size = os.fstat(log).st_size
        at_line = self._offset == 0 or os.pread(log, 1, self._offset - 1) == b"\n"
        if self._offset > size or not at_line:
            self._offset = 0


def _word(kind: str) -> str:
    """The kind of an event for the stream, which must be one line."""
    return re.sub(r"[^\w.-]", "_", kind)[:64]


async def follow(output: Path, last_id: str | None) -> Events:
    """The events of the running job and of those that come after it; None where there is none."""
    follower = Follower(output, last_id)
    while True:
        found = await LOGS(follower.read)
        for one in found:
            yield one
        if not found:
            yield None
            await asyncio.sleep(LOOK_EVERY_S)


# commands


class CommandRefused(Exception):
    """A command that cannot be done now; the message says why, and what to do."""


async def steer(output: Path, command: str) -> dict[str, Any]:
    """Send a command to the running job.

    Returns:
        run_id, command, and via: "websocket" or "signal".

    Raises:
        CommandRefused: no job is running, it does not take this command, or it did not answer.
        RunError: the lock cannot be read.
    """
    holder = await FILES(running_job, output)
    if holder is None:
        raise CommandRefused("no discovery job is running")
    done = {"run_id": holder.run_id, "command": command}
    if holder.client_file:
        address, token = await FILES(read_client_file, Path(holder.client_file))
        await _ask(address, token, command)
        return {**done, "via": "websocket"}
    if command != "stop":
        raise CommandRefused(
            f"run {holder.run_id} cannot be sent {command}: start it with --websocket-port"
        )
    await FILES(terminate, output, holder)
    return {**done, "via": "signal"}


def read_client_file(path: Path) -> tuple[str, str]:
    """The address and the token of a job.

    Raises:
        CommandRefused: they cannot be read, or are not those of a job of this user and machine.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CommandRefused(
            f"cannot read {path} ({error.strerror}): the job must run as the user of the service"
        ) from None
    try:
        facts = os.fstat(handle)
        content = os.read(handle, MOST_CLIENT_FILE_BYTES) if stat.S_ISREG(facts.st_mode) else b""
    finally:
        os.close(handle)
    try:
        found = msgspec.json.decode(content, type=dict[str, str])
        address = found["url"]
        is_local = urlsplit(address).scheme == "ws" and urlsplit(address).hostname in LOOPBACK
        token = found["token"]
    except (msgspec.MsgspecError, ValueError, KeyError):
        raise CommandRefused(f"{path} is not the client file of a job") from None
    if not is_local or facts.st_uid != os.getuid():
        raise CommandRefused(f"{path} is not of a job of this user on this machine")
    return address, token


async def _ask(address: str, token: str, command: str) -> None:
    """Send a command over the WebSocket of a job, and wait until it is taken."""
    mark = os.urandom(8).hex()
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            connect(
                address, additional_headers=headers, compression=None, proxy=None,
                max_size=1 << 22, open_timeout=None, close_timeout=1,
            ) as connection,
        ):  # fmt: skip
            await connection.send(msgspec.json.encode({"command": command, "id": mark}).decode())
            async for message in connection:
                answer = msgspec.json.decode(message)
                if answer.get("event") == "answer" and answer.get("id") == mark:
                    if not answer["ok"]:
                        raise CommandRefused(str(answer.get("reason", "the job refused it")))
                    return
    except (OSError, WebSocketException, TimeoutError, msgspec.MsgspecError):
        raise CommandRefused(
            f"the job did not answer within {ANSWER_S:g} seconds: see /discovery/status"
        ) from None
    raise CommandRefused("the job ended before it answered: see /discovery/status")


def terminate(output: Path, holder: Holder) -> None:
    """Send SIGTERM to the process that holds the lock: it stops at a checkpoint.

    Raises:
        CommandRefused: it is not a process of this machine and user that has the lock open.
    """
    pid = holder.pid
    elsewhere = CommandRefused(
        f"run {holder.run_id} is not computed by a process that the service sees: stop it where it "
        "was started, or start it with --websocket-port"
    )
    if not pid or pid <= 1 or not hasattr(os, "pidfd_open"):
        raise elsewhere
    try:
        # What is held from here on is this process, whoever gets its number next.
        process = os.pidfd_open(pid)
    except (OSError, OverflowError):
        raise elsewhere from None
    try:
        if not _has_open(pid, output / LOCK):
            raise elsewhere
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise CommandRefused(
            f"process {pid} is another user's: stop run {holder.run_id} as that user"
        ) from None
    except OSError:
        raise elsewhere from None
    finally:
        os.close(process)


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open, as Linux shows it."""
    wanted = path.stat()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            facts = entry.stat()
            if (facts.st_dev, facts.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False
