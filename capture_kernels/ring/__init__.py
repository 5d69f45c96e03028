"""Records in device memory: the ring, its reader, and the kernel that appends a step to it.

May import `capture_kernels.decode` and `capture_kernels.fingerprint`; needs torch (append: triton).
"""
