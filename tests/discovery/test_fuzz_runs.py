"""Damaged runs, parents and checkpoints, and mutated lines to classify: one clear error, or the
same answer as without the damage; never a traceback."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import Door, fuzz, mutated, some_mutated
from planted import planted, planted_batch
from shared import NOW, REPO, START
from uninterrupted import fingerprint_of

from capture_kernels.errors import AttnError, NewRunNeededError
from capture_kernels.fingerprint.vector import Layout
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.artifacts.schema import identity_of
from discovery.events.schema import Progress, StageFinished
from discovery.job import discover
from discovery.options import DiscoverOptions
from discovery.runs.parent import before_this_run, open_parent
from discovery.runs.state import survey
from pipeline.store.open import open_store

GOLDEN = REPO / "tests" / "golden" / "run_v1"
VECTOR = [0.1875, 0.3125, 0.5, 0.5] + [0.0625] * 16


def damage(folder: Path, names: list[str], rng: random.Random) -> str:
    """Mutate one of these files; which."""
    name = rng.choice(names)
    (folder / name).write_bytes(mutated((folder / name).read_bytes(), rng))
    return name


def reading_a_run(output: Path) -> Door:
    """A run with one mutated file is classified with, verified and listed."""
    run = output / open_artifacts(GOLDEN).manifest["run_id"]
    names = sorted(path.name for path in GOLDEN.iterdir())

    def try_one(rng: random.Random) -> int:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(GOLDEN, run)
        damage(run, names, rng)
        assert len(survey(output)) <= 1
        Classifier.load(run).answer([VECTOR])
        open_artifacts(run).verify()
        return 1

    return try_one


def following_a_parent(output: Path) -> Door:
    """A run whose parent has one mutated file follows it as it was, or says why it cannot."""
    manifest = open_artifacts(GOLDEN).manifest
    parent = output / manifest["run_id"]
    identity = identity_of(manifest)
    window = {**identity, "layout": int(Layout.parse(identity["layout"]))}
    whole = None
    # What is not hashed: the log, and what the manifest says of itself.
    names = sorted(path.name for path in GOLDEN.iterdir() if path.name != "progress.jsonl")
    later = "2099-01-01T00-00-00"

    def try_one(rng: random.Random) -> int:
        nonlocal whole
        shutil.rmtree(parent, ignore_errors=True)
        shutil.copytree(GOLDEN, parent)
        whole = whole or open_parent(output, parent.name)
        damaged = damage(parent, names, rng)
        follows = before_this_run(output, later, window, manifest["parameters"]["hours"])
        if follows["parent"]:
            found = open_parent(output, parent.name)
            if damaged != "manifest.json":
                assert found.ids.tolist() == whole.ids.tolist()
                assert (found.references == whole.references).all()
        elif damaged != "manifest.json" or follows["damaged"]:
            (one,) = follows["damaged"]
            assert one["run_id"] == parent.name and "\n" not in one["reason"]
        # Damaged after it was chosen.
        with pytest.raises(NewRunNeededError, match="bring it back"):
            (parent / "manifest.json").write_bytes(b"{}")
            open_parent(output, parent.name)
        return 1

    return try_one


class Checkpoints:
    """A run, and copies of its folder from when each of its stages had finished, or was in its
    middle."""

    def __init__(self, folder: Path) -> None:
        self.db, self.output = folder / "fingerprints.db", folder / "output"
        with open_store(self.db, create=True) as store:
            store.append(planted_batch(planted(300, 0)[0], START))
        self.options = DiscoverOptions(
            db=str(self.db), output=str(self.output), hours=0, batch_size=256
        )
        self.copies: list[Path] = []

        def copy(event: object) -> None:
            middle = isinstance(event, Progress) and event.done < event.total
            if middle or isinstance(event, StageFinished):
                made = folder / f"after-{len(self.copies)}"
                shutil.copytree(self.output, made, symlinks=True)
                self.copies.append(made)

        self.run_id = discover(self.options, now=NOW, listeners=[copy])["run_id"]
        self.expected = fingerprint_of(self.output / self.run_id)

    def resumed(self) -> dict[str, object]:
        discover(self.options, resume=self.run_id)
        return fingerprint_of(self.output / self.run_id)


def resuming(folder: Path) -> Door:
    """A run of which one checkpoint file is mutated is refused, or ends in the same artifacts."""
    made = Checkpoints(folder)

    def try_one(rng: random.Random) -> int:
        # More of the late ones, which take less to finish.
        copy = made.copies[max(rng.randrange(len(made.copies)) for _ in range(3))]
        shutil.rmtree(made.output)
        shutil.copytree(copy, made.output, symlinks=True)
        checkpoint = made.output / made.run_id / ".checkpoint"
        names = [str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()]
        damage(checkpoint, sorted(names), rng)
        try:
            assert made.resumed() == made.expected
        except AttnError as error:
            assert "\n" not in str(error)
            # Not half of a run was published.
            served = made.output / "latest"
            assert not served.exists() or fingerprint_of(served.resolve()) == made.expected
        return 1

    return try_one


DOORS: dict[str, tuple[Callable[[Path], Door], int]] = {
    "a run": (reading_a_run, 1_500),
    "a parent": (following_a_parent, 1_000),
    "checkpoints": (resuming, 200),
}


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("door", DOORS)
def test_a_damaged_run_is_one_error_or_as_it_was(tmp_path, door, many):
    make, mutations = DOORS[door]
    fuzz(make(tmp_path), mutations if many else 10)


@pytest.mark.parametrize("mutations", [500, pytest.param(6_000, marks=pytest.mark.slow)])
def test_every_line_to_classify_is_answered_whatever_its_neighbours_are(attn, tmp_path, mutations):
    fields = {"request_id": "request-7", "position": 12, "layout": "log16", "note": "é\u2028"}
    vectors = planted(50, 0)[0].tolist()
    lines = [json.dumps(vector).encode() for vector in vectors]
    lines += [json.dumps({**fields, "vector": v}, ensure_ascii=False).encode() for v in vectors]
    lines *= 20
    alone = Classifier.load(GOLDEN).answer([json.loads(line) for line in lines])

    def try_one(rng: random.Random) -> int:
        some, intact = some_mutated(lines, rng)
        given = b"\n".join(some)
        (tmp_path / "lines.jsonl").write_bytes(given)
        done = attn("classify", "--artifacts", GOLDEN, tmp_path / "lines.jsonl", "--skip-bad")
        assert done.returncode == 3, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        numbers = [n for n, line in enumerate(given.split(b"\n"), start=1) if line.strip()]
        assert len(answers) == len(numbers)
        bad = {a["line"] for a in answers if "error" in a}
        assert bad <= set(numbers)
        assert done.stderr == f"lines that could not be classified: {len(bad):,}\n"
        # A mutation may have put a line break in: the numbers of what follows are higher.
        first, of_number = 1, dict(zip(numbers, answers, strict=True))
        for i, line in enumerate(some):
            if i in intact:
                known = of_number[first]
                assert {name: known.get(name) for name in alone[i]} == alone[i]
                assert ("note" in known) == (b"note" in line)
            first += 1 + line.count(b"\n")
        return len(lines) - len(intact)

    fuzz(try_one, mutations)
