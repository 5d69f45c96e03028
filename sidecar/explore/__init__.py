"""`attn explore`: the demo model, the sidecar, its page and a discovery run on one machine."""
