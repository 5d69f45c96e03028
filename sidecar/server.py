"""uvicorn around the service: sockets, signals, and the messages of a start and an end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from capture_kernels.errors import AttnError, OptionError

from .http.app import create_app
from .http.limits import bounded_protocol
from .http.live import Broadcast
from .options import SidecarOptions
from .service import DRAIN_S, Service

LOG = logging.getLogger("attn.sidecar")

# The event loop must not wait 5 ms (Python's default) for a thread that computes.
SWITCH_S = 0.0005
# Connections at once, and seconds that an idle one is kept.
MOST_CONNECTIONS, KEEP_ALIVE_S = 4_096, 75
# Seconds that requests under way may take at the end.
SHUTDOWN_S = 2


class RowsLeftError(AttnError):
    """Rows were received that could not be stored before the end."""

    exit_code = 1


def serve(options: SidecarOptions) -> None:
    """Serve until SIGINT or SIGTERM, then drain.

    Raises:
        AttnError: an option, the store or an address cannot be used.
        RowsLeftError: the store refused rows until the end.
    """
    sys.setswitchinterval(SWITCH_S)
    listening = bound(options)
    service = Service(options)
    broadcast = Broadcast()
    config = uvicorn.Config(
        create_app(service, broadcast), http=bounded_protocol(MOST_CONNECTIONS), log_config=None,
        access_log=False, lifespan="off", server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )  # fmt: skip
    announce(service, listening)
    try:
        Server(config, broadcast).run(sockets=[listening])
    finally:
        drained = service.drain(DRAIN_S)
    if not drained:
        raise RowsLeftError(
            f"{service.intake.queue.rows:,} rows were not stored: {service.intake.writer.problem}"
        )
    counts = service.intake.counts
    say(f"stopped; {counts['received']:,} fingerprints received, {counts['stored']:,} stored")


class Server(uvicorn.Server):
    """A server for which SIGTERM and SIGINT are the ordinary end, not an error."""

    def __init__(self, config: uvicorn.Config, broadcast: Broadcast) -> None:
        super().__init__(config)
        self._broadcast = broadcast

    def handle_exit(self, sig: int, frame: Any) -> None:
        # A second Ctrl+C does not wait for requests that are under way.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        # Streams of events end by themselves only when their clients go.
        self._broadcast.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, this does not raise the signal again after the end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


def bound(options: SidecarOptions) -> socket.socket:
    """A socket at the address of the options. OptionError: it cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        found = socket.create_server(
            (options.host.strip("[]"), options.port), family=family, backlog=2_048
        )
    except OSError as error:
        raise OptionError(
            f"cannot serve on {options.host}:{options.port}: {error.strerror}; choose another "
            "--port or --host"
        ) from None
    return found


def announce(service: Service, listening: socket.socket) -> None:
    """Say where the service is, and what is missing."""
    options = service.options
    host, port = listening.getsockname()[:2]
    say(f"serving on http://{f'[{host}]' if ':' in host else host}:{port} (docs at /docs)")
    if service.receiver:
        say(f"receiving fingerprints at {service.receiver.address}")
    if service.hints:
        say(f"publishing hints at {service.hints.address}")
    run = service.serving.current
    say(
        f"store {options.db}, "
        + (f"run {run.run_id}" if run else f"no run: {service.nothing_served}")
    )
    if options.is_public and options.api_key_file is None:
        say(
            f"warning: {options.host} can be reached from other machines, and there is no "
            "--api-key-file: whoever reaches it can read and add fingerprints"
        )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
