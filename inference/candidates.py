"""From a hidden state and a root to the tokens of a tree: each node holds one of its head's best.

A medusa head looks at the hidden state alone, so it has one list of candidates for all nodes of its depth. A hydra head
or a recurrent drafter also reads the tokens that lead to the node, so it has a list for every parent, and the tree is
filled level by level. Heads that read copies have, in either way, one more thing to look at (`embeddings`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.inference.copies import NO_COPY, agreeing
from medusa_train.inference.graphs import Graphs
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.heads_config import HeadsConfig
from medusa_train.inference.tree import Tree

Embed = Callable[[Tensor], Tensor]  # (...) token ids -> (..., hidden), see `Backbone.embed`
ShapeLogits = Callable[[Tensor], Tensor]  # raw projections -> logits, see `Backbone.shape_logits`


@dataclass(frozen=True)
class Level:
    """The nodes of one depth.

    Attributes:
        ranks: how many of the head's best tokens are used.
        parents: ``(n,)`` each node's parent in the tree.
        lines: ``(P, depth)`` for every list of candidates, the nodes from the root to the parent that it continues.
        above: ``(P,)`` for each of these parents, the place of its own parent among those of the level before.
        lists: ``(n,)`` the list that each node takes its token from.
        picks: ``(n,)`` its place in that list.
    """

    ranks: int
    parents: Tensor
    lines: Tensor
    above: Tensor
    lists: Tensor
    picks: Tensor


class TreeFiller:
    """Fills one tree."""

    def __init__(self, heads: MedusaHeads, tree: Tree, embed: Embed | None = None, compiled: bool = False) -> None:
        """Prepare the tree's levels.

        Args:
            heads: on the device where they run.
            embed: the backbone's embedding; heads that read tokens or copies need it.
            compiled: make one graph of what `tokens` does, for each number of rows.

        Raises:
            UserError: the tree does not fit the heads (`Tree.check`), or there is no compiler.
        """
        tree.check(heads.config.num_heads, heads.config.projection_size)
        self.heads, self.tree, self.embed = heads, tree, embed
        device = heads.draft_token_ids.device
        self._levels = [_level(tree, depth, heads.config.reads_tokens, device) for depth in range(1, tree.depth + 1)]
        self._graphs = Graphs(self._tokens, device) if compiled else None

    def tokens(self, hidden: Tensor, roots: Tensor, copies: Tensor | None = None) -> Tensor:
        """The best tokens of every head.

        Args:
            hidden: ``(B, hidden)`` last hidden states.
            roots: ``(B,)`` the tokens that were chosen from them.
            copies: ``(B, m >= K)`` what followed the roots' words before, for heads that read it; None for nothing.

        Returns:
            ``(B, N)`` token ids of the nodes, the root's first.
        """
        if self._graphs is None:
            return self._tokens(hidden, roots, copies)
        what = f"the drafting of {self.tree.size} tokens ({len(roots)} rows{'' if copies is None else ', with copies'})"
        return self._graphs((len(roots), copies is None), what, hidden, roots, copies)

    def _tokens(self, hidden: Tensor, roots: Tensor, copies: Tensor | None) -> Tensor:
        tokens, states = roots[:, None].to(hidden.device), hidden[:, None]
        for head, level in enumerate(self._levels):
            states, logits = self._read(states, tokens, head, level, copies)
            best = logits.topk(level.ranks, dim=-1).indices
            tokens = torch.cat([tokens, self.heads.draft_token_ids[best[:, level.lists, level.picks]]], dim=1)
        return tokens

    def tokens_and_chances(
        self,
        hidden: Tensor,
        roots: Tensor,
        temperatures: Sequence[float],
        copies: Tensor | None = None,
        shape_logits: ShapeLogits = lambda logits: logits,
    ) -> tuple[Tensor, Tensor]:
        """Also ``(B, N)`` the probability that each node is accepted: that of its path under the heads.

        Args:
            temperatures: per head, divides its logits first.
            shape_logits: what the backbone does to raw projections; it keeps their order, and so the tokens.
        """
        tokens, states = roots[:, None].to(hidden.device), hidden[:, None]
        scores = torch.zeros_like(tokens, dtype=torch.float32)
        for head, level in enumerate(self._levels):
            states, logits = self._read(states, tokens, head, level, copies)
            best = logits.topk(level.ranks, dim=-1).indices
            tokens = torch.cat([tokens, self.heads.draft_token_ids[best[:, level.lists, level.picks]]], dim=1)
            chances = (shape_logits(logits).float() / temperatures[head]).log_softmax(dim=-1)
            own = chances.gather(-1, best)[:, level.lists, level.picks]
            scores = torch.cat([scores, scores[:, level.parents] + own], dim=1)
        return tokens, scores.exp()

    def _read(
        self, states: Tensor, tokens: Tensor, head: int, level: Level, copies: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``(B, P, V')``, one row of logits per list of candidates; before them the states for the next level.

        A recurrent drafter goes on from the states of the level above; other heads begin with the backbone's again.
        """
        config, path = self.heads.config, tokens[:, level.lines]
        recurrent = config.kind == "recurrent"
        if copies is not None:
            copies = copies[:, None].expand(-1, len(level.lines), -1)
        before, copied = embeddings(config, self.embed, path, copies, head if recurrent else 0)
        origin = states[:, level.above] if recurrent else states.expand(-1, len(level.lines), -1)
        read = self.heads.read(origin, head, before, copied)
        return read if recurrent else states, self.heads.project(read, head)


