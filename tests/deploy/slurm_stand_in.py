"""A stand-in for Slurm that does to a batch job what Slurm's manuals say: sbatch, scontrol requeue,
--signal=B:, --requeue and the end of a preempted job or a lost node."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from pathlib import Path

from deploy_files import executable
from stopping import Act, started

JOB_ID = "4711"
# What sbatch(1) knows of the options that the script may use.
KNOWN = {
    "job-name", "gres", "cpus-per-task", "mem", "time", "requeue", "open-mode", "dependency",
    "signal", "output",
}  # fmt: skip


def directives(script: Path) -> dict[str, str]:
    """The #SBATCH options: those before the first command."""
    found = {}
    for line in script.read_text().splitlines():
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH")):
                name, _, value = word.removeprefix("--").partition("=")
                found[name] = value
        elif line and not line.startswith("#"):
            break
    return found


class Job:
    """A batch job.

    Args:
        folder: of Slurm's spool and of the log. submitted_in: SLURM_SUBMIT_DIR.
    """

    def __init__(
        self, script: Path, arguments: list[str], environment: dict[str, str], folder: Path,
        submitted_in: Path,
    ) -> None:  # fmt: skip
        self.options = directives(script)
        assert set(self.options) <= KNOWN, self.options
        self._spooled = folder / "slurm_script"
        shutil.copy(script, self._spooled)
        self._requests = folder / "requeue"
        executable(
            folder / "bin" / "scontrol",
            f'#!/bin/sh\n[ "$1 $2" = "requeue {JOB_ID}" ] && touch "{self._requests}"\n',
        )
        self._environment = {
            **environment, "PATH": f"{folder / 'bin'}:{environment['PATH']}",
            "SLURM_JOB_ID": JOB_ID, "SLURM_SUBMIT_DIR": str(submitted_in),
        }  # fmt: skip
        self._arguments = arguments
        self._folder = folder
        self.log = folder / self.options["output"].replace("%j", JOB_ID)
        self.restarts = 0

    def run(self, until: str | None = None, act: Act | None = None) -> int | None:
        """One start of the job: until its end, or until a line with these words in its log, where
        it is acted upon. Its exit code; None if it is to be queued again."""
        self._requests.unlink(missing_ok=True)
        if self.restarts:
            self._environment["SLURM_RESTART_COUNT"] = str(self.restarts)
        code = started(
            ["bash", self._spooled, *self._arguments], self._environment, self._folder, self.log,
            until, act,
        )  # fmt: skip
        # A node that is lost takes the job with it: with --requeue it is queued again.
        if self._requests.exists() or (code < 0 and "requeue" in self.options):
            self.restarts += 1
            return None
        return code


def time_is_nearly_over(job: Job) -> Act:
    """--signal=B:TERM@600: the signal, to the batch shell alone."""
    number = job.options["signal"].removeprefix("B:").split("@")[0]
    return lambda process: os.kill(process.pid, getattr(signal, f"SIG{number}"))
