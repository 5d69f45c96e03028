"""Fingerprints placed on the map of any run, as its classifier would have placed them live."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from capture_kernels.errors import ArtifactError, RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import Artifacts
from discovery.artifacts.schema import SCHEMA_VERSION

from ..errors import Json, documented
from ..reads import FILES
from .runs import RUN_ERRORS, RunId, open_run

MOST_VECTORS = 1_000
# Classifiers that are kept: at most 1,024 prototypes each.
MOST_KEPT = 16

router = APIRouter(prefix="/discovery/runs", tags=["discovery"])


class Classifiers:
    """Classifiers of runs that were asked for lately. Safe to call from several threads."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[str, Classifier] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, artifacts: Artifacts) -> Classifier:
        """The classifier of a run. ArtifactError: a file of it is missing or damaged."""
        files = artifacts.manifest["files"]
        key = f"{artifacts.folder}:{files['landmarks.parquet']['sha256']}"
        with self._lock:
            found = self._kept.pop(key, None) or Classifier(artifacts)
            self._kept[key] = found  # the newest last
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found


Number = Annotated[float, Field(allow_inf_nan=False)]
Vector = Annotated[list[Number], Field(min_length=DIMENSIONS, max_length=DIMENSIONS)]


class Vectors(BaseModel):
    vectors: list[Vector] = Field(
        max_length=MOST_VECTORS, description="fingerprints of the run's layout and capture"
    )


class Placed(BaseModel):
    x: float
    y: float
    cluster_id: int
    probability: float
    second_cluster_id: int = Field(description="of a row between two clusters, else -1")
    second_probability: float
    zone: str
    zone_confidence: float


class PlacedOnMap(BaseModel):
    run_id: str
    schema_version: int
    rows: list[Placed]


CLASSIFIERS = Classifiers()


@router.post(
    "/{run_id}/place",
    summary="Fingerprints on the map of a run",
    response_model=PlacedOnMap,
    responses={**RUN_ERRORS, **documented((400, "a vector that no fingerprint is"))},
)
async def place(request: Request, run_id: RunId, given: Vectors) -> Response:
    """Each at its nearest prototype. Whether they are comparable with the run's is not checked."""
    return Json(await FILES(_place, request.app.state.service, run_id, given.vectors))


def _place(service: Any, run_id: str, vectors: list[list[float]]) -> dict[str, Any]:
    artifacts = open_run(service, run_id)
    try:
        found = CLASSIFIERS.get(artifacts).classify(vectors)
    except ArtifactError as error:
        raise HTTPException(410, str(error)) from None
    except RecordError as error:
        raise HTTPException(400, str(error)) from None
    columns = zip(
        found.coordinates.tolist(), found.cluster_id.tolist(), found.probability.tolist(),
        found.second_cluster_id.tolist(), found.second_probability.tolist(),
        found.zone.tolist(), found.zone_confidence.tolist(), strict=True,
    )  # fmt: skip
    return {
        "run_id": artifacts.run_id, "schema_version": SCHEMA_VERSION,
        "rows": [
            {"x": x, "y": y, "cluster_id": cluster, "probability": probability,
             "second_cluster_id": second, "second_probability": share,
             "zone": ZONES[zone], "zone_confidence": confidence}
            for (x, y), cluster, probability, second, share, zone, confidence in columns
        ],
    }  # fmt: skip
