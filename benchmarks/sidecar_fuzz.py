"""Whether a sidecar answers or counts every one of 100,000 mutated messages.

    python benchmarks/sidecar_fuzz.py [--messages 100000] [--seed N] [--json PATH]

A sidecar serves the run of tests/golden. Half of the messages are Arrow over ZMQ, the others Arrow
and JSON to /fingerprints, /fingerprint and /classify: bits flipped, stretches cut out or put in,
numbers replaced. Exits 1 unless

- every request is answered with 200, 202, 400 or 413 and at most one line of reason;
- every row is stored, a duplicate or invalid, and every message that is none is counted, as this
  process reads the same bytes;
- the process lives, says no traceback and ends with exit code 0, and its store is whole.

Prints its seed. There is no peer: nothing else promises this.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from discovery.artifacts.read import open_artifacts
from discovery.runs.folder import move_latest
from pipeline.store.open import open_store
from tests.planted import planted, planted_batch
from tests.shared import START
from tests.sidecar.message_fuzz import Fuzzer

GOLDEN = common.REPO / "tests" / "golden" / "run_v1"
# Messages between two looks at the counts.
STEP = 5_000
PATIENCE_S = 60.0


def start(folder: Path) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """A sidecar in a folder, and the addresses that it announces."""
    output = folder / "runs"
    artifacts = open_artifacts(GOLDEN)
    shutil.copytree(GOLDEN, output / artifacts.run_id)
    move_latest(output, artifacts.run_id)
    command = [
        sys.executable, str(common.REPO / "cli.py"), "sidecar", "--port", "0",
        "--db", str(folder / "rows.db"), "--discovery-dir", str(output),
        "--zmq-bind", "tcp://127.0.0.1:*",
    ]  # fmt: skip
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while "\nstore " not in (said := (folder / "stderr").read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise WrongAnswerError(f"no sidecar came up: {said}")
        time.sleep(0.05)
    marks = {"http": "serving on ", "zmq": "receiving fingerprints at "}
    return process, {name: said.partition(mark)[2].split()[0] for name, mark in marks.items()}


def fuzz(messages: int, seed: int, folder: Path) -> dict[str, object]:
    """The figures. WrongAnswerError: something is not as it must be."""
    process, addresses = start(folder)
    host, _, port = addresses["http"].removeprefix("http://").partition(":")
    batch = planted_batch(
        planted(10, 0)[0], START, model="examples/demo_model", capture_id="0ee5e517b008"
    )
    memory = psutil.Process(process.pid)
    try:
        fuzzer = Fuzzer((host, int(port)), addresses["zmq"], batch, seed)
        began, resident = time.monotonic(), []
        for sent in range(0, messages, STEP):
            fuzzer.send(min(STEP, messages - sent), first=sent)
            stats = fuzzer.check()
            resident.append(memory.memory_info().rss / 2**20)
        seconds = time.monotonic() - began
        fuzzer.close()
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
    except (AssertionError, OSError) as error:
        raise WrongAnswerError(f"{error}\n{(folder / 'stderr').read_text()[-4_000:]}") from error
    finally:
        process.kill()
    said = (folder / "stderr").read_text()
    if code or "Traceback" in said:
        raise WrongAnswerError(f"exit code {code}:\n{said[-4_000:]}")
    with open_store(folder / "rows.db") as store:
        rows, whole = store.counts().rows, store.verify()
    counts = stats["fingerprints"]
    if rows != counts["stored"] or not whole.is_good:
        raise WrongAnswerError(f"{rows} rows in the store, {counts['stored']} counted; {whole}")
    return {
        "seed": seed,
        "messages": messages,
        "malformed": stats["stream"]["malformed"],
        "fingerprints": {name: counts[name] for name in ("received", "stored", "duplicate",
                                                         "invalid")},
        "seconds": round(seconds, 1),
        "resident_mib": {"first": round(resident[0], 1), "last": round(resident[-1], 1)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(options.messages, options.seed, Path(folder))
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
