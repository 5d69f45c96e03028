"""`attn examples`: prompts whose answer stands in the prompt, and what a server's heads look at
when they answer."""
