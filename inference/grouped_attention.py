"""Attention of a tree pass without copies of keys and values.

Where several query heads share one key/value head, `transformers` repeats all keys and values for every query head in
each layer; for a tree behind a long text that copy costs as much as the product. A single token it leaves to torch,
which on a CPU takes the heads one by one, three times as long. The query heads of a group can instead stand as further
rows below each other, all against the same keys: the same sums, no copy. It is registered as an attention
implementation of its own; whatever is not such a pass (a prompt, a position bias, one query head per key head) goes to
transformers' own function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_grouped"


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
    groups, (rows, heads, nodes, _) = getattr(module, "num_key_value_groups", 1), query.shape
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if groups == 1 or not shared_mask or dropout or kwargs.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return output, None
    assert attention_mask is not None
    below = query.reshape(rows, heads // groups, groups * nodes, query.shape[3])
    mask = attention_mask.expand(-1, groups, -1, -1).reshape(attention_mask.shape[0], 1, groups * nodes, -1)
    product = torch.nn.functional.scaled_dot_product_attention(below, key, value, attn_mask=mask, scale=scaling)
    return product.reshape(rows, heads, nodes, -1).transpose(1, 2), None


def group_attention(model: PreTrainedModel) -> None:
    """Let a model that uses ``sdpa`` use this instead."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
