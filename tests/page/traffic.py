"""Rows that arrive at a sidecar while a page looks on."""

from __future__ import annotations

import datetime as dt
import threading
import time
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from running import Pusher, Sidecar
from served_runs import rows_of

# Rows of one message.
ROWS = 100


class Traffic:
    """Sends planted rows over the stream until it is left, `rate` a second, each request ten rows.

    Args:
        sidecar: that receives them.
        rate: rows a second.
        session: their session id.
    """

    def __init__(self, sidecar: Sidecar, rate: float = 500, session: str = "shop") -> None:
        self._pusher = Pusher(sidecar.stream, f"traffic-{session}")
        self._rate, self._session, self.sent = rate, session, 0
        self._rows = rows_of(ROWS * 40)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(0.02):
            while self.sent < self._rate * (time.monotonic() - began) and not self._stop.is_set():
                self._pusher.send(self._message(self.sent))
                self.sent += ROWS

    def _message(self, number: int) -> pa.RecordBatch:
        batch = self._rows.slice(number % self._rows.num_rows, ROWS)
        names = [f"{self._session}-{number}-{row // 10}" for row in range(ROWS)]
        now = pa.array([dt.datetime.now(dt.UTC)] * ROWS, pa.timestamp("us", tz="UTC"))
        values: dict[str, Any] = {
            "request_id": pa.array(names),
            "session_id": pa.array([self._session] * ROWS),
            "captured_at": now,
        }
        for name, column in values.items():
            at = batch.schema.get_field_index(name)
            batch = batch.set_column(at, batch.schema.field(name), column)
        return batch

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._stop.set()
        self._thread.join(30)
        self._pusher.close()
