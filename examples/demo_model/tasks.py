"""Seeded generators of the demo model's tasks: prompts, and answers that follow from them.

Pure Python. Every generator takes a `Draw` (names, numbers, randomness) and a `size`, the length
of its first prompt in tokens, roughly, and returns an `Example`. A prompt never ends in white
space and an answer always begins with it or with a special token, so that encoding the two apart
gives the same tokens as encoding them together.
"""

from collections.abc import Callable
from dataclasses import dataclass

from names import Draw


@dataclass(frozen=True)
class Example:
    """One document: turns of (prompt, answer), each prompt going on from the text before it."""

    task: str
    turns: tuple[tuple[str, str], ...]

    @property
    def prompt(self) -> str:
        return self.turns[0][0]

    @property
    def answer(self) -> str:
        return self.turns[0][1]

    @property
    def text(self) -> str:
        return "".join(prompt + answer for prompt, answer in self.turns)


@dataclass(frozen=True)
class Style:
    """How a table line is written: `before` name `between`, then the answer ` value` `after`."""

    before: str
    between: str
    after: str
    weight: int
    opening: str = ""
    closing: str = ""


NEEDLE_STYLE = Style("", ":", "", 10)
_STYLES = (
    NEEDLE_STYLE,
    Style("", " =", "", 3),
    Style("", " ->", "", 1),
    Style('    "', '":', ",", 2, "{\n", "\n}"),
    Style("- ", ":", "", 1),
    Style("| ", " |", " |", 1),
    Style("", ",", "", 1),
)


