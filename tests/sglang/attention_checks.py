"""Entries of responses, number by number, against transformers' attention in float64.

Tolerances: the server runs in float32, and shares and logits are rounded to 4 decimals: 1e-4 for
shares, 2e-4 for logits, of which 5e-5 are the rounding. Shares made of logits: 1e-3 of their size.
Fingerprints are rounded to 5 decimals: 2e-5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_reference import AttentionReference

from capture_kernels.fingerprint.vector import Layout, Visibility
from capture_kernels.fingerprint.zones import ZoneRules

ROUNDED = 1e-4
FINGERPRINT = 2e-5
Entries = list[dict[str, Any]]


def check_raw(
    entries: Entries, expected: AttentionReference, prompt: int, positions: list[int],
    *, layers: list[int], k: int = 32, mask: int = 0, heads: list[int] | None = None,
) -> None:  # fmt: skip
    """Raw entries are those of the rows at `positions`, in each of `layers`, after `prompt`
    tokens of the prompt."""
    wanted = [(position, layer) for position in positions for layer in layers]
    assert [(e["position"] + mask, e["layer_id"]) for e in entries] == wanted
    for entry, (position, layer) in zip(entries, wanted, strict=True):
        p, logsumexp = expected.row(layer, position, heads, mask)
        mean = p.mean(axis=0)
        places = entry["token_positions"]
        masses = np.sort(mean)[::-1][:k]
        assert len(places) == len(masses) == len(set(places))
        # By mass, as equals may change places.
        np.testing.assert_allclose(mean[places], masses, atol=2e-6)
        scores = entry["attention_scores"]
        np.testing.assert_allclose(scores, masses / masses.sum(), atol=ROUNDED)
        assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=2 * ROUNDED)
        shares = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
        np.testing.assert_allclose(shares, masses, rtol=1e-3, atol=1e-7)
        assert entry["decode_step"] == position - prompt + 1


def check_head_lists(
    entries: Entries, expected: AttentionReference, prompt: int, heads: list[int], *, k: int
) -> None:
    """Each raw entry lists the top k of each of these heads."""
    assert entries
    for entry in entries:
        position = entry["decode_step"] + prompt - 1
        assert list(entry["heads"]) == list(map(str, heads))
        p, logsumexp = expected.row(entry["layer_id"], position, heads)
        for number, head in enumerate(heads):
            found = entry["heads"][str(head)]
            masses = np.sort(p[number])[::-1][:k]
            np.testing.assert_allclose(p[number][found["token_positions"]], masses, atol=2e-6)
            lse = found["logsumexp_candidates"]
            assert lse == pytest.approx(logsumexp[number], abs=2 * ROUNDED)
            shares = np.exp(np.array(found["topk_logits"]) - lse)
            np.testing.assert_allclose(shares, masses, rtol=1e-3, atol=1e-7)


def check_sketches(
    entries: Entries, expected: AttentionReference, prompt: int, positions: list[int],
    *, layers: list[int], k: int = 32, mask: int = 0, heads: list[int] | None = None,
) -> None:  # fmt: skip
    assert [e["decode_step"] for e in entries] == [position - prompt + 1 for position in positions]
    for entry, position in zip(entries, positions, strict=True):
        assert entry["mode"] == "sketch"
        assert list(entry["layer_sketches"]) == [str(layer) for layer in layers]
        for layer, sketch in entry["layer_sketches"].items():
            mean = expected.row(int(layer), position, heads, mask)[0].mean(axis=0)
            masses = np.sort(mean)[::-1][:k]
            places, found = zip(*sketch["top_hubs"], strict=True)
            assert len(places) <= len(masses)
            # Places whose mass is 0 in float32 are left out.
            np.testing.assert_allclose(found, masses[: len(found)], atol=ROUNDED)
            np.testing.assert_allclose(mean[list(places)], masses[: len(found)], atol=2e-6)
            assert sketch["mass_captured"] == pytest.approx(masses.sum(), abs=ROUNDED)
            visibility = Visibility(1, mask_prefix=mask)
            vector = expected.fingerprint(
                [int(layer)], position, heads=heads, visibility=visibility
            )
            if vector is not None:
                np.testing.assert_allclose(sketch["dist_hist"], vector[4:20], atol=ROUNDED)
                assert sketch["entropy"] == pytest.approx(float(vector[3]), abs=ROUNDED)


def check_fingerprints(
    entries: Entries, expected: AttentionReference, prompt: int, positions: list[int],
    *, layers: list[int], mask: int = 0, heads: list[int] | None = None,
) -> None:  # fmt: skip
    assert [e["step"] for e in entries] == [position - prompt + 1 for position in positions]
    for entry, position in zip(entries, positions, strict=True):
        visibility = Visibility(1, mask_prefix=mask)
        vector = expected.fingerprint(layers, position, heads=heads, visibility=visibility)
        np.testing.assert_allclose(entry["fingerprint"], vector, atol=FINGERPRINT)
        zoned = ZoneRules().classify(vector, Layout.LOG16)
        assert entry["manifold"] == zoned.names[0]
        assert entry["confidence"] == pytest.approx(float(zoned.confidence[0]), abs=1e-3)


def check(
    mode: str, entries: Entries, expected: AttentionReference, prompt: int, positions: list[int],
    *, k: int = 32, **what: Any,
) -> None:  # fmt: skip
    """Entries of a mode, by the function of that mode."""
    if mode == "raw":
        check_raw(entries, expected, prompt, positions, k=k, **what)
    elif mode == "sketch":
        check_sketches(entries, expected, prompt, positions, k=k, **what)
    else:
        check_fingerprints(entries, expected, prompt, positions, **what)
