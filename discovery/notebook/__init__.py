"""Runs and stores in notebooks (extra `notebooks`): data to look at, tables, and plots.

`data` makes the small stores and runs that notebooks/ looks at. `runs` reads runs and stores as
data frames: cuDF's where a GPU answers, else pandas'. `trials` makes runs to compare; `plots`,
`lineage_plot` and `scatter` draw in the colours of `style`. Nothing else imports this.
"""

from .data import NotebookData, open_data, prepare
from .lineage_plot import plot_lineage
from .plots import (
    plot_axis,
    plot_evidence,
    plot_fingerprints,
    plot_histograms,
    plot_map,
    plot_seconds,
    plot_shares,
)
from .runs import (
    KEY,
    Run,
    changes,
    frame,
    life,
    lineage,
    on_host,
    read_rows,
    same_rows,
    stored_table,
    with_task,
)
from .scatter import linked_maps
from .style import shown
from .trials import agreement, explained, transfer, trial

__all__ = [
    "KEY",
    "NotebookData",
    "Run",
    "agreement",
    "changes",
    "explained",
    "frame",
    "life",
    "lineage",
    "linked_maps",
    "on_host",
    "open_data",
    "plot_axis",
    "plot_evidence",
    "plot_fingerprints",
    "plot_histograms",
    "plot_lineage",
    "plot_map",
    "plot_seconds",
    "plot_shares",
    "prepare",
    "read_rows",
    "same_rows",
    "shown",
    "stored_table",
    "transfer",
    "trial",
    "with_task",
]
