"""A run that nothing stopped, which every way of stopping one is compared with."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

from processes import AttnProcess
from shared import NOW

from discovery.artifacts.read import open_artifacts

OPTIONS = ["--hours", "0", "--batch-size", "256", "--umap-sample-size", "700", "--seed", "7"]
RUN_ID = "2026-01-10T04-02-11"

AT_NOW = ("--now", f"{NOW:%Y-%m-%dT%H:%M:%S}")


def killed_at(point: str, *arguments: str) -> None:
    """Run the command until the event `kind:stage:done`, where it dies by SIGKILL."""
    done = AttnProcess(*arguments, kill_at=point).finish()
    assert done.returncode == -signal.SIGKILL, (point, done.returncode, done.stderr)


def fingerprint_of(folder: Path) -> dict[str, object]:
    """Everything a run published: file hashes, and the manifest less the time each stage took."""
    open_artifacts(folder).verify()
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.parquet"))
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["stage_seconds"]
    return {"files": files, "manifest": manifest}
