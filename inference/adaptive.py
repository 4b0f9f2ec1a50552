"""Trees that follow the heads' confidence from step to step.

A static tree is right on average; some steps deserve a deep chain and some nothing. `AdaptiveDrafter` ranks the nodes
of a larger tree by how likely each is accepted (the product of the heads' calibrated probabilities down its path), and
verifies as many of the best as give the most expected tokens per second on this device. A path is never likelier than
its prefix, so the best n nodes are always a tree. The larger tree is as large as a pass may be for the rows at hand,
since every node of it has to be drafted.

Confidence alone is not trusted: the expected gain is scaled by what past steps really accepted. When no size beats
plain decoding, steps draft nothing for a while, then a small tree probes whether drafting pays again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from medusa_train.inference.candidates import Embed, ShapeLogits, TreeFiller
from medusa_train.inference.drafters import Context, Drafting, find_copies
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.tree import RankPath, Tree
from medusa_train.inference.verify import Draft, Generators

TRUST_DECAY = 0.95  # weight of the past, per step, in the ratio of accepted to expected drafts
PROBE_EVERY = 16  # plain steps before a probe
MOST_COSTLY = 2.0  # plain steps: a longer one would need two tokens to break even, which shorter ones get as well


# Rows of a batch -> tokens per row and pass -> seconds of a whole step on this device. One row is always among them,
# and so is one token, which is plain decoding; every batch knows the same sizes.
StepSeconds = Mapping[int, Mapping[int, float]]


@dataclass(frozen=True)
class Calibration:
    """What adaptive drafting needs to know; measured by ``medusa-train tree``.

    Attributes:
        nodes: to choose from, the most often accepted first, each after its parent; the root is not named.
        temperatures: per head, divides its logits so that its probabilities are those of being right.
        step_seconds: see `StepSeconds`.
    """

    nodes: tuple[RankPath, ...]
    temperatures: tuple[float, ...]
    step_seconds: StepSeconds

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
    ) -> None:
        """Prepare the superset.

        Args:
            heads: as `MedusaModel` keeps them, on the backbone's device.
            calibration: see `Calibration`.
            embed: the backbone's embedding, for heads that read it.
            size: always this many tokens per pass (a dynamic tree of static shape); None adapts the size as well.
            shape_logits: what the backbone does to raw projections (`Backbone.shape_logits`).

        Raises:
            UserError: the superset does not fit the heads, or the size is not one of 2..superset.size.
        """
        largest = calibration.superset.size
        if size is not None and not 2 <= size <= largest:
            raise UserError(f"a dynamic tree needs a size from 2 to {largest}, got {size}")
        calibration.superset.check(heads.config.num_heads, heads.config.projection_size)
        self._config, self._shape_logits = heads.config, shape_logits
        self.calibration, self.size = calibration, size
        self.max_size = size or max(calibration.sizes)
        self._filler = lru_cache(lambda nodes: TreeFiller(heads, calibration.best(nodes), embed))
        self._subtree = lru_cache(maxsize=1024)(_subtree)

    def start(self, prompts: Sequence[Tensor], max_new_tokens: int, generators: Generators) -> Drafting:
        sizes = [self.size] if self.size else self.calibration.sizes
        chooser = SizeChooser(self.calibration.step_seconds, sizes)
        plain, find = Tree.root_only(), find_copies(self._config, len(prompts))

        def draft(context: Context) -> Draft:
            rows = len(context.texts)
            chooser.observe([context.accepted[row] for row in context.active])
            if chooser.rests():
                return Draft([plain] * rows, context.roots[:, None])
            filler = self._filler(self.calibration.superset.size if self.size else chooser.largest(rows))
            tokens, chances = filler.tokens_and_chances(
                context.hidden, context.roots, self.calibration.temperatures, find(context), self._shape_logits
            )
            ordered = chances[:, 1:].sort(
                dim=1, descending=True, stable=True
            )  # stable: a parent stays before its child
            values, order = ordered.values.tolist(), ordered.indices.tolist()
            size = chooser.choose([values[row] for row in context.active], rows)
            picked = [sorted(line[: size - 1]) for line in order]
            index = torch.tensor(picked, device=tokens.device, dtype=torch.long)
            own = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, index)], dim=1)
            return Draft([self._subtree(filler.tree, tuple(nodes)) for nodes in picked], own)

        return draft


def _subtree(tree: Tree, nodes: tuple[int, ...]) -> Tree:
    """The root and ``nodes``, counted without it."""
    return Tree((tree.paths[0], *(tree.paths[node + 1] for node in nodes)))


class SizeChooser:
    """The number of tokens per pass with the most expected tokens per second, step after step.

    Attributes:
        trust: what past passes accepted / what confidence promised; scales promised gains.
    """

    def __init__(self, step_seconds: StepSeconds, sizes: Sequence[int]) -> None:
        self.step_seconds, self.sizes = step_seconds, sizes
        # Ten imaginary drafts that kept their promise, so that the first few steps do not decide.
        self._accepted = self._promised = 10.0
        self._pending = 0.0
        self._resting = 0
        self._seconds = lru_cache(self._reckon)

    @property
    def trust(self) -> float:
        return self._accepted / self._promised

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn what the last pass accepted, per row that took part."""
        if self._pending > 0 and accepted:
            self._accepted = TRUST_DECAY * self._accepted + sum(accepted) / len(accepted)
            self._promised = TRUST_DECAY * self._promised + self._pending
            self._pending = 0.0

    def rests(self) -> bool:
        """Whether this step drafts nothing because drafting did not pay lately."""
        if self._resting > 1:
            self._resting -= 1
            return True
        return False

    def _reckon(self, rows: int) -> dict[int, float]:
        return {size: reckon_seconds(self.step_seconds, size, rows) for size in self.sizes}

    def largest(self, rows: int) -> int:
        """The most tokens per row that a pass of so many rows may hold (`MOST_COSTLY`)."""
        seconds, plain = self._seconds(rows), reckon_seconds(self.step_seconds, 1, rows)
        worth = [size for size in self.sizes if size > 1 and seconds[size] <= MOST_COSTLY * plain]
        return max(worth, default=min(size for size in self.sizes if size > 1))

    def choose(self, chances: Sequence[Sequence[float]], rows: int = 1) -> int:
        """Tokens per row and pass, given the node chances of each active row, best first, and how many rows pass."""
        if len(self.sizes) == 1:
            return self.sizes[0]
        gains = [sum(column) / len(chances) for column in zip(*chances, strict=True)]
        promised = dict(enumerate(accumulate(gains, initial=0.0), start=1))  # of all sizes that these nodes make
        seconds = self._seconds(rows)
        speed = {
            size: (1 + self.trust * promised[size]) / seconds[size] for size in self.sizes if size <= max(promised)
        }
        best = max(speed, key=speed.__getitem__)
        if best == 1:
            if self._resting == 1:  # the rest is over: probe with the smallest tree
                best, self._resting = min(size for size in self.sizes if size > 1), 0
            else:
                self._resting = PROBE_EVERY
        else:
            self._resting = 0
        self._pending = promised[best]
        return best


def reckon_seconds(step_seconds: StepSeconds, size: int, rows: int) -> float:
    """Time of a step whose pass holds ``size`` tokens of each of ``rows`` rows: between and beyond the timed ones.

    Beyond the largest timed batch, rows are taken for nodes of its trees: weights are read once per pass, and
    products grow with its tokens, whatever row they are of.
    """
    batches = sorted(step_seconds)
    if rows > batches[-1]:
        return _read_curve(step_seconds[batches[-1]], size * rows / batches[-1])
    return _read_curve({batch: _read_curve(step_seconds[batch], size) for batch in batches}, rows)


def _read_curve(curve: Mapping[int, float], place: float) -> float:
    """A curve between its points, and beyond them along the slope of all of it."""
    points = sorted(curve)
    if place <= points[0] or len(points) == 1:
        return curve[points[0]]
    if place > points[-1]:
        # The last two may lie too close together to tell; the whole curve does not.
        slope = (curve[points[-1]] - curve[points[0]]) / (points[-1] - points[0])
        return curve[points[-1]] + slope * (place - points[-1])
    high = bisect_left(points, place)
    low = points[high - 1]
    return curve[low] + (curve[points[high]] - curve[low]) * (place - low) / (points[high] - low)
