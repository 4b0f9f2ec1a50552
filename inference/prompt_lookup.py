"""Drafting by copying (see `copies`).

Prompt lookup (Saxena 2023) costs no model call. It is strong where the output repeats its input, as in summaries,
retrieval and code edits, which is where heads that see one hidden state are weakest; `MedusaLookupDrafter` verifies
both proposals in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from medusa_train.inference.copies import CopyFinder
from medusa_train.inference.drafters import Context, Drafting, MedusaDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.joined_tree import agreeing_node, join
from medusa_train.inference.tree import Tree
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


BESIDE_HEADS = 6  # tokens of a copy, counted from the root; on a CPU, what more of them gain, longer passes cost


class MedusaLookupDrafter:
    """A Medusa tree and a copied phrase, verified in one pass; see `joined_tree`."""

    def __init__(self, medusa: MedusaDrafter, lookup: PromptLookupDrafter | None = None) -> None:
        """Prepare the trees.

        Args:
            lookup: its ``num_tokens`` (6 by default) are how deep a copy goes at most; a pass has that many more nodes
                than the heads' tree has alone, less the depth of that tree.
        """
        self.medusa = medusa
        self.lookup = lookup = lookup or PromptLookupDrafter(BESIDE_HEADS)
        self._lengths = {tree: max(1, lookup.num_tokens - tree.depth) for tree in medusa.trees.values()}
        self.max_size = max(tree.size + length for tree, length in self._lengths.items())
        self._joined = lru_cache(maxsize=1024)(join)

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        reach = max(tree.depth + length for tree, length in self._lengths.items())
        find = CopyFinder(len(prompts), reach, self.lookup.max_ngram, self.lookup.min_ngram)
        draft_heads = self.medusa.start(prompts, max_new_tokens, generators)

        def draft(context: Context) -> Draft:
            heads, copies = draft_heads(context), find(context.texts, context.numbers, context.active)
            if not any(copies):
                return heads
            own, length = heads.trees[0], self._lengths[heads.trees[0]]
            trees, rows = list(heads.trees), []
            for row, (tokens, copy) in enumerate(zip(heads.tokens.tolist(), copies, strict=True)):
                if copy is None:  # keeps the heads' tree, behind which the rest of the pass is padding
                    rows.append(tokens + tokens[:1] * length)
                    continue
                node = agreeing_node(own, tokens, copy)
                known, joined = len(own.paths[node]), self._joined(own, node, length)
                tokens += copy[known : known + length]
                trees[row] = joined.tree
                rows.append([tokens[source] for source in joined.sources])
            return Draft(trees, torch.tensor(rows, device=heads.tokens.device))

        return draft