def embeddings(
    config: HeadsConfig, embed: Embed | None, path: Tensor, copies: Tensor | None, since: int = 0
) -> tuple[Tensor | None, Tensor | None]:
    """What heads read beside the hidden state, None for what they do not.

    Args:
        embed: the backbone's embedding.
        path: ``(..., d)`` ids of the root and the tokens after it.
        copies: ``(..., m >= d)`` what followed the root's words before, `NO_COPY` where nothing did; None where it is
            nowhere.
        since: the first token of the path that is wanted.

    Returns:
        Embeddings ``(..., d - since, hidden)`` of the path, and of the copied token after each of its tokens, zeros
        where the path is not that of the copy. Heads that do not read the path cannot know that, and are given the
        whole copy.
    """
    if not config.reads_embeddings:
        return None, None
    assert embed is not None, "these heads read the backbone's embeddings"
    wanted = path[..., since:]
    if not config.reads_copies:
        return embed(wanted), None
    if copies is None:
        before = embed(wanted)
        return (before if config.reads_tokens else None), torch.zeros_like(before)
    found = (agreeing(copies, path) if config.reads_tokens else copies[..., : path.shape[-1]])[..., since:]
    known = (found != NO_COPY)[..., None]
    if not config.reads_tokens:
        return None, embed(found.clamp(min=0)) * known
    # Of both at once: a step waits for every small operation of drafting.
    before, copied = embed(torch.cat([wanted, found.clamp(min=0)], dim=-1)).split(wanted.shape[-1], dim=-2)
    return before, copied * known


def _level(tree: Tree, depth: int, list_per_parent: bool, device: torch.device) -> Level:
    nodes = [node for node, path in enumerate(tree.paths) if len(path) == depth]
    parents = [tree.parents[node] for node in nodes]
    listed = sorted(set(parents)) if list_per_parent else parents[:1]
    place = {parent: i for i, parent in enumerate(listed)}
    before = sorted({tree.parents[node] for node, path in enumerate(tree.paths) if len(path) == depth - 1})
    picks = [tree.paths[node][-1] for node in nodes]
    return Level(
        ranks=1 + max(picks),
        parents=torch.tensor(parents, device=device),
        lines=torch.tensor([tree.ancestors[parent] for parent in listed], device=device),
        above=torch.tensor([before.index(tree.parents[parent]) for parent in listed], device=device),
        lists=torch.tensor([place.get(parent, 0) for parent in parents], device=device),
        picks=torch.tensor(picks, device=device),
    )
