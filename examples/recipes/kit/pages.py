"""Puts the committed figures into the pages of docs/recipes/, between their two comments.

PYTHONPATH=examples/recipes python -m kit.pages
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .report import fact_lines, markdown, overview_row

REPO = Path(__file__).parents[3]
PAGES, RESULTS = REPO / "docs" / "recipes", REPO / "benchmarks" / "results" / "recipes"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
_HEAD = [
    "| recipe | measure | 20 numbers | per head | best without attention | published | verdict |",
    "|---|---|---|---|---|---|---|",
]


def figures(found: dict[str, Any]) -> str:
    """Date, machine, table and further figures of a recipe's page, from its JSON."""
    machine = f"{found['machine']['cores']} cores of {found['machine']['cpu']}"
    when = (
        f"{found['date']}, {machine}, {found['requests']} requests, seed {found['seed']}."
        " In brackets: 95% intervals by request."
    )
    return "\n".join([when, "", markdown(found), "", *fact_lines(found)])


def refreshed(page: str, content: str) -> str:
    """A page with this between its two comments.

    Raises:
        ValueError: it does not have both.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page needs {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def title_and_number(page: str) -> tuple[str, int]:
    """Of a heading such as `# 4. Ghost-context pruning`.

    Raises:
        ValueError: the page begins with another line.
    """
    found = re.match(r"# (\d+)\. (.+)\n", page)
    if found is None:
        raise ValueError("a recipe's page begins with # NUMBER. TITLE")
    return found[2], int(found[1])


def verdict(page: str) -> str:
    """The first sentence of a page's section `Verdict`.

    Raises:
        ValueError: it has none.
    """
    found = re.search(r"\n## Verdict\n\n(.+?\.)(?=\s)", page, flags=re.DOTALL)
    if found is None:
        raise ValueError("a recipe's page has a section ## Verdict")
    return " ".join(found[1].split())


def overview() -> str:
    """The table of all recipes, in the order of their numbers."""
    rows = []
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        page = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
        title, number = title_and_number(page)
        rows.append((number, overview_row(found, title, verdict(page))))
    return "\n".join([*_HEAD, *(row for _, row in sorted(rows))])


def main() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        page = PAGES / f"{path.stem}.md"
        content = figures(json.loads(path.read_text(encoding="utf-8")))
        page.write_text(refreshed(page.read_text(encoding="utf-8"), content), encoding="utf-8")
    table = PAGES / "README.md"
    table.write_text(refreshed(table.read_text(encoding="utf-8"), overview()), encoding="utf-8")


if __name__ == "__main__":
    main()
