"""uvicorn around the service: sockets, signals, and the messages of a start and an end."""

from __future__ import annotations

import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from capture_kernels.errors import AttnError, OptionError

from .http.app import Additions, create_app
from .http.keys import KeyFile
from .http.limits import bounded_protocol
from .http.live import Broadcast
from .options import SidecarOptions
from .service import DRAIN_S, Service

if TYPE_CHECKING:
    from .page.config import PageOptions

LOG = logging.getLogger("attn.sidecar")

# The event loop must not wait 5 ms (Python's default) for a thread that computes.
SWITCH_S = 0.0005
# Connections at once, and seconds that an idle one is kept.
MOST_CONNECTIONS, KEEP_ALIVE_S = 4_096, 75
# Files that the process needs beside connections: store, runs, ZMQ, threads.
OTHER_FILES = 512
# Seconds that requests under way may take at the end.
SHUTDOWN_S = 2


class RowsLeftError(AttnError):
    """Rows were received that could not be stored before the end."""

    exit_code = 3


def serve(
    options: SidecarOptions, page: PageOptions | None = None,
    listening: socket.socket | None = None,
) -> None:  # fmt: skip
    """Serve until SIGINT or SIGTERM, then drain.

    Args:
        page: what the web page is served with; None for no page.
        listening: a socket that takes connections already, in the place of host and port.

    Raises:
        AttnError: an option, the store or an address cannot be used.
        RowsLeftError: the store refused rows until the end.
    """
    sys.setswitchinterval(SWITCH_S)
    # From the first row that is received a signal means: store what there is, then end.
    signals = Signals()
    keys = KeyFile(options.api_key_file) if options.api_key_file else None
    most_connections = room_for_connections()
    with listening or bound(options) as ready:
        additions = None
        if page is not None:
            from .page.config import page_additions

            additions = page_additions(page)
        service = Service(options)
        serve_with(service, ready, keys, most_connections, signals, additions)


def serve_with(
    service: Service, listening: socket.socket, keys: KeyFile | None, most_connections: int,
    signals: Signals, additions: Additions | None = None,
) -> None:  # fmt: skip
    """Answer requests until a signal, then drain. RowsLeftError: as of `serve`."""
    try:
        broadcast = Broadcast()
        config = uvicorn.Config(
            create_app(service, broadcast, keys, additions),
            http=bounded_protocol(most_connections, on_refusal=service.metrics.connection_refused),
            log_config=None, access_log=False, lifespan="off", server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=SHUTDOWN_S,
        )  # fmt: skip
        server = Server(config)
        signals.end(server, broadcast)
        if keys:
            keys.start()
        # What was made until now stays. A collection that looked at it would hold up every request
        # for 40 ms, and a large body of JSON begins one.
        gc.collect()
        gc.freeze()
        announce(service, listening, has_page=additions is not None)
        server.run(sockets=[listening])
    finally:
        drained = service.drain(DRAIN_S)
    if not drained:
        left = service.intake.queue.rows + service.lost_at_end
        why = service.intake.writer.problem or f"the store took longer than {DRAIN_S:g} s"
        raise RowsLeftError(f"{left:,} rows were received and are not stored: {why}")
    counts = service.intake.counts
    say(f"stopped; {counts['received']:,} fingerprints received, {counts['stored']:,} stored")


class Signals:
    """SIGTERM and SIGINT as the ordinary end, from now on: of a server, once there is one."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._broadcast: Broadcast | None = None
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def end(self, server: uvicorn.Server, broadcast: Broadcast) -> None:
        """Have a signal end this server, also one that came before."""
        self._server, self._broadcast = server, broadcast
        server.should_exit = self._came

    def _handle(self, sig: int, frame: Any) -> None:
        self._came = True
        if self._server:
            # A second Ctrl+C does not wait for requests that are under way.
            if self._server.should_exit and sig == signal.SIGINT:
                self._server.force_exit = True
            self._server.should_exit = True
        if self._broadcast:
            # Streams of events end by themselves only when their clients go.
            self._broadcast.close()


class Server(uvicorn.Server):
    """A server that leaves signals to `Signals`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(options: SidecarOptions) -> socket.socket:
    """A socket at the address of the options. OptionError: it cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        found = socket.create_server(
            (options.host.strip("[]"), options.port), family=family, backlog=2_048
        )
    except (OSError, UnicodeError) as error:  # a name that cannot be one is a UnicodeError
        why = getattr(error, "strerror", None) or "not a host name"
        raise OptionError(
            f"cannot serve on {options.host}:{options.port}: {why}; choose another --port or --host"
        ) from None
    return found


def room_for_connections() -> int:
    """How many connections there may be, with this process's limit of open files raised for them:
    without a file to open the store could not be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_CONNECTIONS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(allowed - OTHER_FILES, allowed // 2)


def announce(service: Service, listening: socket.socket, *, has_page: bool) -> None:
    """Say where the service is, and what is missing."""
    options = service.options
    host, port = listening.getsockname()[:2]
    page = "page at /, " if has_page else ""
    say(f"serving on http://{f'[{host}]' if ':' in host else host}:{port} ({page}docs at /docs)")
    if service.receiver:
        say(f"receiving fingerprints at {service.receiver.address}")
    if service.hints:
        say(f"publishing hints at {service.hints.address}")
    run = service.serving.current
    served = f"run {run.run_id}" if run else f"no run: {service.nothing_served}"
    say(f"store {options.db}, {served}")
    if options.is_public and options.api_key_file is None:
        say(
            f"warning: {options.host} can be reached from other machines, and there is no "
            "--api-key-file: whoever reaches it can read and add fingerprints"
        )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
