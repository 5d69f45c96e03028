"""Batch mode: the recent rows are clustered anew every interval, in a process of its own.

The process is kept, because starting it and compiling UMAP takes longer than a round. It holds
nothing that is needed: if it dies or takes too long, the next round starts another one, and the
clusters of the round before are served until then.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from capture_kernels.arrays import Floats
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import DIMENSIONS
from discovery.artifacts.prototypes import Codebook
from discovery.artifacts.schema import NOISE
from pipeline.child_process import child_environment, how_ended

from .buffer import Recent, RecentRows
from .groups import Group
from .live import GetServed, Known, LiveCluster, Prediction, group_of, hellinger, in_words
from .rounds import Array, Failure, Found, Result, Space, Task, floats, receive, send

LOG = logging.getLogger("attn.sidecar")

# Fewest rows worth clustering, as of a run (--min-rows), and the smallest cluster by default.
LEAST_ROWS, LEAST_CLUSTER = 100, 20
# Clusters of the smallest size that there must be room for.
ROOM = 2
# A round that takes longer, in seconds, is given up with its process.
TIMEOUT = 300.0


class RoundError(Exception):
    """A round that gave no clusters, and why in a line."""


class Answer(NamedTuple):
    """The last round's: codebook, whose labels are cluster ids, None without clusters; usual
    float32[20], the mean of the rows."""

    group: Group | None
    codebook: Codebook | None
    known: list[Known]
    usual: Floats


class Reclusterer:
    """Clusters of the recent rows, a round old at most. Methods may be called from any thread and
    do not wait for a round.

    Args:
        recent: the rows.
        interval: seconds from one round to the next (--recluster-interval).
        min_cluster_size: fewest rows of a cluster; None: 1% of the rows, at least 20.
        served: gives the served run: its PCA space is used if it is of the rows' group.
        engine: as of `attn discover --engine`. timeout: seconds that a round may take.
        wall: seconds since 1970.

    Raises:
        OptionError: an interval or a size that cannot be used, or a buffer without room for it.
    """

    def __init__(
        self,
        recent: RecentRows,
        *,
        interval: float = 60.0,
        min_cluster_size: int | None = None,
        served: GetServed = lambda: None,
        engine: str = "cpu",
        seed: int = 42,
        timeout: float = TIMEOUT,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise OptionError(f"--recluster-interval must be above 0 seconds, got {interval}")
        if min_cluster_size is not None and min_cluster_size < 2:
            raise OptionError(f"--min-cluster-size must be 2 or more, got {min_cluster_size}")
        self._recent, self._interval, self._size = recent, interval, min_cluster_size
        self._served, self._engine, self._seed = served, engine, seed
        self._timeout, self._wall = timeout, wall
        self.needed_rows = max(LEAST_ROWS, ROOM * (min_cluster_size or LEAST_CLUSTER))
        if recent.size < self.needed_rows:
            raise OptionError(
                f"--buffer-size {recent.size} has no room for the {self.needed_rows:,} rows that "
                "re-clustering needs: raise it, or lower --min-cluster-size"
            )
        self._last = Answer(None, None, [], np.zeros(DIMENSIONS, np.float32))
        self._words: tuple[Any, list[LiveCluster]] = (None, [])
        self._next_id = 0
        self._found: Found | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._running = threading.Event()
        self._thread: threading.Thread | None = None
        self._clustered = -1  # version of the rows of the last round
        self._facts: dict[str, Any] = {
            "rounds": 0, "failures": 0, "last_error": None, "finished_at": None, "seconds": None,
            "engine": None, "rows": 0, "noise_share": None,
        }  # fmt: skip

    def start(self) -> None:
        """Begin the rounds; the process starts with the first one."""
        self._thread = threading.Thread(target=self._supervise, name="recluster", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the rounds and the process, at once."""
        self._closed.set()
        self._wake.set()
        child = self._child
        if child is not None:
            child.kill()
        if self._thread is not None:
            self._thread.join(10)
        self._end_child()

    def trigger(self) -> dict[str, Any]:
        """Start a round now: {"started": bool, "reason": why not, or None}."""
        rows = len(self._recent)
        reason = None
        if self._closed.is_set() or self._thread is None:
            reason = "the service is stopping"
        elif self._running.is_set():
            reason = "a round is running"
        elif rows < self.needed_rows:
            reason = self._too_few(rows)
        else:
            self._wake.set()
        return {"started": reason is None, "reason": reason}

    def _too_few(self, rows: int) -> str:
        return f"waiting for rows: {rows:,} of the {self.needed_rows:,} that are needed"

    def _supervise(self) -> None:
        while not self._closed.is_set():
            asked = self._wake.wait(self._interval)
            self._wake.clear()
            if self._closed.is_set():
                break
            # Nothing new: the answer would be the same.
            if asked or self._recent.version != self._clustered:
                self._round()
        self._end_child()

    def _round(self) -> None:
        recent = self._recent.snapshot()
        if len(recent.vectors) < self.needed_rows:
            return
        self._running.set()
        try:
            self._take(recent, self._ask(self._task(recent)))
            self._clustered = recent.version
            self._facts["rounds"] += 1
            self._facts["last_error"] = None
        except RoundError as error:
            self._failed(str(error))
        except Exception as error:
            # A thread that ended would be silent: the clusters would stay what they are.
            LOG.exception("re-clustering failed")
            self._failed(f"an unexpected error ({type(error).__name__}): the log has it")
        finally:
            self._running.clear()

    def _failed(self, reason: str) -> None:
        if not self._closed.is_set():
            self._facts["failures"] += 1
            self._facts["last_error"] = reason

    def _task(self, recent: Recent) -> Task:
        assert recent.group is not None  # it has rows
        served = self._served()
        same = served is not None and group_of(served) == recent.group
        space = Space.of(served.classifier.codebook.projection) if served and same else None
        previous = self._found if self._last.group == recent.group else None
        return Task(
            Array.of(recent.vectors), Array.of(recent.requests), recent.group.layout, self._engine,
            self._seed, self._size, space, previous, self._next_id,
        )  # fmt: skip

    def _ask(self, task: Task) -> Result:
        """Have the process do a round. RoundError: it died, took too long, or could not."""
        connection = self._connection or self._start_child()
        try:
            # For each send and receive; a round is one receive, and then its few bytes.
            connection.settimeout(self._timeout)
            send(connection, task)
            answer = msgspec.msgpack.decode(receive(connection), type=Result | Failure)
        except TimeoutError:
            self._end_child()
            raise RoundError(f"no answer after {self._timeout:g} seconds") from None
        except (OSError, EOFError, msgspec.DecodeError):
            raise RoundError(f"the re-clustering process {self._end_child()}") from None
        if isinstance(answer, Failure):
            raise RoundError(answer.reason)
        return answer

    def _take(self, recent: Recent, found: Result) -> None:
        now, before = self._wall(), self._last
        earlier = {known.cluster_id: known for known in before.known}
        known = []
        rows = zip(found.ids, found.sizes, floats(found.centroids), strict=True)
        for cluster_id, size, centroid in rows:
            old = earlier.get(cluster_id)
            drift = float(hellinger(centroid, old.centroid)) if old else 0.0
            created = old.created_at if old else now
            share = size / len(recent.vectors)
            known.append(Known(cluster_id, centroid, float(size), share, created, now, drift))
        if found.found is not None or before.group != recent.group:
            self._found = found.found
        codebook = found.found.rule.codebook() if found.found else None
        self._next_id = found.next_id
        usual = recent.vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._last = Answer(recent.group, codebook, known, usual)
        self._facts |= {
            "finished_at": now,
            "seconds": round(found.seconds, 3),
            "engine": found.engine,
            "rows": len(recent.vectors),
            "noise_share": round(1 - sum(found.sizes) / len(recent.vectors), 6),
        }

    def _start_child(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "sidecar.clusters.worker", str(theirs.fileno())]
        with theirs:
            try:
                self._child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    env=child_environment(), pass_fds=[theirs.fileno()],
                    # Ctrl+C is for the service, which ends the process when it has stopped.
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise RoundError(f"cannot start a process: {error.strerror}") from None
        self._connection = ours
        if self._closed.is_set():  # `close` may have come too early to see this process
            self._end_child()
            raise RoundError("the service is stopping")
        return ours

    def _end_child(self) -> str:
        """Kill the process, if there is one; how it ended, in words."""
        child, self._child = self._child, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if child is None:
            return "is gone"
        # One that has ended by itself says why; one that hangs is killed.
        try:
            code = child.wait(1.0 if not self._closed.is_set() else 0.0)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        return how_ended(code)

    def clusters(self) -> list[LiveCluster]:
        """The clusters of the last round, largest first."""
        last, served = self._last, self._served()
        key = (last, served)
        made_of, words = self._words
        if made_of is None or made_of[0] is not last or made_of[1] is not served:
            words = in_words(last.known, last.usual, last.group, served) if last.group else []
            self._words = key, words
        return words

    def predict(self, vectors: Floats) -> Prediction:
        """The live cluster of each vector float32[n, 20] of the group, by the nearest prototype;
        distance in PCA space. Rows of noise have cluster -1 and are not within."""
        codebook = self._last.codebook
        if codebook is None:
            return Prediction.none(len(vectors))
        near, beyond = codebook.nearest(vectors)
        cluster = codebook.labels[near.row]
        return Prediction(cluster, near.distance, ~beyond & (cluster != NOISE))

    def status(self) -> dict[str, Any]:
        """The parameters, what the process does, and how the last round ended, for /stats."""
        rows, last = len(self._recent), self._last
        child = self._child
        if self._thread is None or not self._thread.is_alive():
            state = "stopped"
        elif self._running.is_set():
            state = "running"
        else:
            state = "idle" if rows >= self.needed_rows else self._too_few(rows)
        return {
            "mode": "recluster",
            "interval_seconds": self._interval,
            "min_cluster_size": self._size,
            "needed_rows": self.needed_rows,
            "buffered_rows": rows,
            "other_rows": self._recent.other_rows,
            "state": state,
            "process": child.pid if child is not None and child.poll() is None else None,
            "clusters": len(last.known),
            "group": last.group._asdict() if last.group else None,
            **self._facts,
        }
