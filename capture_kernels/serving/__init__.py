"""Capture inside a serving engine: one object between the engine's steps and the kernels.

`step` needs Triton on a GPU alone; on a CPU it takes the plan of `decode.host`.
"""
