"""From arriving batches to the store: checked, classified, shown to observers, written.

May import `sidecar.serving`, `sidecar.options` and what these may.
"""
