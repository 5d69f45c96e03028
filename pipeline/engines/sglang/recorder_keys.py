"""Keys of `meta_info` under which the model's process says what it captured. Needs nothing."""

# The entries of the response so far, and its `usage.attention` at the end.
ENTRIES, USAGE = "attention_tokens", "attention_usage"
# Its full scores at the end: arguments of `FullScores.entries`.
SCORES = "attn_capture_data"
