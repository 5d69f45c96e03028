"""Records of the rows of steps, made in a separate process that also stores or sends them.

The process that runs the model imports `rows` and `process`; `worker` is the other process, and
imports neither torch nor an engine.
"""
