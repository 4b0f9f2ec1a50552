"""Who may attend to whom in a verification pass, in the form that stock transformers models take.

transformers hands a 4-D mask through to attention as it is, and takes a dict of them, one per layer type, for models
that mix full and sliding-window layers. Positions are logical: node at depth d stands at ``length + d``, whatever
column of the cache it lies in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.tree import Tree

Masks = Tensor | dict[str, Tensor]


def pass_masks(backbone: Backbone, length: int, depths: Tensor, ancestor_mask: Tensor) -> Masks:
    """Masks of one pass of N nodes behind ``length`` committed positions.

    Args:
        depths: ``(N,)`` distance of each node from the root.
        ancestor_mask: ``(N, N)`` bool, `Tree.ancestor_mask`.

    Returns:
        ``(1, 1, N, length + N)``, bool for sdpa and additive for eager attention; a dict by layer type for models
        that mix them.
    """
    committed = torch.ones(len(depths), length, dtype=torch.bool, device=depths.device)
    full = torch.cat([committed, ancestor_mask], dim=1)
    config = backbone.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not window or (layer_types and "sliding_attention" not in layer_types):
        return _as_model_takes_it(backbone, full)
    key_positions = torch.cat([torch.arange(length, device=depths.device), length + depths])
    near = (length + depths)[:, None] - key_positions[None, :] < window
    sliding = _as_model_takes_it(backbone, full & near)
    if not layer_types:
        return sliding
    return {"full_attention": _as_model_takes_it(backbone, full), "sliding_attention": sliding}


def _as_model_takes_it(backbone: Backbone, allowed: Tensor) -> Tensor:
    if backbone.model.config._attn_implementation == "eager":
        blocked = torch.finfo(backbone.dtype).min
        return torch.zeros_like(allowed, dtype=backbone.dtype).masked_fill(~allowed, blocked)[None, None]
    return allowed[None, None]


def new_cache(backbone: Backbone, capacity: int) -> TreeCache:
    """An empty cache with one layer per decoder layer."""
    return TreeCache(int(backbone.model.config.get_text_config().num_hidden_layers), capacity)


def check_tree_attention(backbone: Backbone) -> None:
    """Refuse a model that cannot verify a tree exactly, before the first token.

    The kinds known to fail are refused by name. Every other model proves itself: two sibling branches in one pass
    must give the hidden states of each branch read alone.

    Raises:
        UserError: the model keeps other state than keys and values, or does not follow a 4-D mask.
    """
    name, config = type(backbone.model).__name__, backbone.model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other or getattr(backbone.model, "_is_stateful", False):
        kind = ", ".join(sorted(other)) or "state-space"
        raise UserError(f"{name} has {kind} layers, whose state cannot be rolled back to an accepted branch")
    if backbone.model.config._attn_implementation not in ("sdpa", "eager"):
        raise UserError(
            f"{name} was loaded with attn_implementation={backbone.model.config._attn_implementation!r}, which takes "
            "no tree mask; load it with attn_implementation='sdpa'"
        )
    tree = Tree.from_paths([(0, 0), (1, 0)])
    prompt = torch.tensor([[3, 1]], device=backbone.device) % backbone.vocab_size
    nodes = torch.tensor([[2, 4, 5, 6, 7]], device=backbone.device) % backbone.vocab_size
    with torch.inference_mode():
        cache = new_cache(backbone, 16)
        backbone.hidden_states(prompt, cache)
        cache.commit(range(2))
        depths, mask = tree.depths.to(backbone.device), tree.ancestor_mask.to(backbone.device)
        branched = backbone.hidden_states(
            nodes, cache, position_ids=(depths + 2)[None], attention_mask=pass_masks(backbone, 2, depths, mask)
        )[0]
        for leaf in (3, 4):
            path = mask[leaf].nonzero()[:, 0]
            alone = backbone.hidden_states(torch.cat([prompt, nodes[:, path]], dim=1))[0, -1]
            if not torch.allclose(
                branched[leaf].float(), alone.float(), rtol=0.1, atol=0.05 * float(alone.abs().max())
            ):
                raise UserError(f"{name} does not follow a tree attention mask, so its output would not be exact")
