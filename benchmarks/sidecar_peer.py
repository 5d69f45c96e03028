"""The peer of benchmarks/sidecar.py: FastAPI by its defaults, one fingerprint a request, and
hdbscan.approximate_predict for each.

    python benchmarks/sidecar_peer.py FOLDER     # of vectors.npy; prints its port
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import hdbscan
import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sklearn.preprocessing import StandardScaler


class Fingerprint(BaseModel):
    vector: list[float]


def main() -> None:
    vectors = np.load(Path(sys.argv[1]) / "vectors.npy")
    scaler = StandardScaler().fit(vectors)
    clusterer = hdbscan.HDBSCAN(min_cluster_size=20, prediction_data=True).fit(
        scaler.transform(vectors)
    )
    app = FastAPI()

    @app.post("/classify")
    def classify(fingerprint: Fingerprint) -> dict[str, Any]:
        rows = scaler.transform(np.array([fingerprint.vector]))
        label, strength = hdbscan.approximate_predict(clusterer, rows)
        return {"cluster_id": int(label[0]), "confidence": float(strength[0])}

    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])


if __name__ == "__main__":
    main()
