"""Artifacts: what a run publishes, and how a reader makes sure of it (DESIGN.md section 6).

Parquet and JSON only: loading an artifact never runs code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.errors import ArtifactError
from capture_kernels.fingerprint.vector import DIMENSIONS
from pipeline.durable import Facts, facts_of, write_atomically
from pipeline.record import PHASES

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
# Without these a run can neither be shown nor served.
NEEDED = {"run_id", "layout", "capture_id", "model", "counts", "quality", "stages", "zone_rules",
          "parameters", "parent_run"}  # fmt: skip
FILES = tuple(f"{name}.parquet" for name in ("embedding", "clusters", "landmarks", "projection"))

_WORD = pa.dictionary(pa.int32(), pa.string())
EMBEDDING = pa.schema(
    [
        ("request_id", pa.string()),
        ("position", pa.int32()),
        ("layer", pa.int16()),
        ("phase", _WORD),
        ("token_id", pa.int32()),
        ("x", pa.float32()),
        ("y", pa.float32()),
        ("cluster_id", pa.int32()),
        ("probability", pa.float32()),
        ("zone", _WORD),
        ("zone_confidence", pa.float32()),
    ]
)
EXEMPLAR = pa.struct([("request_id", pa.string()), ("position", pa.int32()), ("layer", pa.int16())])
TOKEN = pa.struct(
    [
        ("token_id", pa.int32()),
        ("text", pa.string()),
        ("share", pa.float64()),
        ("lift", pa.float64()),
    ]
)
CLUSTERS = pa.schema(
    [
        ("cluster_id", pa.int32()),
        ("label", pa.string()),
        ("says", pa.string()),
        ("zone", pa.string()),
        ("size", pa.int64()),
        ("share", pa.float64()),
        ("persistence", pa.float64()),
        ("centroid", pa.list_(pa.float32(), DIMENSIONS)),
        ("x", pa.float32()),
        ("y", pa.float32()),
        ("traits", pa.list_(pa.string())),
        ("phases", pa.struct([(phase, pa.float64()) for phase in PHASES])),
        ("tokens", pa.list_(TOKEN)),
        ("exemplars", pa.list_(EXEMPLAR)),
        ("born_in", pa.string()),
        ("parents", pa.list_(pa.int32())),
    ]
)


def landmark_schema(dimensions: int) -> pa.Schema:
    return pa.schema(
        [
            ("projected", pa.list_(pa.float32(), dimensions)),
            ("x", pa.float32()),
            ("y", pa.float32()),
            ("cluster_id", pa.int32()),
            ("probability", pa.float32()),
        ]
    )


def write_parquet(path: Path, rows: pa.Table | pa.RecordBatchReader) -> Facts:
    """Write rows so that they are whole and on disk before they have their name.

    Of a reader only one batch is held at a time; each becomes a row group.

    Returns:
        The `file_facts` of the file.
    """
    # Floats have no words that repeat: a dictionary of them is built only to be thrown away, and
    # page by page.
    repeating = [
        field.name
        for field in rows.schema
        if not pa.types.is_floating(field.type) and not pa.types.is_nested(field.type)
    ]

    def write(file: IO[bytes]) -> None:
        # No statistics or timestamps that differ between two writings of the same rows.
        with pq.ParquetWriter(
            file, rows.schema, compression="zstd", use_dictionary=repeating
        ) as writer:
            for batch in [rows] if isinstance(rows, pa.Table) else rows:
                writer.write(batch)

    return write_atomically(path, write)


@dataclass(frozen=True)
class Artifacts:
    """A verified run folder. Tables are read when asked for."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def run_id(self) -> str:
        return str(self.manifest["run_id"])

    def table(self, name: str) -> pa.Table:
        """A Parquet artifact by name, for example "clusters"."""
        return pq.read_table(self.folder / f"{name}.parquet", memory_map=True)


def load_artifacts(folder: Path) -> Artifacts:
    """Open a run folder, or an output folder by its `latest`, and verify every file's hash.

    Raises:
        ArtifactError: nothing there, another schema version, or a file missing or damaged.
    """
    if not (folder / MANIFEST).exists() and (folder / "latest").is_symlink():
        folder = folder / "latest"
    folder = folder.resolve()
    manifest = read_manifest(folder)
    files = manifest["files"]
    for name, found in zip(files, facts_of([folder / name for name in files]), strict=True):
        if found is None:
            raise ArtifactError(f"{folder / name} is missing: run attn discover again")
        if found != files[name]:
            raise ArtifactError(
                f"{folder / name} is damaged (its hash is another): run attn discover again"
            )
    return Artifacts(folder, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder, of a version this reader knows; the files are not verified."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ArtifactError(
            f"{folder} holds no finished run (no {MANIFEST}): run attn discover first"
        ) from None
    except ValueError:
        raise ArtifactError(f"{path} is damaged: run attn discover again") from None
    found = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if found != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} has schema version {found}, this version reads {SCHEMA_VERSION}: upgrade attn"
        )
    files = manifest.get("files")
    whole = isinstance(files, dict) and set(manifest) >= NEEDED and set(FILES) <= set(files)
    if not (whole and "gate" in manifest["quality"]):
        raise ArtifactError(f"{path} is damaged: run attn discover again")
    return manifest
