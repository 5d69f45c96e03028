"""What responses and records say besides attention: the routing of experts, and the logit lens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from capture_models import make_tokenizer, save_model, words
from live_server import LiveServer, entries_of, running, wait_until
from transformers import AutoModelForCausalLM

from pipeline.engines import hidden_states
from pipeline.engines.openai_server.model import ServedModel
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.sinks import Counts

torch = pytest.importorskip("torch")
ALL = ServeOptions(return_attention_tokens=True, layers="all")
ROUTED = {"mixtral": [0, 1, 2, 3], "qwen3_moe": [0, 3], "gpt_oss": [0, 1, 2, 3]}
PROMPT, NEW = 20, 5


class Gathered:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def put(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)

    @property
    def counts(self) -> Counts:
        raise AssertionError("nobody asked for /health")


class Truth:
    """What transformers itself says of some tokens."""

    def __init__(self, folder: Path, tokens: list[int]) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        routers = {}
        for name, module in model.named_modules():
            if "Router" in type(module).__name__:
                layer = int(name.split(".layers.")[1].split(".")[0])
                module.register_forward_hook(
                    lambda _, given, found, layer=layer: routers.setdefault(layer, found)
                )
        with torch.inference_mode():
            found = model(torch.tensor([tokens]), output_hidden_states=True)
            # The last of transformers' hidden states is after the last norm, the others before it.
            *before, last = found.hidden_states
            norm, head = model.get_decoder().norm, model.get_output_embeddings()
            self.lens = [head(norm(state[0])).log_softmax(-1) for state in before[1:]]
            self.lens.append(head(last[0]).log_softmax(-1))
        self.routers = {
            layer: (logits.double().softmax(-1).numpy(), scores.numpy(), experts.numpy())
            for layer, (logits, scores, experts) in routers.items()
        }

    def routing(self, layer: int, position: int) -> tuple[set[int], float]:
        p, _, experts = self.routers[layer]
        p = p[position]
        return set(experts[position].tolist()), float(-(p * np.log(p)).sum() / math.log(len(p)))


@pytest.fixture(scope="module", params=list(ROUTED))
def routed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A server of a tiny model with experts, its folder and kind, and what its sink was given."""
    folder = save_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    sink = Gathered()
    with running(folder, ALL, sink=sink) as live:
        yield live, folder, request.param, sink


def tokens_of(live: LiveServer, found: dict) -> list[int]:
    texts = found["choices"][0]["logprobs"]["tokens"]
    return [
        *live.model.prompt_tokens(words(PROMPT)),
        *make_tokenizer().convert_tokens_to_ids(texts),
    ]


def asked(live: LiveServer, **fields) -> dict:
    return live.complete(
        words(PROMPT), max_tokens=NEW, logprobs=0, ignore_eos=True,
        return_attention_tokens=True, **fields,
    )  # fmt: skip


def check_routing(said: dict, experts: set[int], entropy: float) -> None:
    assert set(said["top_experts"]) == experts
    assert said["router_entropy"] == pytest.approx(entropy, abs=1e-4)


def test_entries_of_every_mode_name_the_experts_of_their_layers(routed):
    live, folder, kind, _ = routed
    raw = asked(live, attention_moe_routing=True, include_prompt_attention=2)
    truth = Truth(folder, tokens_of(live, raw)[:-1])
    entries = entries_of(raw)
    assert len(entries) == 4 * (NEW - 1 + 2)
    for entry in entries:
        if entry["layer_id"] in ROUTED[kind]:
            check_routing(entry, *truth.routing(entry["layer_id"], entry["position"]))
        else:
            assert not entry.keys() & {"top_experts", "router_entropy"}
    sketch = entries_of(asked(live, attention_moe_routing=True, attention_sketch_mode=True))
    for entry in sketch:
        position = entry["decode_step"] + PROMPT - 1
        for layer in ROUTED[kind]:
            check_routing(entry["layer_sketches"][str(layer)], *truth.routing(layer, position))
    fingerprints = entries_of(
        asked(live, attention_moe_routing=True, attention_fingerprint_mode=True)
    )
    assert len(fingerprints) == NEW - 1
    for entry in fingerprints:
        of_layers = [truth.routing(layer, entry["step"] + PROMPT - 1) for layer in ROUTED[kind]]
        entropy = float(np.mean([entropy for _, entropy in of_layers]))
        # As in its record: the deepest layer's experts, and all layers' mean entropy.
        check_routing(entry, of_layers[-1][0], entropy)


def test_the_largest_weight_comes_first(routed):
    live, folder, *_ = routed
    found = asked(live, attention_moe_routing=True, attention_capture_layers="last")
    _, scores, experts = Truth(folder, tokens_of(live, found)[:-1]).routers[3]
    for entry in entries_of(found):
        weight = dict(zip(experts[entry["position"]], scores[entry["position"]], strict=True))
        said = [weight[expert] for expert in entry["top_experts"]]
        assert said == sorted(said, reverse=True)


