"""Records on the wire: messages over ZMQ, their sender, and `attn send` (DESIGN.md section 7).

May import `capture_kernels`, `pipeline.record`, `pipeline.store` and `pipeline.progress`.
"""
