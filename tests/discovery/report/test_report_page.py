"""report.html as a file: the same for the same run, nothing from outside, nothing let in."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_inputs import HOSTILE, RUN, first_run, hostile, later_run

from discovery import report
from discovery.report.page import SCRIPTS, SHARED, plain_script
from discovery.report.points import MOST_POINTS, even_rows


class Elements(HTMLParser):
    def __init__(self, page: bytes):
        super().__init__()
        self.tags: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)


def data_of(page: bytes) -> dict:
    found = re.search(rb'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def column(data: dict, name: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data["points"]["columns"][name]), dtype)


def test_the_same_run_has_the_same_report_however_long_it_took(tmp_path: Path):
    inputs = later_run(tmp_path)
    page = inputs.html()
    assert page == inputs.html()
    elsewhere = {"stage_seconds": {"pca": 99.0}, "versions": {"numpy": "3"}, "files": {"a": {}}}
    assert inputs._replace(manifest=inputs.manifest | elsewhere).html() == page


def test_the_report_names_no_address_to_load_anything_from(tmp_path: Path):
    page = later_run(tmp_path).html().decode()
    assert set(re.findall(r"\b\w+://[^\s\"'`<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|\bsrc=|<link", page)
    assert "default-src 'none'" in page


def test_no_text_of_a_run_becomes_markup(tmp_path: Path):
    tame = later_run(tmp_path)
    tags = Elements(tame.html()).tags
    page = hostile(tame).html()
    assert Elements(page).tags == tags
    data = data_of(page)
    assert data["run_id"] == data["points"]["requests"][0] == HOSTILE
    assert data["clusters"][0]["label"] == HOSTILE


def test_of_many_rows_an_even_sample_is_drawn(tmp_path: Path):
    inputs = first_run(tmp_path, rows=250_000)
    data = data_of(inputs.html())
    assert (data["points"]["shown"], data["points"]["total"]) == (MOST_POINTS, 250_000)
    rows = even_rows(250_000, MOST_POINTS)
    taken = inputs.rows.take(pa.array(rows))
    request = column(data, "request", "<u4")
    assert [data["points"]["requests"][i] for i in request[:500]] == taken[
        "request_id"
    ].to_pylist()[:500]
    assert (column(data, "position", "<i4") == taken["position"].to_numpy()).all()
    ids = np.array(data["points"]["clusters"])[column(data, "cluster", "<u2")]
    assert (ids == taken["cluster_id"].to_numpy()).all()
    zones = np.array(data["points"]["zones"])[column(data, "zone", "u1")]
    assert (zones == np.array(taken["zone"].to_pylist())).all()
    low, high = data["points"]["extent"][:2]
    x = low + column(data, "x", "<u2") * (high - low) / 65_535
    assert np.abs(x - taken["x"].to_numpy()).max() <= (high - low) / 65_535
    token = column(data, "token", "<i4")
    assert ((token < 0) == taken["token_id"].is_null().to_numpy()).all()


@given(total=st.integers(0, 3_000), most=st.integers(1, 500))
def test_the_sample_has_one_row_of_each_interval(total: int, most: int):
    rows = even_rows(total, most)
    count = min(total, most)
    assert len(rows) == count
    if count:
        edges = np.arange(count + 1) * total // count
        assert (rows >= edges[:-1]).all() and (rows < edges[1:]).all()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_run_of_hardly_any_rows_has_a_report(tmp_path: Path, rows: int):
    data = data_of(first_run(tmp_path, rows=rows, count=0).html())
    assert data["points"]["shown"] == rows
    assert data["clusters"] == []


def test_what_is_no_number_in_json_is_null(tmp_path: Path):
    inputs = first_run(tmp_path)
    inputs.manifest["quality"]["trustworthiness"] = float("nan")
    data = data_of(inputs.html())
    assert data["quality"]["trustworthiness"] is None
    assert data["run_id"] == RUN


@pytest.mark.parametrize(
    "line",
    [
        'import * as all from "./dom.js";',
        'import "./dom.js";',
        'import { el } from "../dom.js";',
        "export default el;",
        "export { el };",
        "export async function load() {}",
    ],
)
def test_a_module_that_cannot_be_inline_is_refused(line: str):
    with pytest.raises(ValueError, match="a module of the report may not"):
        plain_script(f"const a = 1;\n{line}\n")


def test_a_shared_module_uses_nothing_but_what_it_imports_of_modules_before_it():
    folder = Path(report.__file__).parent
    for place, name in enumerate(SHARED):
        module = (folder / f"{name}.js").read_text()
        imported = re.findall(r'^import \{([^}]+)\} from "\./(\w+)\.js";', module, re.M)
        for names, other in imported:
            assert other in SHARED[:place], f"{name} imports {other}, which comes later"
            source = (folder / f"{other}.js").read_text()
            exported = re.findall(r"^export (?:const|class|function) (\w+)", source, re.M)
            assert set(re.findall(r"\w+", names)) <= set(exported)
        # What is inline only: the data of the report and its elements.
        assert not re.search(r"(?<![\w.])(data|state|\$)[.(\[]", plain_script(module)), name
    assert set(SHARED) <= set(SCRIPTS)