def test_records_have_the_routing_whoever_asks_for_entries(routed):
    live, folder, kind, sink = routed
    sink.batches.clear()
    found = asked(live, attention_fingerprint_mode=True)
    assert not any("top_experts" in entry for entry in entries_of(found))
    truth = Truth(folder, tokens_of(live, found)[:-1])
    wait_until(lambda: sum(len(batch) for batch in sink.batches) == NEW - 1)
    for row in (row for batch in sink.batches for row in batch.to_pylist()):
        of_layers = [truth.routing(layer, row["position"]) for layer in ROUTED[kind]]
        assert set(row["top_experts"]) == of_layers[-1][0]
        expected = np.mean([entropy for _, entropy in of_layers])
        assert row["router_entropy"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("count", "named"), [(True, 5), (3, 3), (20, 20)])
def test_the_lens_shows_what_the_models_head_makes_of_each_layer(routed, count, named):
    live, folder, _, _ = routed
    raw = asked(live, attention_logit_lens=count, attention_mask_prefix=4)
    truth = Truth(folder, tokens_of(live, raw)[:-1]).lens
    entries = entries_of(raw)
    assert len(entries) == 4 * (NEW - 1)
    for entry in entries:
        expected = truth[entry["layer_id"]][entry["position"] + 4]
        lens = entry["logit_lens"]
        assert len(lens) == named
        best = expected.topk(named).values.tolist()
        assert [one["logprob"] for one in lens] == pytest.approx(best, abs=2e-4)
        for one in lens:
            assert one["logprob"] == pytest.approx(float(expected[one["token_id"]]), abs=2e-4)
            assert one["token"] == live.model.text([one["token_id"]])
    # After the last layer it is what the model samples from.
    texts = raw["choices"][0]["logprobs"]["tokens"]
    last = [entry["logit_lens"][0]["token"] for entry in entries if entry["layer_id"] == 3]
    assert last == texts[1:]


def test_the_lens_of_sketches_and_fingerprints_is_by_layer(routed):
    live, _, _, _ = routed
    two = {"attention_capture_layers": [1, 3], "attention_logit_lens": 2}
    raw = entries_of(asked(live, **two))
    by_step = {(entry["decode_step"], str(entry["layer_id"])): entry["logit_lens"] for entry in raw}
    for entry in entries_of(asked(live, attention_sketch_mode=True, **two)):
        for layer, sketch in entry["layer_sketches"].items():
            assert sketch["logit_lens"] == by_step[entry["decode_step"], layer]
    for entry in entries_of(asked(live, attention_fingerprint_mode=True, **two)):
        assert list(entry["logit_lens"]) == ["1", "3"]
        for layer, lens in entry["logit_lens"].items():
            assert lens == by_step[entry["step"], layer]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"attention_logit_lens": 21}, "attention_logit_lens", "between 0 and 20"),
        ({"attention_logit_lens": "5"}, "attention_logit_lens", "a whole number"),
        ({"attention_moe_routing": 1}, "attention_moe_routing", "true or false"),
    ],
)
def test_values_that_they_cannot_have_are_refused(routed, fields, param, said):
    live, *_ = routed
    status, error = live.refused(prompt="w1", return_attention_tokens=True, **fields)
    assert (status, error["param"]) == (400, param)
    assert said in error["message"]


def test_capabilities_say_what_there_is(routed, tmp_path):
    live, *_ = routed
    features = live.client.get("/v1/attention/capabilities").json()["features"]
    assert features["moe_routing"]
    assert features["logit_lens"]


def test_a_model_without_experts_or_whose_head_is_another_says_so(tmp_path, monkeypatch):
    with running(save_model("llama", tmp_path / "llama"), ALL) as live:
        said = live.client.get("/v1/attention/capabilities").json()
        assert not said["features"]["moe_routing"]
        assert said["reasons"]["moe_routing"] == "the model routes no experts"
        assert said["features"]["logit_lens"]
        status, error = live.refused(
            prompt="w1", return_attention_tokens=True, attention_moe_routing=True
        )
        assert (status, error["code"]) == (400, "attention_unavailable")
        assert "routes no experts" in error["message"]
    # A norm that is not the model's own: its lens would show something else.
    monkeypatch.setattr(hidden_states, "NORMS", ("rotary_emb_of_nobody",))
    model = ServedModel(str(tmp_path / "llama"), ALL, device="cpu")
    assert "not its head over its last norm" in model.facts().reasons["logit_lens"]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "mistral", "gpt2", "qwen3", "deepseek_v3"])
def test_other_models_have_a_lens_or_say_why(kind, tmp_path):
    model = ServedModel(str(save_model(kind, tmp_path / kind)), ALL, device="cpu")
    assert "logit_lens" not in model.facts().reasons
