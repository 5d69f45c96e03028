"""/docs: the page of the routes, which needs nothing of another host."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode


def test_the_page_needs_no_other_host_and_may_use_none(sidecar):
    page = sidecar.client.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "//" not in page.text  # no address of a host
    named = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page.text)
    assert {name.rpartition(".")[2] for name in named} == {"css", "js"}
    for name in named:
        asset = sidecar.client.get(f"/{name}")
        assert asset.status_code == 200 and len(asset.content) > 100_000
        assert {"css": "text/css", "js": "javascript"}[name.rpartition(".")[2]] in (
            asset.headers["content-type"]
        )
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "http" not in policy and "script-src 'self' 'sha256-" in policy
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    assert b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    (document,) = re.findall(r'url: "([^"]+)"', script)
    paths = sidecar.get(f"/{document}")["paths"]
    assert {"/classify", "/predict", "/fingerprints", "/stats", "/live"} <= set(paths)
    assert "/docs" not in paths


def test_nothing_but_the_files_of_the_page_is_served_beside_it(sidecar):
    for path in ("/docs/assets/", "/docs/assets/../core.py", "/docs/assets/%2e%2e/core.py",
                 "/docs/assets/none.js", "/redoc"):  # fmt: skip
        found = sidecar.client.get(path)
        assert found.status_code == 404 and list(found.json()) == ["error"], path
