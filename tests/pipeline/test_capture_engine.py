"""Fingerprints captured from a running model are those of the attention it says it computed."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from capture_models import (
    NOON,
    WINDOW,
    make_engine,
    make_model,
    make_tokenizer,
    run,
    save_model,
    torch,
    words,
)
from transformers import DynamicCache

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout, Visibility, fingerprint
from pipeline.engines.attention_tap import AttentionTap
from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions, PromptError
from pipeline.engines.revision import local_revision
from pipeline.engines.transformers import TransformersEngine
from pipeline.record import SCHEMA, vectors

EXAMPLES = Path(__file__).parents[2] / "examples"
CAPTURABLE = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2"),
    *("deepseek_v3", "llama4"),
]
# Of tests that are made of every model, `make test` runs these.
DAILY = ("llama", "gemma2")
MASKS = [*DAILY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "gpt_oss"))]
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
]
OF_EACH = [
    pytest.param(kind, marks=() if kind in DAILY else pytest.mark.slow) for kind in CAPTURABLE
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def own_attention(model, tokens):
    """What the model says its rows are, in one pass: [L][T, H, T] float32, from eager attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(torch.tensor([tokens], device=model.device), output_attentions=True)
    return [layer[0].transpose(0, 1).float().cpu().numpy() for layer in out.attentions]


def expected(rows, position, layout=Layout.LOG16, visibility=None, heads=None):
    chosen = slice(None) if heads is None else heads
    seen = [row[position, :, : position + 1] for row in rows]
    # Keys outside a model's own window are not visible; those inside have a probability.
    first_keys = [int(row.any(axis=0).argmax()) for row in seen]
    layers = [row[chosen] for row in seen]
    return fingerprint(layers, position, layout, visibility or Visibility(), first_keys)


