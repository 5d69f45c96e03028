"""Attention in a server's API, whatever engine serves it: requests, guardrails, responses, records.

Nothing here imports torch.
"""
