"""kill -9 of commands that write: the small version of benchmarks/kills.py, and that its checks see
what they are for."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from benchmarks.common import WrongAnswerError
from benchmarks.kill_cases import Ended, Exporting, Importing, Pruning, Truth
from benchmarks.kills import SHARES, measure
from pipeline.store.open import open_store

KILLED = Ended(-9, "", "")
EVERY_DAY = "import of Parquet into SQLite"


@pytest.mark.parametrize(
    "name", [n if n == EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in SHARES]
)
def test_a_killed_command_loses_nothing_and_can_be_run_again(tmp_path, name):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    found = measure(tmp_path, {name: 2}, rows=20_000, night_rows=1_000, seed=seed)
    assert found["kills"] == 2


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(4_000)


def lose_a_row(path) -> None:
    with open_store(path) as store:
        (first, *_) = store.scan(columns=["captured_at"])
        assert store.prune(datetime.fromtimestamp(first[0][0].as_py().timestamp() + 1, UTC)) == 1


@pytest.mark.parametrize("db", ["fingerprints.db", "fingerprints"])
def test_a_row_that_is_lost_is_seen(tmp_path, truth, db):
    for case in (Importing("import", tmp_path, truth, "jsonl", db),
                 Pruning("compaction", tmp_path, truth, db, 0)):  # fmt: skip
        case.fresh()
        case.check_killed(KILLED)
        lose_a_row(case.folder / db)
        with pytest.raises(WrongAnswerError, match="lost"):
            case.check_killed(KILLED)


def test_half_an_export_and_one_that_was_said_to_be_written_are_seen(tmp_path, truth):
    case = Exporting("export", tmp_path, truth, "jsonl", over=True)
    case.fresh()
    assert case.check_killed(KILLED) == "nothing"
    with pytest.raises(WrongAnswerError, match="half an export"):
        case.check_killed(Ended(-9, "said to be written\n", ""))
    path = case.folder / "out.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:500]))
    with pytest.raises(WrongAnswerError, match="half an export"):
        case.check_killed(KILLED)
