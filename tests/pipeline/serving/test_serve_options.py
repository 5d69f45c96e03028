"""Options of a server: one table for the command line, the variables and the checks."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from collected import commands, options
from hypothesis import given
from hypothesis import strategies as st
from pages import GUIDE, OPERATIONS, code_in, section, table

from capture_kernels.errors import AttnError, OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.body import FIELDS
from pipeline.engines.serving.option_table import Option
from pipeline.engines.serving.options import (
    DEPLOYMENT_VARIABLES,
    SECRET_VARIABLE,
    TABLE,
    ServeOptions,
)

KEY = "0123456789abcdef"


def values(option: Option) -> st.SearchStrategy:
    """Values that an option by itself can have."""
    by_field = {
        "layers": st.sampled_from(["last", "auto", "all", "2,18,27"]),
        "instrumentation_layers": st.just("last"),
        "sidecar_url": st.sampled_from(["tcp://127.0.0.1:9001", "ipc:///tmp/x"]),
        "api_key": st.just(KEY),
        "cors_origins": st.sampled_from([(), ("*",), ("https://a.example", "http://b:1")]),
    }
    if option.field in by_field:
        return by_field[option.field]
    if option.kind is float:
        return st.floats(option.low, option.high)
    if option.kind is int:
        return st.integers(int(option.low or 0), int(option.high or 1_000_000))
    kinds = {bool: st.booleans(), Path: st.just(Path("/some where/x")), str: st.just("x"),
             Layout: st.just(Layout.LOG16)}  # fmt: skip
    return kinds[option.kind]


def test_the_table_is_the_fields_of_the_options_in_order():
    own = [field for field in fields(ServeOptions) if field.metadata]
    assert [option.field for option in TABLE] == [field.name for field in own]
    assert [option.default for option in TABLE] == [field.default for field in own]
    assert MISSING not in [option.default for option in TABLE]
    assert len({option.variable for option in TABLE}) == len(TABLE)


@given(data=st.data())
def test_options_survive_the_way_through_the_environment(data):
    chosen = {one.field: data.draw(values(one)) for one in TABLE if data.draw(st.booleans())}
    for first, second in (("sketch_mode", "fingerprint_mode"), ("sidecar_url", "store"),
                          ("api_key", "api_key_file")):  # fmt: skip
        if chosen.get(first):
            chosen.pop(second, None)
    if not chosen.get("sidecar_url"):
        chosen.pop("curve_keys", None)
    before = ServeOptions(**chosen)
    after = ServeOptions.from_environment(before.environment())
    assert after == before and after.secret == before.secret


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tokens_top_k": 0}, "--attention-tokens-top-k"),
        ({"tokens_top_k": 65}, "--attention-tokens-top-k"),
        ({"tokens_stride": 0}, "--attention-tokens-stride"),
        ({"tokens_max": -1}, "--attention-tokens-max"),
        ({"tokens_window": 1 << 31}, "--attention-tokens-window"),
        ({"mask_prefix": 1 << 31}, "--attention-mask-prefix"),
        ({"sample_rate": float("nan")}, "--attention-sample-rate"),
        ({"sample_rate": 1.5}, "--attention-sample-rate"),
        ({"overhead_budget": 0.0}, "--attention-overhead-budget"),
        ({"layers": "first"}, "--attention-capture-layers"),
        ({"layers": "1,-2"}, "--attention-capture-layers"),
        ({"layout": Layout.LAYERED}, "--attention-capture-layers"),
        ({"layout": Layout.LAYERED, "layers": "3"}, "--attention-capture-layers"),
        ({"sketch_mode": True, "fingerprint_mode": True}, "--attention-fingerprint-mode"),
        ({"sidecar_url": "tcp://127.0.0.1:9", "store": Path("x.db")}, "--attention-store"),
        ({"sidecar_url": "localhost"}, "tcp://HOST:PORT"),
        ({"sidecar_url": "tcp://10.0.0.1:9001"}, "--curve-keys"),
        ({"curve_keys": Path("keys")}, "--attention-sidecar-url"),
        ({"api_key": KEY, "api_key_file": Path("x")}, "--attention-api-key-file"),
        ({"api_key": "short"}, "--attention-api-key"),
        ({"cors_origins": ("https://a.example/page",)}, "--attention-cors-origins"),
        ({"cors_origins": ("a.example",)}, "--attention-cors-origins"),
        ({"instrumentation_layers": "all"}, "--enable-attention-instrumentation"),
        ({"max_body_mb": 0}, "--attention-max-body-mb"),
    ],
)
def test_what_cannot_be_used_is_one_line_that_names_the_option(wrong, named):
    with pytest.raises(OptionError) as refused:
        ServeOptions(**wrong)
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["TOKENS_TOP_K", "SAMPLE_RATE", "SKETCH_MODE", "LAYOUT"])
def test_a_variable_that_cannot_be_read_is_named(name):
    with pytest.raises(OptionError, match="squid"):
        ServeOptions.from_environment({f"ATTN_CAPTURE_{name}": "squid"})


def test_a_variable_that_does_not_exist_is_refused_and_an_empty_one_is_none():
    with pytest.raises(OptionError, match="ATTN_CAPTURE_TOPK"):
        ServeOptions.from_environment({"ATTN_CAPTURE_TOPK": "3"})
    assert ServeOptions.from_environment({"ATTN_CAPTURE_LAYERS": ""}).layers == "last"


def test_what_is_given_goes_before_the_variables():
    environment = {"ATTN_CAPTURE_TOKENS_TOP_K": "squid", "ATTN_CAPTURE_LAYERS": "auto"}
    options = ServeOptions.from_environment(environment, tokens_top_k=5)
    assert (options.tokens_top_k, options.layers) == (5, "auto")


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({"ATTN_ENV": "production"}, False),
        ({"ENV": "Development"}, True),
        ({"ATTN_ENV": "dev"}, True),
        ({"ATTN_ENV": "production", "ENV": "development"}, False),
        ({"ATTN_ENV": "", "ENV": "test"}, True),
    ],
)
def test_capture_is_off_in_production_if_it_is_to_be(environment, is_on):
    chosen = {"return_attention_tokens": True}
    options = ServeOptions.from_environment(environment, **chosen, disable_in_production=True)
    assert (options.is_on, options.turned_off) == (is_on, not is_on)
    assert ServeOptions.from_environment(environment, **chosen).is_on


def test_nothing_is_captured_unless_something_asks_for_it(tmp_path):
    assert not ServeOptions().is_on
    assert not ServeOptions(tokens_top_k=5, mask_system_prompt=True).is_on
    for chosen in ({"return_attention_tokens": True}, {"sketch_mode": True},
                  {"fingerprint_mode": True}, {"store": tmp_path / "x.db"},
                  {"sidecar_url": "tcp://127.0.0.1:9001"},
                  {"enable_attention_instrumentation": True}):  # fmt: skip
        assert ServeOptions(**chosen).is_on
    assert ServeOptions(fingerprint_mode=True).modes == ("fingerprint",)
    assert ServeOptions(store=tmp_path / "x.db").modes == ()


def test_layers_are_chosen_among_those_that_have_attention():
    options = ServeOptions(layers="auto", enable_attention_instrumentation=True,
                           instrumentation_layers="2,4")  # fmt: skip
    assert options.choose_layers(range(0, 16, 2), 16) == (4, 8, 12, 14)
    assert options.choose_score_layers(range(0, 16, 2), 16) == (2, 4)
    assert ServeOptions().choose_score_layers(range(16), 16) == ()
    with pytest.raises(OptionError, match="--attention-capture-layers: layer 3"):
        replace(options, layers="2,3").choose_layers(range(0, 16, 2), 16)
    with pytest.raises(OptionError, match="no layer 16"):
        replace(options, layers="16").choose_layers(range(16), 16)
    with pytest.raises(OptionError, match="several"):
        replace(options, layout=Layout.LAYERED).choose_layers([5], 16)


def test_files_are_tried_before_a_model_is_loaded(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n# a comment\n{KEY}2\n")
    keys.chmod(0o600)
    store = tmp_path / "fingerprints.db"
    good = ServeOptions(api_key_file=keys, store=store)
    good.check_files()
    assert store.exists()
    accepted = good.keys()
    assert accepted is not None and KEY.encode() in accepted and b"other" not in accepted
    store.write_bytes(b"no database at all, whatever its name says")
    keys.chmod(0o644)
    for wrong in ({"api_key_file": keys}, {"api_key_file": tmp_path / "none"}, {"store": store},
                  {"sidecar_url": "tcp://127.0.0.1:9", "curve_keys": tmp_path}):  # fmt: skip
        with pytest.raises(AttnError) as refused:
            ServeOptions(**wrong).check_files()
        assert "\n" not in str(refused.value)


def test_every_option_of_the_table_is_one_of_attn_serve_with_its_default():
    known = options(commands()["attn serve"])
    for option in TABLE:
        found = known[option.names]
        assert found.help == option.help
        assert found.is_flag == (option.kind is bool)


def test_every_variable_is_documented():
    rows = table(GUIDE, "`attn serve`")
    documented = {code_in(row[0])[0]: code_in(row[3])[0] for row in rows if row[3]}
    assert documented == {option.name: option.variable for option in TABLE}
    written = set(code_in(section(OPERATIONS, "Environment variables")))
    assert {SECRET_VARIABLE, *DEPLOYMENT_VARIABLES} <= written


def test_every_field_of_a_request_is_documented():
    rows = table(GUIDE, "Fields of a request")
    assert [code_in(row[0])[0] for row in rows] == list(FIELDS)


def test_the_default_chunk_size_is_the_kernels_own_scratch():
    plan = pytest.importorskip("capture_kernels.decode.plan")
    assert ServeOptions().scratch_bytes == plan.SCRATCH_BYTES
    assert ServeOptions(chunk_size=0).scratch_bytes == 0
