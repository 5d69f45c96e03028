"""Hashes that stores have written: they are the same in every version."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipeline.hashing import string_hash, string_hashes


@given(st.lists(st.text()))
def test_one_string_has_the_hash_that_it_has_in_a_column(texts):
    column = pa.array(texts, pa.string())
    assert [string_hash(text) for text in texts] == string_hashes(column).tolist()


def test_a_hash_is_what_it_was():
    assert string_hash("") == 0xB4B2797457A0A6E4
    assert string_hash("request-1") == 0x6478032A4D7C81FA
