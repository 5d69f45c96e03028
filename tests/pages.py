"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import itertools
import re
import shlex
from functools import cache
from pathlib import Path

from shared import REPO

README = REPO / "README.md"
GUIDE, OPERATIONS, FORMATS, PERFORMANCE = (
    REPO / "docs" / f"{name}.md" for name in ("guide", "operations", "formats", "performance")
)
DEPLOYMENT = REPO / "deploy" / "README.md"
PAGES = sorted(
    {*REPO.glob("*.md")}.union(
        *(
            (REPO / top).rglob("*.md")
            for top in ("docs", "benchmarks", "deploy", "examples", "tests")
        )
    )
)
PAGE_IDS = [str(page.relative_to(REPO)) for page in PAGES]


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its fenced code."""
    return without_fences(text(page))


def without_fences(markdown: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.DOTALL | re.MULTILINE)


def inline_code(page: Path) -> set[str]:
    return set(code_in(text(page)))


def shell_lines(page: Path) -> list[list[str]]:
    """The commands of the fenced shell code of a page, split into words, without comments."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", text(page), flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def section(page: Path, heading: str) -> str:
    """What is under a heading, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", text(page), flags=re.MULTILINE)
    assert found, f"{page.name} has no section {heading!r}"
    rest = text(page)[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, flags=re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the rows of the first table of a section, without its head."""
    lines = section(page, heading).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def code_in(markdown: str) -> list[str]:
    """The inline code of a cell, a section or a page."""
    return re.findall(r"`([^`\n]+)`", without_fences(markdown))


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
