"""report.html: the page and its data in one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import pyarrow as pa

from discovery.describe.clusters import what_clusters_are

from .points import map_points

# ES modules that the sidecar's page uses as well, at /static/report/NAME.js.
SHARED = "colors dom view image charts labels cards".split()
# In the order in which the report runs them: each may use those before it. What a shared module
# exports is in scope of all after it.
SCRIPTS = [*SHARED, *"page points map legend clusters lineage quality report".split()]
# The first one is the sidecar's page's as well, at /static/report/cards.css.
STYLES = ("cards.css", "report.css")
# Without what may differ in a run that was resumed elsewhere (stage_seconds, versions, created_at),
# so that the page is the same byte for byte.
SHOWN = (
    "run_id model layout capture_id engine window counts parameters zone_rules quality lineage"
).split()


def report_html(manifest: dict[str, Any], clusters: pa.Table, embedding: Path) -> bytes:
    """The report of a run: an HTML file in UTF-8 that loads nothing, the same for the same input.

    Args:
        manifest: the run's manifest, with or without "files". What a first or an older run does not
            have (lineage, drift, checks of the gate, axes) may be missing.
        clusters: the run's clusters, in the schema `CLUSTERS` or an earlier one.
        embedding: path of its embedding.parquet; at most 100,000 of its rows are shown.
    """
    stages = manifest.get("stages", {})
    data = {
        **{name: manifest.get(name) for name in SHOWN},
        "stages": {name: stages.get(name, {}) for name in ("pca", "zones")},
        "clusters": clusters.to_pylist(),
        "clusters_are": what_clusters_are(stages.get("cluster", {})),
        "points": map_points(embedding, clusters["cluster_id"].to_pylist()),
    }
    style = "".join(map(_own_file, STYLES))
    script = "\n".join(['"use strict";', *(plain_script(_own_file(f"{n}.js")) for n in SCRIPTS)])
    page = Template(_own_file("template.html")).substitute(
        policy=(
            f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        title=html.escape(f"{manifest['run_id']} · attn"),
        style=style,
        data=_inert_json(data),
        script=script,
    )
    return page.encode()


def plain_script(module: str) -> str:
    """A module without its imports and exports, as part of one script that is inline in the page: a
    module cannot be, as it is loaded from a URL.

    Raises:
        ValueError: it imports or exports in another way than `import { a, b } from "./c.js";` and
            `export` before a declaration.
    """
    script = _IMPORT.sub("", module)
    script = _EXPORT.sub("", script)
    if found := _OTHER.search(script):
        raise ValueError(f"a module of the report may not {found[0].strip()!r}: see plain_script")
    return script


_IMPORT = re.compile(r'^import \{[\w\s,]+\} from "\./\w+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|class|function) )", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*", re.MULTILINE)


def _own_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The CSP source expression that allows an inline script or style of this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _inert_json(data: Any) -> str:
    """JSON in ASCII in which no text can become markup."""
    text = json.dumps(_finite(data), allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(data: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
