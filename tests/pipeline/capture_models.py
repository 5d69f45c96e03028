"""Tiny language models with random weights, and a word tokenizer, for the tests of capture."""

import copy
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from pipeline.engines.options import CaptureOptions  # noqa: E402
from pipeline.engines.transformers import TransformersEngine  # noqa: E402

# Tiny tensors: on a busy machine a second thread only waits.
torch.set_num_threads(1)
WORDS = ["<unk>", "<think>", "</think>", *(f"w{i}" for i in range(61))]
CONTEXT = 96
WINDOW = 8
NOON = datetime(2026, 1, 10, 12, tzinfo=UTC)
_SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Sharp enough that rows differ, and that a wrong scale or mask shows.
    "initializer_range": 0.4,
}


def _gpt2():
    return transformers.GPT2Config(
        vocab_size=len(WORDS),
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,
        scale_attn_by_inverse_layer_idx=True,
    )


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE),
    # Every layer slides.
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=WINDOW),
    # Every other layer slides, and logits are soft-capped, in eager attention.
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
    ),
    # Every other layer slides, under sdpa.
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHAPE,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    # Learned sinks, in eager attention.
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SHAPE, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": _gpt2,
    # Keys and values come from a low rank, and their heads differ in size.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_SHAPE, "num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    # Attention within chunks of 8 tokens in some layers.
    "llama4": lambda: transformers.Llama4TextConfig(
        **_SHAPE,
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=48,
    ),
    # Linear attention in every other layer.
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_SHAPE,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    # Experts in every layer; and in all but the second and third.
    "mixtral": lambda: transformers.MixtralConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        mlp_only_layers=[1, 2],
    ),
    # Refused: two attentions a layer, a mask with weights for each head, relative positions as
    # ALiBi, no softmax attention, a cache of its own, an encoder.
    "diffllama": lambda: transformers.DiffLlamaConfig(**_SHAPE),
    "doge": lambda: transformers.DogeConfig(**_SHAPE),
    "minimax": lambda: transformers.MiniMaxConfig(
        **_SHAPE, num_local_experts=2, num_experts_per_tok=1
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=len(WORDS), hidden_size=32, n_layer=2, n_head=4
    ),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=len(WORDS), d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT
    ),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    ),
}


def make_tokenizer():
    """One token a word; words that are not in `WORDS` are <unk>."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@cache
def _made(kind: str):
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM.from_config(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def make_model(kind: str, device: str = "cpu"):
    """A model of `CONFIGS` with seeded random weights, in float32 and evaluation mode."""
    return copy.deepcopy(_made(kind)).to(device)


def save_model(kind: str, folder: Path) -> Path:
    """The model and the tokenizer as a folder that `from_pretrained` reads."""
    make_model(kind).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def words(count: int, seed: int = 0) -> str:
    """A prompt of `count` tokens."""
    picks = torch.randint(3, len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picks.tolist())


def make_engine(model, **options):
    return TransformersEngine(
        model, make_tokenizer(), CaptureOptions(**options), name="tiny", revision="r"
    )


def run(engine, prompt):
    return engine.capture(prompt, request_id="a", session_id="s", clock=lambda: NOON)
