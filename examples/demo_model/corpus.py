"""Text for the demo model: the running Python's own standard library, split by file.

A file is held out when a hash of its name relative to the library says so; held-out files are
never trained on, nor are their docstrings or comments.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_SKIPPED = {"site-packages", "dist-packages", "encodings", "__pycache__"}
_HELD_OUT_ONE_IN = 12
_LARGEST_FILE = 400_000


@dataclass
class Corpus:
    """Documents of one side of the split: whole source files, docstrings, and lines of prose."""

    code: list[str] = field(default_factory=list)
    docstrings: list[str] = field(default_factory=list)

    def prose_lines(self) -> list[str]:
        """Lines of docstrings long enough to pass for sentences."""
        lines = (line.strip() for text in self.docstrings for line in text.split("\n"))
        return sorted({line for line in lines if 30 <= len(line) <= 110 and line[0].isalpha()})


def held_out_file(name: str) -> bool:
    """Whether the file with this path, relative to the library and with `/`, is held out."""
    return hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % _HELD_OUT_ONE_IN == 0


def _sources() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if _SKIPPED & set(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the library's tests hold files in other encodings on purpose
        if 200 <= len(text) <= _LARGEST_FILE:
            yield name.as_posix(), text.expandtabs()


def _docstrings(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # nor do all of them parse
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            found = ast.get_docstring(node)
            if found and len(found) >= 120:
                yield found


def load(held_out: bool) -> Corpus:
    """One side of the split; docstrings are taken from outside the library's tests only."""
    corpus = Corpus()
    for name, text in _sources():
        if held_out_file(name) != held_out:
            continue
        corpus.code.append(text)
        if not {"test", "tests"} & set(name.split("/")):
            corpus.docstrings.extend(_docstrings(text))
    return corpus
