"""What cannot be captured is refused by name, instead of captured wrongly."""

import re

import pytest
from capture_models import make_engine, make_model, run, save_model, torch, words

from capture_kernels.errors import MissingExtraError, OptionError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bloom", "BloomForCausalLM .* does not go through the attention interface"),
        ("mpt", "MptForCausalLM .* does not go through the attention interface"),
        ("falcon", "FalconForCausalLM .* does not go through the attention interface"),
        ("diffllama", "layer 0 of .* does not run its attention once over every token"),
        ("doge", r"layer 0 \(DogeAttention\) has a mask of shape"),
        ("minimax", "MiniMax uses cache of its own"),
        ("mamba", "no layer has softmax attention"),
        ("t5", "encoder-decoder"),
    ],
)
def test_models_whose_attention_is_something_else_are_refused_by_name(tmp_path, kind, reason):
    with pytest.raises(OptionError, match=reason):
        load_engine(str(save_model(kind, tmp_path)), CaptureOptions())


def test_a_hybrid_model_gives_its_attention_layers():
    engine = make_engine(make_model("qwen3_next"), layers="all", max_new_tokens=3)
    assert engine.layers == (1, 3)
    assert make_engine(make_model("qwen3_next")).layers == (3,)
    assert run(engine, words(9)).batch.num_rows == 10
    with pytest.raises(OptionError, match="layer 0 of tiny cannot be captured"):
        make_engine(make_model("qwen3_next"), layers="0")


def test_attention_that_is_not_what_it_says_is_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = make_model("llama")
    model.set_attn_implementation("eager")
    original = modeling_llama.eager_attention_forward

    def with_distance(module, query, key, value, attention_mask, **options):
        keys = torch.arange(key.shape[2], dtype=query.dtype)
        return original(module, query, key, value, attention_mask + 0.3 * keys, **options)

    engine = make_engine(model)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_distance)
    with pytest.raises(OptionError, match=r"layer 3 \(LlamaAttention\) does not compute softmax"):
        run(engine, words(30))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "'position_bias', which is not supported"),
        ({"indices": torch.zeros(1)}, "'indices', which is not supported"),
        ({"dropout": 0.5}, "dropout"),
        ({"is_causal": False}, "is not causal"),
        ({"attention_mask": torch.ones(1, 1, 2, 2, dtype=torch.bool)}, "one range that ends at"),
        ({"attention_mask": torch.full((1, 1, 2, 2), -1.0)}, "one range that ends at"),
        ({"attention_mask": torch.ones(1, 4, 2, 2, dtype=torch.bool)}, "a mask of shape"),
    ],
    ids=str,
)
def test_a_layer_that_changes_its_scores_is_refused_by_the_name_of_the_change(
    monkeypatch, extra, reason
):
    from transformers.models.llama import modeling_llama

    original = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

    def interface(name, default):
        inner = original(name, default)

        def attention(module, query, key, value, attention_mask, **options):
            options["attention_mask"] = attention_mask
            return inner(module, query, key, value, **{**options, **extra})

        return attention

    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", interface)
    monkeypatch.setattr(
        "pipeline.engines.attention_tap._original",
        lambda module, base: lambda m, q, k, v, mask, **o: (v.transpose(1, 2)[:, :, :1], None),
    )
    model = make_model("llama")
    for module in model.modules():  # the stand-in's output must fit the projection that follows
        if hasattr(module, "o_proj"):
            module.o_proj = torch.nn.Linear(16, 32)
    with pytest.raises(OptionError, match=reason):
        make_engine(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "4"}, r"no layer 4: layers are 0\.\.3"),
        ({"layers": "-1"}, "no layer -1"),
        ({"layers": "first"}, "'first' is not supported"),
        ({"layers": "1,,2"}, "'1,,2' is not supported"),
        ({"heads": "4"}, r"no head 4: heads are 0\.\.3"),
        ({"heads": "x"}, "'x' is not supported"),
        ({"layout": Layout.LAYERED}, "layered needs several layers"),
        ({"layout": Layout.LAYERED, "layers": "2,2"}, "layered needs several layers"),
        ({"layout": Layout.LAYERED, "layers": "all", "per_layer": True}, "drop --per-layer"),
        ({"stride": 0}, "stride"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_steps": -1}, "max_steps"),
        ({"window": -1}, "window"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        make_engine(make_model("llama"), **options)


@pytest.mark.parametrize(
    ("layers", "capturable", "chosen"),
    [
        ("last", range(32), (31,)),
        ("auto", range(32), (8, 16, 24, 31)),
        ("auto", range(2), (0, 1)),
        ("auto", [3], (3,)),
        ("auto", [3, 7, 11, 15, 19, 23, 27, 31], (11, 19, 27, 31)),
        ("all", [1, 3], (1, 3)),
        ("18, 2,27,2", range(32), (2, 18, 27)),
    ],
)
def test_the_names_of_layers(layers, capturable, chosen):
    assert CaptureOptions(layers=layers).choose_layers(list(capturable), 32) == chosen


def test_a_model_that_is_not_there_is_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name in ("missing", "empty", "broken"):
        with pytest.raises(OptionError, match="cannot load model") as error:
            load_engine(str(tmp_path / name), CaptureOptions())
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["./none", "../none", "/none", "~/none", "."])
def test_a_name_that_is_a_folders_alone_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = f"cannot load model {name!r}: " + ("" if name == "." else "there is no such folder")
    with pytest.raises(OptionError, match=re.escape(says)):
        load_engine(name, CaptureOptions())


def test_devices_that_are_not_there_are_refused(tmp_path):
    for name in ("gpu", "meta", "cuda:99" if torch.cuda.is_available() else "toaster"):
        with pytest.raises(OptionError, match="device"):
            load_engine(str(tmp_path), CaptureOptions(device=name))
    if not torch.cuda.is_available():
        with pytest.raises(MissingExtraError, match="no CUDA device is available"):
            load_engine(str(tmp_path), CaptureOptions(device="cuda"))
