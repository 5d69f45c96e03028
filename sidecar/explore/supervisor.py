"""The processes of `attn explore`: which start, in which order they end, and what is said of it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from capture_kernels.errors import OptionError, WriteError
from pipeline.examples.files import DEMO_NAME, demo_model, sample
from sidecar.page.config import PageOptions

from .demo import PROMPTS, data_folder, missing_packages

HOST = "127.0.0.1"
# Where an engine that is not ours sends its fingerprints: the default of attn sidecar, if free.
STREAM_PORT = 9001
# Seconds that the sidecar may take to answer, and a process to end after a signal.
READY_S, END_S = 60.0, 15.0
POLL_S = 0.1
# Bytes of a socket's path, less than any system allows, with ipc://.
MOST_OF_SOCKET = 100
# With one of these a program can open a window, or the user has chosen one to open addresses.
SCREENS = frozenset(("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
LAST_LINES = 5


@dataclass(frozen=True)
class ExploreOptions:
    """Options of `attn explore`; docs/guide.md describes each.

    Raises:
        OptionError: a value that cannot be used.
    """

    port: int = 9009
    data_dir: Path | None = None
    browser: bool = True
    engine_url: str | None = None
    engine_key_file: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port must be between 0 and 65535, got {self.port}")
        PageOptions(self.engine_url, self.engine_key_file)


class Child:
    """A process of `sidecar.explore.child`, whose stderr goes to a file.

    Args:
        listening: a socket that it serves on; closed here.
    """

    def __init__(
        self, kind: str, log: Path, given: dict[str, Any], listening: socket.socket | None = None
    ) -> None:
        self.kind, self.log = kind, log
        handed = () if listening is None else (listening.fileno(),)
        words = [sys.executable, "-P", "-m", "sidecar.explore.child", kind, json.dumps(given)]
        with log.open("ab") as said:
            self._from = said.tell()
            # Its own session: a Ctrl+C in the terminal is for us, who end them in order. Nothing
            # is ever written to its input, which ends with this process.
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=said, stderr=said, pass_fds=handed,
                start_new_session=True,
            )  # fmt: skip
        if listening is not None:
            listening.close()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def end(self) -> None:
        """Ask it to end."""
        if self.code is None:
            self.process.terminate()

    def wait(self, until: float, hurried: Callable[[], bool]) -> None:
        """Wait for its end; kill it then, or if that is hurried."""
        while self.code is None:
            if time.monotonic() > until or hurried():
                # And what it started: it leads a process group.
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(POLL_S / 2)
        if self.process.stdin:
            self.process.stdin.close()

    def last_said(self) -> str:
        with self.log.open("rb") as said:
            said.seek(self._from)
            lines = said.read()[-10_000:].decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LAST_LINES:])


class Signals:
    """SIGINT, SIGTERM and SIGHUP: how often one came."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def run(options: ExploreOptions) -> int:
    """Start everything, and wait for a signal; returns the exit code.

    Raises:
        OptionError: the port or the folder is taken, or what is shipped is missing.
        WriteError: the folder cannot be written.
    """
    signals = Signals()
    with ExitStack() as stack:
        listening = stack.enter_context(_bound(options.port))
        folder = data_folder(options.data_dir)
        stack.enter_context(_locked(folder))
        explorer = Explorer(options, folder, listening, signals)
        stack.callback(explorer.end)
        return explorer.run()


