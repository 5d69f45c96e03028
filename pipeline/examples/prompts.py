"""The prompts of the examples: each asks for something that stands in one of its lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How a prompt is sent.
Style = Literal["auto", "chat", "plain"]


@dataclass(frozen=True)
class Example:
    """A prompt that ends where the answer begins.

    Attributes:
        name: of the command.
        prompt: text.
        line: the line of the prompt that holds the answer.
        answer: what the model has to say.
    """

    name: str
    prompt: str
    line: str
    answer: str


_NUMBERS = {
    "alpha": 1729, "beta": 2048, "gamma": 3141, "delta": 4096, "epsilon": 5678, "zeta": 6174,
    "eta": 7777, "theta": 8008, "iota": 9999, "kappa": 1234, "lambda": 5555, "mu": 3721,
    "nu": 8642, "xi": 2468, "omicron": 1357,
}  # fmt: skip
_AGENTS = {
    "Nora": "Lantern", "Felix": "Walnut", "Ingrid": "Comet", "Omega": "Phantom", "Pablo": "Thistle",
    "Yuki": "Anvil",
}  # fmt: skip

NEEDLE = Example(
    name="needle",
    prompt="\n".join([*(f"{name}: {number}" for name, number in _NUMBERS.items()), "alpha:"]),
    line="alpha: 1729",
    answer="1729",
)
CODENAME = Example(
    name="codename",
    prompt="\n".join(
        [
            "Security Log: Agent Codename Retrieval\n",
            *(
                f"[Entry {number:02d}] Agent: {agent}, Codename: '{codename}'"
                for number, (agent, codename) in enumerate(_AGENTS.items(), 1)
            ),
            "\nRequest: Retrieve the codename for Agent Omega.",
            "Agent: Omega, Codename:",
        ]
    ),
    line="Agent: Omega, Codename: 'Phantom'",
    answer="Phantom",
)
