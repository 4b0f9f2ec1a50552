"""From a hidden state and a root to the tokens of a tree: each node holds one of its head's best.

A medusa head looks at the hidden state alone, so it has one list of candidates for all nodes of its depth. A hydra head
or a recurrent drafter also reads the tokens that lead to the node, so it has a list for every parent, and the tree is
filled level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.tree import Tree

Embed = Callable[[Tensor], Tensor]  # (...) token ids -> (..., hidden), see `Backbone.embed`


@dataclass(frozen=True)
class Level:
    """The nodes of one depth.

    Attributes:
        ranks: how many of the head's best tokens are used.
        parents: ``(n,)`` each node's parent in the tree.
        lines: ``(P, depth)`` for every list of candidates, the nodes from the root to the parent that it continues.
        lists: ``(n,)`` the list that each node takes its token from.
        picks: ``(n,)`` its place in that list.
    """

    ranks: int
    parents: Tensor
    lines: Tensor
    lists: Tensor
    picks: Tensor


class TreeFiller:
    """Fills one tree."""

    def __init__(self, heads: MedusaHeads, tree: Tree, embed: Embed | None = None) -> None:
        """Prepare the tree's levels.

        Args:
            heads: on the device where they run.
            embed: the backbone's embedding; heads that read tokens need it.

        Raises:
            UserError: the tree does not fit the heads (`Tree.check`).
        """
        tree.check(heads.config.num_heads, heads.config.projection_size)
        self.heads, self.tree, self.embed = heads, tree, embed
        device = heads.draft_token_ids.device
        self._levels = [_level(tree, depth, heads.config.reads_tokens, device) for depth in range(1, tree.depth + 1)]

    def tokens(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Hidden ``(B, hidden)``, roots ``(B,)`` -> ``(B, N)`` token ids of the nodes, the root's first."""
        tokens = roots[:, None].to(hidden.device)
        for head, level in enumerate(self._levels):
            best = self._logits(hidden, tokens, head, level).topk(level.ranks, dim=-1).indices
            tokens = torch.cat([tokens, self.heads.draft_token_ids[best[:, level.lists, level.picks]]], dim=1)
        return tokens

    def tokens_and_chances(self, hidden: Tensor, roots: Tensor, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Also ``(B, N)`` the probability that each node is accepted: that of its path under the heads.

        Args:
            temperatures: per head, divides its logits first.
        """
        tokens = roots[:, None].to(hidden.device)
        scores = torch.zeros_like(tokens, dtype=torch.float32)
        for head, level in enumerate(self._levels):
            logits = self._logits(hidden, tokens, head, level).float() / temperatures[head]
            best = logits.log_softmax(dim=-1).topk(level.ranks, dim=-1)
            tokens = torch.cat([tokens, self.heads.draft_token_ids[best.indices[:, level.lists, level.picks]]], dim=1)
            own = best.values[:, level.lists, level.picks]
            scores = torch.cat([scores, scores[:, level.parents] + own], dim=1)
        return tokens, scores.exp()

    def _logits(self, hidden: Tensor, tokens: Tensor, head: int, level: Level) -> Tensor:
        """``(B, P, V')`` one row of logits per list of candidates."""
        if not self.heads.config.reads_tokens:
            shared: Tensor = self.heads(hidden, head)
            return shared[:, None]
        assert self.embed is not None, f"{self.heads.config.kind} heads read the backbone's embeddings"
        before = self.embed(tokens[:, level.lines]).to(hidden)
        logits: Tensor = self.heads(hidden[:, None].expand(-1, len(level.lines), -1), head, before)
        return logits


def _level(tree: Tree, depth: int, list_per_parent: bool, device: torch.device) -> Level:
    nodes = [node for node, path in enumerate(tree.paths) if len(path) == depth]
    parents = [tree.parents[node] for node in nodes]
    listed = sorted(set(parents)) if list_per_parent else parents[:1]
    place = {parent: i for i, parent in enumerate(listed)}
    picks = [tree.paths[node][-1] for node in nodes]
    return Level(
        ranks=1 + max(picks),
        parents=torch.tensor(parents, device=device),
        lines=torch.tensor([tree.ancestors[parent] for parent in listed], device=device),
        lists=torch.tensor([place.get(parent, 0) for parent in parents], device=device),
        picks=torch.tensor(picks, device=device),
    )
