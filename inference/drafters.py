"""Drafters: what proposes the tokens of a tree.

A drafter sees the hidden state that the root token was chosen from and the root itself, and fills the nodes of its
tree. ``chosen`` says how: True if its tokens are picked deterministically (then exact verification needs only the
target's own draws), False if they are sampled (then a verifier also needs their probabilities).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.tree import Tree


class Drafter(Protocol):
    """Proposes the tokens of one tree per step."""

    chosen: bool
    tree: Tree

    def draft(self, hidden: Tensor, root: Tensor) -> Tensor:
        """Tokens of every node.

        Args:
            hidden: ``(hidden,)`` last hidden state of the position before the root.
            root: ``()`` the token that the backbone chose there.

        Returns:
            ``(N,)`` token ids, the root's first.
        """
        ...


class MedusaDrafter:
    """Fills a tree with the best tokens of each head."""

    chosen = True

    def __init__(self, heads: MedusaHeads, tree: Tree) -> None:
        tree.check(heads.config.num_heads, heads.config.projection_size)
        self.heads, self.tree = heads, tree
        self._ranks = tree.ranks_needed()
        # Node -> column in [root, head 1's best, head 2's best, ...] laid end to end.
        starts = [1]
        for ranks in self._ranks:
            starts.append(starts[-1] + ranks)
        columns = [starts[len(path) - 1] + path[-1] if path else 0 for path in tree.paths]
        self._columns = torch.tensor(columns, device=heads.draft_token_ids.device)

    def draft(self, hidden: Tensor, root: Tensor) -> Tensor:
        candidates = [root.view(1)]
        for head, ranks in enumerate(self._ranks):
            best = self.heads(hidden[None], head)[0].topk(ranks).indices
            candidates.append(self.heads.draft_token_ids[best])
        return torch.cat(candidates)[self._columns]


class NoDrafter:
    """Proposes nothing: every pass holds the root alone, which is plain decoding in the same loop."""

    chosen = True
    tree = Tree.root_only()

    def draft(self, hidden: Tensor, root: Tensor) -> Tensor:
        return root.view(1)
