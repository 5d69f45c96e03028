"""Compiled functions of umap-learn on disk: found again, never needed."""

from __future__ import annotations

import errno
import gc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest

from discovery.engines import compiled
from discovery.engines.compiled import OptionalCache, keep_compiled, umap_class


@pytest.fixture
def process(tmp_path, monkeypatch) -> Callable[[], Any]:
    """A function as a new process has it: not compiled, kept in tmp_path/kept."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    path = tmp_path / "doubling.py"
    path.write_text("def double(x):\n    return 2 * x\n")

    def new(**options: Any) -> Any:
        spec = importlib.util.spec_from_file_location("doubling", path)
        module = importlib.util.module_from_spec(spec)
        # Loading imports the module that a function was compiled in, as another process would.
        monkeypatch.setitem(sys.modules, "doubling", module)
        spec.loader.exec_module(module)
        function = numba.njit(**options)(module.double)
        keep_compiled(function)
        # numba finds the environment of a function that is still referenced without loading it.
        gc.collect()
        return function

    return new


def loaded(function: Any) -> bool:
    """Whether a call found its compiled code."""
    assert function(2.0) == 4.0
    return bool(function.stats.cache_hits)


def test_a_process_loads_what_another_compiled(process, tmp_path):
    assert not loaded(process())
    assert loaded(process())
    assert list((tmp_path / "kept").rglob("*.nbc"))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "content", [b"", b"\0" * 200, b"cno_such_module\nname\n."], ids=["empty", "zeros", "import"]
)
def test_a_damaged_file_is_compiled_and_saved_again(process, tmp_path, suffix, content):
    assert not loaded(process())
    (file,) = (tmp_path / "kept").rglob(f"*.{suffix}")
    file.write_bytes(content)
    assert not loaded(process())
    assert loaded(process())


def test_a_full_disk_and_a_function_without_a_file_are_no_failure(process, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
        assert not loaded(process())
    names: dict[str, Any] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "nowhere.py", "exec"), names)
    nowhere = numba.njit(names["double"])
    keep_compiled(nowhere)
    assert not loaded(nowhere)


def test_another_release_of_umap_does_not_load_what_the_last_compiled(process, monkeypatch):
    assert not loaded(process())
    monkeypatch.setattr(compiled, "version", lambda _: "99")
    assert not loaded(process())


def test_what_was_compiled_with_other_options_is_not_loaded(process):
    assert not loaded(process())
    assert not loaded(process(nogil=True))
    assert loaded(process(nogil=True))


def test_what_a_layout_compiles_is_kept_and_leaves_pythons_lock_to_others():
    from umap import layouts, umap_

    assert umap_class().__name__ == "UMAP"
    for function in (umap_.smooth_knn_dist, umap_.compute_membership_strengths,
                     layouts._nb_optimize_layout_euclidean_single_epoch):  # fmt: skip
        assert isinstance(function._cache, OptionalCache), function
        assert Path(function._cache.cache_path).is_dir()
    epoch = layouts._nb_optimize_layout_euclidean_single_epoch
    assert epoch.targetoptions["nogil"] and epoch.targetoptions["fastmath"]
    umap_class()
    assert layouts._nb_optimize_layout_euclidean_single_epoch is epoch
