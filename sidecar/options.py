"""What `attn sidecar` is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capture_kernels.errors import OptionError
from discovery.engines.protocol import check_engine
from pipeline.stream.curve import check_address, is_loopback

# Rows that wait for the store before ingest pushes back: a few seconds of a busy server.
QUEUE_ROWS = 524_288
# Rows in one request, and bytes of one of them as JSON.
MAX_BATCH, ROW_BYTES = 10_000, 2_048


@dataclass(frozen=True)
class SidecarOptions:
    """Options of the service; docs/guide.md describes each.

    Raises:
        OptionError: a value cannot be used.
    """

    port: int = 9009
    host: str = "127.0.0.1"
    db: Path = Path("fingerprints.db")
    discovery_dir: Path = Path("discovery_outputs")
    zmq_bind: str | None = "tcp://127.0.0.1:9001"
    hints_bind: str | None = None
    curve_keys: Path | None = None
    online: bool = False
    online_threshold: float = 2.0
    online_max_clusters: int = 50
    recluster_interval: float = 60.0
    buffer_size: int = 10_000
    min_cluster_size: int | None = None
    engine: str = "cpu"
    auto_reload_interval: float = 300.0
    api_key_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    max_batch: int = MAX_BATCH
    queue_rows: int = QUEUE_ROWS
    drift_hours: float = 1.0
    log_json: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port must be between 0 and 65535, got {self.port}")
        if not self.host:
            raise OptionError("--host must be an address: 127.0.0.1 for this machine alone")
        least = {
            "online_max_clusters": 2, "buffer_size": 100, "max_batch": 1, "queue_rows": 1,
            "min_cluster_size": 2,
        }  # fmt: skip
        for name, low in least.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise OptionError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
        positive = ("online_threshold", "recluster_interval", "auto_reload_interval", "drift_hours")
        for name in positive:
            if not 0 < getattr(self, name) < 1e9:
                raise OptionError(f"--{name.replace('_', '-')} must be greater than 0")
        check_engine(self.engine)
        if self.queue_rows < self.max_batch:
            raise OptionError(
                f"--queue-rows must hold a batch of --max-batch ({self.max_batch:,}) rows"
            )
        for name in ("zmq_bind", "hints_bind"):
            if (address := getattr(self, name)) is not None:
                check_address(address, has_keys=self.curve_keys is not None)

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request."""
        return (self.max_batch + 32) * ROW_BYTES

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the HTTP port."""
        return not is_loopback(self.host)
