"""The float64 truth, against the definitions written with loops and against its invariants."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.reference import attention_rows, decode_statistics
from capture_kernels.fingerprint.vector import Layout, Visibility, fingerprint


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_row_is_the_softmax_of_its_definition(soft_cap, window, with_sinks):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 4, 5)), rng.normal(size=(9, 2, 5))
    sinks = rng.normal(size=4) if with_sinks else None
    positions = [0, 5, 8]
    rows = attention_rows(
        q, k, scale=0.7, positions=positions, soft_cap=soft_cap, sinks=sinks, window=window
    )
    assert rows.shape == (3, 4, 9)
    assert rows.dtype == np.float64
    for r, t in enumerate(positions):
        for h in range(4):
            weights = {}
            for j in range(t + 1):
                if window and j <= t - window:
                    continue
                x = 0.7 * sum(q[r, h, d] * k[j, h // 2, d] for d in range(5))
                weights[j] = math.exp(soft_cap * math.tanh(x / soft_cap) if soft_cap else x)
            total = sum(weights.values()) + (math.exp(sinks[h]) if with_sinks else 0.0)
            expected = [weights.get(j, 0.0) / total for j in range(9)]
            np.testing.assert_allclose(rows[r, h], expected, atol=1e-12)


def test_huge_logits_do_not_overflow():
    q, k = np.full((1, 1, 1), 1e4), np.arange(3.0).reshape(3, 1, 1)
    rows = attention_rows(q, k, scale=1.0, positions=[2], sinks=[5e4])
    np.testing.assert_allclose(rows[0, 0], [0, 0, 0], atol=1e-300)
    assert attention_rows(q, k, scale=1.0, positions=[2])[0, 0].tolist() == [0, 0, 1]


def test_no_rows_and_wrong_shapes():
    k = np.zeros((4, 2, 3))
    assert attention_rows(np.zeros((0, 2, 3)), k, scale=1, positions=[]).shape == (0, 2, 4)
    with pytest.raises(OptionError, match="3 query heads over 2"):
        attention_rows(np.zeros((1, 3, 3)), k, scale=1, positions=[0])
    with pytest.raises(OptionError, match=r"0\.\.3"):
        attention_rows(np.zeros((1, 2, 3)), k, scale=1, positions=[4])


def slow_statistics(logits, t, visibility, window, sinks, top_k, mean_top_k):
    """DESIGN.md section 2, one key at a time; logits[h][j] of every key, seen or not."""
    real = [
        j
        for j in range(t + 1)
        if j >= visibility.mask_prefix
        and not (visibility.window and t - j >= visibility.window)
        and not (window and t - j >= window)
    ]
    visible = [j for j in real if j >= visibility.sink_tokens]
    n, low = len(visible), min(visible, default=0)
    mean = [0.0] * (t + 1)
    heads = []
    # A masked prefix is not counted.
    masked = visibility.mask_prefix
    for h, row in enumerate(logits):
        weight = {j: math.exp(row[j]) for j in real}
        total = sum(weight.values()) + (math.exp(sinks[h]) if sinks is not None else 0.0)
        seen = sum(weight[j] for j in visible)
        hist, places, log16, layered, entropy = [0.0] * 16, [0.0] * 8, [0.0] * 3, [0.0] * 3, 0.0
        for j in visible:
            p, d = weight[j] / seen, t - j
            hist[min(15, int(math.log2(max(d, 1))))] += p
            places[int((j - low + 0.5) / n * 8)] += p
            log16[(d >= 8) + (d >= 256)] += p
            layered[(d >= 10) + (d >= 100)] += p
            entropy -= p * math.log(p) / math.log(n) if n > 1 else 0.0
        best = sorted(real, key=lambda j: (-row[j], j))[:top_k]
        heads.append(
            {
                "logsumexp": math.log(total) if real else -math.inf,
                "entropy": entropy,
                "hist": hist,
                "places": places,
                "bands_log16": log16,
                "bands_layered": layered,
                "sink_mass": 1 - seen / sum(weight.values()) if real else 0.0,
                "top_positions": [j - masked for j in best] + [-1] * (top_k - len(best)),
                "top_logits": [row[j] for j in best] + [-math.inf] * (top_k - len(best)),
                "top_mass": sum(weight[j] / total for j in best),
            }
        )
        for j in real:
            mean[j] += weight[j] / total / len(logits)
    found = {name: [head[name] for head in heads] for name in heads[0]}
    best = sorted(real, key=lambda j: (-mean[j], j))[:mean_top_k]
    found["mean"] = mean
    found["mean_top_positions"] = [j - masked for j in best] + [-1] * (mean_top_k - len(best))
    found["mean_top_mass"] = [mean[j] for j in best] + [0.0] * (mean_top_k - len(best))
    return found, bool(n > 0)


VISIBILITIES = [
    Visibility(),
    Visibility(0),
    Visibility(4, 2),
    Visibility(1, 30),
    Visibility(3, 5, 64),
    Visibility(1, 0, 1),
    Visibility(0, 500),
    Visibility(500),
]


@pytest.mark.parametrize("visibility", VISIBILITIES)
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("t", [0, 1, 38, 310])
def test_statistics_are_what_a_loop_over_single_keys_finds(t, with_sinks, window, visibility):
    rng = np.random.default_rng(t)
    q, k = rng.normal(size=(4, 8)), rng.normal(size=(t + 1, 2, 8))
    sinks = rng.normal(size=4) if with_sinks else None
    found = decode_statistics(
        q,
        k,
        scale=0.5,
        position=t,
        visibility=visibility,
        sinks=sinks,
        window=window,
        top_k=7,
        mean_top_k=5,
    )
    logits = [[0.5 * float(q[h] @ k[j, h // 2]) for j in range(t + 1)] for h in range(4)]
    slow, valid = slow_statistics(logits, t, visibility, window, sinks, 7, 5)
    assert found.valid == valid
    for name, expected in slow.items():
        ours = getattr(found, name)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12, err_msg=name)
        assert ours.dtype == (np.int64 if name.endswith("positions") else np.float64)
    shown = found.logits > -np.inf
    np.testing.assert_allclose(found.logits[shown], np.array(logits)[shown], atol=1e-12)
    assert ((found.mean > 0) == shown).all()


cases = st.fixed_dictionaries(
    {
        "t": st.one_of(st.integers(0, 12), st.integers(13, 600)),
        "shape": st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 6)]),
        "size": st.sampled_from([0.0, 0.1, 1.0, 8.0, 60.0]),
        "seed": st.integers(0, 2**31),
        "visibility": st.builds(
            Visibility,
            sink_tokens=st.integers(0, 5),
            mask_prefix=st.integers(0, 50),
            window=st.one_of(st.just(0), st.integers(1, 300)),
        ),
        "window": st.one_of(st.just(0), st.integers(1, 300)),
        "soft_cap": st.sampled_from([None, 1.0, 30.0]),
        "with_sinks": st.booleans(),
    }
)


def make(case, **changes):
    """q, k and the options of `decode_statistics` that a drawn case stands for."""
    case = case | changes
    heads, key_heads = case["shape"]
    rng = np.random.default_rng(case["seed"])
    q = rng.normal(size=(heads, 8)) * case["size"]
    k = rng.normal(size=(case["t"] + 1, key_heads, 8))
    options = {name: case[name] for name in ("visibility", "window", "soft_cap")}
    sinks = rng.normal(size=heads) * 3 if case["with_sinks"] else None
    return q, k, options | {"scale": 8**-0.5, "position": case["t"], "sinks": sinks}


@given(case=cases, layout=st.sampled_from(Layout))
def test_the_means_over_the_heads_are_the_fingerprint_of_the_exact_rows(case, layout):
    q, k, options = make(case)
    found = decode_statistics(q, k, **options)
    t, visibility = case["t"], case["visibility"]
    exact = {name: options[name] for name in ("scale", "soft_cap", "sinks", "window")}
    rows = attention_rows(q[None], k, positions=[t], **exact)[0]
    first = max(0, t - case["window"] + 1) if case["window"] else 0
    truth = fingerprint([rows], t, layout, visibility, [first])
    if truth is None:
        # An exact row loses what underflows; its logarithms do not.
        assert not found.valid or (rows[:, visibility.start(t) :].sum(axis=1) == 0).any()
        return
    entropy = found.entropy.mean()
    if layout is Layout.LOG16:
        parts = [found.bands_log16.mean(axis=0), [entropy], found.hist.mean(axis=0)]
    else:
        parts = [found.bands_layered.mean(axis=0), [entropy], found.places.mean(axis=0)]
        parts.append([entropy] * 8)
    assert found.valid
    np.testing.assert_allclose(np.concatenate(parts), truth.vector, atol=1e-6)
    assert found.sink_mass.mean() == pytest.approx(truth.sink_mass, abs=1e-9)


def test_equal_logits_go_to_the_lower_position_first():
    found = decode_statistics(
        np.zeros((2, 3)),
        np.ones((9, 1, 3)),
        scale=1.0,
        position=8,
        visibility=Visibility(1, 2),
        top_k=4,
        mean_top_k=8,
    )
    assert found.top_positions.tolist() == [[0, 1, 2, 3]] * 2
    assert found.mean_top_positions.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    assert found.top_logits.tolist() == [[0.0] * 4] * 2
    np.testing.assert_allclose(found.mean_top_mass, [1 / 7] * 7 + [0])
    np.testing.assert_allclose(found.logsumexp, math.log(7))
    np.testing.assert_allclose(found.entropy, 1.0)
    np.testing.assert_allclose(found.top_mass, 4 / 7)


def test_visible_mass_that_underflows_is_still_described():
    # The sink token's logit is 2,000 above the rest: a softmax gives the visible keys exactly 0.
    k = np.array([2000.0, 0.0, 0.0, 0.0, 0.0]).reshape(5, 1, 1)
    found = decode_statistics(
        np.ones((1, 1)), k, scale=1.0, position=4, visibility=Visibility(), top_k=2, sinks=[3000.0]
    )
    assert found.valid
    assert found.sink_mass[0] == 1.0
    assert found.logsumexp[0] == 3000.0
    assert found.entropy[0] == pytest.approx(1.0)
    np.testing.assert_allclose(found.hist[0, :2], [0.5, 0.5])
    assert found.top_positions.tolist() == [[0, 1]]
    assert found.top_logits.tolist() == [[2000.0, 0.0]]
    assert found.top_mass[0] == 0.0


def test_huge_logits_do_not_overflow_in_statistics():
    k = np.array([0.0, 1.0, -1.0, 0.0]).reshape(4, 1, 1)
    found = decode_statistics(
        np.full((1, 1), 1e4), k, scale=1.0, position=3, visibility=Visibility(), top_k=4
    )
    assert found.logsumexp.tolist() == [1e4]
    assert found.top_positions.tolist() == [[1, 0, 3, 2]]
    assert found.entropy.tolist() == [0.0]
    assert found.hist[0].tolist() == [0.0, 1.0] + [0.0] * 14


@pytest.mark.parametrize(
    ("t", "visibility"), [(-1, Visibility()), (-1, Visibility(0)), (5, Visibility(1, 6))]
)
@pytest.mark.parametrize("sinks", [None, [1.0, 2.0]])
def test_a_row_without_real_keys_says_nothing(t, visibility, sinks):
    found = decode_statistics(
        np.ones((2, 3)),
        np.ones((t + 1, 1, 3)),
        scale=1.0,
        position=t,
        visibility=visibility,
        sinks=sinks,
        top_k=3,
        mean_top_k=2,
    )
    assert found.valid is False
    assert found.logits.shape == (2, t + 1)
    assert found.mean.shape == (t + 1,)
    for name in ("logits", "logsumexp", "top_logits"):
        assert (getattr(found, name) == -np.inf).all()
    assert (found.top_positions == -1).all() and (found.mean_top_positions == -1).all()
    names = "entropy hist places bands_log16 bands_layered sink_mass top_mass mean mean_top_mass"
    for name in names.split():
        assert not getattr(found, name).any()


def test_a_row_of_sink_tokens_only_keeps_what_includes_them():
    found = decode_statistics(
        np.ones((1, 1)),
        np.array([0.5, 1.5]).reshape(2, 1, 1),
        scale=1.0,
        position=1,
        visibility=Visibility(2),
        top_k=1,
    )
    assert found.valid is False
    assert found.logsumexp[0] == pytest.approx(math.log(math.exp(0.5) + math.exp(1.5)))
    assert found.top_positions.tolist() == [[1]]
    assert found.sink_mass.tolist() == [1.0]
    assert not found.hist.any() and not found.entropy.any()


def test_statistics_of_shapes_that_do_not_fit_are_refused():
    options = {"scale": 1.0, "visibility": Visibility()}
    with pytest.raises(OptionError, match="3 query heads over 2"):
        decode_statistics(np.zeros((3, 4)), np.zeros((5, 2, 4)), position=4, **options)
    with pytest.raises(OptionError, match="position 5 needs 6 keys, got 5"):
        decode_statistics(np.zeros((2, 4)), np.zeros((5, 2, 4)), position=5, **options)
