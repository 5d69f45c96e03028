"""Requests to a server, on each route and in each way, and what they are answered."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

CHAT, COMPLETIONS, GENERATE = "chat", "completions", "generate"
MODES = {
    "raw": {},
    "sketch": {"attention_sketch_mode": True},
    "fingerprint": {"attention_fingerprint_mode": True},
}


@dataclass
class Answer:
    """What a request was answered. chunks: entries by the chunk of a stream that brought them."""

    text: str
    entries: list[dict[str, Any]]
    attention: dict[str, Any] | None  # its usage
    id: str
    chunks: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)


def ask(
    url: str, route: str, prompt: str, tokens: int, *, stream: bool = False,
    headers: dict[str, str] | None = None, sampling: dict[str, Any] | None = None,
    messages: list[dict[str, str]] | None = None, **fields: Any,
) -> Answer:  # fmt: skip
    """Ask for exactly so many tokens, through the OpenAI client, or SGLang's own /generate.

    Args:
        sampling: further parameters of SGLang's sampling.
        fields: of attention, in the body.
    """
    if route == GENERATE:
        return _generate(url, prompt, tokens, stream, fields)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
    given: dict[str, Any] = {
        "model": "demo", "temperature": 0, "max_tokens": tokens, "extra_headers": headers or {},
        "extra_body": {"ignore_eos": True, **(sampling or {}), **fields},
    }  # fmt: skip
    if stream:
        given |= {"stream": True, "stream_options": {"include_usage": True}}
    with client:
        if route == CHAT:
            given["messages"] = messages or [{"role": "user", "content": prompt}]
            found = client.chat.completions.create(**given)
        else:
            found = client.completions.create(prompt=prompt, **given)
        if not stream:
            return _whole(found)
        return _streamed(list(found))


def _whole(found: Any) -> Answer:
    body = found.model_dump(warnings=False)
    choice = body["choices"][0]
    text = _text(choice)
    entries = choice.get("attention_tokens")
    if "message" in choice:
        # Both places have them.
        assert choice["message"].get("attention_tokens") == entries
    return Answer(text, entries or [], body["usage"].get("attention"), body["id"])


def _streamed(events: list[Any]) -> Answer:
    chunks: list[tuple[str, list[dict[str, Any]]]] = []
    attention = None
    for event in events:
        body = event.model_dump(warnings=False)
        if body.get("usage"):
            attention = body["usage"].get("attention")
        for choice in body["choices"]:
            entries = choice.get("delta", choice).get("attention_tokens") or []
            chunks.append((_text(choice), entries))
    text = "".join(piece for piece, _ in chunks)
    entries = [entry for _, own in chunks for entry in own]
    return Answer(text, entries, attention, events[0].id, chunks)


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    place = choice.get("message") or choice["delta"]
    return (place.get("reasoning_content") or "") + (place.get("content") or "")


def _generate(url: str, prompt: str, tokens: int, stream: bool, fields: dict) -> Answer:
    limits = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": prompt, "sampling_params": limits, **fields}
    if not stream:
        answer = httpx.post(f"{url}/generate", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        found = answer.json()
    else:
        body["stream"] = True
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=240) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
        found = json.loads(lines[-1].removeprefix("data: "))
    info = found["meta_info"]
    usage = info.get("attention_usage") or [None]
    return Answer(found["text"], info.get("attention_tokens", []), usage[-1], info["id"])
