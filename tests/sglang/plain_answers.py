"""What an answer looks like, number for number left out: to compare servers by what they send to
those who ask for no attention."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

# Of SGLang without the plug-in; `test_server.py` keeps it true.
EXPECTED = Path(__file__).with_name("plain_answers.json")
PROMPT = "alpha: 1729\nbeta: 2048\nalpha:"
LIMITS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
REQUESTS = {
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": PROMPT}],
                             **LIMITS},
    "/v1/completions": {"model": "demo", "prompt": PROMPT, **LIMITS},
    "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0,
                                                      "ignore_eos": True}},
}  # fmt: skip
USAGE = {"stream_options": {"include_usage": True}}


def shape(text: str) -> str:
    """A text with 0 for each number, `id` for a random one, and `text` for what was generated."""
    text = re.sub(r'"[0-9a-f]{32}"', '"id"', text)
    text = re.sub(r'"(text|content)":"(\\.|[^"\\])*"', r'"\1":"text"', text)
    text = re.sub(r"\[[0-9,]+\]", "[]", text)
    return re.sub(r"(?<=:)-?[0-9][0-9.eE+-]*", "0", text)


def answer_shapes(url: str, routes: list[str] | None = None) -> dict[str, list[str]]:
    """By route, and whether it streams: names of the headers and the different lines of bodies."""
    found = {}
    for route in routes or REQUESTS:
        for stream in (False, True):
            body = REQUESTS[route] | {"stream": stream}
            if stream and route != "/generate":
                body |= USAGE
            answer = httpx.post(url + route, json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            lines = [shape(line) for line in answer.text.splitlines() if line]
            # How many tokens make a chunk is chance; the same lines follow each other.
            different = [line for at, line in enumerate(lines) if line not in lines[:at]]
            found[f"{route} {'stream' if stream else 'whole'}"] = [*answer.headers, *different]
    return found


def expected_shapes(routes: list[str] | None = None) -> dict[str, list[str]]:
    found = json.loads(EXPECTED.read_text())
    return {key: found[key] for key in found if not routes or key.split()[0] in routes}
