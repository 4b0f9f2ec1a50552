"""Which tree to verify: exactly the best one of each size, and the size that is fastest on this device.

On calibration positions, record for every head the rank of the token that really came. The gain of a node is the share
of positions whose rank prefix equals its path, i.e. how often a pass that holds the node emits one token more because
of it. A prefix is at least as frequent as any of its extensions, so the N most frequent prefixes are closed under
prefixes: they are the best tree of N nodes, exactly, without assuming that heads err independently.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.inference.tree import RankPath, Tree

MISS = 1 << 30  # rank of a token that a head cannot draft or that never came


@dataclass(frozen=True)
class PrefixCounts:
    """How often each rank prefix occurred.

    Attributes:
        counts: path -> positions whose true tokens have these ranks.
        positions: all positions looked at.
    """

    counts: Mapping[RankPath, int]
    positions: int


def count_prefixes(ranks: Tensor, max_rank: int) -> PrefixCounts:
    """Count rank prefixes.

    Args:
        ranks: ``(T, K)`` rank of the true token under each head, 0 the best, `MISS` if it cannot be drafted.
        max_rank: ranks from here on are misses; a bound on a node's siblings.
    """
    counts: dict[RankPath, int] = {}
    within = torch.ones(len(ranks), dtype=torch.bool)
    for depth in range(1, ranks.shape[1] + 1):
        within &= ranks[:, depth - 1] < max_rank
        paths, frequencies = ranks[within, :depth].unique(dim=0, return_counts=True)
        counts.update((tuple(path), n) for path, n in zip(paths.tolist(), frequencies.tolist(), strict=True))
    return PrefixCounts(counts, len(ranks))


def best_tree(prefixes: PrefixCounts, size: int) -> Tree:
    """The tree of at most ``size`` tokens per pass (root included) with the most expected tokens per step."""
    return Tree.from_paths(best_nodes(prefixes, size - 1))


def best_nodes(prefixes: PrefixCounts, count: int) -> list[RankPath]:
    """The ``count`` most frequent prefixes, the most frequent first and each after its own prefixes."""
    ordered = sorted(prefixes.counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return [path for path, _ in ordered[:count]]


def rank_shares(ranks: Tensor, present: Tensor, max_rank: int) -> Tensor:
    """``(K, max_rank)``: the share of a head's targets that it ranks r-th, of the positions where it has a target.

    Args:
        ranks: as in `count_prefixes`; `MISS` where there is no target.
        present: ``(T, K)`` whether there is a target.
    """
    wanted = torch.arange(max_rank)
    found = ranks[:, :, None] == wanted
    return found.sum(dim=0) / present.sum(dim=0).clamp(min=1)[:, None]


def independent_tree(shares: Tensor, size: int) -> Tree:
    """The best tree of at most ``size`` tokens if heads erred independently of each other.

    The original's search: a node's gain is the product of its ranks' shares, and the best nodes are taken one by one
    (Cai et al. 2024, section 2.3.3). Here for comparison only; real heads tend to be right together.

    Args:
        shares: ``(K, ranks)``, see `rank_shares`.
    """
    chosen: list[RankPath] = []
    frontier: list[tuple[float, RankPath]] = [(-1.0, ())]
    table = shares.tolist()
    while frontier and len(chosen) < size:
        gain, path = heapq.heappop(frontier)
        chosen.append(path)
        if len(path) < len(table):
            for rank, share in enumerate(table[len(path)]):
                if share > 0:
                    heapq.heappush(frontier, (gain * share, (*path, rank)))
    return Tree.from_paths(chosen)


def expected_tokens(prefixes: PrefixCounts, tree: Tree) -> float:
    """Tokens per step that the counted positions give this tree: 1 + the sum of its nodes' gains."""
    return 1 + sum(prefixes.counts.get(path, 0) for path in tree.paths if path) / max(1, prefixes.positions)


@dataclass(frozen=True)
class TreeChoice:
    """One size of the search: its tree, what it yields and what it costs."""

    tree: Tree
    expected_tokens: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.expected_tokens / self.step_seconds


def choose_tree(choices: Sequence[TreeChoice], noise: float) -> TreeChoice:
    """The fastest choice; of those that the noise cannot tell from it, the one with the most tokens per step.

    Tokens per step are counted, times are measured: where the times do not decide, the counts should.

    Args:
        choices: one or more.
        noise: relative error of their step times (`step_curve.StepTimes`).
    """
    fastest = max(choice.tokens_per_second for choice in choices)
    close = [choice for choice in choices if choice.tokens_per_second * (1 + noise) >= fastest]
    return max(close, key=lambda choice: (choice.expected_tokens, choice.tokens_per_second))


def choice_reason(choices: Sequence[TreeChoice], chosen: TreeChoice, noise: float) -> str:
    """Why `choose_tree` took this one, for people."""
    fastest = max(choices, key=lambda choice: choice.tokens_per_second)
    text = (
        f"{chosen.tokens_per_second:.1f} expected tokens/s a row: {chosen.expected_tokens:.2f} tokens per step of "
        f"{chosen.step_seconds * 1000:.3g} ms"
    )
    if chosen is fastest:
        return f"the fastest of {len(choices)} sizes, {text}"
    return (
        f"{text}; {fastest.tree.size} tokens per pass come to {fastest.tokens_per_second:.1f}, within the noise of "
        f"{noise:.1%}, with fewer tokens per step"
    )
