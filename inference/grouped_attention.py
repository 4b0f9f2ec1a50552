"""Attention of a tree pass without copies of keys and values.

Where several query heads share one key/value head, `transformers` repeats all keys and values for every query head in
each layer; for a tree behind a long text that copy costs as much as the product. A single token it leaves to torch,
which on a CPU takes the heads one by one, three times as long. The query heads of a group can instead stand as further
rows below each other, all against the same keys: the same sums, no copy. Rows of a batch whose texts differ in length
are taken apart where that pays (`row_blocks`). It is registered as an attention implementation of its own; whatever is
not such a pass (a prompt, a position bias, one query head per key head) goes to transformers' own function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa_train.inference.row_blocks import Blocks

NAME = "sdpa_grouped"
_blocks = Blocks()


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention in the form that transformers calls.

    Args:
        query: ``(B, heads, N, D)``.
        key, value: ``(B, kv_heads, L, D)``.
        attention_mask: ``(B, 1, N, L)`` bool or additive; None for a causal prompt.

    Returns:
        ``(B, N, heads, D)``.
    """
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if not shared_mask or dropout or kwargs.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return output, None
    assert attention_mask is not None
    groups = getattr(module, "num_key_value_groups", 1)
    blocks = _blocks(attention_mask, groups)
    if len(blocks) == 1:
        return _attend(module, query, key, value, blocks[0].mask, groups, scaling, kwargs), None
    parts = []
    for block in blocks:
        keys, values = (each[block.rows, :, : block.columns] for each in (key, value))
        parts.append(_attend(module, query[block.rows], keys, values, block.mask, groups, scaling, kwargs))
    return torch.cat(parts), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    groups: int,
    scaling: float | None,
    keywords: dict[str, Any],
) -> Tensor:
    if groups == 1:
        output: Tensor = sdpa_attention_forward(module, query, key, value, mask, 0.0, scaling, **keywords)[0]
        return output
    rows, heads, nodes, width = query.shape
    below = query.reshape(rows, heads // groups, groups * nodes, width)
    product = torch.nn.functional.scaled_dot_product_attention(below, key, value, attn_mask=mask, scale=scaling)
    return product.reshape(rows, heads, nodes, -1).transpose(1, 2)


def group_attention(model: PreTrainedModel) -> None:
    """Let a model that uses ``sdpa`` use this instead."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
