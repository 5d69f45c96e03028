"""The classifier as tables and back: projection.parquet and landmarks.parquet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Doubles, Floats
from capture_kernels.errors import ArtifactError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout

from .memberships import MEMBERSHIP_COLUMNS, Memberships
from .projection import Projection
from .prototypes import Borders, Codebook
from .read import Artifacts
from .schema import landmark_columns


def landmarks_table(codebook: Codebook, coordinates: Floats, members: Memberships) -> pa.Table:
    """landmarks.parquet: one row for each prototype, with its coordinates on the map float32[p, 2]
    and its memberships, whose labels are cluster ids."""
    dimensions = codebook.prototypes.shape[1]
    flat = pa.array(np.ascontiguousarray(codebook.prototypes).reshape(-1))
    projected = pa.FixedSizeListArray.from_arrays(flat, dimensions)
    columns = map(pa.array, (*coordinates.T.copy(), *members))
    return pa.table([projected, *columns], schema=landmark_columns(dimensions))


def projection_table(codebook: Codebook, quantiles: Doubles) -> pa.Table:
    """projection.parquet: one row with the arrays of the projection and the rejection distance.

    Args:
        quantiles: float64[q], of the distances to the nearest prototype.
    """
    projection, borders = codebook.projection, codebook.borders
    empty = np.empty(0)
    rule = borders or Borders(empty.astype(np.int32), empty, empty)
    floats, doubles = pa.list_(pa.float32()), pa.list_(pa.float64())
    return pa.table(
        {
            "transform": pa.array(["power"]),
            "power": pa.array([float(projection.power)]),
            "mean": pa.array([projection.mean.reshape(-1)], floats),
            "scale": pa.array([projection.scale], floats),
            "components": pa.array([projection.components.reshape(-1)], floats),
            "explained": pa.array([projection.explained], doubles),
            "distance_quantiles": pa.array([quantiles], doubles),
            "reach": pa.array([codebook.reach]),
            "noise_factor": pa.array([codebook.noise_factor]),
            "border_clusters": pa.array([rule.labels], pa.list_(pa.int32())),
            "border_weights": pa.array([rule.weights.reshape(-1)], doubles),
            "border_bias": pa.array([rule.bias], doubles),
        }
    )


def read_prototypes(artifacts: Artifacts) -> tuple[Codebook, Floats, Memberships]:
    """The classifier of a run, from its verified files: its codebook, whose labels are cluster ids,
    and of its p prototypes the coordinates on the map float32[p, 2] and the memberships.

    Raises:
        ArtifactError: a file is missing or damaged, or there are no prototypes.
    """
    saved = artifacts.table("projection").to_pylist()[0]
    landmarks = with_second_clusters(artifacts.table("landmarks"))
    if landmarks.num_rows == 0:
        raise ArtifactError(f"{artifacts.folder} has no landmarks: run attn discover again")
    projection = Projection(
        np.array(saved["mean"], np.float32).reshape(-1, DIMENSIONS),
        np.array(saved["scale"], np.float32),
        np.array(saved["components"], np.float32).reshape(DIMENSIONS, -1),
        np.array(saved["explained"], np.float64),
        # Runs of before had square roots, and said so.
        np.array(saved.get("power", 0.5), np.float64),
    )
    flat = landmarks.column("projected").combine_chunks().flatten().to_numpy()
    codebook = Codebook(
        projection,
        Layout.parse(artifacts.manifest["layout"]),
        np.ascontiguousarray(flat.reshape(-1, projection.components.shape[1])),
        landmarks.column("cluster_id").to_numpy(),
        float(saved["noise_factor"]),
        float(saved["reach"]),
        borders_of(saved),
    )
    coordinates = np.column_stack([landmarks.column(axis).to_numpy() for axis in ("x", "y")])
    columns = (landmarks.column(name).to_numpy() for name in MEMBERSHIP_COLUMNS)
    return codebook, coordinates, Memberships(*columns)


def borders_of(saved: dict[str, Any]) -> Borders | None:
    """The borders in a row of projection.parquet; earlier runs have no columns for them."""
    labels = np.array(saved.get("border_clusters", []), np.int32)
    if not len(labels):
        return None
    weights = np.array(saved["border_weights"], np.float64).reshape(-1, len(labels))
    return Borders(labels, weights, np.array(saved["border_bias"], np.float64))


def with_second_clusters(table: pa.Table) -> pa.Table:
    """A table of rows or prototypes as it is published now: earlier runs name no second cluster."""
    none = Memberships.none(table.num_rows)
    for name, values in zip(MEMBERSHIP_COLUMNS, none, strict=True):
        if name not in table.column_names:
            table = table.append_column(name, pa.array(values))
    return table
