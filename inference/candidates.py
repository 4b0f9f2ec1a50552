"""From a hidden state and a root to the tokens of a tree: each node holds one of its head's best.

A medusa head looks at the hidden state alone, so it has one list of candidates for all nodes of its depth. A hydra head
or a recurrent drafter also reads the tokens that lead to the node, so it has a list for every parent, and the tree is
filled level by level. Heads that read copies have, in either way, one more thing to look at (`embeddings`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        parents: ``(n,)`` each node's parent, among the nodes of the level before.
        listed: ``(P,)`` the parents that have a list of candidates each, there too.
        lines: ``(P, depth)`` the nodes of the tree from the root to each of these.
        above: ``(P,)`` for each of these, the place of its own parent among those of the level before; None if the two
            levels have the same places.
        places: ``(n,)`` where each node's token stands among the candidates, which are ``ranks`` of each list.
    """

    ranks: int
    parents: Tensor
    listed: Tensor
    lines: Tensor
    above: Tensor | None
    places: Tensor


@dataclass(frozen=True)
class Scored:
    """Where the logits of a tree's nodes are among those of all levels.

    Attributes:
        list_heads: each list's head, from 0.
        node_heads: ``(N - 1,)`` that of each node below the root.
        node_lists: ``(N - 1,)`` the list that it is from.
        terms: ``(N, depth)`` for every node, the nodes below the root that lead to it, the first of them 0; N - 1 for
            none.
    """

    list_heads: Tensor
    node_heads: Tensor
    node_lists: Tensor
    terms: Tensor


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
        self._scored = _scored(tree, self._levels, device)
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
        seen: list[tuple[Tensor, Tensor]] = []
        tokens = self._tokens(hidden, roots, copies, seen)
        if not seen:
            return tokens, torch.ones_like(tokens, dtype=torch.float32)
        # Of all levels at once: a step waits for every small operation of drafting.
        warmth, scored = torch.tensor(temperatures[: len(seen)], device=tokens.device), self._scored
        logits, own = (shape_logits(torch.cat(each, dim=1)).float() for each in zip(*seen, strict=True))
        total = (logits / warmth[scored.list_heads, None]).logsumexp(dim=-1)
        scores = own / warmth[scored.node_heads] - total.index_select(1, scored.node_lists)
        # Of a path: the sum down from the root, of terms that rounding must not lift above 0, so that no node is
        # likelier than its parent.
        padded = torch.nn.functional.pad(scores.clamp(max=0), (0, 1))
        terms = padded.index_select(1, scored.terms.flatten()).view(len(padded), *scored.terms.shape)
        return tokens, terms.sum(dim=-1).exp()

    def _tokens(
        self, hidden: Tensor, roots: Tensor, copies: Tensor | None, seen: list[tuple[Tensor, Tensor]] | None = None
    ) -> Tensor:
        """Fill level by level.

        Args:
            seen: gets every level's logits, ``(B, P, V')`` of its lists and ``(B, n)`` of its nodes' tokens.
        """
        config = self.heads.config
        roots = roots.to(hidden.device)
        root, copied = self._known(roots, copies)
        tokens, states = [roots[:, None]], hidden[:, None]
        agrees = None  # (B, n) whether the path to each node of the last level is that of the copy; the root's is
        for head, level in enumerate(self._levels):
            read = self._read(states, tokens, head, level, root, copied, agrees)
            if config.kind == "recurrent":
                states = read
            logits = self.heads.project(read, head)
            best = logits.topk(level.ranks, dim=-1)
            drafted = self.heads.draft_token_ids[best.indices.flatten(1).index_select(1, level.places)]
            tokens.append(drafted)
            if copies is not None and config.reads_tokens and level is not self._levels[-1]:
                same = drafted == copies[:, head : head + 1]
                agrees = same if agrees is None else agrees.index_select(1, level.parents) & same
            if seen is not None:
                seen.append((logits, best.values.flatten(1).index_select(1, level.places)))
        return torch.cat(tokens, dim=1)

    def _known(self, roots: Tensor, copies: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Embeddings of what is known before the first head, in one call: the roots' and the copies', or None."""
        if not self.heads.config.reads_tokens:
            return None, None if copies is None else copy_embedding(self.embed, copies[:, : len(self._levels)])
        if copies is None:
            return read_embedding(self.embed, roots[:, None]), None
        known = copy_embedding(self.embed, torch.cat([roots[:, None], copies[:, : len(self._levels)]], dim=1))
        return known[:, :1], known[:, 1:]

    def _read(
        self,
        states: Tensor,
        tokens: Sequence[Tensor],
        head: int,
        level: Level,
        root: Tensor | None,
        copied: Tensor | None,
        agrees: Tensor | None,
    ) -> Tensor:
        """``(B, P, hidden)``, a state per list of candidates; the same as from `embeddings` of its whole path."""
        config, lists = self.heads.config, len(level.listed)
        before = more = None
        if config.kind == "recurrent":  # goes on from the states of the level above, which have read the rest
            origin = states if level.above is None else states.index_select(1, level.above)
        else:
            origin = states.expand(-1, lists, -1)
        if config.reads_tokens and head == 0:
            assert root is not None
            before = root[:, :, None]
        elif config.kind == "recurrent":
            before = read_embedding(self.embed, tokens[-1].index_select(1, level.listed)[..., None])
        elif config.reads_tokens:
            before = read_embedding(self.embed, torch.cat(list(tokens), dim=1)[:, level.lines])
        if config.reads_copies:
            more = origin.new_zeros(1, 1, 1, 1) if copied is None else copied[:, None, head : head + 1]
            if agrees is not None:
                more = more * agrees.index_select(1, level.listed)[..., None, None]
            more = more.expand(len(origin), lists, 1, origin.shape[-1])
        return self.heads.read(origin, head, before, more)


def embeddings(
    config: HeadsConfig, embed: Embed | None, path: Tensor, copies: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What heads read beside the hidden state, None for what they do not.

    Args:
        embed: the backbone's embedding.
        path: ``(..., d)`` ids of the root and the tokens after it.
        copies: ``(..., m >= d)`` what followed the root's words before, `NO_COPY` where nothing did; None where it is
            nowhere.

    Returns:
        Embeddings ``(..., d, hidden)``, see `read_embedding`, of the path, and of the copied token after each of its
        tokens, zeros where the path is not that of the copy. Heads that do not read the path cannot know that, and are
        given the whole copy.
    """
    before = copied = None
    if config.reads_tokens:
        before = read_embedding(embed, path)
    if config.reads_copies:
        if copies is None:
            found = torch.full_like(path, NO_COPY)
        else:
            found = agreeing(copies, path) if config.reads_tokens else copies[..., : path.shape[-1]]
        copied = copy_embedding(embed, found)
    return before, copied


def read_embedding(embed: Embed | None, token_ids: Tensor) -> Tensor:
    """Embeddings as heads read them, ``(...)`` ids to ``(..., hidden)``.

    Embeddings of different models differ in scale by orders of magnitude; hidden states are normed already.
    """
    assert embed is not None, "these heads read the backbone's embeddings"
    embedded = embed(token_ids)
    return torch.nn.functional.rms_norm(embedded, embedded.shape[-1:])


def copy_embedding(embed: Embed | None, copies: Tensor) -> Tensor:
    """`read_embedding` of copied tokens, zeros for `NO_COPY`."""
    return read_embedding(embed, copies.clamp(min=0)) * (copies != NO_COPY)[..., None]


def _level(tree: Tree, depth: int, list_per_parent: bool, device: torch.device) -> Level:
    nodes, above = _nodes_at(tree, depth), _nodes_at(tree, depth - 1)
    parents = [above.index(tree.parents[node]) for node in nodes]
    listed = sorted(set(parents)) if list_per_parent else parents[:1]
    # The level before has a list for each parent of its own nodes.
    before = sorted({tree.parents[node] for node in above})
    origins = [before.index(tree.parents[above[parent]]) for parent in listed]
    picks = [tree.paths[node][-1] for node in nodes]
    ranks = 1 + max(picks)
    place = {parent: ranks * i for i, parent in enumerate(listed)}
    places = [place.get(parent, 0) + pick for parent, pick in zip(parents, picks, strict=True)]
    return Level(
        ranks=ranks,
        parents=torch.tensor(parents, device=device),
        listed=torch.tensor(listed, device=device),
        lines=torch.tensor([tree.ancestors[above[parent]] for parent in listed], device=device),
        above=None if origins == list(range(len(before))) else torch.tensor(origins, device=device),
        places=torch.tensor(places, device=device),
    )


def _nodes_at(tree: Tree, depth: int) -> list[int]:
    return [node for node, path in enumerate(tree.paths) if len(path) == depth]


def _scored(tree: Tree, levels: Sequence[Level], device: torch.device) -> Scored:
    starts = [0, *accumulate(len(level.listed) for level in levels)]
    list_heads = [head for head, level in enumerate(levels) for _ in level.listed]
    node_lists = [
        start + int(place) // level.ranks
        for start, level in zip(starts, levels, strict=False)
        for place in level.places
    ]
    paths = [[node - 1 for node in line[1:]] for line in tree.ancestors]
    terms = [path + [tree.size - 1] * (tree.depth - len(path)) for path in paths]
    return Scored(
        torch.tensor(list_heads, device=device, dtype=torch.long),
        tree.depths[1:].to(device) - 1,
        torch.tensor(node_lists, device=device, dtype=torch.long),
        torch.tensor(terms, device=device, dtype=torch.long),
    )
