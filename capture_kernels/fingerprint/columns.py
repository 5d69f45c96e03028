"""Fingerprint vectors from the statistics columns of the captured layers, on the host.

The mathematics is that of `ring.append`, which does the same on a device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Floats, Mask

from .vector import DEPTHS, HIST_BINS, LOG16_BAND_BINS, PLACE_BINS, Layout, at_depths

PLACES, NEAR, SINK_MASS, ENTROPY, VISIBLE = HIST_BINS, 24, 26, 27, 28


class Described(NamedTuple):
    """Fingerprints of R rows: a row that is not `valid` sees no key, and is zero."""

    vector: Floats  # float32[R, 20]
    sink_mass: Floats  # float32[R]
    valid: Mask  # bool[R]


def vectors_of_columns(columns: Floats, layout: Layout = Layout.LOG16) -> Described:
    """The fingerprints of R rows from their statistics in L captured layers, shallowest first.

    Args:
        columns: float32[L, R, 32], means over the heads, as `decode.answers` has them.
    """
    # Not `!= 0`, which a NaN would pass.
    valid: Mask = np.all(columns[:, :, VISIBLE] > 0.5, axis=0)
    mean = columns.mean(axis=0, dtype=np.float64)
    entropy = mean[:, ENTROPY, None]
    if layout is Layout.LOG16:
        hist = mean[:, :HIST_BINS]
        bands = np.add.reduceat(hist, LOG16_BAND_BINS[:-1], axis=1)
        parts = [bands, entropy, hist]
    else:
        near = mean[:, NEAR : NEAR + 2]
        far = np.maximum(1.0 - near.sum(axis=1, keepdims=True), 0.0)
        places = mean[:, PLACES : PLACES + PLACE_BINS]
        # Linear in the entropies: its matrix is what it makes of the unit vectors.
        weights = np.stack([at_depths(unit) for unit in np.eye(len(columns))])
        depths = columns[:, :, ENTROPY].T.astype(np.float64) @ weights.reshape(-1, DEPTHS)
        parts = [near, far, entropy, places, depths]
    vector = np.where(valid[:, None], np.concatenate(parts, axis=1), 0.0).astype(np.float32)
    sink_mass = np.where(valid, mean[:, SINK_MASS], 0.0).astype(np.float32)
    return Described(vector, sink_mass, valid)
