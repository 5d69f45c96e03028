"""SGLang's kernels of speculative decoding for CPUs, in torch, as far as drafts of one chain need
them, and attention of `torch_native` over drafts, which SGLang does not have.

What drafts come to may differ from what they are on a GPU; which are accepted may not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def assign_draft_cache_locs_contiguous_cpu(
    rows: Any, table: Any, lengths: Any, found: Any, width: int, topk: int, columns: int
) -> None:
    """The KV slots of `topk * columns` tokens behind those that each request has."""
    count = topk * columns
    for number, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        found[number * count : (number + 1) * count] = table[row, length : length + count]


def assign_extend_cache_locs_cpu(
    rows: Any, table: Any, starts: Any, ends: Any, found: Any, width: int
) -> None:
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        found[at : at + end - start] = table[row, start:end]
        at += end - start


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, ends: Any, slots: Any, width: int
) -> None:
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start]
        at += end - start


def copy_all_layer_kv_cache_cpu(*_: Any) -> None:
    """Of a tree's accepted path. That of a chain is where it belongs."""


def fill_bonus_tokens_cpu(tokens: Any, lengths: Any, found: Any, width: int) -> None:
    """The last accepted token of each request."""
    for number, length in enumerate(lengths.tolist()):
        found[number] = tokens.flatten()[number * width + length - 1]


def fill_accept_out_cache_loc_cpu(accepted: Any, slots: Any, found: Any) -> None:
    kept = accepted[accepted > -1]
    found[: len(kept)] = slots[kept]


def build_tree_kernel_efficient_cpu(
    parents: Any, chosen: Any, lengths: Any, mask: Any, positions: Any, index: Any,
    next_token: Any, next_sibling: Any, topk: int, depth: int, tokens: int, mode: int,
) -> None:  # fmt: skip
    """A chain of the last token of each request and its drafts."""
    import torch

    assert topk == 1, "a tree"
    at = torch.arange(tokens)
    positions.copy_((lengths[:, None] + at).flatten())
    index.copy_(torch.arange(len(lengths) * tokens).view(index.shape))
    next_token.copy_(torch.where(at + 1 < tokens, at + 1, -1).expand(next_token.shape))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, retrive_index: Any,
    retrive_next_token: Any, retrive_next_sibling: Any, target_predict: Any,
) -> None:  # fmt: skip
    """Accepts drafts as long as each is the model's likeliest token."""
    for row, likeliest in enumerate(target_predict.tolist()):
        drafts, index = candidates[row].tolist(), retrive_index[row].tolist()
        accept_index[row, 0], count = index[0], 0
        while count + 1 < len(drafts) and drafts[count + 1] == likeliest[count]:
            predicts[index[count]] = likeliest[count]
            count += 1
            accept_index[row, count] = index[count]
        accept_token_num[row] = count
        predicts[index[count]] = likeliest[count]


KERNELS = {
    each.__name__: each
    for each in (
        assign_draft_cache_locs_contiguous_cpu, assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        copy_all_layer_kv_cache_cpu, fill_bonus_tokens_cpu, fill_accept_out_cache_loc_cpu,
        build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu,
    )
}  # fmt: skip


class _EachStep:
    """`torch_native` for each step of a draft model."""

    def __init__(self, backend: type, runner: Any, steps: int) -> None:
        self.attn_backends = [backend(runner) for _ in range(steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def draft_with_torch_native(module: ModuleType) -> None:
    """For sglang.srt.speculative.draft_utils."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def decode(factory: Any) -> Any:
        steps = factory.speculative_num_steps
        return _EachStep(TorchNativeAttnBackend, factory.draft_model_runner, steps)

    def extend(factory: Any) -> Any:
        return TorchNativeAttnBackend(factory.draft_model_runner)

    module.DraftBackendFactory.create_decode_backend = decode
    module.DraftBackendFactory.create_draft_extend_backend = extend
