"""Traits, sampling hints and PCA axes in words.

Traits follow the rules of `discovery.describe.claims`, so that a live cluster and a published one
are described alike. Sampling hints are conventions, one table of them; nobody has measured that
they make answers better, and nothing in attn applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from capture_kernels.arrays import Floats
from capture_kernels.fingerprint.vector import HIST_BINS, Layout
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.schema import NOISE
from discovery.describe.axes import axes_in_words
from discovery.describe.claims import claims
from discovery.describe.clusters import traits_of
from discovery.describe.profiles import Profile, TokenCounts


class SamplingHint(msgspec.Struct, frozen=True):
    """Suggested sampling parameters, and why."""

    temperature: float
    top_p: float
    reason: str


class Setting(NamedTuple):
    """A row of the tables below: parameters, or what is added to them, and why."""

    temperature: float
    top_p: float
    why: str


# Where a hint starts, by zone.
BY_ZONE = {
    "syntax_floor": Setting(0.7, 0.95, "it continues local text, where variety does little harm"),
    "semantic_bridge": Setting(0.5, 0.9, "it draws on sentences nearby, and should stay with them"),
    "long_range": Setting(0.3, 0.85, "it retrieves from far back, where a variation is an error"),
    "structure_ripple": Setting(0.2, 0.9, "it repeats a structure, which a variation breaks"),
    "diffuse": Setting(0.8, 0.95, "it looks everywhere, and no continuation stands out"),
}
# What traits add to that, in this order.
BY_TRAIT = {
    "focused": Setting(-0.1, -0.05, "its attention is focused"),
    "diffuse": Setting(0.1, 0.0, "its attention is diffuse"),
    "periodic": Setting(-0.1, 0.0, "it is periodic"),
    "start_of_context": Setting(-0.1, 0.0, "it reads the start of the context"),
}
# Traits that a zone says already.
SAID_BY_ZONE = {("diffuse", "diffuse"), ("structure_ripple", "periodic")}
TEMPERATURES, TOP_PS = (0.1, 1.0), (0.5, 1.0)

# Standard deviations from which an axis is named with this word.
STRENGTHS = ((1.5, "strongly"), (0.75, "moderately"), (0.0, "weakly"))
AXES_PER_ROW = 2


def sampling_hint(zone: str, traits: Sequence[str] = ()) -> SamplingHint:
    """The hint for a zone of `ZONES` and traits: the zone's row plus those of the traits."""
    return _hint(zone, tuple(name for name in BY_TRAIT if name in traits))


@lru_cache(maxsize=256)
def _hint(zone: str, traits: tuple[str, ...]) -> SamplingHint:
    start = BY_ZONE[zone]
    used = [BY_TRAIT[name] for name in traits if (zone, name) not in SAID_BY_ZONE]
    temperature = start.temperature + sum(setting.temperature for setting in used)
    top_p = start.top_p + sum(setting.top_p for setting in used)
    reason = "; ".join([f"{zone}: {start.why}", *(setting.why for setting in used)])
    return SamplingHint(
        round(float(np.clip(temperature, *TEMPERATURES)), 2),
        round(float(np.clip(top_p, *TOP_PS)), 2),
        reason,
    )


def cluster_traits(centroid: Floats, usual: Floats, layout: Layout) -> list[str]:
    """Traits of a mean row, keys of `discovery.describe.claims.TRAITS` in their order.

    Those that need more than mean rows (phases, tokens, context length) are never among them.

    Args:
        centroid: float[20], the mean of the cluster's vectors.
        usual: float[20], the mean of all rows that it is compared with.
    """
    own, all_rows = (mean_profile(mean, usual) for mean in (centroid, usual))
    return traits_of(list(claims(own, all_rows, [], layout)))


def mean_profile(mean: Floats, usual: Floats) -> Profile:
    """The profile of rows of which only the mean float[20] is known."""
    nothing = np.empty(0, np.int64)
    return Profile(
        size=1,
        share=1.0,
        centroid=np.asarray(mean, np.float64),
        usual=np.asarray(usual, np.float64),
        octaves=np.zeros(HIST_BINS),
        oldest=0.0,
        usual_oldest=0.0,
        log2_keys=0.0,
        phases={},
        zones={},
        tokens=TokenCounts(nothing, nothing, 0),
    )


class AxisInWords(msgspec.Struct, frozen=True):
    """A fingerprint's position on one PCA axis: value in standard deviations of the run's
    prototypes, and one phrase."""

    axis: str
    value: float
    says: str


def explain(vectors: Floats, classifier: Classifier) -> list[list[AxisInWords]]:
    """The two PCA axes that each vector is farthest out on, in words from the run's own loadings.

    Args:
        vectors: float32[m, 20] of the run's layout, finite.

    Returns:
        For each row its axes, the strongest first.
    """
    codebook = classifier.codebook
    projection = codebook.projection
    axes = axes_in_words(projection.components, projection.explained, codebook.layout)
    members = codebook.prototypes[codebook.labels != NOISE]
    points = members if len(members) > 1 else codebook.prototypes
    # Prototypes stand for the run's rows; an axis without spread distinguishes nothing.
    spread = points.std(axis=0)
    apart = projection(vectors, codebook.layout) - points.mean(axis=0)
    values = np.divide(apart, spread, out=np.zeros_like(apart), where=spread > 1e-6)
    # Axes hold less and less of the variance: being far out on the last says little.
    weight = np.abs(values) * np.sqrt(projection.explained)
    strongest = np.argsort(-weight, axis=1, kind="stable")[:, :AXES_PER_ROW]
    return [
        [_said(axes[axis], float(row[axis])) for axis in chosen.tolist()]
        for row, chosen in zip(values, strongest, strict=True)
    ]


def _said(axis: dict[str, str], value: float) -> AxisInWords:
    how = next(word for least, word in STRENGTHS if abs(value) >= least)
    return AxisInWords(
        axis["name"], round(value, 3), f"{how} {axis['high' if value > 0 else 'low']}"
    )
