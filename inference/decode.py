"""The decode loop: draft, one backbone pass, verify, commit.

One loop serves every drafter and verifier; plain decoding is the same loop with a drafter that proposes nothing, so
that the baseline of a speedup runs the same code. The state between steps is small: the committed cache, the root
token (already emitted, not yet in the cache) and the hidden state that the root was chosen from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medusa_train.inference.attention import new_cache, pass_masks
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.drafters import Drafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.kv_cache import TreeCache
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.tree import Tree
from medusa_train.inference.verify import Verdict

Verify = Callable[[Tensor, Sequence[int], Tree], Verdict]
FinishReason = Literal["stop", "length", "context", "steps"]


@dataclass(frozen=True)
class Block:
    """Tokens emitted together: prefill's one, or those of a step.

    Attributes:
        tokens: token ids, cut at an end token or at the budget.
        drafted: how many of them a drafter proposed (the rest the backbone chose itself).
        finish_reason: set on the last block; ``stop`` an end token, ``length`` the budget, ``context`` the model's
            longest sequence, ``steps`` the bound on passes.
    """

    tokens: tuple[int, ...]
    drafted: int
    finish_reason: FinishReason | None


@torch.inference_mode()  # torch wraps a generator step by step, so the mode does not leak to the caller
def decode(
    backbone: Backbone,
    drafter: Drafter,
    verify: Verify,
    prompt: Tensor,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    stats: DecodeStats,
    max_steps: int | None = None,
) -> Iterator[Block]:
    """Generate after one prompt, a block at a time.

    Args:
        prompt: ``(T,)`` token ids, T >= 1.
        stats: filled as blocks are emitted.
        max_steps: bound on backbone passes after prefill.

    Raises:
        UserError: the prompt is empty or already fills the model's context.
    """
    prompt_length = len(prompt)
    limit = backbone.max_positions
    if prompt_length == 0:
        raise UserError("the prompt holds no token; give at least one")
    if limit is not None and prompt_length >= limit:
        raise UserError(f"the prompt has {prompt_length} tokens, the backbone reads at most {limit - 1}; shorten it")
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - prompt_length)
    if max_new_tokens < 1:
        return
    tree = drafter.tree
    depths, mask = tree.depths.to(backbone.device), tree.ancestor_mask.to(backbone.device)
    cache = new_cache(backbone, prompt_length + room + tree.size)

    def block(tokens: list[int], drafted: int, steps: int) -> Block:
        """Cut tokens at the first end token or at the budget; find whether they are the last after ``steps`` passes."""
        nonlocal room
        end = next((i for i, token in enumerate(tokens) if token in eos_token_ids), None)
        kept = min(room, len(tokens) if end is None else end + 1)
        room -= kept
        reason: FinishReason | None = None
        if end is not None and end < kept:
            reason = "stop"
        elif room == 0:
            reason = "length" if limit is None or prompt_length + max_new_tokens <= limit else "context"
        elif max_steps is not None and steps >= max_steps:
            reason = "steps"
        return Block(tuple(tokens[:kept]), min(drafted, kept), reason)

    clock = time.perf_counter()
    hidden = prefill(backbone, prompt, cache)
    root = verify(backbone.logits(hidden)[None], [-1], Tree.root_only()).next_token
    first = block([root], drafted=0, steps=0)
    stats.prefill_tokens += 1
    stats.prefill_seconds += time.perf_counter() - clock
    yield first
    finish_reason = first.finish_reason
    while finish_reason is None:
        marks = [time.perf_counter()]
        tokens = drafter.draft(hidden, torch.tensor(root, device=backbone.device))
        marks.append(time.perf_counter())
        node_hidden = tree_pass(backbone, tokens, cache, depths, mask)
        logits = backbone.logits(node_hidden)
        marks.append(time.perf_counter())
        drafted = tokens.tolist()
        verdict = verify(logits, drafted, tree)
        marks.append(time.perf_counter())
        cache.commit(verdict.path)
        hidden, root = node_hidden[verdict.path[-1]], verdict.next_token
        step = block([drafted[node] for node in verdict.path[1:]] + [root], len(verdict.path) - 1, stats.steps + 1)
        marks.append(time.perf_counter())
        stats.emitted.append(len(step.tokens))
        for name, start, end in zip(("draft", "forward", "verify", "commit"), marks, marks[1:], strict=False):
            setattr(stats, f"{name}_seconds", getattr(stats, f"{name}_seconds") + end - start)
        yield step
        finish_reason = step.finish_reason


def prefill(backbone: Backbone, prompt: Tensor, cache: TreeCache) -> Tensor:
    """Read ``(T,)`` tokens into an empty cache; the last position's hidden state, ``(hidden,)``."""
    hidden = backbone.hidden_states(prompt[None], cache)[0, -1]
    cache.commit(range(len(prompt)))
    return hidden


def tree_pass(backbone: Backbone, tokens: Tensor, cache: TreeCache, depths: Tensor, ancestor_mask: Tensor) -> Tensor:
    """One backbone pass over a tree: ``(N,)`` tokens -> ``(N, hidden)`` hidden states of the nodes."""
    positions = cache.length + depths
    if backbone.max_positions is not None:
        # Nodes past the last position lie beyond the budget and are never emitted, but they must be computable.
        positions = positions.clamp(max=backbone.max_positions - 1)
    masks = pass_masks(backbone, cache.length, depths, ancestor_mask)
    return backbone.hidden_states(tokens[None], cache, position_ids=positions[None], attention_mask=masks)[0]
