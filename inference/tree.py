"""The token tree that one verification pass checks.

A node is a path of ranks: ``(r1, ..., rd)`` holds the r_d-th best token of head d, below its parent
``(r1, ..., r_{d-1})``. The root ``()`` is the token that the backbone itself already chose. A tree is immutable and
knows nothing of tokens: its mask follows ancestry, so two nodes with equal tokens never see each other by accident.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.inference.errors import UserError

RankPath = tuple[int, ...]
# A file may ask for anything; useful trees have tens of nodes and a few levels.
MOST_NODES, MOST_LEVELS = 4096, 64


@dataclass(frozen=True)
class Tree:
    """A set of rank paths closed under prefixes, root included.

    Attributes:
        paths: every node's path; the root first, then by depth, then by ranks. Node i of a pass is ``paths[i]``.
    """

    paths: tuple[RankPath, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Build from rank paths in any order; duplicates are merged and missing prefixes added.

        Raises:
            UserError: a rank is negative or not a whole number, or the tree is absurdly large.
        """
        nodes: set[RankPath] = {()}
        for path in paths:
            if len(path) > MOST_LEVELS or len(nodes) > MOST_NODES:
                raise UserError(f"tree: it is over {MOST_LEVELS} levels deep or has over {MOST_NODES} nodes")
            if not all(type(rank) is int and rank >= 0 for rank in path):
                raise UserError(f"tree: path {list(path)} must hold whole numbers from 0 (ranks of a head's tokens)")
            nodes.update(tuple(path[:depth]) for depth in range(1, len(path) + 1))
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @classmethod
    def root_only(cls) -> Tree:
        """One token per pass: plain decoding."""
        return cls(((),))

    @classmethod
    def chain(cls, length: int) -> Tree:
        """The best token of each of the first ``length`` heads."""
        return cls.from_paths([(0,) * length])

    @property
    def size(self) -> int:
        """Tokens in one verification pass, root included."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Deepest node's distance from the root; 0 for a root alone."""
        return max(len(path) for path in self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Node -> its parent's index; -1 for the root."""
        index = {path: i for i, path in enumerate(self.paths)}
        return tuple(index[path[:-1]] if path else -1 for path in self.paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Node -> indices of its children, best rank first."""
        below: list[list[int]] = [[] for _ in self.paths]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                below[parent].append(node)
        return tuple(tuple(nodes) for nodes in below)

    @cached_property
    def depths(self) -> Tensor:
        """``(N,)`` distance of each node from the root."""
        return torch.tensor([len(path) for path in self.paths])

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """``(N, N)`` bool: row i may attend to column j, i.e. j is i or an ancestor of i."""
        mask = [[False] * self.size for _ in self.paths]
        for node, line in enumerate(self.ancestors):
            for ancestor in line:
                mask[node][ancestor] = True
        return torch.tensor(mask)

    @cached_property
    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """Node -> the nodes from the root to it, both included."""
        lines: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            lines.append((*lines[parent], node) if parent >= 0 else (node,))
        return tuple(lines)

    def ranks_needed(self) -> list[int]:
        """Per depth 1..depth, how many of that head's best tokens the tree uses."""
        return [1 + max(path[d] for path in self.paths if len(path) > d) for d in range(self.depth)]

    def check(self, num_heads: int, vocab_size: int) -> None:
        """Refuse a tree that these heads cannot fill.

        Raises:
            UserError: the tree is deeper than K, or uses a rank outside the draft vocabulary.
        """
        if self.depth > num_heads:
            raise UserError(f"tree: it is {self.depth} deep, but there are {num_heads} heads; cut it or train more")
        for depth, ranks in enumerate(self.ranks_needed(), start=1):
            if ranks > vocab_size:
                raise UserError(f"tree: rank {ranks - 1} at depth {depth}, but head {depth} has {vocab_size} tokens")

    def to_json(self) -> dict[str, list[list[int]]]:
        """``{"paths": [[0], [0, 0], ...]}``, the root implied."""
        return {"paths": [list(node) for node in self.paths if node]}

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Tree:
        """Read what `save` wrote; other keys are ignored.

        Raises:
            UserError: the file is missing or is not such a list.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_paths(content["paths"])
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file") from error
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f'{path}: expected {{"paths": [[0], [0, 0], ...]}}') from error
