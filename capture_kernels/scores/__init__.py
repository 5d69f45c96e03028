"""Full attention scores of chosen rows, in Triton.

May import `capture_kernels.launch`; needs torch and triton.
"""
