"""What heads are worth while they are still being trained: recall, and the tokens per step that a tree would give."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from medusa_train.data.hidden_states import Shard
from medusa_train.eval.acceptance import Ranks, recall
from medusa_train.eval.tree_search import best_tree, count_prefixes, expected_tokens
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.stats import DecodeStats

DECODED = 64  # tokens of an answer that is decoded while heads are trained


def first_positions(shards: Sequence[Shard], positions: int) -> list[Shard]:
    """About so many positions, the same share from the start of every shard; an answer that is cut ends there."""
    total = sum(len(shard.tokens) for shard in shards)
    thinned = []
    for shard in shards:
        kept = min(len(shard.tokens), -(-len(shard.tokens) * positions // total))
        thinned.append(shard.first(kept))
    return thinned


def heads_quality(ranks: Ranks, tree_size: int, max_rank: int) -> dict[str, float]:
    """The figures of one evaluation.

    Args:
        ranks: of answers that were not trained on.
        tree_size: tokens per pass of the tree, root included.
        max_rank: best tokens of a head that the tree may use.

    Returns:
        ``tokens_per_step`` (see `cross_fitted_tokens_per_step`), and ``top1_h1`` .. ``top5_hK``: the share of targets
        among the best 1 and 5 tokens of every head.
    """
    figures = {"tokens_per_step": cross_fitted_tokens_per_step(ranks, tree_size, max_rank)}
    for best in (1, 5):
        figures |= {f"top{best}_h{head}": share for head, share in enumerate(recall(ranks, best), start=1)}
    return figures


def decoded_tokens_per_step(model: MedusaModel, prompts: Sequence[Tensor], new_tokens: int = DECODED) -> float | None:
    """Tokens per step of real greedy decoding: ``new_tokens`` at most after each prompt, ``(T,)`` token ids.

    None where every answer ended with its first token, for which no step is taken.
    """
    stats = DecodeStats()
    for prompt in prompts:
        model.generate(prompt, new_tokens, stats=stats)
    return stats.tokens_per_step


def cross_fitted_tokens_per_step(ranks: Ranks, tree_size: int, max_rank: int) -> float:
    """Expected tokens per step of the best tree of a size, by exact counts.

    A tree looks too good on the positions that chose it. So the answers are dealt into two halves, each half is
    measured with the tree that the other half chose, and the result is the mean over all positions. A single answer
    has no other half and is measured with its own tree.
    """
    counted = ranks.present[:, 0]
    _, answers = ranks.ends[counted].unique_consecutive(return_inverse=True)
    halves = [count_prefixes(ranks.calibration()[answers % 2 == half], max_rank) for half in (0, 1)]
    if not halves[1].positions:
        halves = halves[:1]
    trees = [best_tree(half, tree_size) for half in halves]
    tokens = sum(
        half.positions * expected_tokens(half, tree) for half, tree in zip(halves, reversed(trees), strict=True)
    )
    return tokens / max(1, sum(half.positions for half in halves))
