"""Attention statistics of a decode step over a paged key cache, in Triton.

May import `capture_kernels.fingerprint`; needs torch and triton.
"""
