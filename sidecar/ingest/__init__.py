"""From arriving batches to the store: checked, classified, shown to observers, written.

May import `sidecar.watch` (its metrics), `sidecar.processed` and what these may.
"""
