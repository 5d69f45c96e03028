"""The served model: its weights, tokenizer and prompts, and what requests may capture of it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from capture_kernels.errors import OptionError
from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.phases import PhaseTracker, starts_inside, think_tags
from pipeline.engines.serving.request import CaptureRequest, ModelFacts, RequestError
from pipeline.engines.serving.rows import Lens
from pipeline.engines.serving.system_prompt import Message, count_system_tokens
from pipeline.engines.serving.token_names import roles_of
from pipeline.engines.transformers import TransformersEngine
from pipeline.record import capture_id

from .hidden import HiddenStates


class ServedModel:
    """A model of `transformers` as this server uses it, one request at a time.

    Args:
        name: folder or hub name.
        options: layers, layout and sink tokens of the captures.
        reasoning_parser: whose tags say what is thinking (`phases.PARSERS`); None: nothing is.
        device: auto, cpu, cuda or cuda:N.
        served_name: what the API and the records call the model; by default `name`.

    Raises:
        OptionError: the model cannot be loaded or captured, or its tokenizer has no fast form.
        MissingExtraError: as of `load_engine`.
    """

    def __init__(
        self,
        name: str,
        options: ServeOptions,
        *,
        reasoning_parser: str | None = None,
        device: str = "auto",
        served_name: str | None = None,
    ) -> None:
        self.options = options
        captured = CaptureOptions(layers="all", sink_tokens=options.sink_tokens, device=device)
        self.engine: TransformersEngine = load_engine(name, captured)
        self.name = served_name or name
        self.tokenizer: Any = self.engine.tokenizer
        if not self.tokenizer.is_fast:
            raise OptionError(f"the tokenizer of {name} is not a fast one (no tokenizer.json)")
        count = self.engine.config.num_hidden_layers
        self.layers = options.choose_layers(self.engine.layers, count)
        self.score_layers = options.choose_score_layers(self.engine.layers, count)
        self.hidden = self._hidden_states(count)
        self._taken = set(inspect.signature(self.tokenizer.apply_chat_template).parameters)
        self._tags = None
        if reasoning_parser is not None:
            self._tags = think_tags(reasoning_parser, self._encode, self.text)
        cache: Any = self.cache()
        self.windows: tuple[int, ...] = tuple(
            int(layer.sliding_window) if layer.is_sliding else 0 for layer in cache.layers
        )
        self._windowed = any(cache.is_sliding)

    def facts(self, *, off: str | None = None) -> ModelFacts:
        """What requests may ask.

        Args:
            off: why nothing is captured any more.
        """
        config, options = self.engine.config, self.options
        plain = CaptureRequest(
            layers=list(self.layers), mask_prefix=options.mask_prefix, window=options.tokens_window
        )
        return ModelFacts(
            name=self.name,
            num_layers=config.num_hidden_layers,
            layers=self.layers,
            score_layers=self.score_layers,
            capture_id=self.capture_id(plain),
            heads=self.heads,
            max_context=self.context,
            reasons=({} if off is None else {"capture": off}) | self.hidden.reasons,
            moe=bool(self.hidden.routed),
        )

    def _hidden_states(self, layers: int) -> HiddenStates:
        def run() -> Tensor:
            return self.forward([0, 0], self.cache())

        with torch.inference_mode():
            return HiddenStates(self.engine.model, layers, run)

    @property
    def context(self) -> int | None:
        """Tokens of the model's longest input; None if its config does not say."""
        return self.engine.context

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return int(self.engine.config.num_attention_heads)

    @property
    def end_tokens(self) -> set[int]:
        return self.engine.end_tokens

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.engine.model.config)

    def forward(self, tokens: list[int], cache: DynamicCache) -> Tensor:
        """Logits float[V] after the last of some tokens, whose keys go to the cache."""
        return self.engine.forward(tokens, cache)[-1]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def lens(self, hidden: Tensor, count: int) -> list[Lens]:
        """The most likely tokens after a layer, by `HiddenStates.lens`, for each of float[R, D]."""
        logprobs, tokens = self.hidden.lens(hidden, count)
        return [
            Lens(own, [self.text([token]) for token in own], found)
            for own, found in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a plain prompt. RequestError: it has none, or numbers that are no token."""
        tokens = prompt if isinstance(prompt, list) else list(self.tokenizer(prompt)["input_ids"])
        if not tokens:
            raise RequestError("the prompt has no tokens", "prompt")
        # The rows of the embedding, which may be more than the tokenizer's.
        size = self.engine.model.get_input_embeddings().num_embeddings
        if not all(0 <= token < size for token in tokens):
            raise RequestError(f"tokens of the prompt must lie in 0..{size - 1}", "prompt")
        return tokens

    def chat_tokens(self, messages: list[Message], template_arguments: dict[str, Any]) -> list[int]:
        """The tokens of a conversation that asks for an answer.

        Without a chat template these are the contents of its messages, a line each.

        Raises:
            RequestError: messages that are not text, or that the template refuses.
        """
        return self._template([_plain(message) for message in messages], template_arguments, True)

    def system_tokens(
        self, messages: list[Message], tokens: list[int], template_arguments: dict[str, Any]
    ) -> int:
        """How many of a conversation's tokens are its system prompt: `count_system_tokens`."""
        return count_system_tokens(
            [_plain(message) for message in messages],
            tokens,
            lambda some: self._template(some, template_arguments, False),
        )

    def roles(
        self, messages: list[Message], tokens: list[int], template_arguments: dict[str, Any]
    ) -> list[str | None]:
        """The role of each of a conversation's tokens, as far as it is known: `roles_of`."""
        return roles_of(
            [_plain(message) for message in messages],
            tokens,
            lambda some: self._template(some, template_arguments, False),
        )

    def capture_id(self, request: CaptureRequest) -> str:
        """The hash of what makes this request's vectors comparable, as `attn capture` makes it."""
        options = self.options
        return capture_id(
            revision=self.engine.revision,
            layers=request.layers,
            heads=request.heads,
            mask=request.mask_prefix,
            window=request.window,
            sinks=options.sink_tokens,
            layout=options.layout,
            windowed=self._windowed,
        )

    def phases(self, prompt: list[int]) -> PhaseTracker:
        """The phases of the tokens that follow a prompt."""
        if self._tags is None:
            return PhaseTracker(None)
        return PhaseTracker(self._tags, inside=starts_inside(self._tags.rule, prompt, self.text))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _template(
        self, messages: list[Message], arguments: dict[str, Any], asks: bool
    ) -> list[int]:
        # What a template is given, not which one it is or what becomes of it.
        if taken := sorted(self._taken & arguments.keys()):
            raise RequestError(
                f"chat_template_kwargs must not have {taken[0]}", "chat_template_kwargs"
            )
        if not self.tokenizer.chat_template:
            return list(self.tokenizer("\n".join(m["content"] for m in messages))["input_ids"])
        # Imported by transformers for a template alone; what templates raise to refuse.
        from jinja2.exceptions import TemplateError

        try:
            return list(
                self.tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=asks,
                    tokenize=True,
                    return_dict=False,
                    **arguments,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {error}", "messages"
            ) from error


def _plain(message: Message) -> Message:
    """A message whose content is text. RequestError: it has a part that is not."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if not all(isinstance(part.get("text"), str) for part in parts):
            raise RequestError("this server takes text only", "messages")
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise RequestError("a message has a role and a content of text", "messages")
    return {**message, "content": content}
