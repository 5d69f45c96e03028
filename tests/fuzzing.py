"""Fuzzing: a door is tried with input that is mutated at random, and must refuse it in one clear
line or use it without losing anything in silence."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from capture_kernels.errors import AttnError

WORDS = (b"\xff" * 8, bytes(8), b"1e999   ", b"null    ", b"-1      ", b'"\\ud800"')
# No try of so few bytes may take longer.
PATIENCE_S = 20.0

# So that a change is not blamed for a fault that another seed would have found.
SEED = 20_260_110

# One try of a door: how many mutated inputs it had. An AttnError is the answer to one of them.
Door = Callable[[random.Random], int]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to five bits flipped, stretches cut out, put in or overwritten."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(5):
            case 0:
                made[at : at + 1] = bytes(b ^ (1 << rng.randrange(8)) for b in made[at : at + 1])
            case 1:
                del made[at : at + rng.choice([1, 4, 100])]
            case 2:
                made[at:at] = rng.randbytes(rng.choice([1, 4, 30]))
            case 3:
                made[at : at + 8] = rng.choice(WORDS)
            case 4:  # one of the aligned numbers that lengths and offsets are
                size = rng.choice([4, 8])
                number = rng.choice([-1, 0, 1, rng.randrange(64), 1 << 31, rng.getrandbits(63)])
                at -= at % 4
                made[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(made)


def some_mutated(lines: list[bytes], rng: random.Random) -> tuple[list[bytes], set[int]]:
    """Lines of which half are mutated, and which of them are not."""
    intact = set(rng.sample(range(len(lines)), len(lines) // 2))
    return [line if i in intact else mutated(line, rng) for i, line in enumerate(lines)], intact


def fuzz_seed() -> int:
    """Always the same unless the environment variable FUZZ_SEED is set: to a number, or to
    `random`."""
    asked = os.environ.get("FUZZ_SEED", str(SEED))
    return random.SystemRandom().randrange(2**32) if asked == "random" else int(asked)


def fuzz(try_one: Door, mutations: int) -> None:
    """Try a door until it had this many mutations.

    The seed (`fuzz_seed`) is printed.
    """
    seed = fuzz_seed()
    print(f"FUZZ_SEED={seed}")
    done = number = 0
    while done < mutations:
        began, where = time.monotonic(), f"try {number} of FUZZ_SEED={seed}"
        try:
            done += try_one(random.Random(f"{seed} {number}"))
        except AttnError as error:
            assert "\n" not in str(error), (where, error)
            done += 1
        except Exception as error:
            raise AssertionError(where) from error
        assert time.monotonic() - began < PATIENCE_S, where
        number += 1
