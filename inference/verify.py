"""Verification: from the target model's view of a drafted tree to the tokens that are emitted.

Pure functions on tensors; no tokenizer, model or cache. Each takes the target distribution at every node (the root
included) and the drafted tokens, and returns the accepted path and the token that follows it.

For a tree of *chosen* tokens (top ranks of the heads, not samples) exact sampling needs no acceptance ratio: draw one
token from the target distribution at the root; while a child of the current node holds the drawn token, move there
and draw again; the last draw, which no child holds, is the next token. Every emitted token is a draw from the target
distribution given the text before it, so their joint distribution is the backbone's own, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medusa_train.inference.errors import UserError
from medusa_train.inference.tree import Tree

VerifierName = Literal["greedy", "rejection"]


@dataclass(frozen=True)
class Verdict:
    """Outcome of one pass.

    Attributes:
        path: accepted nodes in order, the root first.
        next_token: the token after the last accepted node, chosen by the target model.
    """

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True)
class Sampling:
    """How logits become the target distribution; applied alike to every node and to the bonus token.

    Attributes:
        temperature: divides the logits; above 0.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(f"sampling needs temperature > 0, top_k >= 0 and 0 < top_p <= 1, got {self}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """``(..., V)`` logits -> fp32 probabilities that sum to 1."""
        logits = logits.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            kept = logits.topk(self.top_k, dim=-1)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
        probabilities = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays while the probability before it is below p, so the likeliest always stays.
            ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities


def verify_greedy(logits: Tensor, tokens: Sequence[int], tree: Tree) -> Verdict:
    """Follow the target's best tokens: the output is that of plain greedy decoding.

    Args:
        logits: ``(N, V)`` target logits at every node.
        tokens: the N drafted tokens, the root's first.
    """
    return _descend(logits.argmax(dim=-1).tolist(), tokens, tree)


def verify_rejection(
    logits: Tensor, tokens: Sequence[int], tree: Tree, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """Exact sampling for trees of chosen tokens; the output is distributed as plain sampling from the backbone.

    A draw is made at every node in one call, so that the host waits once; those off the path are never looked at,
    and draws at different nodes are independent, so the path's own draws are what one-by-one drawing would give.
    """
    draws = torch.multinomial(sampling.probabilities(logits), num_samples=1, generator=generator)
    return _descend(draws[:, 0].tolist(), tokens, tree)


def _descend(wanted: Sequence[int], tokens: Sequence[int], tree: Tree) -> Verdict:
    """From the root, move to the child that holds the wanted token for as long as there is one."""
    path = [0]
    while True:
        token = wanted[path[-1]]
        child = next((node for node in tree.children[path[-1]] if tokens[node] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
