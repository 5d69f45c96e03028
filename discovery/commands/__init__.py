"""The commands `attn discover`, `attn classify` and `attn runs`.

May import everything in `discovery`.
"""
