"""GET /page/config: what the page begins with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from capture_kernels.errors import OptionError
from sidecar.http.app import Additions
from sidecar.http.errors import Json

from . import relay
from .engine import Engine, checked_url
from .files import PageFiles
from .relay import Relay
from .serving import Page, is_page


@dataclass(frozen=True)
class Prompt:
    """A prompt to begin with.

    Args:
        style: `plain` for a text that the model goes on with.
        says: what to look at in its answer.
    """

    name: str
    prompt: str
    style: Literal["chat", "plain"]
    says: str


# Of a model that nobody has looked at yet: what to look for.
PROMPTS = (
    Prompt(
        "a fact from the prompt",
        "Nora's badge says Lantern. Felix's says Walnut. Ingrid's says Comet. What does Felix's "
        "badge say?",
        "chat",
        "which words of the prompt do the tokens of the answer look at?",
    ),
    Prompt(
        "a table", "Write a table of the planets with their moons and their days.", "chat",
        "does a cell look one row up, at its own column?",
    ),
    Prompt(
        "a story", "Tell a short story of a lighthouse keeper who finds a letter.", "chat",
        "how far back does prose look, and where, when a name comes again?",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class PageOptions:
    """What the page is served with.

    Args:
        engine_url: of the engine that is relayed to; None for no engine.
        engine_key_file: holds the key that the engine wants.
        prompts: to begin with.
        notes: what does not work here, and what to do, a line each.

    Raises:
        OptionError: a value cannot be used.
    """

    engine_url: str | None = None
    engine_key_file: Path | None = None
    prompts: tuple[Prompt, ...] = PROMPTS
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.engine_url is not None:
            checked_url(self.engine_url)
        elif self.engine_key_file is not None:
            raise OptionError("--engine-key-file needs --engine-url")


router = APIRouter(tags=["page"])


class EngineFacts(BaseModel):
    model: str
    capabilities: dict[str, Any] | None


class Config(BaseModel):
    engine: EngineFacts | None = Field(description="null without an engine that answers")
    engine_problem: str | None = Field(description="why it is null")
    version: str
    examples: list[dict[str, str]] = Field(description="name, prompt, style, says")
    notes: list[str] = Field(description="what does not work here, and what to do")


@router.get("/page/config", summary="What the page begins with", response_model=Config)
async def config(request: Request) -> Response:
    """The engine is asked at most every 5 seconds, and for at most 3."""
    state = request.app.state
    options: PageOptions = state.page
    facts, problem = None, "no engine is given: start the sidecar with --engine-url"
    if state.relay is not None:
        facts, problem = await state.relay.engine.facts()
    return Json({
        "engine": facts, "engine_problem": problem, "version": state.service.version,
        "examples": [vars(prompt) for prompt in options.prompts], "notes": options.notes,
    })  # fmt: skip


def page_additions(options: PageOptions) -> Additions:
    """The page and its relay, for an app. OptionError: the engine's key file cannot be used."""
    relayed = None
    if options.engine_url is not None:
        relayed = Relay(Engine(checked_url(options.engine_url), options.engine_key_file))
    files = PageFiles()
    return Additions(
        routers=(router, relay.router),
        state={"page": options, "relay": relayed},
        in_front=lambda app, service: Page(app, files, service.metrics.answered),
        keyless=is_page,
    )
