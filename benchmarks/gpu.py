"""What the GPU benchmarks share: device memory while a block runs, and cuML's plain pipeline."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import PLAIN_CLUSTER_SIZE, PLAIN_COMPONENTS, PLAIN_MIN_SAMPLES

LOOK_EVERY_MS = 100
RECIPE_NEIGHBORS = 15


class DeviceWatch:
    """Looks at the memory in use of every GPU while the block runs, every 100 ms, as nvidia-smi
    says it: of all processes, and pools count whole. Sees nothing where that tool is not there."""

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}
        self._tool: subprocess.Popen[str] | None = None

    def __enter__(self) -> DeviceWatch:
        if tool := shutil.which("nvidia-smi"):
            query = ["--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
            self._tool = subprocess.Popen(
                [tool, *query, "-lms", str(LOOK_EVERY_MS)], stdout=subprocess.PIPE, text=True
            )
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._tool:
            self._tool.terminate()
            self._thread.join()
            self._tool.wait()

    @property
    def peak_gb(self) -> list[float]:
        """The most of each GPU."""
        return [mebibytes * 2**20 / 1e9 for _, mebibytes in sorted(self._peaks.items())]

    def _read(self) -> None:
        assert self._tool and self._tool.stdout
        for line in self._tool.stdout:
            number, _, used = line.partition(",")
            # A GPU that does not say, and a last line that was cut off, are no look.
            if line.endswith("\n") and used.strip().isdigit():
                self._peaks[int(number)] = max(self._peaks.get(int(number), 0), int(used))


class Recipe(NamedTuple):
    """What cuML's pipeline gives: labels int32[n], map float32[n, 2], the space float32[n, 16] that
    the map is of, seconds in all and of PCA, UMAP and HDBSCAN."""

    labels: NDArray[np.int32]
    points: NDArray[np.float32]
    space: NDArray[np.float32]
    seconds: float
    step_seconds: dict[str, float]


def cuml_recipe(vectors: NDArray[np.float32], seed: int) -> Recipe:
    """cuML as its documentation shows it: PCA, UMAP and HDBSCAN on device arrays, from the vectors
    float32[n, 20] on the host to labels on the host."""
    import cupy
    from cuml import PCA, UMAP
    from cuml.cluster import HDBSCAN

    marks = [time.perf_counter()]

    def done() -> None:
        cupy.cuda.Device().synchronize()
        marks.append(time.perf_counter())

    space = PCA(n_components=PLAIN_COMPONENTS).fit_transform(cupy.asarray(vectors))
    done()
    points = UMAP(n_neighbors=RECIPE_NEIGHBORS, min_dist=0.0, random_state=seed).fit_transform(
        space
    )
    done()
    model = HDBSCAN(min_samples=PLAIN_MIN_SAMPLES, min_cluster_size=PLAIN_CLUSTER_SIZE).fit(points)
    labels = cupy.asnumpy(model.labels_)
    done()
    steps = dict(zip(("pca", "umap", "hdbscan"), np.diff(marks).tolist(), strict=True))
    return Recipe(
        labels.astype(np.int32), cupy.asnumpy(points), cupy.asnumpy(space),
        marks[-1] - marks[0], steps,
    )  # fmt: skip
