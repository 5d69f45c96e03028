"""Zones: the evidence formula, the order of ties, and the file that overrides the thresholds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import BLOCK_ROWS, ZONES, ZoneRules, ripple

LAYOUTS = list(Layout)
# Where each zone's signal stands in a vector; the ripple is computed from the histogram.
COLUMNS = {"local_mass": (0, 0), "mid_mass": (1, 1), "long_mass": (2, 2), "entropy": (3, 4)}


def random_vectors(rows, layout, seed=0):
    rng = np.random.default_rng(seed)
    vectors = rng.random((rows, 20)).astype(np.float32)
    vectors[:, :3] /= vectors[:, :3].sum(axis=1, keepdims=True)
    bins = 16 if layout is Layout.LOG16 else 8
    vectors[:, 4 : 4 + bins] /= vectors[:, 4 : 4 + bins].sum(axis=1, keepdims=True)
    return vectors


@pytest.mark.parametrize("threshold", COLUMNS)
@pytest.mark.parametrize("strong", [0.1, 0.5, 0.9])
def test_evidence_is_half_at_the_strong_value_and_whole_at_one(threshold, strong):
    column, zone = COLUMNS[threshold]
    rules = ZoneRules(**{threshold: strong})
    vectors = np.zeros((5, 20), np.float32)
    vectors[:, column] = [0.0, strong / 2, strong, (1 + strong) / 2, 1.0]
    evidence = rules.evidence(vectors, Layout.LOG16)[:, zone]
    np.testing.assert_allclose(evidence, [0.0, 0.25, 0.5, 0.75, 1.0], atol=1e-6)


@given(
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
    strong=st.floats(0.01, 0.99),
)
def test_evidence_and_confidence_stay_in_their_range(seed, layout, strong):
    rules = ZoneRules(*[strong] * 5)
    vectors = random_vectors(20, layout, seed)
    evidence = rules.evidence(vectors, layout)
    zoned = rules.classify(vectors, layout)
    assert evidence.shape == (20, len(ZONES))
    assert (evidence >= 0).all() and (evidence <= 1 + 1e-6).all()
    assert (zoned.zone == evidence.argmax(axis=1)).all()
    np.testing.assert_allclose(
        zoned.confidence, evidence.max(axis=1) / evidence.sum(axis=1), rtol=1e-5
    )
    assert zoned.names == [ZONES[i] for i in zoned.zone]


def test_a_tie_goes_to_the_zone_that_is_named_first():
    rules = ZoneRules(local_mass=0.4, mid_mass=0.4, long_mass=0.4, entropy=0.4)
    vector = np.zeros(20, np.float32)
    vector[1] = vector[2] = vector[3] = 0.4
    assert rules.classify(vector, Layout.LOG16).names == ["semantic_bridge"]
    vector[0] = 0.4
    zoned = rules.classify(vector, Layout.LOG16)
    assert zoned.names == ["syntax_floor"]
    assert zoned.confidence[0] == pytest.approx(0.25)


def test_a_vector_without_evidence_still_has_a_zone():
    zoned = ZoneRules().classify(np.zeros(20), Layout.LOG16)
    assert zoned.names == ["syntax_floor"]
    assert zoned.confidence[0] == 0.0


@pytest.mark.parametrize(
    ("signals", "zone"),
    [
        ([0.95, 0.04, 0.01, 0.1], "syntax_floor"),
        ([0.1, 0.85, 0.05, 0.2], "semantic_bridge"),
        ([0.1, 0.1, 0.8, 0.2], "long_range"),
        ([0.35, 0.34, 0.1, 0.99], "diffuse"),
    ],
)
def test_each_zone_is_reached_by_its_signal(signals, zone):
    vector = np.zeros(20, np.float32)
    vector[:4] = signals
    assert ZoneRules().classify(vector, Layout.LOG16).names == [zone]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_rows_have_the_zones_of_the_rows_one_by_one(layout):
    vectors = random_vectors(BLOCK_ROWS + 3, layout)
    zoned = ZoneRules().classify(vectors, layout)
    for row in (0, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 2):
        one = ZoneRules().classify(vectors[row], layout)
        assert one.zone[0] == zoned.zone[row]
        assert one.confidence[0] == pytest.approx(zoned.confidence[row], rel=1e-6)
    empty = ZoneRules().classify(np.empty((0, 20)), layout)
    assert empty.names == []


BINS = [(Layout.LOG16, 16), (Layout.LAYERED, 8)]


def with_histogram(masses):
    vectors = np.zeros((1, 20), np.float32)
    vectors[0, 4 : 4 + len(masses)] = masses
    return vectors


def test_ripple_of_three_bins_is_what_comes_out_by_hand():
    # Square roots 1, 3, 2: the half wave has (1 - 2)**2 / 2 = 0.5, the whole wave
    # (1 - 2 * 3 + 2)**2 / 6 = 1.5, and there is no other.
    for layout in LAYOUTS:
        assert ripple(with_histogram([1, 9, 4]), layout)[0] == pytest.approx(0.75)


@pytest.mark.parametrize(("layout", "bins"), BINS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_ripple_is_the_low_share_of_the_spectrum_of_the_bins_that_are_reached(layout, bins, scale):
    vectors = random_vectors(bins * 20, layout)
    reach = np.arange(len(vectors)) % bins + 1
    vectors[:, 4 : 4 + bins] *= np.arange(bins) < reach[:, None]
    expected = []
    for vector, reached in zip(vectors.astype(np.float64), reach, strict=True):
        amplitudes = np.sqrt(vector[4 : 4 + reached])
        energy = np.abs(np.fft.fft(np.concatenate([amplitudes, amplitudes[::-1]])))[:reached] ** 2
        expected.append(energy[2 : bins // 2].sum() / energy[1:].sum() if reached > 1 else 0.0)
    found = ripple(vectors * np.float32(scale), layout)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("layout", "bins"), BINS)
def test_a_slope_and_a_fast_wave_are_no_ripple_and_a_slow_wave_is_nothing_else(layout, bins):
    for half_waves in range(1, bins):
        wave = np.cos(np.pi * half_waves * (np.arange(bins) + 0.5) / bins)
        found = ripple(with_histogram((1 + wave / 2) ** 2), layout)[0]
        assert found == pytest.approx(1.0 if 2 <= half_waves < bins // 2 else 0.0, abs=1e-5)


@pytest.mark.parametrize(("layout", "bins"), BINS)
def test_a_constant_histogram_has_no_ripple(layout, bins):
    assert ripple(np.zeros((1, 20), np.float32), layout).tolist() == [0.0]
    for reach in range(1, bins + 1):
        assert ripple(with_histogram([1 / reach] * reach), layout).tolist() == [0.0]


@given(
    layout=st.sampled_from(LAYOUTS),
    vector=st.lists(
        st.floats(0, float(np.finfo(np.float32).max), width=32), min_size=20, max_size=20
    ),
)
def test_ripple_is_a_share_whatever_the_histogram(layout, vector):
    share = ripple(np.array([vector], np.float32), layout)
    assert share.dtype == np.float32
    assert 0.0 <= share[0] <= 1.0


def test_a_file_overrides_the_thresholds_it_names(tmp_path):
    file = tmp_path / "zones.toml"
    file.write_text("local_mass = 0.9\nripple = 0.25\n")
    rules = ZoneRules.from_toml(file)
    assert rules == ZoneRules(local_mass=0.9, ripple=0.25)
    assert rules.mid_mass == ZoneRules().mid_mass
    file.write_text("")
    assert ZoneRules.from_toml(file) == ZoneRules()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local_mass = ", "is not a TOML file"),
        ("locl_mass = 0.5", "unknown threshold 'locl_mass'"),
        ("local_mass = 'high'", "local_mass must be a number"),
        ("local_mass = true", "local_mass must be a number"),
        ("local_mass = 0.0", "between 0 and 1"),
        ("local_mass = 1", "between 0 and 1"),
        ("local_mass = -0.5", "between 0 and 1"),
        ("local_mass = nan", "between 0 and 1"),
        ("local_mass = inf", "between 0 and 1"),
        ("[zones]\nlocal_mass = 0.5", "unknown threshold 'zones'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_reason(tmp_path, text, message):
    file = tmp_path / "zones.toml"
    file.write_text(text)
    with pytest.raises(OptionError, match=message):
        ZoneRules.from_toml(file)


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path):
    with pytest.raises(OptionError, match=r"cannot read .*missing\.toml"):
        ZoneRules.from_toml(tmp_path / "missing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="is not a TOML file"):
        ZoneRules.from_toml(tmp_path / "bytes.toml")
