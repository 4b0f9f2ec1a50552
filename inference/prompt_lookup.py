"""Drafting by copying (see `copies`).

Prompt lookup (Saxena 2023) costs no model call. It is strong where the output repeats its input, as in summaries,
retrieval and code edits, which is where heads that see one hidden state are weakest; `MedusaLookupDrafter` verifies
both proposals in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.inference.copies import CopyFinder
from medusa_train.inference.drafters import Context, Drafting, MedusaDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.tree import RankPath, Tree
from medusa_train.inference.verify import Draft, Generators


class PromptLookupDrafter:
    """Proposes the continuation of the latest earlier occurrence of the text's last n-gram, as a chain."""

    def __init__(self, num_tokens: int = 8, max_ngram: int = 3, min_ngram: int = 2) -> None:
        """Set what is looked up.

        Args:
            num_tokens: length of a proposed continuation.
            max_ngram: longest n-gram to look for; shorter ones follow.
            min_ngram: shortest one; with 1, common words trigger useless copies.
        """
        if num_tokens < 1 or not 1 <= min_ngram <= max_ngram:
            raise UserError(
                "prompt lookup needs num_tokens >= 1 and 1 <= min_ngram <= max_ngram, "
                f"got {num_tokens}, {min_ngram} and {max_ngram}"
            )
        self.num_tokens, self.max_ngram, self.min_ngram = num_tokens, max_ngram, min_ngram
        self.max_size = num_tokens + 1
        self._chain, self._root = Tree.chain(num_tokens), Tree.root_only()

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        find = self.finder(len(prompts))

        def draft(context: Context) -> Draft:
            copies = find(context.texts, context.numbers, context.active)
            trees = [self._root if copy is None else self._chain for copy in copies]
            if not any(copies):
                return Draft(trees, context.roots[:, None])
            return Draft(trees, torch.cat([context.roots[:, None], _filled(copies, context)], dim=1))

        return draft

    def finder(self, rows: int) -> CopyFinder:
        """A new request's memory of what followed which words."""
        return CopyFinder(rows, self.num_tokens, self.max_ngram, self.min_ngram)


def _filled(copies: Sequence[list[int] | None], context: Context) -> Tensor:
    """``(B, num_tokens)``; rows without a copy repeat their root, as padding."""
    width = next(len(copy) for copy in copies if copy)
    rows = [copy or [text[-1]] * width for copy, text in zip(copies, context.texts, strict=True)]
    return torch.tensor(rows, device=context.roots.device)


class MedusaLookupDrafter:
    """A Medusa tree and a copied phrase below one root, verified in one pass."""

    def __init__(self, medusa: MedusaDrafter, lookup: PromptLookupDrafter) -> None:
        self.medusa, self.lookup = medusa, lookup
        self._joined = {tree: _join(tree, lookup.num_tokens) for tree in medusa.trees.values()}
        self.max_size = max(joined.tree.size for joined in self._joined.values())

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        find = self.lookup.finder(len(prompts))
        draft_heads = self.medusa.start(prompts, max_new_tokens, generators)

        def draft(context: Context) -> Draft:
            heads, copies = draft_heads(context), find(context.texts, context.numbers, context.active)
            if not any(copies):
                return heads
            # A row without a copy keeps the heads' tree, behind which the rest of the pass is padding.
            phrases, own = _filled(copies, context).to(heads.tokens.device), heads.trees[0]
            both = self._joined[own]
            joined = torch.empty(len(copies), both.tree.size, dtype=torch.long, device=phrases.device)
            joined[:, both.heads_at], joined[:, both.chain_at] = heads.tokens, phrases
            apart = torch.cat([heads.tokens, phrases], dim=1)
            found = torch.tensor([copy is not None for copy in copies], device=phrases.device)
            trees = [own if copy is None else both.tree for copy in copies]
            return Draft(trees, torch.where(found[:, None], joined, apart))

        return draft


@dataclass(frozen=True)
class _Joined:
    """A tree of heads with a chain of copied tokens as one more branch, and which of its nodes are whose."""

    tree: Tree
    heads_at: Tensor
    chain_at: Tensor


def _join(heads: Tree, num_tokens: int) -> _Joined:
    spare = max(heads.ranks_needed(), default=0)  # a rank that the heads do not use
    chain: RankPath = (spare,) + (0,) * (num_tokens - 1)
    tree = Tree.from_paths([*heads.paths, chain])
    node = {path: i for i, path in enumerate(tree.paths)}
    return _Joined(
        tree,
        torch.tensor([node[path] for path in heads.paths]),
        torch.tensor([node[chain[:depth]] for depth in range(1, len(chain) + 1)]),
    )
