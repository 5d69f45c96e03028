"""A notebook executed from top to bottom, and what it printed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from shared import REPO

NOTEBOOKS = REPO / "notebooks"
# Seconds until a cell counts as one that hangs. A notebook takes less than a minute.
CELL_S = 300


class OwnPython(KernelSpecManager):
    """Gives this process's Python as the one kernel, whatever is installed for the user."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="Python", language="python", env={"PYTHONPATH": str(REPO)},
        )  # fmt: skip


@dataclass
class Executed:
    """An executed notebook."""

    notebook: nbformat.NotebookNode

    def __post_init__(self) -> None:
        self.cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]

    @property
    def printed(self) -> str:
        """What its cells wrote to standard output, and the text of their values."""
        parts = []
        for cell in self.cells:
            for output in cell.outputs:
                if output.output_type == "stream" and output.name == "stdout":
                    parts.append(output.text)
                elif output.output_type in ("execute_result", "display_data"):
                    parts.append(output.data.get("text/plain", "") + "\n")
        return "".join(parts)

    def shown(self, kind: str) -> int:
        """How many outputs are of a media type."""
        return sum(kind in output.get("data", {}) for cell in self.cells for output in cell.outputs)


def execute(name: str, folder: Path) -> Executed:
    """Run notebooks/NAME.py in a kernel of this Python. Fails with the first cell that does.

    Args:
        folder: the working folder.
    """
    notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
    manager = AsyncKernelManager(kernel_spec_manager=OwnPython(), kernel_name="python3")
    client = NotebookClient(
        notebook, km=manager, timeout=CELL_S, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return Executed(notebook)
