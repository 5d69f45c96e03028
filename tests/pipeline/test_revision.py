"""Which weights a model has: what another revision is, and that no engine has a rule of its own."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.revision import local_revision, revision_of, sampled_facts

# The rows of each tensor: of a norm, of a matrix, and of one without a number.
TENSORS = {"norm": 64, "layers.0": 300_000, "layers.1": 300_000, "none": 0, "head": 1_000_000}


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """As the format has it: the header's length, the header, and the tensors."""
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        span = [at, at + values.nbytes]
        entries[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": span}
        at = span[1]
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + b"".join(v.tobytes() for v in tensors.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def drawn() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(rows).astype(np.float32) for name, rows in TENSORS.items()}


def test_files_that_are_read_whole_differ_by_any_byte(folder):
    content = np.random.default_rng(0).bytes(4_000_000)
    files = [folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for path in files:
        path.write_bytes(content)
    seen = {local_revision(folder)}
    for path in files:
        for at in (0, 30_000, 1_234_567, 2_999_999, len(content) - 1):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            seen.add(local_revision(folder))
        path.write_bytes(content)
    files[0].rename(folder / "pytorch_model.bin")
    seen.add(local_revision(folder))
    assert len(seen) == 12 and all(len(revision) == 16 for revision in seen)


def test_of_large_files_another_training_of_any_tensor_shows(folder):
    path = folder / "model.safetensors"

    def revision(tensors: dict[str, np.ndarray]) -> str:
        path.write_bytes(safetensors(tensors))
        return local_revision(folder, whole_bytes=0)

    seen = {revision(drawn())}
    assert {revision(drawn())} == seen
    for name, rows in TENSORS.items():
        if rows:
            seen.add(revision(drawn() | {name: drawn()[name] * np.float32(1.001)}))
    moved = drawn()
    moved["layers.2"] = moved.pop("layers.1")
    seen.add(revision(moved))
    seen.add(revision({name: value[:-1] for name, value in drawn().items()}))
    (folder / "config.json").write_text("{}")
    seen.add(revision(drawn()))
    assert len(seen) == 1 + 4 + 3


def test_of_large_files_in_another_format_noise_shows(folder):
    path = folder / "pytorch_model.bin"
    content = np.random.default_rng(0).integers(0, 256, 40_000_000, np.uint8)
    seen = set()
    for begin, end in ((0, 0), (0, 1), (39_999_999, 40_000_000), (7_000_000, 7_100_000)):
        changed = content.copy()
        changed[begin:end] ^= 1
        path.write_bytes(changed.tobytes())
        seen.add(local_revision(folder, whole_bytes=0))
    assert len(seen) == 4


@given(
    header=st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner) |
            st.dictionaries(st.sampled_from(["a", "data_offsets"]), inner)
        ).map(lambda value: json.dumps(value).encode()),
    ),
    length=st.none() | st.integers(0, 2**64 - 1),
    after=st.binary(max_size=100),
)  # fmt: skip
def test_any_bytes_have_a_revision(tmp_path_factory, header, length, after):
    folder = tmp_path_factory.mktemp("weights")
    (folder / "config.json").write_text("{}")
    said = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", said) + header + after)
    assert len(local_revision(folder, whole_bytes=0)) == 16


def test_a_large_file_is_hardly_read(tmp_path):
    """A file of 200 GB, without anything in it: a second is enough for what is looked at."""
    tensors = {
        f"t{n}": {"dtype": "F32", "shape": [1], "data_offsets": [n * 10**8, (n + 1) * 10**8]}
        for n in range(2_000)
    }
    header = json.dumps(tensors).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2_000 * 10**8)
    assert sampled_facts(path)["bytes"] > 200e9


def test_a_model_of_the_hub_is_its_commit(tmp_path):
    commit = SimpleNamespace(_commit_hash="b" * 40)
    assert revision_of("org/model", commit) == "b" * 40
    assert revision_of("org/model", SimpleNamespace(_commit_hash=None)) == "org/model"
    (tmp_path / "config.json").write_text("{}")
    assert revision_of(str(tmp_path), commit) == local_revision(tmp_path)
