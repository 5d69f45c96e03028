"""What is wrong with the rows and files of a Parquet store, and its repair."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Mask
from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import Verified
from pipeline.store.refusals import os_errors
from pipeline.store.verify import bad_rows, save_rejected

from .compaction import leftovers, rewrite
from .files import DataFile, read_file
from .folder import FILES_LOCK, RUNS, Folder


@dataclass
class Checked:
    """What is wrong with one file.

    Args:
        file: None if its footer cannot be read.
        rows: how many of its rows were read.
        good, unread: which of its rows are records, and which cannot be read, bool[rows]; empty if
            all are records.
        bad: how many rows that were read are not records, by reason.
        problem: why rows cannot be read; empty if all can.
    """

    file: DataFile | None = None
    rows: int = 0
    good: Mask = field(default_factory=lambda: np.zeros(0, bool))
    unread: Mask = field(default_factory=lambda: np.zeros(0, bool))
    bad: dict[str, int] = field(default_factory=dict)
    problem: str = ""


def verify(folder: Folder, progress: Callable[[int], None]) -> Verified:
    """See `Store.verify`. The files lock is held for a file at a time."""
    found: dict[str, Checked] = {}
    rows = 0
    names = folder.names()
    with os_errors(folder.root):
        # Another process may compact the folder meanwhile: its new files are read as well.
        while unseen := sorted(set(names) - set(found)):
            for name in unseen:
                with folder.locked(FILES_LOCK, exclusive=False):
                    found[name] = _check(folder.root, name)
                rows += found[name].rows
                progress(rows)
            names = folder.names()
        others = [f"{path} was left by a writer that died" for path in leftovers(folder.root)]
    checked = _that_count({name: found[name] for name in names})
    bad = sum((Counter(one.bad) for one in checked.values()), Counter[str]())
    problems = [one.problem for one in checked.values() if one.problem]
    problems += [f"{path} cannot be read" for path in _unreadable_runs(folder.root)]
    return Verified(sum(one.rows for one in checked.values()), dict(bad), problems + others)


def repair(folder: Folder) -> Iterator[str]:
    """See `Store.repair`. No file is listed, merged or removed by others meanwhile."""
    with folder.locked(FILES_LOCK, exclusive=True):
        found = _that_count({name: _check(folder.root, name) for name in sorted(folder.names())})
        faulty = [one for one in found.values() if len(one.good)]
        rows = sum(sum(one.bad.values()) for one in faulty)
        if rows:
            saved = save_rejected(folder.root, _bad_tables(faulty))
            yield f"moved {rows:,} rows that are not records to {saved}"
        for name, one in found.items():
            damaged = folder.root / name
            aside = damaged.with_name(f"_{damaged.name}.damaged") if one.problem else None
            if one.file and len(one.good):
                rewrite(folder, [(one.file, one.good)], aside)
            elif aside:
                damaged.rename(aside)
            if aside:
                kept = f", with {int(one.good.sum()):,} rows kept" if one.good.any() else ""
                yield f"moved {damaged} to {aside}{kept}"
        for path in _unreadable_runs(folder.root):
            path.rename(path.with_name(f"{path.name}.damaged"))
            yield f"moved {path} to {path}.damaged"
        for path in leftovers(folder.root):
            path.unlink(missing_ok=True)
            yield f"deleted {path}, which a writer that died has left"


def _check(root: Path, name: str) -> Checked:
    try:
        file = read_file(root, name)
    except FileNotFoundError:
        return Checked(problem=f"{root / name} is gone")
    except StoreError as error:
        return Checked(problem=str(error))
    checked = Checked(file, 0, np.zeros(file.rows, bool), np.zeros(file.rows, bool))
    reasons = Counter[str]()
    for row_group, span in file.row_groups:
        try:
            table = file.read(row_group, record.SCHEMA.names)
        except StoreError as error:
            checked.unread[span] = True
            checked.problem = str(error)
            continue
        bad, rejected = bad_rows(table.combine_chunks().to_batches()[0])
        checked.good[span] = ~bad
        reasons.update(rejected)
    checked.bad, checked.rows = dict(reasons), file.rows - int(checked.unread.sum())
    if checked.good.all():
        checked.good = checked.unread = np.zeros(0, bool)
    return checked


def _that_count(found: dict[str, Checked]) -> dict[str, Checked]:
    """Without the files that a compaction replaced and did not live to remove."""
    replaced = {name for one in found.values() if one.file for name in one.file.replaces}
    return {name: one for name, one in found.items() if name not in replaced}


def _bad_tables(checked: list[Checked]) -> Iterator[pa.Table]:
    for one in checked:
        assert one.file
        for row_group, span in one.file.row_groups:
            bad = ~(one.good | one.unread)[span]
            if bad.any():
                yield one.file.read(row_group, record.SCHEMA.names).filter(pa.array(bad))


def _unreadable_runs(root: Path) -> list[Path]:
    unreadable = []
    for path in sorted((root / RUNS).glob("*.json")):
        try:
            dict(json.loads(path.read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, LookupError, TypeError):
            unreadable.append(path)
    return unreadable
