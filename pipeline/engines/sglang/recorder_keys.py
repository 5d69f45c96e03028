"""Keys of `meta_info` under which the model's process says what it captured, beside those of
`answer_writer`. Needs nothing."""

# The response's `usage.attention`, at the end.
USAGE = "attention_usage"
