"""uvicorn around the application: from a model's name to a server that a signal ends."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn

from capture_kernels.errors import OptionError
from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.sinks import Counts, open_sink

from .app import create_app
from .loop import ModelLoop
from .model import ServedModel

LOG = logging.getLogger("attn.serve")
# Seconds that answers may take to end after a signal, which ends the model's work at once.
SHUTDOWN_S = 2
MOST_CONNECTIONS = 1_024


def serve(
    name: str,
    options: ServeOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    reasoning_parser: str | None = None,
    device: str = "auto",
    served_name: str | None = None,
    listening: socket.socket | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM; records that wait are then handed on.

    Args:
        name: folder or hub name of the model.
        port: 0 for any that is free; the line on stderr says which.
        reasoning_parser, device, served_name: as of `ServedModel`.
        listening: a socket that takes connections already, in the place of host and port.

    Raises:
        OptionError: an option, the model or the address cannot be used.
        MissingExtraError: as of `ServedModel`.
        StoreError: the store of `options` cannot be used.
    """
    with ExitStack() as stack:
        options.check_files()
        ready = stack.enter_context(listening or _bound(host, port))
        model = ServedModel(
            name,
            options,
            reasoning_parser=reasoning_parser,
            device=device,
            served_name=served_name,
        )
        sink = None
        if options.is_on:
            sink = open_sink(
                sidecar_url=options.sidecar_url, store=options.store, curve_keys=options.curve_keys
            )
        if sink is not None:
            stack.callback(lambda: _say_counts(sink.close()))
        loop = stack.enter_context(ModelLoop(model, records=None if sink is None else sink.put))
        app = create_app(model, loop, sink, options.max_body_mb << 20)
        config = uvicorn.Config(
            CaptureGate(app, options, lambda: model.facts(off=loop.budget.exceeded)),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        server = _Server(config, loop)
        place = ready.getsockname()
        captured = ", ".join(map(str, model.layers)) if options.is_on else "none"
        _say(f"serving {model.name} on http://{host}:{place[1]}; captured layers: {captured}")
        server.run(sockets=[ready])


def _say_counts(counts: Counts) -> None:
    _say(f"stopped; {counts.delivered:,} records handed on, {counts.dropped:,} dropped")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=1_024)
    except (OSError, UnicodeError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "not an address"
        raise OptionError(
            f"cannot serve on {host}:{port}: {why}; choose another --port or --host"
        ) from None


class _Server(uvicorn.Server):
    """Ends with exit code 0 after a signal, where uvicorn raises it again. The signal ends the
    requests under way, too: their clients are told."""

    def __init__(self, config: uvicorn.Config, loop: ModelLoop) -> None:
        super().__init__(config)
        self._loop = loop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl+C does not wait for requests that are under way.
        if self.should_exit and number == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self._loop.end()