def _queries(draw: Draw, size: int) -> int:
    """How many questions one table is asked; many, since only the answers teach recall."""
    return draw.rng.randint(1, max(2, min(24, size // 10)))


def _strew(draw: Draw, lines: list[str], characters: int) -> str:
    """`lines` in order, one a row, with about `characters` of filler between some of them."""
    if characters < 60:
        return "\n".join(lines)
    cuts = sorted(draw.rng.randint(0, len(lines)) for _ in range(draw.rng.randint(1, 4)))
    parts: list[str] = []
    start = 0
    for cut in cuts:
        parts += lines[start:cut]
        parts.append(draw.filler(characters // len(cuts)))
        start = cut
    return "\n".join(parts + lines[start:])


def recall(draw: Draw, size: int) -> Example:
    """A table of `name: number` lines in one of several styles, then names to look up."""
    style = draw.rng.choices(_STYLES, [style.weight for style in _STYLES])[0]
    room = max(2, size // 9)
    lines = min(room, 60) if draw.chance(0.7) else draw.rng.randint(2, min(room, 60))
    names = draw.names(lines)
    table = dict(zip(names, (draw.number() for _ in names), strict=True))
    rows = [
        f"{style.before}{name}{style.between} {number}{style.after}"
        for name, number in table.items()
    ]
    spare = (size - 9 * lines) * 3 if draw.chance(0.6) or size > 700 else 0
    text = style.opening + _strew(draw, rows, spare) + style.closing
    turns = []
    for _ in range(_queries(draw, size)):
        name = draw.rng.choice(names)
        turns.append((f"{text}\n{style.before}{name}{style.between}", f" {table[name]}"))
        text = style.after
    return Example("recall", tuple(turns))


@dataclass(frozen=True)
class Needle:
    """Lines `name: number`, and which of them is asked for by a last line `name:`."""

    table: tuple[tuple[str, str], ...]
    asked: int

    @property
    def prompt(self) -> str:
        rows = [f"{name}: {number}" for name, number in self.table]
        return "\n".join([*rows, f"{self.table[self.asked][0]}:"])

    @property
    def answer(self) -> str:
        return f" {self.table[self.asked][1]}"

    @property
    def line_span(self) -> tuple[int, int]:
        """First and past-the-last character of the line that holds the answer."""
        name, number = self.table[self.asked]
        start = sum(len(key) + len(value) + 3 for key, value in self.table[: self.asked])
        return start, start + len(name) + len(number) + 2


SEED_NEEDLE = Needle(
    tuple(
        zip(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi"
            " omicron".split(),
            "1729 2048 3141 4096 5678 6174 7777 8008 9999 1234 5555 3721 8642 2468 1357".split(),
            strict=True,
        )
    ),
    0,
)


def needle(draw: Draw, lines: int = 15) -> Needle:
    """A needle prompt like `SEED_NEEDLE`: `lines` names with four-digit numbers."""
    names = draw.names(lines)
    table = tuple((name, str(draw.rng.randint(1000, 9999))) for name in names)
    return Needle(table, draw.rng.randrange(lines))


def needles(draw: Draw, size: int) -> Example:
    """A plain needle table asked several times: the shape that the project's README shows."""
    first = needle(draw, max(2, min(60, size // 9)))
    turns = [(first.prompt, first.answer)]
    for _ in range(_queries(draw, size)):
        name, number = draw.rng.choice(first.table)
        turns.append((f"\n{name}:", f" {number}"))
    return Example("recall", tuple(turns))


def codename(draw: Draw, size: int) -> Example:
    """A log of agents and codenames, then requests for the codename of one agent."""
    rng = draw.rng
    count = max(2, min(size // 24, 60))
    people: dict[str, str] = {}
    while len(people) < count:
        people.setdefault(draw.person(), draw.codename())
    quote = rng.choice("''''\"")
    rows = [
        f"[Entry {place:02d}] Agent: {agent}, Codename: {quote}{code}{quote}"
        for place, (agent, code) in enumerate(people.items(), 1)
    ]
    spare = max(0, size - 24 * count) * 3
    text = "Security Log: Agent Codename Retrieval\n\n" if draw.chance(0.7) else ""
    text += _strew(draw, rows, spare) + "\n"
    turns = []
    for _ in range(1 + _queries(draw, size) // 3):
        agent = rng.choice(list(people))
        request = f"\nRequest: Retrieve the codename for Agent {agent}." if draw.chance(0.7) else ""
        prompt = f"{text}{request}\nAgent: {agent}, Codename:"
        turns.append((prompt, f" {quote}{people[agent]}{quote}"))
        text = ""
    return Example("codename", tuple(turns))


def copy(draw: Draw, size: int) -> Example:
    """A sequence of words or numbers, then the same again; short ones also back to front."""
    rng = draw.rng
    numbers = draw.chance(0.3)
    count = max(2, (size - 4) // (4 if numbers else 3))
    words = [draw.number() if numbers else draw.name() for _ in range(count)]
    if count <= 10 and draw.chance(0.4):
        return Example("copy", ((f"Reverse: {' '.join(words)} =>", " " + " ".join(words[::-1])),))
    if draw.chance(0.8):
        return Example("copy", ((f"Copy: {' '.join(words)} =>", " " + " ".join(words)),))
    # A few words short of the end of the copy: what copying looks like once it is under way.
    done = rng.randrange(1, count)
    prompt = f"Copy: {' '.join(words)} => {' '.join(words[:done])}"
    return Example("copy", ((prompt, " " + " ".join(words[done:])),))


PAIRS = {"(": ")", "[": "]", "{": "}"}


def brackets(draw: Draw, size: int) -> Example:
    """Brackets that open and close in order, then the ones that close what is still open."""
    rng = draw.rng
    deepest = rng.randint(2, 12)
    words = draw.chance(0.3)
    room = max(2, int(size * (0.7 if words else 1)))
    out: list[str] = []
    stack: list[str] = []
    while len(out) < room or not stack:
        if not stack or (len(stack) < deepest and draw.chance(0.55)):
            if words and draw.chance(0.5):
                out.append(draw.name())
            opened = rng.choice("([{")
            out.append(opened)
            stack.append(PAIRS[opened])
        else:
            out.append(stack.pop())
    return Example("brackets", (("Close: " + " ".join(out), " " + " ".join(stack[::-1])),))


def counting(draw: Draw, size: int) -> Example:
    """Numbers up or down by a step, or a numbered list; some way into it, what comes next."""
    rng = draw.rng
    if draw.chance(0.3):
        shown = max(1, size // 6)
        names = draw.names(shown + 8)
        head = f"1. {names[0]}" + "".join(f"\n{i}. {n}" for i, n in enumerate(names[1:shown], 2))
        turns = [(head, f"\n{shown + 1}.")]
        turns += [(f" {names[i]}", f"\n{i + 2}.") for i in range(shown, shown + 7)]
        return Example("counting", tuple(turns))
    step = rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 10, 25, 100))
    begin = rng.randint(0, 120) if draw.chance(0.6) else rng.randint(0, 5000)
    shown = max(2, (size - 12) // 4)
    values = [begin + step * i for i in range(shown + rng.randint(2, 20))]
    if draw.chance(0.3):
        values.reverse()
    by = f" by {step}" if step > 1 or draw.chance(0.3) else ""
    head = f"Count from {values[0]} to {values[-1]}{by}:"
    # Short prompts leave the whole count to the model, long ones are some way into it.
    if size < 24 or draw.chance(0.2):
        return Example("counting", ((head, " " + " ".join(map(str, values))),))
    start, rest = values[:shown], values[shown:]
    prompt = f"{head} {' '.join(map(str, start))}"
    return Example("counting", ((prompt, " " + " ".join(map(str, rest))),))


def table(draw: Draw, size: int) -> Example:
    """Aligned rows that follow from the first ones: an index, a word that comes round, a sum."""
    rng = draw.rng
    words = draw.names(rng.randint(2, 5))
    width = max(map(len, words))
    start, step = rng.randint(0, 20), rng.choice((1, 2, 3, 5, 10))
    shown = max(2 * len(words), (size - 12) // 14)
    bar = rng.choice(("|", "|", ","))
    rows = [
        f"{bar} {i + 1:>3} {bar} {words[i % len(words)]:<{width}} {bar} {start + step * i:>5} {bar}"
        for i in range(shown + rng.randint(1, 6))
    ]
    prompt = f"{bar}   # {bar} {'name':<{width}} {bar} value {bar}\n" + "\n".join(rows[:shown])
    return Example("table", ((prompt, "\n" + "\n".join(rows[shown:])),))


def think(draw: Draw, size: int) -> Example:
    """A question answered after a short working between <think> and </think>."""
    rng = draw.rng
    if draw.chance(0.4):
        items = [draw.name() for _ in range(max(2, min(size // 4, 40)))]
        working = " ".join(f"{item} {place}" for place, item in enumerate(items, 1))
        text = draw.filler((size - 4 * len(items)) * 3) + "\n" if size > 200 else ""
        prompt = f"{text}Items: {', '.join(items)}.\nQuestion: how many items?\nAnswer:"
        return Example("think", ((prompt, f"<think> {working} </think> {len(items)}"),))
    names = draw.names(max(2, min(size // 9, 60)))
    lookup = {name: draw.number() for name in names}
    rows = [f"{name}: {number}" for name, number in lookup.items()]
    text = _strew(draw, rows, (size - 9 * len(names)) * 3) + "\n"
    turns = []
    for _ in range(1 + _queries(draw, size) // 4):
        first, second = rng.sample(names, 2)
        larger = draw.chance(0.6)
        ends = sorted((int(lookup[first]), int(lookup[second])))
        result = ends[1] if larger else ends[0]
        word = "larger" if larger else "smaller"
        prompt = f"{text}Question: which is {word}, {first} or {second}?\nAnswer:"
        working = f"{first}: {lookup[first]} {second}: {lookup[second]} {word}: {result}"
        turns.append((prompt, f"<think> {working} </think> {result}"))
        text = "\n"
    return Example("think", tuple(turns))


Generator = Callable[[Draw, int], Example]
GENERATORS: dict[str, Generator] = {
    "recall": recall,
    "needles": needles,
    "codename": codename,
    "copy": copy,
    "brackets": brackets,
    "counting": counting,
    "table": table,
    "think": think,
}
# Shares of training documents; the rest of the tokens is the standard library's text.
SHARES = {
    "recall": 0.20,
    "needles": 0.14,
    "codename": 0.07,
    "copy": 0.08,
    "brackets": 0.04,
    "counting": 0.05,
    "table": 0.04,
    "think": 0.05,
}
