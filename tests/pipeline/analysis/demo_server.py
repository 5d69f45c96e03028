"""An OpenAI-compatible server of the demo model with attention in its answers: a real process of
HTTP, whose scores `transformers` computes with eager attention."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from shared import REPO

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from fastapi import FastAPI, Request  # noqa: E402
from fastapi.responses import JSONResponse, StreamingResponse  # noqa: E402

FOLDER = REPO / "examples" / "demo_model"
LAYERS = (0, 1, 2, 3)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class DemoModel:
    """Greedy answers with the attention of every layer."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def answer(self, prompt: str, max_tokens: int) -> tuple[list[int], list[int], np.ndarray]:
        """Token ids of the prompt and of the answer up to the end of its line, and float32[L, T, H,
        T] probabilities over both."""
        ids = self.tokenizer(prompt).input_ids
        out: list[int] = []
        ends = {self.tokenizer.eos_token_id}
        while len(out) < max_tokens:
            best = int(self.model(input_ids=torch.tensor([ids + out])).logits[0, -1].argmax())
            if best in ends or "\n" in self.tokenizer.decode([best]):
                break
            out.append(best)
        ran = self.model(input_ids=torch.tensor([ids + out]), output_attentions=True)
        attention = torch.cat(ran.attentions).transpose(1, 2).numpy()
        return ids, out, attention


def pack(scores: np.ndarray) -> str:
    return base64.b64encode(gzip.compress(scores.astype("<f2").tobytes())).decode()


def scores_of(layer: int, scores: np.ndarray, prompt_len: int) -> dict[str, Any]:
    """A layer of `attn_capture_data`; scores are [T, H, T]."""
    return {
        "layer_idx": layer,
        "data": pack(scores),
        "shape": list(scores.shape),
        "token_meta": {
            "prompt_len": prompt_len,
            "total_len": len(scores),
            "vision_ranges": [],
            "lang_ranges": [{"start": 0, "end": prompt_len}],
        },
    }


def raw_entry(layer: int, row: np.ndarray, position: int, prompt_len: int, k: int) -> dict:
    """A raw entry of a row's probabilities [H, T]; its logsumexp is one of the test's choice."""
    mean = row.mean(0)
    best = np.argsort(-mean, kind="stable")[:k]
    logsumexp = 3.5
    return {
        "token_positions": best.tolist(),
        "attention_scores": (mean[best] / mean[best].sum()).tolist(),
        "topk_logits": (np.log(mean[best]) + logsumexp).tolist(),
        "logsumexp_candidates": logsumexp,
        "layer_id": layer,
        "decode_step": position - prompt_len + 1,
        "position": position,
        "think_phase": "output",
    }


def make_app(demo: DemoModel, *, chat: bool, key: str | None = None, hidden: int = 0) -> FastAPI:
    """The app.

    Args:
        chat: whether the model has a chat template, of its messages' texts.
        key: that every request needs.
        hidden: tokens of the prompt that scores do not show.
    """
    app = FastAPI()

    def refused(status: int, message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": message, "code": status}}, status)

    @app.middleware("http")
    async def check_key(request: Request, go_on: Any) -> Any:
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return refused(401, "the key is wrong")
        return await go_on(request)

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": str(FOLDER), "object": "model"}]}

    @app.get("/v1/attention/capabilities")
    def capabilities() -> dict:
        return {"supported": True, "layers": [3], "score_layers": list(LAYERS)}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        if not chat:
            return refused(400, "the tokenizer has no chat template")
        body = await request.json()
        text = demo.tokenizer.apply_chat_template(
            body["messages"], chat_template=TEMPLATE, tokenize=False
        )
        return respond(body, text, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await request.json()
        return respond(body, body["prompt"], chat=False)

    def respond(body: dict, text: str, chat: bool) -> Any:
        wanted = [int(n) for n in body.get("attn_capture_layers", "3").split(",")]
        if not set(wanted) <= set(LAYERS):
            return refused(400, f"attn_capture_layers: this server offers {list(LAYERS)}")
        ids, out, attention = demo.answer(text, body.get("max_tokens", 16))
        entries = []
        if body.get("return_attention_tokens"):
            k = body.get("top_k_attention", 32)
            entries = [
                [raw_entry(n, attention[n, row], row, len(ids), k) for n in wanted]
                for row in range(len(ids) - 1, len(ids) + len(out) - 1)
            ]
        texts = [demo.tokenizer.decode([id_]) for id_ in out]
        if body.get("stream"):
            return StreamingResponse(events(texts, entries), media_type="text/event-stream")
        flat = [entry for row in entries for entry in row]
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(out),
            "total_tokens": len(ids) + len(out),
        }
        if chat:
            content = [
                {"token": text, "logprob": 0.0, "bytes": None, "top_logprobs": []} for text in texts
            ]
            choice: dict[str, Any] = {
                "message": {"role": "assistant", "content": "".join(texts)},
                "logprobs": {"content": content, "refusal": None},
            }
            if flat:
                choice["message"]["attention_tokens"] = flat
        else:
            choice = {"text": "".join(texts), "logprobs": {"tokens": texts}}
        if flat:
            choice["attention_tokens"] = flat
        answer: dict[str, Any] = {
            "id": "1",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", **choice}],
            "usage": usage,
        }
        if body.get("attn_capture"):
            answer["attn_capture_data"] = [
                scores_of(n, attention[n, hidden:, :, hidden:], max(0, len(ids) - hidden))
                for n in wanted
            ]
        return answer

    def events(texts: list[str], entries: list[list[dict]]) -> Iterator[str]:
        for text, row in zip(texts, entries, strict=True):
            delta = {"content": text, "attention_tokens": row}
            yield chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        yield chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        yield chunk([])  # as with stream_options: usage alone
        yield "data: [DONE]\n\n"

    def chunk(choices: list[dict]) -> str:
        message = {
            "id": "1", "object": "chat.completion.chunk", "created": 0, "model": "demo",
            "choices": choices,
        }  # fmt: skip
        return f"data: {json.dumps(message)}\n\n"

    return app
