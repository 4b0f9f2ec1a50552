"""Trees that follow the heads' confidence from step to step.

A static tree is right on average; some steps deserve a deep chain and some nothing. `AdaptiveDrafter` ranks the nodes
of a larger tree by how likely each is accepted (the product of the heads' calibrated probabilities down its path), and
verifies as many of the best as give the most expected tokens per second on this device. A path is never likelier than
its prefix, so the best n nodes are always a tree. The larger tree is as large as a pass may be for the rows at hand,
since every node of it has to be drafted.

A copy (`copies`) costs nothing to draft, so it is always among what is chosen from: its tokens go on from the node of
the heads' tree that agrees with it, each as much less likely than the one before as copies came true in this text.

Confidence alone is not trusted: the expected gain is scaled by what past steps really accepted. When no size beats
plain decoding, steps draft nothing for a while, then a small tree probes whether drafting pays again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from medusa_train.inference.candidates import Embed, ShapeLogits, TreeFiller
from medusa_train.inference.copies import HEADS_NGRAMS, CopyFinder, CopyRecord, copied_ids
from medusa_train.inference.drafters import Context, Drafting
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.joined_tree import JoinedTree, agreeing_node, join
from medusa_train.inference.pass_size import SizeChooser, StepSeconds, TextSeconds
from medusa_train.inference.tree import RankPath, Tree
from medusa_train.inference.verify import Draft, Generators

LONGEST_COPY = 8  # tokens, counted from the root


@dataclass(frozen=True)
class Calibration:
    """What adaptive drafting needs to know; measured by ``medusa-train tree``.

    Attributes:
        nodes: to choose from, the most often accepted first, each after its parent; the root is not named.
        temperatures: per head, divides its logits so that its probabilities are those of being right.
        step_seconds: see `StepSeconds`.
        text_seconds: see `TextSeconds`.
    """

    nodes: tuple[RankPath, ...]
    temperatures: tuple[float, ...]
    step_seconds: StepSeconds
    text_seconds: TextSeconds

    def __post_init__(self) -> None:
        known: set[RankPath] = {()}
        for path in self.nodes:
            if path in known or path[:-1] not in known:
                raise UserError("tree: the nodes to choose from must be named once each, after their parents")
            known.add(path)
        if len(self.temperatures) < self.superset.depth or not all(t > 0 for t in self.temperatures):
            raise UserError(f"tree: {self.superset.depth} positive temperatures are needed, got {self.temperatures}")
        if 1 not in self.step_seconds or not all(rows > 0 for rows in self.step_seconds):
            raise UserError("tree: step_seconds must hold the times of batches, that of 1 row among them")
        curves = list(self.step_seconds.values())
        if any(curve.keys() != curves[0].keys() for curve in curves):
            raise UserError("tree: step_seconds must hold the same sizes for every batch")
        if 1 not in curves[0] or not all(t > 0 for curve in curves for t in curve.values()):
            raise UserError("tree: step_seconds must hold positive times, that of 1 token among them")
        if max(curves[0]) > self.superset.size:
            raise UserError(f"tree: step_seconds has size {max(curves[0])}, the tree {self.superset.size}")
        if 1 not in self.text_seconds or not all(0 <= t < inf for t in self.text_seconds.values()):
            raise UserError("tree: text_seconds must hold times from 0 up, that of 1 token among them")

    @cached_property
    def superset(self) -> Tree:
        """All nodes."""
        return self.best(1 + len(self.nodes))

    def best(self, size: int) -> Tree:
        """The tree of the most often accepted nodes, of ``size`` tokens per pass."""
        return Tree.from_paths(self.nodes[: size - 1])

    @property
    def sizes(self) -> list[int]:
        """Tokens per row and pass whose steps were timed."""
        return sorted(self.step_seconds[1])

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [list(path) for path in self.nodes],
            "temperatures": list(self.temperatures),
            "step_seconds": {
                str(rows): {str(size): seconds for size, seconds in curve.items()}
                for rows, curve in self.step_seconds.items()
            },
            "text_seconds": {str(size): seconds for size, seconds in self.text_seconds.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Calibration:
        # Checked as a tree first: a file may ask for anything.
        tree = Tree.from_paths(content["nodes"])
        if tree.size != 1 + len(content["nodes"]):
            raise UserError("tree: the nodes to choose from must be named once each, with their parents")
        return cls(
            tuple(map(tuple, content["nodes"])),
            tuple(map(float, content["temperatures"])),
            {
                int(rows): {int(size): float(seconds) for size, seconds in curve.items()}
                for rows, curve in content["step_seconds"].items()
            },
            {int(size): float(seconds) for size, seconds in content["text_seconds"].items()},
        )


class AdaptiveDrafter:
    """Chooses a tree's nodes and its size anew for every step."""

    def __init__(
        self,
        heads: MedusaHeads,
        calibration: Calibration,
        embed: Embed | None = None,
        size: int | None = None,
        shape_logits: ShapeLogits = lambda logits: logits,
        timed_sizes: bool = False,
    ) -> None:
        """Prepare the superset.

        Args:
            heads: as `MedusaModel` keeps them, on the backbone's device.
            calibration: see `Calibration`.
            embed: the backbone's embedding, for heads that read it.
            size: always this many tokens per pass (a dynamic tree of static shape); None adapts the size as well.
            shape_logits: what the backbone does to raw projections (`Backbone.shape_logits`).
            timed_sizes: choose among the sizes that were timed; compiled steps have a graph for every size.

        Raises:
            UserError: the superset does not fit the heads, or the size is not one of 2..superset.size.
        """
        largest = calibration.superset.size
        if size is not None and not 2 <= size <= largest:
            raise UserError(f"a dynamic tree needs a size from 2 to {largest}, got {size}")
        calibration.superset.check(heads.config.num_heads, heads.config.projection_size)
        self._config, self._shape_logits = heads.config, shape_logits
        self.calibration, self.size = calibration, size
        every = calibration.sizes if timed_sizes else range(1, 1 + max(calibration.sizes))
        self.sizes = [size] if size else every
        self.max_size = max(self.sizes)
        self._filler = lru_cache(lambda nodes: TreeFiller(heads, calibration.best(nodes), embed))

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        chooser = SizeChooser(self.calibration.step_seconds, self.calibration.text_seconds, self.sizes)
        count = max(LONGEST_COPY, self._config.num_heads)
        plain, find = Tree.root_only(), CopyFinder(len(prompts), count, *HEADS_NGRAMS)
        records = [CopyRecord() for _ in prompts]

        def draft(context: Context) -> Draft:
            rows = len(context.texts)
            chooser.observe([context.accepted[row] for row in context.active])
            if chooser.rests():
                return Draft([plain] * rows, context.roots[:, None])
            lengths = [len(text) for text in context.texts]
            copies = find(context.texts, context.numbers, context.active)
            filler = self._filler(self.calibration.superset.size if self.size else chooser.largest(lengths))
            tokens, chances = filler.tokens_and_chances(
                context.hidden,
                context.roots,
                self.calibration.temperatures,
                copied_ids(copies, count, context.roots.device) if self._config.reads_copies else None,
                self._shape_logits,
            )
            rates = [
                records[number].rate(text, copy)
                for number, text, copy in zip(context.numbers, context.texts, copies, strict=True)
            ]
            proposed = zip(tokens.tolist(), chances.tolist(), copies, rates, strict=True)
            choices = [Choice.of(filler.tree, *row) for row in proposed]
            size = chooser.choose([choices[row].chances for row in context.active], lengths)
            picked = [choice.best(size) for choice in choices]
            nodes = max(len(tokens) for _, tokens in picked)
            padded = [tokens + tokens[:1] * (nodes - len(tokens)) for _, tokens in picked]
            return Draft([tree for tree, _ in picked], torch.tensor(padded, device=context.roots.device))

        return draft


