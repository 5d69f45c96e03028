"""What a run's own Dask workers keep to themselves. Imports Dask."""

from __future__ import annotations

import logging

from distributed import Worker, WorkerPlugin

# Of distributed.worker 2026.8, with a traceback, where the scheduler has ended a moment before the
# worker. The scheduler is in the process of the run: where it ends, so does the run, or it has.
AT_THE_END = "Failed to communicate with scheduler during heartbeat"


class QuietEnd(WorkerPlugin):
    """Drops that line in a worker, and each that takes its place."""

    def setup(self, worker: Worker) -> None:
        logging.getLogger("distributed.worker").addFilter(is_told)


def is_told(record: logging.LogRecord) -> bool:
    return AT_THE_END not in record.getMessage()
