"""A process of `attn explore`: the engine, the sidecar, or the sample's discovery run.

    python -m sidecar.explore.child KIND JSON

Its standard input is a pipe that the parent never writes to: when it ends, the parent has, however
that came about, and so does this process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from capture_kernels.errors import AttnError

# Seconds that a process without a parent may take to end in order.
ORPHAN_S = 10.0


def end_with_parent(pipe: int) -> None:
    """Have this process end, in order if it can, once nobody holds the other end of the pipe."""

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def engine(model: str, name: str, fd: int, sidecar_url: str, layout: int = 1) -> None:
    """Serve the demo model on a socket that listens already; its records go to the sidecar."""
    from capture_kernels.fingerprint.vector import Layout
    from pipeline.engines.openai_server.server import serve
    from pipeline.engines.serving.options import ServeOptions

    options = ServeOptions(
        return_attention_tokens=True, layers="auto", sidecar_url=sidecar_url,
        enable_attention_instrumentation=True, instrumentation_layers="all",
        layout=Layout(layout),
    )  # fmt: skip
    with socket.socket(fileno=fd) as listening:
        serve(
            model, options, reasoning_parser="qwen3", device="cpu", served_name=name,
            listening=listening,
        )  # fmt: skip


def sidecar(
    fd: int, options: dict[str, Any], page: dict[str, Any], prompts: list[dict[str, Any]]
) -> None:
    """The sidecar with its page, on a socket that listens already."""
    from sidecar.logs import log_to_stderr
    from sidecar.options import SidecarOptions
    from sidecar.page.config import PROMPTS, PageOptions, Prompt
    from sidecar.server import serve

    log_to_stderr(as_json=False)
    key = page.pop("engine_key_file")
    shown = tuple(Prompt(**one) for one in prompts) or PROMPTS
    with socket.socket(fileno=fd) as listening:
        serve(
            SidecarOptions(
                **{**options, **{name: Path(options[name]) for name in ("db", "discovery_dir")}}
            ),
            PageOptions(
                **{**page, "notes": tuple(page["notes"])}, prompts=shown,
                engine_key_file=Path(key) if key else None,
            ),
            listening,
        )  # fmt: skip


def job(db: str, output: str, sample: str, tokenizer: str) -> None:
    """Store the sample and find its behaviours; a run that was cut off is finished."""
    from capture_kernels.errors import NewRunNeededError
    from discovery.events.websocket import LiveEvents
    from discovery.execution.stopping import StopRequest, stop_on_signals
    from discovery.job import discover
    from discovery.options import DiscoverOptions
    from discovery.runs.state import survey
    from pipeline.store.open import open_store
    from pipeline.store.transfer import import_file

    with open_store(db, create=True) as store:
        import_file(store.append, Path(sample))
    options = DiscoverOptions(
        db, output, hours=0, engine="cpu", clustering="consensus", tokenizer=tokenizer
    )
    stop = StopRequest()
    # With it the page can pause the run.
    live = LiveEvents(0, stop)
    given: dict[str, Any] = {
        "stop": stop, "listeners": [live], "client_file": live.client_file,
    }  # fmt: skip
    try:
        with stop_on_signals(stop):
            for left in survey(Path(output)):
                # One of another version is left as it is: all is computed again.
                with suppress(NewRunNeededError):
                    if left.state == "unfinished":
                        discover(options, resume=left.run_id, **given)
                        return
            discover(options, **given)
    finally:
        live.close()


KINDS: dict[str, Callable[..., None]] = {"engine": engine, "sidecar": sidecar, "job": job}


def main(arguments: list[str]) -> None:
    end_with_parent(sys.stdin.fileno())
    kind, given = arguments
    try:
        KINDS[kind](**json.loads(given))
    except AttnError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
