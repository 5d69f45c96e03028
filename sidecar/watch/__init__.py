"""What an operator watches: drift, metrics, the nightly runs, traces.

May import `sidecar.options`, and of discovery what needs no library of the job.
"""
