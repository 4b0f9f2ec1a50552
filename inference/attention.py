"""Who may attend to whom in a verification pass, in the form that stock transformers models take.

transformers hands a 4-D mask through to attention as it is, and takes a dict of them, one per layer type, for models
that mix full and sliding-window layers. Positions are logical: a node at depth d stands at ``length + d`` of its row,
whatever column of the cache it lies in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError
from medusa_train.inference.grouped_attention import NAME as GROUPED
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.tree import Tree

WORTH_A_PASS = 128  # tokens; reading that many fewer pays for reading all weights once more

Masks = Tensor | dict[str, Tensor]


def new_cache(backbone: Backbone, scratch: int, capacity: int, bucket: int | None = None) -> TreeCache:
    """An empty cache with one layer per decoder layer; see `TreeCache`."""
    layers = int(backbone.model.config.get_text_config().num_hidden_layers)
    devices = len(set((getattr(backbone.model, "hf_device_map", None) or {"": 0}).values()))
    return TreeCache(layers, scratch, capacity, bucket, devices)


def read_prompts(backbone: Backbone, prompts: Sequence[Tensor], cache: TreeCache) -> Tensor:
    """Read each row's ``(T_b,)`` tokens into an empty cache; the last positions' hidden states, ``(B, hidden)``.

    Shorter prompts are padded on the right: causal attention never looks there, so no mask is needed. What all rows
    begin with (a template's opening, a system prompt) is read once where that is worth a pass of its own.
    """
    lengths, rows = [len(prompt) for prompt in prompts], len(prompts)
    cache.reserve(max(lengths))
    prefix = _common_length(prompts)
    if rows > 1 and prefix == max(lengths):
        hidden = backbone.hidden_states(prompts[0][None].to(backbone.device), cache)
        cache.share_prefix(prefix, rows)
        cache.finish_prompt(lengths)
        return hidden[0, -1:].expand(rows, -1)
    prefix = min(prefix, min(lengths) - 1)  # every row's last position is read with the rest
    if (rows - 1) * prefix < WORTH_A_PASS:
        prefix = 0
    else:
        backbone.hidden_states(prompts[0][None, :prefix].to(backbone.device), cache)
        cache.share_prefix(prefix, rows)
    rest = torch.nn.utils.rnn.pad_sequence([prompt[prefix:] for prompt in prompts], batch_first=True)
    hidden = backbone.hidden_states(rest.to(backbone.device), cache)
    cache.finish_prompt(lengths)
    return hidden[torch.arange(rows), torch.tensor(lengths) - 1 - prefix]


def _common_length(prompts: Sequence[Tensor]) -> int:
    """How many tokens all prompts begin with."""
    shortest = min(map(len, prompts))
    alike = torch.stack([prompt[:shortest] == prompts[0][:shortest] for prompt in prompts]).all(dim=0)
    return int(alike.long().cumprod(dim=0).sum())


def pass_inputs(backbone: Backbone, trees: Sequence[Tree], cache: TreeCache) -> tuple[Tensor, Masks]:
    """What a pass over a tree per row needs beside its tokens: positions ``(B, N)`` and masks (see `pass_masks`).

    Args:
        trees: a tree for each row; N is the size of the largest, and the nodes that others lack are padding.
    """
    depths, ancestors = batch_trees(trees, backbone.device)
    lengths = torch.tensor(cache.lengths, device=backbone.device)[:, None]
    positions = lengths + depths
    masks = pass_masks(backbone, positions, lengths, ancestors, cache.visible)
    if backbone.max_positions is not None:
        # Nodes past the last position lie beyond the budget and are never emitted, but they must be computable.
        positions = positions.clamp(max=backbone.max_positions - 1)
    return positions, masks


def batch_trees(trees: Sequence[Tree], device: torch.device) -> tuple[Tensor, Tensor]:
    """Depths ``(B or 1, N)`` and ancestor masks ``(B or 1, N, N)`` of a tree per row (one if they are the same)."""
    distinct = trees[:1] if all(tree is trees[0] for tree in trees) else trees
    nodes = max(tree.size for tree in distinct)
    depths, masks = zip(*(_tree_tensors(tree, nodes, device) for tree in distinct), strict=True)
    return torch.stack(depths), torch.stack(masks)


@lru_cache(maxsize=256)
def _tree_tensors(tree: Tree, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # they outlive the call that made them
        padding = nodes - tree.size  # such a node stands at the root's place and sees only itself
        depths = torch.nn.functional.pad(tree.depths, (0, padding))
        mask = torch.block_diag(tree.ancestor_mask, torch.eye(padding, dtype=torch.bool))
        return depths.to(device), mask.to(device)


def pass_masks(backbone: Backbone, positions: Tensor, lengths: Tensor, ancestors: Tensor, visible: int) -> Masks:
    """Masks of one pass of N nodes over the columns of `TreeCache`: N nodes, then ``visible`` committed ones.

    Args:
        positions: ``(B, N)`` logical position of each node.
        lengths: ``(B, 1)`` committed positions of each row.
        ancestors: ``(B or 1, N, N)`` bool, `Tree.ancestor_mask`.

    Returns:
        ``(B, 1, N, N + visible)``, bool for transformers' sdpa and additive for others, so that not every layer makes
        it anew; a dict by layer type for models that mix them.
    """
    rows, nodes = positions.shape
    columns = torch.arange(visible, device=positions.device)
    committed = (columns < lengths)[:, None].expand(rows, nodes, visible)
    full = torch.cat([ancestors.expand(rows, nodes, nodes), committed], dim=2)
    config = backbone.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not window or (layer_types and "sliding_attention" not in layer_types):
        return _as_model_takes_it(backbone, full)
    key_positions = torch.cat([positions, columns.expand(rows, visible)], dim=1)
    near = positions[:, :, None] - key_positions[:, None, :] < window
    sliding = _as_model_takes_it(backbone, full & near)
    if not layer_types:
        return sliding
    return {"full_attention": _as_model_takes_it(backbone, full), "sliding_attention": sliding}


def _as_model_takes_it(backbone: Backbone, allowed: Tensor) -> Tensor:
    if backbone.model.config._attn_implementation in ("eager", GROUPED):
        blocked = torch.finfo(backbone.dtype).min
        return torch.zeros_like(allowed, dtype=backbone.dtype).masked_fill(~allowed, blocked)[:, None]
    return allowed[:, None]


def check_layer_kinds(model: PreTrainedModel) -> None:
    """Refuse by name a model whose state is more than keys and values; weights are not looked at.

    Raises:
        UserError: it has such layers.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other or getattr(model, "_is_stateful", False):
        kind = ", ".join(sorted(other)) or "state-space"
        raise UserError(f"{name} has {kind} layers, whose state cannot be rolled back to an accepted branch")


def check_tree_attention(backbone: Backbone) -> None:
    """Refuse a model that cannot verify a tree exactly, before the first token.

    The kinds known to fail are refused by name. Every other model proves itself: two sibling branches in one pass
    must give the hidden states of each branch read alone.

    Raises:
        UserError: the model keeps other state than keys and values, or does not follow a 4-D mask.
    """
    check_layer_kinds(backbone.model)
    name = type(backbone.model).__name__
    if backbone.model.config._attn_implementation not in ("sdpa", "eager", GROUPED):
        raise UserError(
            f"{name} was loaded with attn_implementation={backbone.model.config._attn_implementation!r}, which takes "
            "no tree mask; load it with attn_implementation='sdpa'"
        )
    try:
        follows = _follows_a_tree(backbone)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{name} does not take a tree attention mask ({reason})") from error
    if not follows:
        raise UserError(f"{name} does not follow a tree attention mask, so its output would not be exact")


def _follows_a_tree(backbone: Backbone) -> bool:
    """Whether two branches in one pass give the hidden states of each branch read alone."""
    tree = Tree.from_paths([(0, 0), (1, 0)])
    prompt, nodes = backbone.ordinary_ids(2 + tree.size).split([2, tree.size])
    with torch.inference_mode():
        cache = new_cache(backbone, tree.size, 16)
        read_prompts(backbone, [prompt], cache)
        positions, masks = pass_inputs(backbone, [tree], cache)
        branched = backbone.hidden_states(nodes[None], cache, position_ids=positions, attention_mask=masks)[0]
        for leaf in (3, 4):
            path = tree.ancestor_mask[leaf].nonzero()[:, 0].to(nodes.device)
            alone = backbone.hidden_states(torch.cat([prompt, nodes[path]])[None])[0, -1]
            if not torch.allclose(
                branched[leaf].float(), alone.float(), rtol=0.1, atol=0.05 * float(alone.abs().max())
            ):
                return False
    return True
