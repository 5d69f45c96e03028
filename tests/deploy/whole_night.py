"""A night that nothing stopped, which every way of stopping one is compared with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from planted import planted
from published import make_store
from shared import AttnCommand
from uninterrupted import AT_NOW, OPTIONS, RUN_ID, fingerprint_of


@dataclass(frozen=True)
class WholeNight:
    """A store, and what a night made of it."""

    store: Path
    published: dict[str, object]

    @classmethod
    def of(cls, attn: AttnCommand, folder: Path) -> WholeNight:
        store = make_store(folder / "fingerprints.db", planted(1_501, 0)[0])
        shutil.copy(store, folder / "own.db")
        done = attn("discover", "--db", folder / "own.db", "--output", folder / "out", *AT_NOW,
                    *OPTIONS)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return cls(store, fingerprint_of(folder / "out" / RUN_ID))

    def settings(self, folder: Path) -> dict[str, str]:
        """Those of `attn-nightly` for the same night, of a copy of the store."""
        shutil.copy(self.store, folder / "fingerprints.db")
        return {
            "ATTN_DB": str(folder / "fingerprints.db"), "ATTN_OUTPUT": str(folder / "out"),
            "ATTN_OPTIONS": " ".join([*OPTIONS, *AT_NOW]),
            "ATTN_METRICS_FILE": str(folder / "attn.prom"),
        }  # fmt: skip

    def assert_same(self, folder: Path, log: Path, resumed: int) -> None:
        """The night in this folder published the same, after it was resumed so many times."""
        said = log.read_text()
        assert said.count(f"run {RUN_ID} resumed") == resumed and "Traceback" not in said, said
        assert fingerprint_of(folder / "out" / RUN_ID) == self.published
        assert (folder / "out" / "latest").readlink() == Path(RUN_ID)
        assert "attn_discover_last_exit_code 0.0" in (folder / "attn.prom").read_text()
