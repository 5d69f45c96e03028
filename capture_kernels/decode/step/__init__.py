"""The rows of a decode step, its layers, and the logits of a tile of keys.

`schedule` says which keys each row reads and which program reads them, `layers` where the inputs
of layers are that one launch handles together, `logits` how q . k becomes a logit.

May import `capture_kernels.fingerprint`, `launch` and `errors`.
"""
