"""Full attention scores of chosen rows of a prompt: in Triton `plan`, and its `kernel`; in plain
torch `plain`.

May import `capture_kernels.launch`, `fingerprint` and `errors`; needs torch, and all but `plain`
triton.
"""
