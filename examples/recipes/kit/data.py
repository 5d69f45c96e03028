"""Seeded data of the recipes, from the demo model's own task generators.

Names are held out: the model was trained on none of them.
"""

from __future__ import annotations

import random

import corpus
from names import Draw


def source(recipe: str, seed: int, prose: bool = False) -> Draw:
    """Names, numbers and randomness of a recipe; another seed draws other data.

    Args:
        prose: fill with lines of held-out docstrings of Python's library (read in a few seconds)
            rather than with random words.
    """
    lines = corpus.load(held_out=True).prose_lines() if prose else ()
    return Draw(random.Random(f"{recipe}-{seed}"), evaluation=True, prose=lines)


def library() -> corpus.Corpus:
    """Held-out text of Python's standard library, which the model was not trained on."""
    return corpus.load(held_out=True)
