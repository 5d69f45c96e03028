"""Memberships of rows that are certain of their clusters."""

from __future__ import annotations

import numpy as np

from discovery.artifacts.memberships import Memberships
from discovery.artifacts.schema import NOISE


def certain(label: np.ndarray) -> Memberships:
    """Rows, or voters, int32[...] that are wholly in these clusters, -1 for noise."""
    inside = label != NOISE
    nowhere = np.zeros(label.shape, np.float32)
    return Memberships(label, inside.astype(np.float32), np.full_like(label, NOISE), nowhere)
