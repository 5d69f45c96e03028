"""The demo model behind the attention API, and a sidecar that serves a run of the sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.errors import OptionError
from discovery.job import discover
from discovery.notebook.data import sample_rows
from discovery.options import DiscoverOptions
from discovery.runs.state import survey
from pipeline.examples.files import demo_model
from pipeline.store.open import open_store
from sidecar.client.answers import Manifold
from sidecar.notebook.local import LocalEngine, LocalSidecar

from .answers import Answer, read_answer

# Rows of one call to /classify.
_BATCH = 4096


def make_run(folder: Path, requests_per_task: int | None = None) -> Path:
    """The output folder of a discovery run of the shipped sample, made if it is not there.

    Args:
        folder: holds the store and the runs of the recipes.
        requests_per_task: of the sample, the first ones; None for all, which are 28.

    Raises:
        OptionError: the sample is not installed, or the folder cannot be made.
        AttnError: as of `discovery.job.discover`.
    """
    store, runs = folder / "fingerprints.db", folder / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot make {folder}: {error.strerror}") from None
    if not any(run.served for run in survey(runs)):
        print(f"{runs}: one run of the shipped sample, once", flush=True)
        with open_store(store, create=True) as opened:
            opened.append(sample_rows(requests_per_task))
        discover(
            DiscoverOptions(
                str(store), str(runs), hours=0, late_hours=0, tokenizer=str(demo_model())
            )
        )
    return runs


@dataclass(frozen=True)
class Services:
    """A running engine and the sidecar that gets its fingerprints."""

    engine: LocalEngine
    sidecar: LocalSidecar

    def ask(self, prompt: str, *, max_tokens: int, scores: bool = False, **fields: Any) -> Answer:
        """A prompt's greedy answer with a fingerprint for each token of it.

        Args:
            prompt: a text that the model goes on with.
            max_tokens: of the answer at most.
            scores: also the full scores of all rows, heads and layers (`attn_capture`).
            fields: of the request (docs/guide.md), as `stop`, `temperature` and `seed`.

        Full scores take 64 bytes a pair of tokens: `Answer.light` lets go of them.

        Raises:
            LocalError: the engine refuses the request.
        """
        if scores:
            fields = {"attn_capture": 1, "attn_capture_layers": "all", **fields}
        # Raw entries and sketches are read from `Answer.response`.
        fingerprints = not fields.get("attention_sketch_mode") and "top_k_attention" not in fields
        asked = {"attention_fingerprint_mode": fingerprints, "max_tokens": max_tokens, **fields}
        return read_answer(prompt, self.engine.ask(prompt, **asked))

    def classified(self, vectors: NDArray[np.float32]) -> list[Manifold]:
        """How the sidecar's run names fingerprints float32[n, 20]: zone, and cluster (-1: none)."""
        found: list[Manifold] = []
        for start in range(0, len(vectors), _BATCH):
            batch = [
                row.tolist() for row in np.asarray(vectors, np.float64)[start : start + _BATCH]
            ]
            for result in self.sidecar.client.classify(batch).results:
                if result.manifold is None:
                    raise OptionError(f"the sidecar refuses a fingerprint: {result.error}")
                found.append(result.manifold)
        return found


@contextmanager
def open_services(folder: Path, asked: str = "asked.db") -> Iterator[Services]:
    """Start both as processes of this one; they end with it.

    Args:
        folder: of `make_run`, which is called.
        asked: the store in it that the sidecar puts the fingerprints of answers into.
    """
    runs = make_run(folder)
    with LocalSidecar(folder / asked, runs) as sidecar, LocalEngine(sidecar) as engine:
        yield Services(engine, sidecar)
