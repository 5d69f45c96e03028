"""Records in device memory: `ring` and its reader on the host, and `append`, which writes a step.

May import `capture_kernels.decode`, `fingerprint`, `launch` and `errors`. `ring` needs torch,
`append` triton as well.
"""
