"""The answering process is small: it loads nothing that trains a map."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from served_runs import vectors_of
from shared import REPO, without_pandas

HEAVY = {
    "dask", "distributed", "fast_hdbscan", "hdbscan", "numba", "pandas", "rich", "scipy", "sklearn",
    "torch", "triton", "umap", "cupy", "cuml",
}  # fmt: skip

# The whole of it in one process: a service that took rows, classified, stored and answered.
PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from sidecar.http.app import create_app
from sidecar.http.live import Broadcast
from sidecar.options import SidecarOptions
import sidecar.server
from sidecar.service import Service

folder, runs, vector = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
service = Service(SidecarOptions(
    port=0, db=folder / "rows.db", discovery_dir=runs, zmq_bind="tcp://127.0.0.1:*",
    hints_bind="tcp://127.0.0.1:*",
))
app = create_app(service, Broadcast())


async def request(method, path, body=b""):
    sent = []

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"",
             "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 1), "root_path": "",
             "client": ("127.0.0.1", 2), "raw_path": path.encode(), "state": {}}
    scope["headers"] = [(b"host", b"127.0.0.1")]
    await app(scope, receive, send)
    return sent[0]["status"]


async def main():
    row = {"request_id": "a", "position": 1, "vector": vector}
    return [
        await request("POST", "/classify", json.dumps(row).encode()),
        await request("POST", "/fingerprint", json.dumps(row).encode()),
        await request("POST", "/fingerprints", json.dumps([row, row]).encode()),
        await request("GET", "/stats"),
        await request("GET", "/ready"),
        await request("POST", "/discovery/reload"),
        await request("POST", "/storage/flush"),
        await request("GET", "/openapi.json"),
    ]


statuses = asyncio.run(main())
assert service.drain()
print(json.dumps({"statuses": statuses, "modules": sorted(sys.modules)}))
"""


def test_a_service_that_answered_has_loaded_no_library_of_the_job(runs, tmp_path):
    (vector,) = vectors_of(1).tolist()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, runs, json.dumps(vector)],
        capture_output=True, text=True, timeout=120, cwd=REPO, check=False,
        env=without_pandas(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["statuses"] == [200, 202, 202, 200, 200, 200, 200, 200]
    assert HEAVY & {name.partition(".")[0] for name in found["modules"]} == set()
    # FastAPI imports the API of OpenTelemetry where it is installed; what sends spans is an option.
    assert not any(name.startswith("opentelemetry.sdk") for name in found["modules"])
    assert {"uvicorn", "zmq", "pyarrow"} <= set(found["modules"])


def test_the_command_has_loaded_none_either(runs, tmp_path):
    """As `attn sidecar` is started, with the imports of cli.py: other commands print with rich."""
    program = (
        "import sys, cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "finally:\n    print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    command = [sys.executable, "-c", program, "sidecar", "--port", "0", "--discovery-dir", runs,
               "--zmq-bind", "tcp://127.0.0.1:*", "--db", tmp_path / "rows.db"]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO,
        env=without_pandas(tmp_path),
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            while "serving on" not in (line := process.stderr.readline()):
                assert line, "it ended before it served"
            process.send_signal(signal.SIGTERM)
            modules, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert (HEAVY - {"rich"}) & set(modules.split()) == set()
    assert "uvicorn" in modules
