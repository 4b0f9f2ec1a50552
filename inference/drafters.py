"""Drafters: what proposes the tokens of a tree.

A drafter sees each row's text, whose last token (the root) the backbone chose in the step before, and the hidden
state that the root was chosen from. It answers with a `Draft`: a tree per row, its tokens, and, if it drew them at
random, what from. Verification makes the output right whatever is proposed, so a drafter only decides the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.tree import Tree
from medusa_train.inference.verify import Draft, Generators


@dataclass(frozen=True)
class Context:
    """What a drafter may look at before a pass.

    Attributes:
        texts: per row, prompt and emitted tokens; the last is the root, which the backbone has not read yet.
        hidden: ``(B, hidden)`` last hidden state of the position before the root.
        roots: ``(B,)`` the roots.
        active: rows that still generate; what is drafted for the others is never read.
        accepted: per row, drafted tokens that the last pass accepted (0 before the first).
    """

    texts: Sequence[Sequence[int]]
    hidden: Tensor
    roots: Tensor
    active: Sequence[int]
    accepted: Sequence[int]


Drafting = Callable[[Context], Draft]


class Drafter(Protocol):
    """Proposes a tree per row and step."""

    @property
    def max_size(self) -> int:
        """Most tokens of a pass, roots included; the cache keeps room for them."""
        ...

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        """Begin a request; what a drafter has to remember during it lives in the function that is returned.

        Args:
            prompts: ``(T_b,)`` token ids of each row.
            max_new_tokens: most tokens that a row may get.
            generators: one per row, for drafters that draw.
        """
        ...


class NoDrafter:
    """Proposes nothing: every pass holds the roots alone, which is plain decoding in the same loop."""

    max_size = 1
    _tree = Tree.root_only()

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        return lambda context: Draft([self._tree] * len(context.texts), context.roots[:, None])


class MedusaDrafter:
    """Fills one tree with the best tokens of each head."""

    def __init__(self, heads: MedusaHeads, tree: Tree) -> None:
        tree.check(heads.config.num_heads, heads.config.projection_size)
        self.heads, self.tree, self.max_size = heads, tree, tree.size
        self._ranks = tree.ranks_needed()
        # Node -> column in [root, head 1's best, head 2's best, ...] laid end to end.
        starts = [1]
        for ranks in self._ranks:
            starts.append(starts[-1] + ranks)
        columns = [starts[len(path) - 1] + path[-1] if path else 0 for path in tree.paths]
        self._columns = torch.tensor(columns, device=heads.draft_token_ids.device)

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        return self.draft

    def draft(self, context: Context) -> Draft:
        candidates = [context.roots[:, None].to(self._columns.device)]
        for head, ranks in enumerate(self._ranks):
            best = self.heads(context.hidden, head).topk(ranks).indices
            candidates.append(self.heads.draft_token_ids[best])
        return Draft([self.tree] * len(context.texts), torch.cat(candidates, dim=1)[:, self._columns])
