"""The service beside an inference server: ingest, live classification, hot reload.

May import `discovery.artifacts`, `discovery.runs`, `discovery.events`, `discovery.describe`, the
drift of `discovery.algorithms`, `pipeline` and `capture_kernels`; nothing that trains a map.
"""
