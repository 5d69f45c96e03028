"""Files of limits: numbers by name, and one line that says what is wrong with a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import OptionError
from capture_kernels.limits import read_limits

KNOWN = {"entropy", "mid_mass", "ripple"}


def refusal(path, known=KNOWN, what="threshold"):
    with pytest.raises(OptionError) as refused:
        read_limits(path, known, what)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "limits.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_the_numbers_come_back_by_name_as_floats(written):
    found = read_limits(written("entropy = 0.7 # wide\nripple = 1\nmid_mass = -2e-1\n"), KNOWN, "x")
    assert found == {"entropy": 0.7, "ripple": 1.0, "mid_mass": -0.2}
    assert all(type(value) is float for value in found.values())


def test_what_a_file_does_not_name_is_not_there(written):
    assert read_limits(written("ripple = 0.5"), KNOWN, "x") == {"ripple": 0.5}
    assert read_limits(written("# nothing yet\n"), KNOWN, "x") == {}


@given(table=st.dictionaries(st.sampled_from(sorted(KNOWN)), st.floats(allow_nan=False)))
def test_every_number_is_read_to_the_last_bit(tmp_path_factory, table):
    path = tmp_path_factory.mktemp("limits") / "limits.toml"
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in table.items()))
    assert read_limits(path, KNOWN, "x") == table


def test_an_unknown_name_is_answered_with_the_known_ones_in_the_callers_word(written):
    path = written("zebra = 1\nentropi = 0.7\nripple = 0.5")
    assert refusal(path) == f"{path}: unknown threshold 'entropi': use entropy, mid_mass, ripple"
    assert "unknown gate limit 'entropi'" in refusal(path, what="gate limit")


@pytest.mark.parametrize(
    "value", ["true", "'0.7'", "[0.7]", "{ low = 0.7 }", "2026-01-10", "2026-01-10T04:02:11Z"]
)
def test_what_is_no_number_is_refused_by_name(written, value):
    path = written(f"ripple = 0.5\nentropy = {value}")
    assert refusal(path).startswith(f"{path}: entropy must be a number, got ")


def test_a_table_of_a_known_name_is_no_number(written):
    assert "ripple must be a number" in refusal(written("[ripple]\nentropy = 0.7"))


@pytest.mark.parametrize(
    "content",
    ["entropy: 0.7", "entropy = ", "entropy = 0.7\nentropy = 0.8", '{"entropy": 0.7}', b"\xff = 1"],
)
def test_a_file_that_is_no_toml_is_said_to_be_none(written, content):
    path = written(content)
    assert refusal(path).startswith(f"{path} is not a TOML file: ")


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    missing = tmp_path / "missing.toml"
    assert refusal(missing) == f"cannot read {missing}: No such file or directory"
    assert refusal(tmp_path) == f"cannot read {tmp_path}: Is a directory"
