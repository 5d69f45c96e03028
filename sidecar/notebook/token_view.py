"""The page's token view as a widget: text, links, and the lens of one request.

The widget is a frame with its own document, so that the styles of Jupyter and of the page do not
meet. The document holds the page's own modules (sidecar/static/app), which an import map names
`attn/...`. Two of them are replaced: what asks the sidecar, and what reads the address.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anywidget
import msgspec
import traitlets

from capture_kernels.errors import OptionError
from discovery.notebook import Run
from pipeline.analysis.responses import as_dict
from pipeline.traces import Trace

ENTRY = "app/notebook/view.js"
# Modules of the page that a notebook has others for.
REPLACED = {"app/api.js": "api.js", "app/routes.js": "routes.js", ENTRY: "view.js"}
STYLES = ("css/tokens.css", "css/base.css", "css/ui.css", "css/chat.css")
_IMPORT = re.compile(r'((?:\bfrom|\bimport)\s*)"(\.[^"]+)"')
_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{styles}</style>
<script>{storage}</script>
<script type="importmap">{imports}</script></head>
<body><div id="view"></div>
<script type="application/json" id="given">{given}</script>
<script type="module">import "attn/{entry}";</script></body></html>"""


class TokenView(anywidget.AnyWidget):
    """One request token by token: which tokens each row looked at, and what kind of attention that
    was.

    Args:
        response: of the attention API, whole (not a stream), asked with `return_prompt_tokens`; or
            a `Trace`.
        records: rows that the sidecar stored of it (`stored_rows`), for fingerprints.
        run: names the clusters of these rows.
        layer: shown first; by default the last one.
        pinned: index of a token that is pinned, from 0, prompt first; None for none. It follows
            what is clicked.
        height: pixels.

    Raises:
        OptionError: the response has no tokens. ResponseError: it is none.
    """

    _esm = files("sidecar") / "notebook" / "widget.js"
    document = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int(560).tag(sync=True)
    pinned = traitlets.Int(None, allow_none=True).tag(sync=True)

    def __init__(
        self,
        response: Any,
        *,
        records: Sequence[Mapping[str, Any]] = (),
        run: Run | None = None,
        layer: int | None = None,
        pinned: int | None = None,
        height: int = 560,
    ) -> None:
        given = {
            **_subject(response), "records": list(records), **_of_run(run, records),
            "layer": layer, "pinned": pinned, "theme": "light",
        }  # fmt: skip
        super().__init__(document=document_of(given), pinned=pinned, height=height)

    def save(self, path: str | Path) -> None:
        """Write it as an HTML file that needs nothing else."""
        Path(path).write_text(self.document, encoding="utf-8")


def _subject(response: Any) -> dict[str, Any]:
    """The response, or the lines of a trace, as the view takes them."""
    if isinstance(response, Trace):
        if not response.tokens:
            raise OptionError("the trace has no tokens")
        lines = (
            msgspec.json.encode({"record_type": kind, **line}).decode()
            for kind, line in response.lines()
        )
        return {"response": None, "lines": "\n".join(lines)}
    found = as_dict(response)
    if not found.get("prompt_tokens"):
        raise OptionError(
            "the response does not name its tokens: ask with return_attention_tokens and "
            "return_prompt_tokens"
        )
    return {"response": found, "lines": None}


def _of_run(run: Run | None, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A run as the sidecar's status describes it, its clusters, and the classified records."""
    if run is None:
        return {"run": None, "clusters": [], "classified": []}
    about = {name: run.manifest[name] for name in ("run_id", "model", "layout", "zone_rules")}
    vectors = [one["vector"] for one in records if one.get("vector")]
    answers = run.classifier.answer(vectors)
    return {
        "run": about,
        "clusters": run.artifacts.table("clusters").to_pylist(),
        "classified": [
            {"vector": vector, "answer": answer}
            for vector, answer in zip(vectors, answers, strict=True)
        ],
    }  # fmt: skip


def document_of(given: Mapping[str, Any]) -> str:
    """The HTML document of a view; `given` as sidecar/notebook/view.js takes it."""
    text = json.dumps(given, allow_nan=False, default=str)
    return _TEMPLATE.format(
        title="One request, token by token",
        styles="\n".join(map(_static, STYLES)) + _own("view.css"),
        storage=_own("storage.js"),
        imports=_import_map(),
        # Nothing in it can end the script.
        given=text.replace("<", "\\u003c"),
        entry=ENTRY,
    )


@cache
def _import_map() -> str:
    imports = {f"attn/{name}": as_url(source) for name, source in modules().items()}
    return json.dumps({"imports": imports})


def as_url(source: str) -> str:
    return f"data:text/javascript;charset=utf-8,{quote(source)}"


@cache
def modules() -> dict[str, str]:
    """The modules of the view by their path below sidecar/static, each with the names of the import
    map in its imports."""
    found: dict[str, str] = {}
    left = [ENTRY]
    while left:
        name = left.pop()
        if name in found:
            continue
        source = _own(REPLACED[name]) if name in REPLACED else _static(name)
        folder = posixpath.dirname(name)
        parts = _IMPORT.split(source)  # text, what is before the name, the name, text, ...
        for at in range(2, len(parts), 3):
            wanted = posixpath.normpath(posixpath.join(folder, parts[at]))
            left.append(wanted)
            parts[at] = f'"attn/{wanted}"'
        found[name] = "".join(parts)
    return found


def _static(name: str) -> str:
    return (files("sidecar") / "static" / name).read_text(encoding="utf-8")


def _own(name: str) -> str:
    return (files("sidecar") / "notebook" / name).read_text(encoding="utf-8")
