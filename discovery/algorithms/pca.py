"""PCA from sums that are added up chunk by chunk: what standardize and pca learn.

Shares are raised to a power first, and the effect of their context octave is taken out: see
`discovery.artifacts.projection`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints, array_module, on_host
from capture_kernels.fingerprint.vector import HIST_BINS, Layout
from discovery.algorithms.octaves import MOST_CONTRASTS, Contrasts
from discovery.artifacts.projection import POWER, Projection, context_octave, powers

# cuVS's NN-descent keeps float32 distances only up to 16 dimensions.
MAX_COMPONENTS = 16
# Share of the variance that the kept components hold.
EXPLAINED = 0.99


@dataclass(frozen=True)
class Moments:
    """Sums over shares to the power by context octave, added up chunk by chunk in float64, and the
    contrasts of octaves within requests. They are on the host, wherever the vectors are.

    counts int64[16], totals float64[16, 20], products float64[20, 20] (over all octaves).
    """

    counts: Ints
    totals: Doubles
    products: Doubles
    contrasts: Contrasts

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.counts + other.counts,
            self.totals + other.totals,
            self.products + other.products,
            self.contrasts + other.contrasts,
        )

    @classmethod
    def of(
        cls, vectors: Floats, layout: Layout, requests: Ints | None = None,
        most_contrasts: int = MOST_CONTRASTS, positions: Ints | None = None,
    ) -> Moments:  # fmt: skip
        """Those of the vectors float32[n, 20], on any device.

        Args:
            requests: int[n], a number for each row's request, there; None: nothing is known of
                them, and octaves have no effect.
            positions: int[n], there. A row that could look an octave further than it does, as one
                of a few keys, says nothing of that octave's effect. None: no row is such.
        """
        xp = array_module(vectors)
        raised = powers(vectors.astype(np.float64), POWER)
        octave = context_octave(vectors, layout)
        members = octave[:, None] == xp.arange(HIST_BINS)
        contrasts = Contrasts.none()
        if requests is not None:
            # Its farthest key but for the sink token is `position - 1` back.
            shown = slice(None) if positions is None else (positions - 1) >> (octave + 1) <= 0
            contrasts = Contrasts.of(raised[shown], octave[shown], requests[shown], most_contrasts)
        return cls(
            on_host(members.sum(axis=0)),
            on_host(members.T.astype(np.float64) @ raised),
            on_host(raised.T @ raised),
            contrasts,
        )

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def centre(self) -> Doubles:
        """What is taken out of the rows of each octave: float64[16, 20]. Its effect, and the mean
        of what is left."""
        effects = self.contrasts.effects()
        left = self.totals - self.counts[:, None] * effects
        return effects + left.sum(axis=0) / max(self.rows, 1)

    def covariance(self, centre: Doubles) -> Doubles:
        """float64[20, 20], of all rows about the centres of their octaves."""
        crossed = self.totals.T @ centre
        squares = (centre * self.counts[:, None]).T @ centre
        return (self.products - crossed - crossed.T + squares) / self.rows

    def projection(self) -> Projection:
        """PCA of the rows without the effect of their octaves."""
        centre = self.centre
        return fit_projection(centre, np.ones(centre.shape[1]), self.covariance(centre))


def fit_projection(
    mean: Doubles, scale: Doubles, covariance: Doubles, power: float = POWER
) -> Projection:
    """PCA by the covariance: as many components as hold 99% of the variance, 2 to 16."""
    values, axes = np.linalg.eigh(covariance / np.outer(scale, scale))
    values, axes = values[::-1].clip(min=0), axes[:, ::-1]
    total = values.sum()
    shares = values / total if total > 0 else np.zeros_like(values)
    count = int(np.searchsorted(np.cumsum(shares), EXPLAINED)) + 1
    count = min(max(count, 2), MAX_COMPONENTS)
    # An eigenvector's sign is arbitrary: the largest loading is made positive.
    axes = axes[:, :count]
    signs = np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(count)])
    single = [array.astype(np.float32) for array in (mean, scale, axes * signs)]
    return Projection(single[0], single[1], single[2], shares[:count], np.array(power))