class Explorer:
    """The processes, from their start to their end."""

    def __init__(
        self, options: ExploreOptions, folder: Path, listening: socket.socket, signals: Signals
    ) -> None:
        self._options, self._folder, self._signals = options, folder, signals
        self._listening = listening
        self.url = f"http://{HOST}:{listening.getsockname()[1]}"
        self._children: list[Child] = []
        self._sidecar: Child | None = None
        self._notes: list[str] = []
        self._code: int | None = None  # once all have ended

    def run(self) -> int:
        with tempfile.TemporaryDirectory(prefix="attn-explore-") as folder:
            own = self._options.engine_url is None
            stream = f"ipc://{folder}/stream"
            if not own or len(stream) > MOST_OF_SOCKET:
                stream = _free_stream()
            engine = self._start_engine(stream) if own else self._options.engine_url
            self._start_sidecar(stream, engine)
            if not self._ready():
                return self.end()
            self._start_job()
            if not own:
                say(f"have the engine send its fingerprints to {stream} (--attention-sidecar-url)")
            say(f"open {self.url} (data in {self._folder}; Ctrl+C ends)")
            if self._options.browser and not opened(self.url):
                say("no browser was found: open that address in one")
            self._watch()
            return self.end()

    def _start_engine(self, stream: str) -> str | None:
        """The address of the demo model's server; None if it cannot run here."""
        if missing := missing_packages():
            self._notes.append(
                f"the demo model needs {' and '.join(missing)}, and nothing can be asked without: "
                "pip install 'attn[capture]', or start attn explore with --engine-url"
            )
            say(self._notes[-1])
            return None
        listening = socket.create_server((HOST, 0), backlog=128)
        url = f"http://{HOST}:{listening.getsockname()[1]}"
        given = {
            "model": str(demo_model()), "name": DEMO_NAME, "fd": listening.fileno(),
            "sidecar_url": stream,
        }  # fmt: skip
        self._start("engine", given, listening)
        return url

    def _start_sidecar(self, stream: str, engine: str | None) -> None:
        db, output = self._places()
        key = self._options.engine_key_file
        given = {
            "fd": self._listening.fileno(),
            "options": {"db": db, "discovery_dir": output, "zmq_bind": stream},
            "page": {
                "engine_url": engine, "engine_key_file": str(key.absolute()) if key else None,
                "notes": self._notes,
            },
            "prompts": PROMPTS if self._options.engine_url is None else [],
        }  # fmt: skip
        self._sidecar = self._start("sidecar", given, self._listening)

    def _start_job(self) -> None:
        db, output = self._places()
        if Path(output, "latest").exists():
            return
        say("finding the behaviours of the sample, once: the page shows how far it is")
        given = {
            "db": db, "output": output, "sample": str(sample()), "tokenizer": str(demo_model()),
        }  # fmt: skip
        self._start("job", given)

    def _places(self) -> tuple[str, str]:
        return str(self._folder / "fingerprints.db"), str(self._folder / "discovery_outputs")

    def _start(
        self, kind: str, given: dict[str, Any], listening: socket.socket | None = None
    ) -> Child:
        child = Child(kind, self._folder / f"{kind}.log", given, listening)
        self._children.append(child)
        return child

    def _ready(self) -> bool:
        """Whether the sidecar answers, before it or a signal ends that."""
        assert self._sidecar is not None
        until = time.monotonic() + READY_S
        while self._sidecar.code is None and not self._signals.count:
            try:
                if httpx.get(f"{self.url}/health", timeout=1.0, trust_env=False).is_success:
                    return True
            except httpx.TransportError:
                if time.monotonic() > until:
                    say(f"the sidecar does not answer after {READY_S:g} s")
                    return False
            time.sleep(POLL_S)
        return False

    def _watch(self) -> None:
        """Wait for a signal, or for the sidecar's end; say so if another process ends."""
        assert self._sidecar is not None
        running = set(self._children)
        while not self._signals.count and self._sidecar.code is None:
            time.sleep(POLL_S)
            for child in [one for one in running if one.code is not None]:
                running.discard(child)
                self._say_end(child)

    def _say_end(self, child: Child) -> None:
        if child.kind == "job" and child.code == 0:
            say("the behaviours of the sample are found")
        elif child is not self._sidecar:
            say(f"the {child.kind} ended (exit code {child.code}); the page goes on without it:")
            say(child.last_said() or f"  see {child.log}")

    def end(self) -> int:
        """End all processes, the sidecar last, so that it gets what the engine sends; returns the
        exit code."""
        if self._code is None:
            self._code = self._end_all()
        return self._code

    def _end_all(self) -> int:
        sidecar_ended = self._sidecar is not None and self._sidecar.code is not None

        def hurried() -> bool:
            # Two may have come before the first was looked at.
            return self._signals.count > 1

        others = [child for child in self._children if child is not self._sidecar]
        for group in (others, [self._sidecar] if self._sidecar else []):
            for child in group:
                child.end()
            until = time.monotonic() + END_S
            for child in group:
                child.wait(until, hurried)
        code = self._sidecar.code if self._sidecar else 0
        if self._sidecar is not None and hurried() and code == -signal.SIGKILL:
            say("killed: fingerprints that were not stored yet are lost")
        elif self._sidecar is not None and (sidecar_ended or code):
            say(f"the sidecar ended (exit code {code}):")
            say(self._sidecar.last_said() or f"  see {self._sidecar.log}")
        return code if code is not None and code >= 0 else 1


def opened(url: str) -> bool:
    """Whether a browser opens the page. One that would take over the terminal is none."""
    has_screen = sys.platform != "linux" or not SCREENS.isdisjoint(os.environ)
    return has_screen and webbrowser.open(url)


def _bound(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port), backlog=2_048)
    except OSError as error:
        raise OptionError(
            f"cannot serve on {HOST}:{port}: {error.strerror}; choose another --port"
        ) from None


def _free_stream() -> str:
    """An address of this machine that fingerprints can be received at."""
    for port in (STREAM_PORT, 0):
        try:
            with socket.create_server((HOST, port)) as found:
                return f"tcp://{HOST}:{found.getsockname()[1]}"
        except OSError:
            continue
    raise OptionError(f"no port of {HOST} is free")


def _locked(folder: Path) -> Any:
    """A file in the folder that is locked as long as this process lives."""
    path = folder / ".explore.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    except OSError as error:
        raise WriteError(f"cannot write to {folder}: {error.strerror}; choose --data-dir") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OptionError(
            f"another attn explore uses {folder}: end it, or choose another --data-dir"
        ) from None
    return file


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
