"""Logs of the service on stderr: a line each, or JSON for a collector."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from .times import iso_time

# What every record of `logging` has: all else was given as `extra`.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a message was given as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class Line(logging.Formatter):
    """`2026-01-10T04:02:11Z WARNING message name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        facts = "".join(f" {name}={value!r}" for name, value in facts_of(record).items())
        line = f"{at} {record.levelname} {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLine(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at": iso_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def log_to_stderr(*, as_json: bool) -> None:
    """Log the service's own messages from INFO, and all others from WARNING."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLine() if as_json else Line())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("attn").setLevel(logging.INFO)
