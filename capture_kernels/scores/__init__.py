"""Full attention scores of chosen rows of a prompt, in Triton: `plan`, and its `kernel`.

May import `capture_kernels.launch`, `fingerprint` and `errors`; needs torch and triton.
"""
