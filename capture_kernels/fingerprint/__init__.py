"""The fingerprint: its 20 numbers (`vector`), the `zones`, the float64 `reference` of all kernels,
and the batched torch version (`eager`).

May import `capture_kernels.errors`, `limits` and `arrays`; only `eager` needs torch.
"""
