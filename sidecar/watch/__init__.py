"""What an operator watches: drift, metrics, the nightly runs, traces.

May import `sidecar.processed` and what it may, and of discovery what needs no library of the job.
"""