@dataclass(frozen=True)
class Choice:
    """What a row may have verified.

    Attributes:
        joined: all nodes.
        tokens: of its sources, the root's first.
        order: the sources below the root, the likeliest first.
        chances: theirs, to be accepted.
    """

    joined: JoinedTree
    tokens: Sequence[int]
    order: Sequence[int]
    chances: Sequence[float]

    @classmethod
    def of(cls, tree: Tree, tokens: list[int], chances: list[float], copy: Sequence[int] | None, rate: float) -> Choice:
        """Join what heads and a copy propose.

        Args:
            tokens: of the heads' tree, the root's first.
            chances: of its nodes, to be accepted; the root's is 1.
            copy: at least `LONGEST_COPY` tokens.
            rate: how often a copied token comes after the one before it.
        """
        node, length = 0, 0
        if copy is not None:
            node = agreeing_node(tree, tokens, copy)
            known = len(tree.paths[node])
            length = max(0, LONGEST_COPY - known)
            tokens = [*tokens, *copy[known : known + length]]
            chances = [*chances, *(chances[node] * rate**more for more in range(1, length + 1))]
        # Stable: a parent stays before its child.
        order = sorted(range(1, len(chances)), key=chances.__getitem__, reverse=True)
        return cls(_joined(tree, node, length), tokens, order, [chances[source] for source in order])

    def best(self, size: int) -> tuple[Tree, list[int]]:
        """The likeliest tree of so many nodes, or of all that there are, and its tokens."""
        wanted = {0, *self.order[: size - 1]}
        nodes = tuple(node for node, source in enumerate(self.joined.sources) if source in wanted)
        return _subtree(self.joined.tree, nodes), [self.tokens[self.joined.sources[node]] for node in nodes]


_joined = lru_cache(maxsize=1024)(join)


@lru_cache(maxsize=4096)
def _subtree(tree: Tree, nodes: tuple[int, ...]) -> Tree:
    return Tree(tuple(tree.paths[node] for node in nodes))
