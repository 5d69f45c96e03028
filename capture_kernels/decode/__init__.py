"""Attention statistics of a decode step over a paged key cache, in Triton.

`plan` is the entry: one pass over the keys (`key_pass`), then `merge`. `fused` computes the
attention output as well. Rooms: `step/` (the rows and layers of a step), `topk/` (the exact top k).

May import `capture_kernels.fingerprint`, `launch` and `errors`; never `ring` or
`scores`. `step` imports neither `topk` nor the modules here, and `topk` imports `step` alone.
Needs torch and triton.
"""
