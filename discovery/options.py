"""What a discovery run is asked to do: one dataclass, checked once, saved with the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules

from .gate import GateRules

if TYPE_CHECKING:
    from discovery.engines.protocol import Engine

# A century: further back there is nothing, and before the year 1 there are no dates.
MOST_HOURS = 876_600
# What may differ when a run is finished elsewhere: it decides how, not what, is computed.
FREE_ON_RESUME = (
    "db",
    "output",
    "engine",
    "long_running",
    "scheduler",
    "max_memory_gb",
    "max_hours",
    "no_gate",
    "tokenizer",
)
# Tables of limits, each with a place of its own in the manifest.
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
    min_rows: int = 100
    min_samples: int = 10
    min_cluster_size: int | None = None  # None: 1% of the fitted rows, 20 at least
    max_per_request: int = 256
    umap_neighbors: int = 30
    umap_min_dist: float = 0.0
    umap_sample_size: int | None = None  # None: the engine's own, see `resolved`
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
    tokenizer: str | None = None
    gate_rules: GateRules = field(default_factory=GateRules)
    zone_rules: ZoneRules = field(default_factory=ZoneRules)

    def __post_init__(self) -> None:
        if self.layout is not None:
            Layout.parse(self.layout)
        lowest: dict[str, float] = {
            "hours": 0, "min_rows": 4, "min_samples": 1, "min_cluster_size": 2,
            "max_per_request": 0, "umap_neighbors": 2, "umap_min_dist": 0,
            "umap_sample_size": 100, "batch_size": 256, "seed": 0,
        }  # fmt: skip
        for name, least in lowest.items():
            # Not `value < least`: NaN is not less than anything.
            if getattr(self, name) is not None and not getattr(self, name) >= least:
                raise OptionError(
                    f"{option_name(name)} must be {least} or more, got {getattr(self, name)}"
                )
        highest = {"umap_min_dist": 1, "seed": 2**32 - 1, "hours": MOST_HOURS, "batch_size": 2**20}
        for name, most in highest.items():
            if getattr(self, name) is not None and getattr(self, name) > most:
                raise OptionError(
                    f"{option_name(name)} must be at most {most}, got {getattr(self, name)}"
                )
        for name in ("max_memory_gb", "max_hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise OptionError(f"{option_name(name)} must be more than 0, got {value}")
        if self.scheduler and not self.long_running:
            raise OptionError("--scheduler needs --long-running")
        if self.max_memory_gb and self.scheduler:
            raise OptionError(
                "--max-memory-gb is for processes of the job's own: with --scheduler, start that "
                "cluster's workers with a limit"
            )

    def resolved(self, engine: Engine) -> DiscoverOptions:
        """The options with the engine's own sizes where none were given. A run keeps them, so that
        it can be finished on another engine."""
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
        """Rows of a part, of resolved options."""
        assert self.batch_size is not None
        return self.batch_size

    def as_json(self) -> dict[str, Any]:
        rules = {name: getattr(self, name).as_dict() for name in RULES}
        return {**asdict(self), **rules}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> DiscoverOptions:
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in saved.items() if name in known}
        rules = {name: kind(**saved[name]) for name, kind in RULES.items()}
        return cls(**{**values, **rules})

    @property
    def output_dir(self) -> Path:
        return Path(self.output)


def option_name(field_name: str) -> str:
    """The command line's name of an option field: `min_rows` -> `--min-rows`."""
    return "--" + field_name.replace("_", "-")
