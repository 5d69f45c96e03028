"""Arrays in a file that is mapped: any shape, aligned, and readable by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from discovery.runs.npz import ALIGNMENT, read_npz, write_npz

DTYPES = st.sampled_from(["?", "i1", "<u8", "<f2", "<f4", ">f8", "<U3", "S5", "<M8[us]"])
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))


def written(path, arrays):
    with path.open("wb") as file:
        write_npz(file, arrays)
    return read_npz(path)


@given(arrays=st.dictionaries(st.text("abcé_", min_size=1, max_size=80), ARRAYS, max_size=4))
def test_arrays_come_back_bit_for_bit_here_and_through_numpy(arrays, tmp_path_factory):
    path = tmp_path_factory.mktemp("npz") / "some.npz"
    back = written(path, arrays)
    assert list(back) == list(arrays)
    with np.load(path, allow_pickle=False) as saved:
        for name, array in arrays.items():
            for found in (back[name], saved[name]):
                assert (found.dtype, found.shape) == (array.dtype, array.shape)
                assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("name_length", range(1, 70, 7))
def test_every_array_lies_where_any_library_can_use_it(tmp_path, name_length):
    arrays = {f"{letter * name_length}": np.arange(7, dtype=np.int8) for letter in "abc"}
    back = written(tmp_path / "some.npz", arrays)
    assert [array.ctypes.data % ALIGNMENT for array in back.values()] == [0, 0, 0]


def test_the_order_in_which_an_array_lies_is_kept(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    arrays = {"c": array, "f": np.asfortranarray(array), "cut": array[::2, 1::3]}
    back = written(tmp_path / "some.npz", arrays)
    for name in arrays:
        assert np.array_equal(back[name], arrays[name])
    assert back["f"].flags.f_contiguous
    assert not back["f"].flags.c_contiguous
    assert back["c"].flags.c_contiguous


def test_what_is_written_into_an_array_does_not_reach_the_file(tmp_path):
    path = tmp_path / "some.npz"
    back = written(path, {"x": np.zeros(100_000)})
    back["x"][:] = 1
    assert not read_npz(path)["x"].any()


def test_arrays_that_were_read_outlive_their_file(tmp_path):
    path = tmp_path / "some.npz"
    back = written(path, {"x": np.arange(100_000)})
    path.unlink()
    assert np.array_equal(back["x"], np.arange(100_000))


def test_the_same_arrays_are_the_same_bytes(tmp_path):
    arrays = {"x": np.arange(9), "y": np.ones((3, 2), np.float32)}
    for name in ("one.npz", "two.npz"):
        written(tmp_path / name, arrays)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


def test_an_object_array_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, values=np.array([{"a": 1}], object))
    with pytest.raises(ValueError, match="Python objects"):
        read_npz(path)
