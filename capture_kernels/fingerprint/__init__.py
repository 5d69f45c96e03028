"""The fingerprint: its 20 numbers, the zones, a float64 reference and the batched torch version.

May import `capture_kernels.errors`, `limits` and `arrays`; only `eager` needs torch.
"""
