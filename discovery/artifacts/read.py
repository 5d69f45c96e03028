"""Verified reading of a published run (DESIGN.md section 6).

A file is read once: its hash is taken of the bytes that are then parsed. Parquet and JSON only, so
that loading an artifact never runs code.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.errors import ArtifactError
from pipeline.durable import facts_of

from .schema import MANIFEST, MANIFEST_KEYS, REQUIRED_FILES, SCHEMA_VERSION, Manifest


@dataclass(frozen=True)
class Artifacts:
    """A run folder with its manifest. Tables are read, and verified, when asked for."""

    folder: Path
    manifest: Manifest

    @property
    def run_id(self) -> str:
        return str(self.manifest["run_id"])

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """A Parquet artifact by name, for example "clusters", or some of its columns.

        Raises:
            ArtifactError: the file is missing or is not what was published.
        """
        path = self.folder / f"{name}.parquet"
        try:
            with pa.OSFile(str(path)) as file:
                content = file.read_buffer()
        except FileNotFoundError:
            raise missing(path) from None
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None
        found = {"bytes": content.size, "sha256": hashlib.sha256(content).hexdigest()}
        if found != self.manifest["files"].get(path.name):
            raise damaged(path)
        return pq.read_table(pa.BufferReader(content), columns=columns)

    def verify(self) -> None:
        """Check the hash of every file.

        Raises:
            ArtifactError: a file is missing or is not what was published.
        """
        files = self.manifest["files"]
        paths = [self.folder / name for name in files]
        for path, found in zip(paths, facts_of(paths), strict=True):
            if found != files[path.name]:
                raise damaged(path) if found else missing(path)


def missing(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is missing: run attn discover again")


def damaged(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is damaged (its hash differs): run attn discover again")


def open_artifacts(folder: Path) -> Artifacts:
    """Open a run folder, or an output folder by its `latest`. Only the manifest is read.

    Raises:
        ArtifactError: no finished run there, or one of another schema version.
    """
    if not (folder / MANIFEST).exists() and (folder / "latest").is_symlink():
        folder = folder / "latest"
    folder = folder.resolve()
    return Artifacts(folder, read_manifest(folder))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder.

    Raises:
        ArtifactError: there is none, it is damaged, or it is of another schema version.
    """
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
    whole = isinstance(files, dict) and manifest.keys() >= MANIFEST_KEYS
    if not (whole and files.keys() >= {*REQUIRED_FILES} and "gate" in manifest["quality"]):
        raise ArtifactError(f"{path} is damaged: run attn discover again")
    return manifest
