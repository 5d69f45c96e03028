"""`--metrics-file`: the figures of the job for node-exporter's textfile collector.

The file is written whole, under a temporary name that the collector does not read, and renamed
(https://github.com/prometheus/node_exporter#textfile-collector): when a run begins, and when the
command ends. One that is killed leaves a start without an end. What is not known anew is repeated
from the file before, so that a failed night does not hide when the last good one was.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from capture_kernels.errors import OptionError, WriteError
from discovery.artifacts.schema import Manifest, identity_of, was_served
from discovery.events.schema import Event, RunFinished, RunStarted, StageFinished
from pipeline.durable import write_atomically

# Of a file that the collector reads.
SUFFIX = ".prom"
PREFIX = "attn_discover_"


class Gauge(NamedTuple):
    """What a metric means, and the names of its labels."""

    meaning: str
    labels: tuple[str, ...] = ()


# Of the last invocation, and, from `run_` on, of the last run that was finished.
GAUGES = {
    "last_start_timestamp_seconds": Gauge("When the last run began or went on."),
    "last_end_timestamp_seconds": Gauge("When the command last ended, however it did."),
    "last_exit_code": Gauge("Exit code of the command when it last ended."),
    "last_duration_seconds": Gauge("Time that the last invocation took."),
    "last_resumed": Gauge("Whether the last invocation finished a run that an earlier one left."),
    "last_success_timestamp_seconds": Gauge("When a run was last published that may be served."),
    "run_info": Gauge(
        "The last finished run.", ("run_id", "model", "layout", "capture_id", "engine")
    ),
    "run_stage_duration_seconds": Gauge("Time that a stage took.", ("stage",)),
    "run_peak_memory_bytes": Gauge("Most resident memory of all processes of the job."),
    "run_window_rows": Gauge("Rows in the window."),
    "run_rows": Gauge("Rows that the run placed."),
    "run_impossible_rows": Gauge("Rows left out as no attention row can have them."),
    "run_clusters": Gauge("Clusters."),
    "run_noise_ratio": Gauge("Share of rows in no cluster."),
    "run_gate_passed": Gauge("Whether the run passed its gate."),
    "run_served": Gauge("Whether the run may be served: it passed, or --no-gate let it through."),
    "run_gate_check_passed": Gauge("Whether a check of the gate passed.", ("check",)),
    "run_gate_check_value": Gauge("What a check of the gate measured.", ("check",)),
    "run_gate_check_limit": Gauge("The limit of a check of the gate.", ("check",)),
}
# A value by the values of its labels.
Samples = dict[tuple[str, ...], float]


class MetricsFile:
    """The file of one invocation.

    Args:
        path: ends with .prom, in a folder that exists.
        clock: seconds since 1970.

    Raises:
        OptionError: the collector would not read the file, or it cannot be written there.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        if path.suffix != SUFFIX or path.name.startswith("."):
            raise OptionError(
                f"--metrics-file must end with {SUFFIX}, got {path.name}: node-exporter reads no "
                "other file"
            )
        if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
            raise OptionError(
                f"--metrics-file {path} cannot be written: choose a folder that this user can "
                "write to"
            )
        self.path = path
        self._clock = clock
        self._began = clock()
        self._values = _read(path)
        self._values["last_resumed"] = {(): 0.0}

    def listen(self, event: Event) -> None:
        """A listener of the run's events."""
        match event:
            case RunStarted():
                self._set("last_start_timestamp_seconds", self._clock())
                self._set("last_resumed", event.resumed)
                self._stages: dict[tuple[str, ...], float] = {}
                for left in self.path.parent.glob(f".{self.path.name}.*.tmp"):  # by a killed job
                    with suppress(OSError):
                        left.unlink()
                self._write()
            case StageFinished():
                self._stages[event.stage,] = event.seconds
            case RunFinished():
                # A manifest does not have the stage that writes it.
                self._values["run_stage_duration_seconds"] = self._stages
                self._set("run_peak_memory_bytes", event.peak_memory_gb * 1e9)

    def finished(self, manifest: Manifest) -> None:
        """A run was published: its figures replace those of the one before."""
        counts, quality = manifest["counts"], manifest["quality"]
        identity = identity_of(manifest)
        info = (manifest["run_id"], *(str(identity[n]) for n in ("model", "layout", "capture_id")))
        self._values["run_info"] = {(*info, manifest["engine"]): 1.0}
        self._set("run_window_rows", counts["rows_in_window"])
        self._set("run_rows", counts["rows"])
        self._set("run_impossible_rows", sum(counts.get("impossible", {}).values()))
        self._set("run_clusters", counts["clusters"])
        self._set("run_noise_ratio", quality["noise_share"])
        self._set("run_gate_passed", quality["gate"]["passed"])
        self._set("run_served", was_served(manifest))
        for figure in ("passed", "value", "limit"):
            self._values[f"run_gate_check_{figure}"] = {
                (check["name"],): float(check[figure])
                for check in quality["gate"]["checks"]
                if check[figure] is not None
            }
        if was_served(manifest):
            self._set("last_success_timestamp_seconds", self._clock())

    def ended(self, exit_code: int) -> None:
        """The command ends. A file that cannot be written does not change how."""
        now = self._clock()
        self._set("last_end_timestamp_seconds", now)
        self._set("last_duration_seconds", now - self._began)
        self._set("last_exit_code", exit_code)
        self._write()

    def _set(self, name: str, value: float) -> None:
        self._values[name] = {(): float(value)}

    def _write(self) -> None:
        registry = CollectorRegistry()
        registry.register(_Figures(self._values))
        text = generate_latest(registry)
        try:
            write_atomically(self.path, lambda file: file.write(text))
        except WriteError as error:
            print(f"the metrics were not written: {error}", file=sys.stderr)


class _Figures(Collector):
    def __init__(self, values: Mapping[str, Samples]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for name, gauge in GAUGES.items():
            family = GaugeMetricFamily(PREFIX + name, gauge.meaning, labels=gauge.labels)
            for labels, value in self._values.get(name, {}).items():
                family.add_metric(labels, value)
            # Without a sample there is nothing to say, not even that there could be.
            if family.samples:
                yield family


def _read(path: Path) -> dict[str, Samples]:
    """The samples of the file as it is; none if there is none, or if it is damaged."""
    found: dict[str, Samples] = {}
    try:
        for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
            name = family.name.removeprefix(PREFIX)
            if (gauge := GAUGES.get(name)) is None:
                continue
            found[name] = {
                tuple(sample.labels[label] for label in gauge.labels): float(sample.value)
                for sample in family.samples
            }
    except (OSError, ValueError, KeyError):
        return {}
    return found
