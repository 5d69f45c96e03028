"""A cluster in words: its zone, its traits, and a short label, from its own mean fingerprint."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint import Layout
from capture_kernels.zones import ripple

FOCUSED, DIFFUSE = 0.3, 0.7
# Share of the mass that makes a band a trait of the cluster.
BAND_SHARE = 0.5
RIPPLE_SHARE = 0.6


class Description(NamedTuple):
    label: str
    traits: list[str]


def describe_cluster(
    centroid: NDArray[np.float32], layout: Layout, zone: str, phases: dict[str, float]
) -> Description:
    """Traits and label of a cluster.

    Args:
        centroid: float32[20], the mean of its vectors.
        zone: the zone of most of its rows.
        phases: share of its rows in each phase.
    """
    local, middle, long, entropy = (float(x) for x in centroid[:4])
    traits = []
    if local >= BAND_SHARE:
        traits.append("local_attention")
    if middle >= BAND_SHARE:
        traits.append("retrieval_heavy")
    if long >= BAND_SHARE:
        traits.append("context_aware")
    if not traits:
        traits.append("mixed_range")
    if entropy <= FOCUSED:
        traits.append("focused")
    elif entropy >= DIFFUSE:
        traits.append("diffuse")
    if float(ripple(centroid[None], layout)[0]) >= RIPPLE_SHARE:
        traits.append("periodic")
    phase, share = max(phases.items(), key=lambda item: item[1])
    if share >= 0.9:
        traits.append(f"{phase}_phase")
    reach = typical_distance(centroid) if layout is Layout.LOG16 else ""
    return Description(f"{zone}{reach}, entropy {entropy:.2f}", traits)


def typical_distance(centroid: NDArray[np.float32]) -> str:
    """The histogram bin with the most mass, as a range of distances in tokens."""
    bin_index = int(np.argmax(centroid[4:20]))
    low = 0 if bin_index == 0 else 2**bin_index
    high = "" if bin_index == 15 else f"{2 ** (bin_index + 1) - 1}"
    return f", {low}-{high} tokens back"
