"""Verified reading of a published run (DESIGN.md section 6).

A file is read once: its hash is taken of the bytes that are then parsed. Parquet and JSON only, so
that loading an artifact never runs code. Only regular files of the run's folder are opened: no
links, and no devices or pipes, whose reading may never end.
"""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.errors import ArtifactError, OptionError
from capture_kernels.fingerprint.zones import ZoneRules
from pipeline.durable import facts_of

from .schema import MANIFEST, REQUIRED_FILES, SCHEMA_VERSION, Manifest, ManifestFields

# A manifest is some 50 KB. A larger file is not read at all.
MOST_MANIFEST_BYTES = 1 << 26
AGAIN = ": run attn discover again"


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
        published = self.manifest["files"].get(path.name, {})
        if bytes_of(path) != published.get("bytes"):
            raise damaged(path, "its size differs")
        try:
            with pa.OSFile(str(path)) as file:
                content = file.read_buffer()
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None
        if hashlib.sha256(content).hexdigest() != published["sha256"]:
            raise damaged(path, "its hash differs")
        try:
            return pq.read_table(pa.BufferReader(content), columns=columns)
        except pa.ArrowException as error:
            raise damaged(path, str(error).partition("\n")[0]) from None

    def verify(self) -> None:
        """Check the hash of every file.

        Raises:
            ArtifactError: a file is missing or is not what was published.
        """
        files = self.manifest["files"]
        paths = [self.folder / name for name in files]
        for path in paths:
            if bytes_of(path) != files[path.name]["bytes"]:
                raise damaged(path, "its size differs")
        try:
            for path, found in zip(paths, facts_of(paths), strict=True):
                if found != files[path.name]:
                    raise damaged(path, "its hash differs")
        except OSError as error:
            raise ArtifactError(f"cannot read {error.filename}: {error.strerror}") from None


def bytes_of(path: Path) -> int:
    """The size of a regular file.

    Raises:
        ArtifactError: it is missing, or it is a link, a folder, a device or a pipe.
    """
    try:
        facts = path.lstat()
    except OSError:
        raise ArtifactError(f"{path} is missing{AGAIN}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise damaged(path, "it is not a regular file")
    return facts.st_size


def damaged(path: Path, why: str) -> ArtifactError:
    return ArtifactError(f"{path} is damaged ({why}){AGAIN}")


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
        if path.exists() and bytes_of(path) > MOST_MANIFEST_BYTES:
            raise damaged(path, "it is too large")
        manifest = msgspec.json.decode(path.read_bytes())
    except OSError:
        raise ArtifactError(
            f"{folder} holds no finished run (no {MANIFEST}): run attn discover first"
        ) from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    found = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if found != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} has schema version {found}, this version reads {SCHEMA_VERSION}: upgrade attn"
        )
    try:
        fields = msgspec.convert(manifest, ManifestFields)
        ZoneRules(**fields["zone_rules"])
    except (msgspec.ValidationError, OptionError, TypeError) as error:
        raise damaged(path, str(error)) from None
    if absent := {*REQUIRED_FILES} - fields["files"].keys():
        raise damaged(path, f"it does not list {min(absent)}")
    return dict(manifest)
