"""Runs that several test files look at."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from made_once import made_once, own_copy
from numpy.typing import NDArray
from planted import planted, planted_batch
from shared import NOW, START, AttnCommand

from discovery.artifacts.read import open_artifacts
from pipeline.store.open import open_store

RUN_ID = f"{NOW:%Y-%m-%dT%H-%M-%S}"
# What makes a run of the planted rows the same wherever and whenever it is run.
ALL_NOW = ("--hours", "0", "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}")
ROWS = 4_000
ROWS_PER_REQUEST = 100


class Published(NamedTuple):
    """A store of planted rows, their true behaviours, and what `attn discover` made of them."""

    db: Path
    output: Path
    vectors: NDArray[np.float32]
    truth: NDArray[np.int64]
    stdout: str
    stderr: str

    @property
    def folder(self) -> Path:
        return self.output / RUN_ID


def published(attn: AttnCommand, folders: pytest.TempPathFactory) -> Published:
    """An ordinary run of 4,000 planted rows."""
    return _published(attn, folders, ())


def published_again(attn: AttnCommand, folders: pytest.TempPathFactory) -> Published:
    """The same rows with another seed."""
    return _published(attn, folders, ("--seed", "7"))


def _published(
    attn: AttnCommand, folders: pytest.TempPathFactory, options: tuple[str, ...]
) -> Published:
    vectors, truth = planted(ROWS, 0)
    folder = made_once(
        folders, f"published{''.join(options)}",
        lambda folder: discovered(attn, make_store(folder / "published.db", vectors), *options),
    )  # fmt: skip
    db = own_copy(folders, folder / "published.db")
    return Published(db, folder / "runs", vectors, truth, *said_in(folder))


def discovered(attn: AttnCommand, db: Path, *options: str) -> None:
    """Run the job on a store; what it says is kept beside that."""
    done = attn("discover", "--db", db, "--output", db.parent / "runs", *ALL_NOW, *options)
    assert done.returncode == 0, done.stderr
    (db.parent / "stdout").write_text(done.stdout)
    (db.parent / "stderr").write_text(done.stderr)


def said_in(folder: Path) -> tuple[str, str]:
    return (folder / "stdout").read_text(), (folder / "stderr").read_text()


def make_store(path: Path, vectors: NDArray[np.float32], **options) -> Path:
    """Add the vectors to the store at `path`, made where there is none."""
    with open_store(path, create=True) as store:
        added = store.append(
            planted_batch(vectors, START, rows_per_request=ROWS_PER_REQUEST, **options)
        )
    assert added.inserted == len(vectors)
    return path


class Mixed(NamedTuple):
    """A store of several models, captures and layouts, and a run of the commonest of them."""

    db: Path
    output: Path
    stdout: str
    stderr: str

    @property
    def folder(self) -> Path:
        return self.output / RUN_ID


# Rows by (model, layout, capture_id), commonest first.
GROUPS = {
    ("common", 1, "a"): 501,
    ("common", 2, "c"): 300,
    ("common", 1, "b"): 203,
    ("other", 1, "a"): 121,
}


def mixed(attn: AttnCommand, folders: pytest.TempPathFactory) -> Mixed:
    """A run of a store with fingerprints that cannot be compared with one another."""
    folder = made_once(
        folders, "mixed", lambda folder: discovered(attn, mixed_store(folder / "mixed.db"))
    )
    db = own_copy(folders, folder / "mixed.db")
    return Mixed(db, folder / "runs", *said_in(folder))


def mixed_store(db: Path) -> Path:
    with open_store(db, create=True) as store:
        for (model, layout, capture_id), rows in GROUPS.items():
            vectors = planted(rows, rows)[0] if layout == 1 else layered(rows, rows)
            prefix = f"{model}{layout}{capture_id}"
            batch = planted_batch(vectors, START, prefix, model=model, capture_id=capture_id)
            layouts = pa.array([layout] * rows, pa.uint8())
            store.append(
                batch.set_column(batch.schema.get_field_index("layout"), "layout", layouts)
            )
    return db


def layered(rows: int, seed: int) -> NDArray[np.float32]:
    """Layered fingerprints of three behaviours: float32[rows, 20]."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, rows)
    bands = rng.dirichlet([30, 8, 2], rows)
    bands = np.take_along_axis(bands, (np.arange(3) + kind[:, None]) % 3, axis=1)
    profiles = np.array([[40, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 20, 20, 1, 1, 1], [1] * 7 + [40]])
    places = np.array([rng.dirichlet(profiles[k]) for k in kind])
    depths = np.clip(0.2 + 0.25 * kind[:, None] + 0.03 * rng.normal(size=(rows, 8)), 0, 1)
    return np.column_stack([bands, depths.mean(axis=1), places, depths]).astype(np.float32)


def labels_by_row(folder: Path, rows: int) -> NDArray[np.int32]:
    """The run's cluster ids in the order in which the rows were planted: int32[rows]."""
    embedding = open_artifacts(folder).table("embedding")
    assert embedding.num_rows == rows
    requests = [int(name.rsplit("-", 1)[1]) for name in embedding["request_id"].to_pylist()]
    row = np.array(requests) * ROWS_PER_REQUEST + embedding["position"].to_numpy()
    assert sorted(row) == list(range(rows))
    labels = np.empty(rows, np.int32)
    labels[row] = embedding["cluster_id"].to_numpy()
    return labels