def assert_records_are(captured, truth, positions, atol=2e-5):
    """The records are of these positions, and `truth(position, layer)` of each."""
    batch = captured.batch
    assert batch.schema == SCHEMA
    assert batch.column("position").to_pylist() == positions
    found, masses = vectors(batch), batch.column("sink_mass").to_pylist()
    layers = batch.column("layer").to_pylist()
    for i, (position, layer) in enumerate(zip(positions, layers, strict=True)):
        vector, sink_mass = truth(position, layer)
        np.testing.assert_allclose(found[i], vector, atol=atol, rtol=0, err_msg=str(position))
        assert masses[i] == pytest.approx(sink_mass, abs=atol)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, Layout.LOG16) for kind in CAPTURABLE]
    + [
        pytest.param(kind, Layout.LAYERED, marks=[] if kind in DAILY else pytest.mark.slow)
        for kind in CAPTURABLE
    ],
)
def test_every_row_is_the_models_own_attention(kind, layout):
    model = make_model(kind)
    engine = make_engine(model, layers="all", layout=layout, max_new_tokens=12)
    captured = run(engine, words(3 * WINDOW))
    tokens = engine.tokenizer(words(3 * WINDOW))["input_ids"] + captured.new_tokens
    rows = own_attention(model, tokens)
    assert engine.layers == (0, 1, 2, 3)
    assert len(captured.new_tokens) == 12
    # The first token sees only itself, a sink, and the last was never fed.
    assert captured.blind_rows == 1
    assert_records_are(
        captured, lambda t, _: expected(rows, t, layout), list(range(1, len(tokens) - 1))
    )


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"mask_prefix": 7},
        {"mask_prefix": 3, "window": 20, "sink_tokens": 6},
        {"sink_tokens": 0},
        {"heads": "0,3"},
        {"heads": "1"},
        {"heads": "0,1,2"},
        {"stride": 4},
        {"layers": "0,2"},
        {"layers": "1", "layout": Layout.LOG16},
    ],
    ids=str,
)
def test_options_choose_what_is_captured(kind, options):
    model = make_model(kind)
    layers = options.get("layers", "all")
    engine = make_engine(model, **{**options, "layers": layers, "max_new_tokens": 6})
    captured = run(engine, words(25))
    tokens = engine.tokenizer(words(25))["input_ids"] + captured.new_tokens
    rows = own_attention(model, tokens)
    chosen = [rows[i] for i in engine.layers]
    visibility = engine.options.visibility
    heads = list(engine.heads) if engine.heads else None
    wanted = range(0, len(tokens) - 1, options.get("stride", 1))
    assert_records_are(
        captured,
        lambda t, _: expected(chosen, t, visibility=visibility, heads=heads),
        [t for t in wanted if visibility.start(t) <= t],
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_per_layer_gives_one_record_for_each_layer(kind):
    model = make_model(kind)
    engine = make_engine(model, layers="0,3", per_layer=True, max_new_tokens=4)
    captured = run(engine, words(20))
    tokens = engine.tokenizer(words(20))["input_ids"] + captured.new_tokens
    rows = own_attention(model, tokens)
    positions = list(range(1, len(tokens) - 1))
    assert captured.batch.column("layer").to_pylist() == [0] * len(positions) + [3] * len(positions)
    assert_records_are(captured, lambda t, layer: expected([rows[layer]], t), 2 * positions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", OF_EACH)
def test_watching_does_not_change_a_single_bit_of_the_output(kind, dtype, device):
    model = make_model(kind, device).to(dtype)
    tokens = torch.randint(0, 64, (1, 30), generator=torch.Generator().manual_seed(1)).to(device)

    def logits():
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            steps = [model(tokens[:, :20], past_key_values=cache).logits]
            steps += [
                model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(20, 30)
            ]
        return torch.cat(steps, dim=1)

    engine = make_engine(model, layers="all", max_new_tokens=8)
    plain = logits()
    calls = []
    with AttentionTap(model, calls.append):
        watched = logits()
    assert len(calls) == 4 * 11
    assert torch.equal(plain, watched)
    assert torch.equal(plain, logits())
    assert model.config._attn_implementation in ("sdpa", "eager")
    with torch.inference_mode():
        greedy = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None)
    prompt = " ".join(engine.tokenizer.convert_ids_to_tokens(tokens[0].tolist()))
    assert run(engine, prompt).new_tokens == greedy[0, 30:].tolist()


def test_a_soft_cap_under_sdpa_puts_the_model_on_its_own_eager_attention(monkeypatch):
    # Some releases of transformers run such a model with sdpa and drop the cap.
    model = make_model("gemma2")
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    model.set_attn_implementation("sdpa")
    engine = make_engine(model, layers="all", max_new_tokens=0)
    assert model.config._attn_implementation == "eager"
    rows = own_attention(model, engine.tokenizer(words(20))["input_ids"])
    assert_records_are(run(engine, words(20)), lambda t, _: expected(rows, t), list(range(1, 20)))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_half_precision_is_close_to_the_models_own_rows(kind):
    model = make_model(kind).to(torch.bfloat16)
    engine = make_engine(model, layers="all", max_new_tokens=0)
    captured = run(engine, words(40))
    tokens = engine.tokenizer(words(40))["input_ids"]
    rows = own_attention(model, tokens)
    # The model rounds its weights to 8 bits; ours are exact for the same queries and keys.
    assert_records_are(captured, lambda t, _: expected(rows, t), list(range(1, 40)), atol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CAPTURABLE)
def test_the_gpu_captures_what_the_cpu_captures(kind, dtype):
    batches = {}
    for device in ("cpu", "cuda"):
        engine = make_engine(make_model(kind, device).to(dtype), layers="all", max_new_tokens=0)
        batches[device] = run(engine, words(80)).batch
    cpu, cuda = vectors(batches["cpu"]), vectors(batches["cuda"])
    error = np.abs(cpu - cuda)
    if dtype == torch.float32:
        assert error.max() < 2e-3
    else:  # hidden states of the two devices drift apart by bfloat16 rounding, layer by layer
        assert error.mean() < 0.02


def test_records_say_which_token_of_which_phase_they_are():
    engine = make_engine(make_model("llama"), max_new_tokens=5)
    captured = run(engine, "w1 w2 w3")
    columns = captured.batch.to_pydict()
    tokens = [4, 5, 6, *captured.new_tokens]
    assert captured.prompt_tokens == 3
    assert columns["position"] == [1, 2, 3, 4, 5, 6]
    assert columns["token_id"] == tokens[1:7]
    assert columns["phase"] == ["prompt"] * 2 + ["output"] * 4
    assert set(columns["request_id"]) == {"a"} and set(columns["session_id"]) == {"s"}
    assert set(columns["prompt_len"]) == {3} and set(columns["layer"]) == {-1}
    assert set(columns["captured_at"]) == {NOON} and set(columns["model"]) == {"tiny"}
    assert set(columns["capture_id"]) == {engine.capture_id} and set(columns["layout"]) == {1}


def test_thinking_runs_from_its_opening_to_its_closing_tag():
    engine = make_engine(make_model("llama"), think_tags=True)
    opening, closing, word = 1, 2, 9
    tokens = [word, opening, word, closing, word, opening, word]
    assert engine._phases(tokens, 1) == ["prompt", *["think"] * 3, "output", *["think"] * 2]
    # A prompt that ends inside <think>, as chat templates leave it.
    assert engine._phases([word, opening, word, closing, word], 2) == [
        *["prompt"] * 2, "think", "think", "output",
    ]  # fmt: skip
    assert engine._phases([opening, word, closing, word], 3) == [*["prompt"] * 3, "output"]
    assert run(engine, "w1 <think>").batch.column("phase")[-1].as_py() == "think"
    plain = make_engine(make_model("llama"))
    assert plain._phases(tokens, 1) == ["prompt", *["output"] * 6]


def test_thinking_tags_that_the_tokenizer_does_not_have_are_refused():
    tokenizer = make_tokenizer()
    tokenizer.get_vocab = lambda: {"w1": 0}
    with pytest.raises(OptionError, match="no token <think>"):
        TransformersEngine(
            make_model("llama"), tokenizer, CaptureOptions(think_tags=True), name="x", revision="r"
        )


def test_rows_can_be_limited_to_some_generated_ones():
    engine = make_engine(make_model("llama"), max_new_tokens=10, max_steps=3)
    captured = run(engine, words(7))
    assert captured.batch.column("position").to_pylist() == list(range(1, 10))
    assert len(captured.new_tokens) == 10
    prompt_only = make_engine(make_model("llama"), max_new_tokens=0)
    captured = run(prompt_only, words(7))
    assert captured.new_tokens == []
    assert captured.batch.column("position").to_pylist() == [1, 2, 3, 4, 5, 6]


def test_a_capture_without_a_visible_key_has_no_records():
    captured = run(make_engine(make_model("llama"), mask_prefix=90), words(7))
    assert captured.batch.num_rows == 0
    assert captured.blind_rows == 70


def test_generation_ends_at_the_end_token_and_at_the_context():
    model = make_model("llama")
    first = run(make_engine(model, max_new_tokens=20), words(10)).new_tokens
    model.generation_config.eos_token_id = [first[2]]
    stopped = run(make_engine(model, max_new_tokens=20), words(10)).new_tokens
    assert stopped == first[: first.index(first[2]) + 1]
    model.generation_config.eos_token_id = None
    full = run(make_engine(model, max_new_tokens=20), words(90))
    assert len(full.new_tokens) == 7  # 96 places: 6 tokens fed, and one that never is
    assert run(make_engine(model), words(96)).batch.num_rows == 95


def test_prompts_that_the_model_cannot_take_are_refused_by_id():
    engine = make_engine(make_model("llama"))
    with pytest.raises(PromptError, match="'a' has 97 tokens, more than the model's context of 96"):
        run(engine, words(97))
    with pytest.raises(PromptError, match="'a' has no tokens"):
        run(engine, "  ")


def test_a_capture_id_names_what_makes_vectors_comparable():
    model = make_model("llama")
    base = make_engine(model, layers="all").capture_id
    assert base == make_engine(model, layers="0,1,2,3", stride=3, max_new_tokens=9).capture_id
    others = [
        {"layers": "last"},
        {"layers": "all", "layout": Layout.LAYERED},
        {"layers": "all", "window": 9},
        {"layers": "all", "mask_prefix": 9},
        {"layers": "all", "sink_tokens": 2},
        {"layers": "all", "heads": "0"},
        {"layers": "all", "per_layer": True},
    ]
    ids = {base, *(make_engine(model, **other).capture_id for other in others)}
    assert len(ids) == 1 + len(others)
    renamed = TransformersEngine(
        model, make_tokenizer(), CaptureOptions(layers="all"), name="tiny", revision="other"
    )
    assert renamed.capture_id != base


def test_the_shipped_sample_can_be_compared_with_a_capture_of_today():
    sample = pq.read_table(EXAMPLES / "sample" / "fingerprints.parquet", columns=["capture_id"])
    engine = load_engine(str(EXAMPLES / "demo_model"), CaptureOptions(layers="auto"))
    assert sample["capture_id"].unique().to_pylist() == [engine.capture_id]


@pytest.mark.parametrize(("kind", "windowed"), [("llama", False), ("gemma2", True)])
def test_a_models_own_window_is_part_of_the_capture_id(kind, windowed, monkeypatch):
    engine = make_engine(make_model(kind), layers="all")
    found = engine.capture_id
    del engine.capture_id
    monkeypatch.setattr("pipeline.record.WINDOWED_KERNEL_VERSION", 99)
    assert (engine.capture_id != found) == windowed


def test_a_local_folder_has_the_revision_of_its_weights(tmp_path):
    folder = save_model("llama", tmp_path / "a")
    revision = local_revision(folder)
    assert revision == local_revision(save_model("llama", tmp_path / "b"))
    engine = load_engine(str(folder), CaptureOptions(max_new_tokens=0))
    assert engine.revision == revision and engine.name == str(folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert local_revision(folder) != revision


def test_a_capture_uses_nothing_that_transformers_will_remove():
    engine = make_engine(make_model("llama"), max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert engine.capture(words(8), request_id="r").batch.num_rows
