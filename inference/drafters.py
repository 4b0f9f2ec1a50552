"""Drafters: what proposes the tokens of a tree.

A drafter sees each row's text, whose last token (the root) the backbone chose in the step before, and the hidden
state that the root was chosen from. It answers with a `Draft`: a tree per row, its tokens, and, if it drew them at
random, what from. Verification makes the output right whatever is proposed, so a drafter only decides the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from medusa_train.inference.candidates import Embed, TreeFiller
from medusa_train.inference.copies import HEADS_NGRAMS, CopyFinder, copied_ids
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import HeadsConfig
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
        numbers: which of the request's rows, as `Drafter.start` got them, each row is. Rows that have ended leave the
            batch, and another may take their place.
    """

    texts: Sequence[Sequence[int]]
    hidden: Tensor
    roots: Tensor
    active: Sequence[int]
    accepted: Sequence[int]
    numbers: Sequence[int]


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
    """Fills a tree with the best tokens of each head, of any kind.

    Attributes:
        trees: the least number of rows -> the tree that so many are decoded with.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        tree: Tree,
        embed: Embed | None = None,
        batch_trees: Mapping[int, Tree] | None = None,
        compiled: bool = False,
    ) -> None:
        """Prepare the trees; see `TreeFiller`.

        Args:
            batch_trees: number of rows -> the tree for so many and more, if not ``tree``.
        """
        self.trees = {1: tree} | dict(batch_trees or {})
        self.max_size = max(each.size for each in self.trees.values())
        self._config = heads.config
        self._fillers = {rows: TreeFiller(heads, each, embed, compiled) for rows, each in self.trees.items()}

    def tree_for(self, rows: int) -> Tree:
        """The tree of the largest known number of rows within these."""
        return self._filler(rows).tree

    def _filler(self, rows: int) -> TreeFiller:
        return self._fillers[max(known for known in self._fillers if known <= rows)]

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        find = find_copies(self._config, len(prompts))

        def draft(context: Context) -> Draft:
            rows = len(context.texts)  # fewer and fewer, as rows end
            filler = self._filler(rows)
            return Draft([filler.tree] * rows, filler.tokens(context.hidden, context.roots, find(context)))

        return draft


def find_copies(config: HeadsConfig, rows: int) -> Callable[[Context], Tensor | None]:
    """What heads that read copies are given in each step of a request: ``(B, K)`` ids, None where no row has any.

    Other heads are given None.
    """
    if not config.reads_copies:
        return lambda context: None
    find = CopyFinder(rows, config.num_heads, *HEADS_NGRAMS)

    def copies(context: Context) -> Tensor | None:
        found = find(context.texts, context.numbers, context.active)
        return copied_ids(found, config.num_heads, context.roots.device)

    return copies
