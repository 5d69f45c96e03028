"""Profiles: what the rows of each cluster have in common, summed over streamed chunks.

Everything is a sum, so chunks may come in any number and order, and memory does not grow with the
rows: 16 x 20 sums for each cluster, and the counts of at most `MOST_PAIRS` pairs of cluster and
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, Mask, array_module, on_host
from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS, Layout
from capture_kernels.fingerprint.zones import ZONES
from pipeline.record import PHASES

# Pairs of cluster and token that are counted: 64 MiB. Beyond that the rarest are dropped.
MOST_PAIRS = 4_194_304
# float64 numbers of the one-hot matrix that a device holds at a time: 0.5 GB.
ONE_HOT = 1 << 26
_TOKEN_BITS = 32
ENTROPY = 3
OCTAVES = np.arange(HIST_BINS)


class TokenCounts(NamedTuple):
    """Token ids, ascending int64[m], and the rows with each, int64[m]; `rows` have any token,
    including ids that were too rare to be kept."""

    ids: Ints
    counts: Ints
    rows: int


@dataclass(frozen=True)
class Profile:
    """The rows of one cluster, or of the whole run.

    size: rows; share: of the run's rows, in [0, 1].
    centroid: mean of the vectors, float64[20].
    usual: mean of the run's rows with as much context, float64[20]: each context octave weighs as
        much as in the cluster.
    octaves: share of the rows in each context octave, float64[16].
    oldest, usual_oldest: mean mass in the last bin that a row reaches (log16; 0 for rows of octaves
        0 to 3, whose oldest tokens are also their nearest).
    log2_keys: mean of entropy times log2 of the context length in tokens (log16; otherwise 0). Two
        to this power is the effective number of keys that the mass is spread over.
    phases, zones: share of the rows in each, by name, in [0, 1].
    tokens: counts of the rows' tokens.
    """

    size: int
    share: float
    centroid: Doubles
    usual: Doubles
    octaves: Doubles
    oldest: float
    usual_oldest: float
    log2_keys: float
    phases: dict[str, float]
    zones: dict[str, float]
    tokens: TokenCounts


class Profiles:
    """Sums over the rows of a run, by cluster: labels are -1 (noise) to clusters - 1. At most
    `most_pairs` pairs of cluster and token are counted."""

    def __init__(self, clusters: int, layout: Layout, most_pairs: int = MOST_PAIRS) -> None:
        groups = clusters + 1  # noise first
        self.clusters = clusters
        self.layout = layout
        self._most_pairs = most_pairs
        self._rows = np.zeros((groups, HIST_BINS), np.int64)
        self._sums = np.zeros((groups, HIST_BINS, DIMENSIONS))
        self._phases = np.zeros((groups, len(PHASES)), np.int64)
        self._zones = np.zeros((groups, len(ZONES)), np.int64)
        self._token_rows = np.zeros(groups, np.int64)
        self._pairs = np.empty(0, np.int64)
        self._pair_counts = np.empty(0, np.int64)

    def add(
        self,
        *,
        vectors: Floats,
        label: Int32s,
        phase: NDArray[np.integer],
        zone: NDArray[np.int8],
        octave: Ints,
        token_ids: Int32s,
        has_token: Mask,
    ) -> None:
        """Add a chunk of n rows, whose columns are all on one device.

        Args:
            vectors: float32[n, 20]; label: int[n], -1 for noise.
            phase: int[n], indices into `pipeline.record.PHASES`.
            zone: int[n], indices into `capture_kernels.fingerprint.zones.ZONES`.
            octave: int[n] in 0..15, from `discovery.artifacts.projection.context_octave`.
            token_ids: int[n]; ignored where `has_token`, bool[n], is false.
        """
        xp = array_module(vectors)
        group = label.astype(np.int64) + 1
        cell = group * HIST_BINS + octave
        groups, cells = len(self._rows), self._rows.size
        self._rows += on_host(xp.bincount(cell, minlength=cells)).reshape(self._rows.shape)
        self._sums += sums_by_cell(vectors, cell, cells).reshape(self._sums.shape)
        for counts, code in ((self._phases, phase), (self._zones, zone)):
            width = counts.shape[1]
            found = xp.bincount(group * width + code, minlength=counts.size)
            counts += on_host(found).reshape(counts.shape)
        group, token_ids = group[has_token], token_ids[has_token]
        if len(group):
            self._token_rows += on_host(xp.bincount(group, minlength=groups))
            pairs = (group << _TOKEN_BITS) + token_ids
            self._count_pairs(*map(on_host, xp.unique(pairs, return_counts=True)))

    def join(self, other: Profiles) -> None:
        """Add the rows of another one with as many clusters."""
        for name in ("_rows", "_sums", "_phases", "_zones", "_token_rows"):
            total = getattr(self, name)
            total += getattr(other, name)
        self._count_pairs(other._pairs, other._pair_counts)

    def _count_pairs(self, new: Ints, counts: Ints) -> None:
        index = np.searchsorted(self._pairs, new)
        known = index < len(self._pairs)
        known[known] = self._pairs[index[known]] == new[known]
        self._pair_counts[index[known]] += counts[known]
        self._pairs = np.insert(self._pairs, index[~known], new[~known])
        self._pair_counts = np.insert(self._pair_counts, index[~known], counts[~known])
        if (length := len(self._pairs)) > self._most_pairs:
            # Down to half, so that this is rare; pairs worth naming are far from this threshold.
            cut = length - self._most_pairs // 2
            keep = self._pair_counts > np.partition(self._pair_counts, cut)[cut]
            self._pairs, self._pair_counts = self._pairs[keep], self._pair_counts[keep]

    def cluster(self, index: int) -> Profile:
        """The profile of one cluster, 0 <= index < clusters."""
        return self._profile(slice(index + 1, index + 2))

    def run(self) -> Profile:
        """The profile of all rows, noise included."""
        return self._profile(slice(None))

    def _profile(self, groups: slice) -> Profile:
        log16 = self.layout is Layout.LOG16

        def oldest(by_octave: Doubles) -> float:
            return log16 * float(by_octave[:, 4:].diagonal()[4:].sum())

        rows, all_rows = self._rows[groups].sum(axis=0), self._rows.sum(axis=0)
        sums, all_sums = self._sums[groups].sum(axis=0), self._sums.sum(axis=0)
        size = max(int(rows.sum()), 1)
        octaves = rows / size
        centroid = sums.sum(axis=0) / size
        run_means = all_sums / np.maximum(all_rows, 1)[:, None]
        phases, zones = (c[groups].sum(axis=0) / size for c in (self._phases, self._zones))
        return Profile(
            size=int(rows.sum()),
            share=float(rows.sum() / max(all_rows.sum(), 1)),
            centroid=centroid,
            usual=octaves @ run_means,
            octaves=octaves,
            oldest=oldest(sums) / size,
            usual_oldest=oldest(octaves[:, None] * run_means),
            # A row of octave o sees 2^o + 1 to 2^(o + 1) keys; octave 0 is one key or two.
            log2_keys=log16 * float(sums[:, ENTROPY] @ np.log2(1.5 * 2.0**OCTAVES)) / size,
            phases=dict(zip(PHASES, phases.tolist(), strict=True)),
            zones=dict(zip(ZONES, zones.tolist(), strict=True)),
            tokens=self._token_counts(groups),
        )

    def _token_counts(self, groups: slice) -> TokenCounts:
        first, last, _ = groups.indices(self.clusters + 1)
        begin, end = np.searchsorted(self._pairs, [first << _TOKEN_BITS, last << _TOKEN_BITS])
        ids = self._pairs[begin:end] & ((1 << _TOKEN_BITS) - 1)
        unique, index = np.unique(ids, return_inverse=True)
        counts = np.zeros(len(unique), np.int64)
        np.add.at(counts, index, self._pair_counts[begin:end])
        return TokenCounts(unique, counts, int(self._token_rows[groups].sum()))


def sums_by_cell(vectors: Floats, cell: Ints, cells: int) -> Doubles:
    """Sums of the vectors of each cell: float64[cells, 20], on the host.

    Args:
        vectors: float32[n, 20]; cell: int64[n], each below `cells`; on one device.
    """
    xp = array_module(vectors)
    if xp is np:
        return np.stack([np.bincount(cell, v, minlength=cells) for v in vectors.T], axis=1)
    # Products with one-hot rows: the order of atomic additions varies, and so does their rounding.
    sums = xp.zeros((cells, vectors.shape[1]))
    numbers = xp.arange(cells)[:, None]
    step = max(1, ONE_HOT // cells)
    for start in range(0, len(cell), step):
        block = slice(start, start + step)
        sums += (numbers == cell[block]).astype(np.float64) @ vectors[block].astype(np.float64)
    return on_host(sums)
