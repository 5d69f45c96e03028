"""What a discovery run is asked to do: one dataclass, checked once, saved with the run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules

from .gate import GateRules

if TYPE_CHECKING:
    from discovery.engines.protocol import Engine

# What may differ when a run is finished elsewhere: it decides how, not what, is computed. The
# tokenizer may have another path, but must be the same file.
FREE_ON_RESUME = (
    "db", "output", "engine", "long_running", "scheduler", "max_memory_gb", "max_hours",
    "tokenizer",
)  # fmt: skip
# Lowest and highest value of an option. The hours are a century: further back there is nothing, and
# before the year 1 there are no dates.
BOUNDS: dict[str, tuple[float, float]] = {
    "hours": (0, 876_600),
    "late_hours": (0, 876_600),
    "min_rows": (4, inf),
    "min_samples": (1, inf),
    "min_cluster_size": (2, inf),
    "max_per_request": (0, inf),
    "umap_neighbors": (2, inf),
    "umap_min_dist": (0, 1),
    "umap_sample_size": (100, inf),
    "batch_size": (256, 2**20),
    "seed": (0, 2**32 - 1),
}
# How clusters are found: by what many halves of the requests agree on, or by HDBSCAN of the map.
CLUSTERINGS = ("consensus", "hdbscan")
# Tables of limits, each with its own entry in the manifest.
RULES = {"gate_rules": GateRules, "zone_rules": ZoneRules}


@dataclass(frozen=True)
class DiscoverOptions:
    """Options of `attn discover`; the names are those of the command line.

    Raises:
        OptionError: a value that cannot be used, with the option's name.
    """

    db: str
    output: str = "discovery_outputs"
    hours: float = 24.0  # 0: all
    late_hours: float = 24.0
    min_rows: int = 100
    clustering: str = "consensus"  # one of CLUSTERINGS
    min_samples: int | None = None  # None: as the smallest cluster; HDBSCAN alone has it
    min_cluster_size: int | None = None  # None: 1% of the fitted rows, 20 at least
    max_per_request: int = 256
    umap_neighbors: int = 30
    umap_min_dist: float = 0.0
    umap_sample_size: int | None = None  # None: the engine's default, see `resolved`
    batch_size: int | None = None
    seed: int = 42
    layout: str | None = None
    model: str | None = None
    capture_id: str | None = None
    engine: str = "auto"
    long_running: bool = False
    scheduler: str | None = None
    max_memory_gb: float | None = None
    max_hours: float | None = None
    no_gate: bool = False
    new_lineage: bool = False
    tokenizer: str | None = None
    gate_rules: GateRules = field(default_factory=GateRules)
    zone_rules: ZoneRules = field(default_factory=ZoneRules)

    def __post_init__(self) -> None:
        if self.layout is not None:
            Layout.parse(self.layout)
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            # Not `value < least`: NaN is not less than anything.
            if value is not None and not least <= value <= most:
                bound = f"at most {most}" if value > most else f"{least} or more"
                raise OptionError(f"{option_name(name)} must be {bound}, got {value}")
        if self.clustering not in CLUSTERINGS:
            raise OptionError(
                f"unknown clustering {self.clustering!r}: use {' or '.join(CLUSTERINGS)}"
            )
        if self.min_samples is not None and self.clustering != "hdbscan":
            raise OptionError("--min-samples is HDBSCAN's: add --clustering hdbscan")
        for name in ("max_memory_gb", "max_hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise OptionError(f"{option_name(name)} must be more than 0, got {value}")
        if self.scheduler and not self.long_running:
            raise OptionError("--scheduler needs --long-running")
        if self.max_memory_gb and self.scheduler:
            raise OptionError(
                "--max-memory-gb limits processes that the job starts: with --scheduler, start "
                "that cluster's workers with a limit"
            )

    def resolved(self, engine: Engine) -> DiscoverOptions:
        """The options with the engine's default sizes. A run keeps them, so that it can be finished
        on another engine."""
        return replace(
            self,
            umap_sample_size=self.umap_sample_size or engine.fit_rows,
            batch_size=self.batch_size or engine.chunk_rows,
        )

    @property
    def fit_rows(self) -> int:
        """Most rows that the map is fitted on, of resolved options."""
        assert self.umap_sample_size is not None
        return self.umap_sample_size

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk, of resolved options."""
        assert self.batch_size is not None
        return self.batch_size

    def some(self, *names: str) -> dict[str, Any]:
        """These fields, by name."""
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> DiscoverOptions:
        values = {f.name: saved[f.name] for f in fields(cls) if f.name in saved}
        rules = {name: kind(**saved[name]) for name, kind in RULES.items()}
        return cls(**{**values, **rules})

    @property
    def output_dir(self) -> Path:
        return Path(self.output)


def option_name(field_name: str) -> str:
    """The command line's name of an option field: `min_rows` -> `--min-rows`."""
    return "--" + field_name.replace("_", "-")
