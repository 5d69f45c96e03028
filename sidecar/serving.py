"""The run that is served: loaded, verified, warmed up, and swapped while requests are answered."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from capture_kernels.errors import ArtifactError
from capture_kernels.fingerprint.vector import DIMENSIONS, broken_invariants
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import Artifacts, open_artifacts
from discovery.artifacts.schema import MANIFEST, Manifest
from discovery.runs.folder import latest_id

from .repeating import Repeating
from .traits import SamplingHint, sampling_hint

LOG = logging.getLogger("attn.sidecar")

Reload = Literal["loaded", "unchanged", "refused"]

# Seconds between two looks at `latest`, which cost a system call each. Unlike events of the file
# system they also work on a network's.
LOOK_EVERY_S = 1.0
# Rows that a new classifier answers before it is served: what it allocates once is there then.
WARM_ROWS = 256


@dataclass(frozen=True)
class ServedRun:
    """One published run, as it is served. Nothing of it changes, and nothing is read later.

    Args:
        classifier: of the run.
        clusters: the rows of clusters.parquet.
        sampling_hints: by cluster id.
        loaded_at: when it was loaded, UTC.
    """

    classifier: Classifier
    manifest: Manifest
    clusters: list[dict[str, Any]]
    sampling_hints: dict[int, SamplingHint]
    artifacts: Artifacts
    loaded_at: datetime

    @property
    def run_id(self) -> str:
        return self.classifier.run_id

    @property
    def folder(self) -> Path:
        return self.artifacts.folder

    def hint(self, cluster_id: int, zone: str) -> SamplingHint:
        """The sampling hint of a row: of its cluster, or without one of its zone."""
        return self.sampling_hints.get(cluster_id) or sampling_hint(zone)

    @property
    def model(self) -> str:
        return str(self.manifest["model"])


@dataclass(frozen=True)
class Refused:
    """A run that could not be loaded, and why."""

    run_id: str | None
    reason: str
    at: datetime


def load_run(output: Path) -> ServedRun:
    """The latest run of an output folder, with every file verified and a few rows classified.

    Raises:
        ArtifactError: there is none, or a file of it is missing, damaged or not of its layout.
    """
    folder = output
    try:
        artifacts = open_artifacts(output)
        folder = artifacts.folder
        artifacts.verify()
        return _loaded(artifacts)
    except ArtifactError:
        raise
    except Exception as error:
        # Whatever it holds (right hashes and the tables of something else, links that lead
        # nowhere), the run that is served goes on.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ArtifactError(
            f"{folder} cannot be used ({reason}): run attn discover again"
        ) from error


def _loaded(artifacts: Artifacts) -> ServedRun:
    classifier = Classifier(artifacts)
    clusters = artifacts.table("clusters").to_pylist()
    hints = {one["cluster_id"]: sampling_hint(one["zone"], one["traits"]) for one in clusters}
    # The manifest names the layout, and no hash covers the manifest. Means of fingerprints keep the
    # sums that fingerprints have.
    centroids = np.array([one["centroid"] for one in clusters], np.float32).reshape(-1, DIMENSIONS)
    layouts = np.full(len(centroids), classifier.layout)
    for reason, hit in broken_invariants(centroids, layouts).items():
        if hit.any():
            raise ArtifactError(
                f"{artifacts.folder} is not of layout {classifier.layout.label} as its manifest "
                f"says ({reason} in a centroid): run attn discover again"
            )
    warm = np.resize(centroids, (WARM_ROWS, DIMENSIONS)) if len(centroids) else np.eye(DIMENSIONS)
    classifier.classify(warm)
    classifier.classify(warm[0])
    return ServedRun(classifier, artifacts.manifest, clusters, hints, artifacts, datetime.now(UTC))


class Serving:
    """Holds the served run and follows `latest`.

    Requests read `current` once and use what they got: a swap is one assignment, so that none of
    them fails, waits, or sees two runs.

    Args:
        output: the output folder of `attn discover`; it need not exist yet.
        on_change: called with the new run after a swap, in the thread that loaded it.
        on_reload: called with the outcome of every reload.
    """

    def __init__(
        self,
        output: Path,
        on_change: Callable[[ServedRun], None],
        on_reload: Callable[[Reload], None] = lambda outcome: None,
    ) -> None:
        self.output = output
        self.current: ServedRun | None = None
        self.refused: Refused | None = None
        self.reloads: dict[Reload, int] = {"loaded": 0, "unchanged": 0, "refused": 0}
        self._on_change, self._on_reload = on_change, on_reload
        self._loaded: Any = None  # what `_identity` was when the current run was loaded
        self._seen: Any = None
        self._lock = threading.Lock()
        self._every_s = math.inf
        self._reloaded_at = time.monotonic()
        self._repeating = Repeating("reload", self._look, LOOK_EVERY_S, rest=0.0)

    def reload(self) -> Reload:
        """Load what `latest` names if it is not what is served: "loaded", "unchanged" or "refused".

        A run that cannot be loaded changes nothing but `refused`. Blocks while it reads: never call
        it in the event loop.
        """
        with self._lock:
            identity = self._seen = self._identity()
            self._reloaded_at = time.monotonic()
            if self.current and identity == self._loaded:
                self.refused = None
                return self._count("unchanged")
            try:
                run = load_run(self.output)
            except ArtifactError as error:
                run_id = identity[0]  # that of now may be another one
                if self.refused is None or self.refused.reason != str(error):
                    LOG.warning("run refused", extra={"run_id": run_id, "reason": str(error)})
                self.refused = Refused(run_id, str(error), datetime.now(UTC))
                return self._count("refused")
            self.current, self._loaded, self.refused = run, identity, None
            LOG.info("serving run", extra={"run_id": run.run_id})
            try:
                self._on_change(run)
            except Exception:
                # It is served all the same, and the next one must be noticed.
                LOG.exception("a new run was not shown to all parts of the service")
            return self._count("loaded")

    def follow(self, every_s: float) -> None:
        """Start a thread that reloads when `latest` changes, and looks at a refused run again
        every `every_s` seconds."""
        self._every_s = every_s
        self._repeating.start()

    def close(self) -> None:
        self._repeating.close()

    @property
    def problem(self) -> str | None:
        """Why nothing, or not what `latest` names, is served; None if all is well."""
        if self.refused:
            return self.refused.reason
        if self.current and not (self.current.folder / MANIFEST).is_file():
            return f"{self.current.folder} was deleted; its run is served from memory"
        return None

    def _look(self) -> None:
        if self._identity() != self._seen or time.monotonic() - self._reloaded_at >= self._every_s:
            self.reload()

    def _identity(self) -> Any:
        """Changes when `latest` names another run, or the run's manifest is another file."""
        run_id = None
        try:
            run_id = latest_id(self.output)
            facts = (self.output / (run_id or "") / MANIFEST).stat()
        except OSError:
            return run_id, None
        return run_id, (facts.st_ino, facts.st_size, facts.st_mtime_ns)

    def _count(self, outcome: Reload) -> Reload:
        self.reloads[outcome] += 1
        self._on_reload(outcome)
        return outcome
