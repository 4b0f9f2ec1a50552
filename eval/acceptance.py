"""How well heads predict, from cached hidden states alone: ranks, recall, and a replay of decoding.

The cache holds the backbone's own greedy answers, so the token that "really came" at a position is the one that greedy
decoding would accept there. `replay` walks the answers exactly as decoding does, without running the backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.data.hidden_states import Shard
from medusa_train.eval.tree_search import MISS
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.stats import DecodeStats
from medusa_train.inference.tree import Tree

CHUNK = 1024  # positions whose logits exist at once


@dataclass(frozen=True)
class Ranks:
    """Ranks of the true tokens in some answers.

    Attributes:
        ranks: ``(T, K)``; `MISS` if head k cannot draft the token, or the answer ends before it.
        present: ``(T, K)`` bool, whether the answer has a token there.
        ends: ``(T,)`` where each position's answer ends (exclusive), as an index into these positions.
    """

    ranks: Tensor
    present: Tensor
    ends: Tensor

    def calibration(self) -> Tensor:
        """Ranks of the positions that have a target for head 1, ``(T', K)``: what trees are counted on."""
        return self.ranks[self.present[:, 0]]


@torch.inference_mode()
def token_ranks(model: MedusaModel, shards: Sequence[Shard]) -> Ranks:
    """Rank, under every head, of the token that came, at every cached position."""
    heads, config = model.heads, model.heads.config
    column_of_token = torch.full((config.vocab_size,), -1)
    column_of_token[heads.draft_token_ids.cpu()] = torch.arange(config.projection_size)
    all_ranks, all_present, all_ends, offset = [], [], [], 0
    for shard in shards:
        positions = torch.arange(len(shard.tokens))
        ahead = positions[:, None] + torch.arange(1, config.num_heads + 1)
        present = ahead < shard.ends[:, None]
        columns = column_of_token[shard.tokens[torch.where(present, ahead, 0)]]
        ranks = torch.full_like(columns, MISS)
        for head in range(config.num_heads):
            for part in (present[:, head] & (columns[:, head] >= 0)).nonzero()[:, 0].split(CHUNK):
                before = shard.tokens[part[:, None] + torch.arange(head + 1)]
                logits = model.draft_logits(shard.states(part), head, before, shard.copies[part])
                own = logits.gather(1, columns[part, head].to(logits.device)[:, None])
                ranks[part, head] = (logits > own).sum(dim=1).cpu()
        all_ranks.append(ranks)
        all_present.append(present)
        all_ends.append(shard.ends + offset)
        offset += len(positions)
    return Ranks(torch.cat(all_ranks), torch.cat(all_present), torch.cat(all_ends))


def recall(ranks: Ranks, best: int) -> list[float]:
    """Per head, the share of targets among its ``best`` likeliest tokens (undraftable tokens count as misses)."""
    return ((ranks.ranks < best).sum(dim=0) / ranks.present.sum(dim=0).clamp(min=1)).tolist()


def recalls(ranks: Ranks) -> dict[str, list[float]]:
    """`recall` among the best 1, 5 and 10 tokens, by name."""
    return {f"top{best}": recall(ranks, best) for best in (1, 5, 10)}


def replay(ranks: Ranks, tree: Tree) -> DecodeStats:
    """Greedy decoding of the cached answers with this tree, step by step, counted like a real run."""
    paths = set(tree.paths)
    rows, ends = ranks.ranks.tolist(), ranks.ends.tolist()
    stats, position = DecodeStats(), 0
    while position < len(rows):
        # Prefill's state is the answer's first entry; it chooses the root, which is emitted with it.
        stats.prefill_tokens += 1
        end = ends[position]
        while position + 1 < end:
            accepted = 0
            while tuple(rows[position][: accepted + 1]) in paths and accepted < tree.depth:
                accepted += 1
            emitted = min(accepted + 1, end - position - 1)
            stats.histogram[emitted] += 1
            position += emitted
        position = end
    return stats
