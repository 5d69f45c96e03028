"""Runs made to be compared: with other options, of other rows, and how much they agree."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from discovery.artifacts.schema import NOISE
from discovery.job import discover
from discovery.options import DiscoverOptions
from pipeline.store.open import open_store

from .runs import Run, read_rows, same_rows


def trial(rows: pa.Table, *, folder: str | Path | None = None, **options: Any) -> Run:
    """A run of some rows, which is served nowhere.

    Args:
        rows: in the record's schema.
        folder: where it is kept; by default a new temporary one.
        options: of `DiscoverOptions`, such as seed, min_cluster_size, umap_sample_size.

    Raises:
        AttnError: as of `discovery.job.discover`.
    """
    kept = Path(folder or tempfile.mkdtemp(prefix="attn-trial-"))
    kept.mkdir(parents=True, exist_ok=True)
    with open_store(kept / "trial.db", create=True) as store:
        store.append(rows)
    output = kept / "runs"
    given = {"hours": 0, "no_gate": True, "new_lineage": True, **options}
    manifest = discover(DiscoverOptions(str(kept / "trial.db"), str(output), **given))
    return Run(output / manifest["run_id"])


def agreement(first: Run, second: Run) -> float:
    """The adjusted Rand index of two runs' clusters on the rows that both have; noise is one more
    cluster. 1: the same clusters; 0: no more in common than by chance."""
    from sklearn.metrics import adjusted_rand_score

    joined = same_rows(first.map(gpu=False), second.map(gpu=False))
    return float(adjusted_rand_score(joined["cluster_id_a"], joined["cluster_id_b"]))


def transfer(first: Run, second: Run, rows: pa.Table) -> float:
    """The adjusted Rand index of the second run's clusters and those that the first run's
    classifier gives its rows, of those that both put into a cluster.

    Args:
        rows: of the second run, in the record's schema.
    """
    from sklearn.metrics import adjusted_rand_score

    known = read_rows(rows)
    vectors = known[list(first.layout.columns)].to_numpy(np.float32)
    known["cluster_id"] = first.classifier.classify(vectors).cluster_id
    joined = same_rows(known, second.map(gpu=False))
    both = (joined["cluster_id_a"] != NOISE) & (joined["cluster_id_b"] != NOISE)
    return float(adjusted_rand_score(joined["cluster_id_a"][both], joined["cluster_id_b"][both]))


def explained(points: ArrayLike, groups: ArrayLike) -> float:
    """The share of the variance of points that the means of their groups hold (eta squared).

    Args:
        points: float[n, d]; groups: the group of each of the n.
    """
    values = np.asarray(points, float)
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), values.shape[1]))
    np.add.at(sums, index, values)
    between = (np.square(sums / counts[:, None] - values.mean(0)).sum(1) * counts).sum()
    whole = np.square(values - values.mean(0)).sum()
    return float(between / whole) if whole else 0.0
