"""Names for the generated tasks, some kept out of training.

A name is held out when a hash of it says so, so that training and evaluation agree without
sharing a list, and no prompt with held-out names can have been seen in training.
"""

import hashlib
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho"
    " sigma tau upsilon phi chi psi omega"
).split()
PEOPLE = (
    "James Sarah Mike Omega Linda Robert Alice Bob Carol David Emma Frank Grace Henry Irene"
    " Jack Karen Louis Maria Nina Oscar Paula Quentin Rosa Simon Tara Ursula Victor Wendy"
    " Xavier Yvonne Zoe Adam Bella Carlos Diana Elias Fiona George Hannah Ivan Julia Kevin"
    " Laura Martin Nora Oliver Petra Ralph Sofia Thomas Uma Vera Walter Yusuf Anton Bruno"
    " Clara Dmitri Elena Felix Gita Hugo Ines Jonas Kira Leon Mona Nils Olga Pablo Rita Sven"
    " Tina Viktor Alpha Bravo Delta Sigma"
).split()
CODENAMES = (
    "Falcon Whisper Hammer Phantom Spark Echo Raven Shadow Viper Ghost Eagle Tiger Cobra"
    " Storm Thunder Frost Ember Blaze Comet Nova Orbit Lynx Otter Badger Panther Wolf Hawk"
    " Heron Crane Swift Anchor Arrow Beacon Cipher Dagger Flint Granite Harbor Iron Jade"
    " Lantern Marble Needle Onyx Pilot Quartz River Saber Talon Umbra Velvet Willow Zephyr"
    " Canyon Desert Forest Glacier Island Meadow Summit Tempest Vortex Mirror Puzzle Riddle"
    " Signal Silver Copper Cobalt Crimson Scarlet"
).split()
WORDS = (
    "value name list path file line text data item node key index count size type state"
    " result error module class method object string number buffer stream socket server client"
    " request response header body token parser reader writer handler logger config option"
    " argument parameter context session thread process queue event task future loop timer"
    " lock cache store table column row field record schema query filter group order limit"
    " offset start stop step width height depth level mode flag mask bit byte word block chunk"
    " page frame stack heap tree graph edge vertex source target input output left right first"
    " last next previous parent child root leaf branch version release build debug trace"
    " signal message packet address host port user owner access color shape point angle length"
    " weight speed time date year month day hour minute second zone apple orange lemon cherry"
    " banana grape melon peach bread butter cheese sugar water coffee house garden window door"
    " chair lamp river mountain forest ocean island bridge castle tower market school winter"
    " summer spring autumn morning evening silver golden purple yellow green blue red white"
    " black small large short long quick slow early late north south east west"
).split()
_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr pl pr sh sl st th tr".split()
_VOWELS = "a e i o u a e i o ai ea io ou".split()
_CODAS = ["", "", "", "", "n", "r", "s", "l", "m", "t", "x", "nd", "rk"]
_HELD_OUT_ONE_IN = 8


def held_out(name: str) -> bool:
    """Whether `name`, whatever its case, is kept out of training; Greek letters never are."""
    plain = name.lower()
    if plain in GREEK:
        return False
    return hashlib.blake2b(plain.encode(), digest_size=4).digest()[0] % _HELD_OUT_ONE_IN == 0


@dataclass
class Draw:
    """A seeded source of names, numbers and filler.

    `evaluation` restricts names to the held-out ones (training never sees those). `prose` is text
    to strew between the parts of a task; words are drawn where it is empty.
    """

    rng: random.Random
    evaluation: bool = False
    prose: Sequence[str] = ()
    _pools: dict[str, list[str]] = field(default_factory=dict)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _pool(self, kind: str, words: Sequence[str]) -> list[str]:
        if kind not in self._pools:
            self._pools[kind] = [word for word in words if held_out(word) == self.evaluation]
        return self._pools[kind]

    def _fresh(self, make: Literal["syllables", "identifier"]) -> str:
        """Make names of one kind until one belongs to this side of the split."""
        while True:
            name = self._syllables() if make == "syllables" else self._identifier()
            if held_out(name) == self.evaluation:
                return name

    def _syllables(self) -> str:
        rng = self.rng
        parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))]
        return "".join(parts) + rng.choice(_ONSETS)[0] + rng.choice(_VOWELS) + rng.choice(_CODAS)

    def _identifier(self) -> str:
        rng = self.rng
        shape = rng.randrange(4)
        if shape == 0:
            return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7)))
        if shape == 1:
            return f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"
        if shape == 2:
            return f"{rng.choice(WORDS)}_{rng.choice(string.ascii_lowercase)}"
        return rng.choice(string.ascii_lowercase) + "".join(
            rng.choices("aeioulnrst", k=rng.randint(2, 5))
        )

    def name(self) -> str:
        """One name: a made word, an identifier, an English word or a Greek letter, in any case."""
        kind = self.rng.random()
        if kind < 0.4:
            name = self._fresh("syllables")
        elif kind < 0.65:
            name = self._fresh("identifier")
        elif kind < 0.9 or self.evaluation:
            name = self.rng.choice(self._pool("words", WORDS))
        else:
            name = self.rng.choice(GREEK)
        return name

    def names(self, count: int) -> list[str]:
        """`count` names that differ even when case is ignored, in one of three cases."""
        found: dict[str, None] = {}
        greek = not self.evaluation and count <= len(GREEK) and self.chance(0.12)
        if greek:
            found = dict.fromkeys(self.rng.sample(GREEK, count))
        while len(found) < count:
            found.setdefault(self.name())
        case = self.rng.random()
        if case < 0.65:
            return list(found)
        if case < 0.9:
            return [name[0].upper() + name[1:] for name in found]
        return [name.upper() for name in found]

    def person(self) -> str:
        """A capitalised personal name, from a list or made up."""
        if self.chance(0.5):
            return self.rng.choice(self._pool("people", PEOPLE))
        return self._fresh("syllables").capitalize()

    def codename(self) -> str:
        """A capitalised codename, from a list or made up."""
        if self.chance(0.5):
            return self.rng.choice(self._pool("codenames", CODENAMES))
        return self.name().capitalize()

    def number(self) -> str:
        """A number of one to six digits without leading zeros; four digits are the commonest."""
        digits = self.rng.choices((1, 2, 3, 4, 5, 6), (1, 2, 3, 6, 2, 1))[0]
        return str(self.rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1))

    def filler(self, characters: int) -> str:
        """About `characters` characters of text that has nothing to do with the task."""
        parts: list[str] = []
        room = characters
        while room > 0:
            if self.prose:
                part = self.rng.choice(self.prose)
            else:
                part = " ".join(self.rng.choices(WORDS, k=self.rng.randint(4, 12))) + "."
            parts.append(part)
            room -= len(part) + 1
        return "\n".join(parts)
