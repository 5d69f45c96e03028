"""The ten stages of a run, in `registry.py`. A stage reads what earlier ones saved in their
checkpoints and saves its own results.

May import everything in `discovery` but `job` and `commands`.
"""
