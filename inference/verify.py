"""Verification: from the target model's view of drafted trees to the tokens that are emitted.

Functions on tensors; no tokenizer, model or cache. Each takes the target logits at every node of a tree per row (the
root included) and the drafted tokens, and returns each row's accepted path and the token that follows it.

*Chosen* tokens (top ranks of the heads, a copied phrase) need no acceptance ratio to be exact: draw one token from the
target distribution at the root; while a child of the current node holds the drawn token, move there and draw again;
the last draw, which no child holds, is the next token. Every emitted token is a draw from the target distribution
given the text before it, so their joint distribution is the backbone's own, whatever was drafted.

*Sampled* tokens come with the distribution q that they were drawn from: accept with probability min(1, p/q), else go
on with the residual max(p - q, 0) and the next sibling (Leviathan et al. 2023, algorithm 1; several siblings: Miao et
al. 2024, "SpecInfer", algorithm 2). When all are rejected the token is drawn from what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from medusa_train.inference.errors import UserError
from medusa_train.inference.sampling import Chances, Sampling, draw
from medusa_train.inference.tree import Tree

VerifierName = Literal["greedy", "rejection", "typical"]
# (row, drafted tokens from below the root to the node, raw logits (V,)) -> logits (V,)
Process = Callable[[int, list[int], Tensor], Tensor]
Generators = Sequence[torch.Generator | None]


@dataclass(frozen=True)
class Verdict:
    """Outcome of one pass for one row.

    Attributes:
        path: accepted nodes in order, the root first.
        tokens: what the row emits: the drafted tokens below the root on that path, then one that the target chose.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, path: Sequence[int], drafted: Sequence[int], next_token: int) -> Verdict:
        return cls(tuple(path), (*(drafted[node] for node in path[1:]), next_token))


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one pass.

    Attributes:
        trees: a tree per row, the same object in every row where they do not differ. The largest has N nodes; what a
            smaller one lacks is padding, which is passed along and never verified.
        tokens: ``(B, N)`` token ids, the roots' first.
        probabilities: ``(B, N, V)`` fp32, at each node the distribution that its children were drawn from,
            independently of each other; None if the tokens were chosen, not drawn.
    """

    trees: Sequence[Tree]
    tokens: Tensor
    probabilities: Tensor | None = None


class NanLogitsError(UserError):
    """The target's logits are not numbers."""


def verify_greedy(
    logits: Tensor,
    draft: Draft,
    rows: Sequence[int],
    process: Process | None = None,
    chances: Sequence[Chances] = (),
) -> list[Verdict]:
    """Follow the target's best tokens: the output is that of plain greedy decoding.

    Args:
        logits: ``(B, N, V)`` target logits at every node.
        rows: the rows to verify; finished ones are left out.
        process: changes a node's logits given the text that leads to it; called at visited nodes only and in the
            order of the text, as plain decoding would call it.
        chances: not used; verifiers that draw take one stream per row of the batch.

    Returns:
        One verdict per entry of ``rows``.

    Raises:
        NanLogitsError: logits of one of the rows are NaN.
    """
    if process is not None:
        verdicts = []
        for row, tokens in _rows(draft, rows):
            at = partial(_node_logits, logits, draft, process, row, tokens)
            verdicts.append(descend(tokens, draft.trees[row], _then(at, lambda shaped: int(shaped.argmax()))))
        return verdicts
    peak = logits.max(dim=-1)  # NaN counts as the largest
    # One transfer to the host: it is the only time that the host waits for the device in a greedy step.
    drafted, wanted, broken = torch.stack([draft.tokens, peak.indices, peak.values.isnan()]).tolist()
    _refuse_nan(broken, rows)
    return [descend(drafted[row], draft.trees[row], wanted[row].__getitem__) for row in rows]


def verify_rejection(
    logits: Tensor,
    draft: Draft,
    rows: Sequence[int],
    process: Process | None = None,
    chances: Sequence[Chances] = (),
    *,
    sampling: Sampling,
) -> list[Verdict]:
    """Exact sampling: the output is distributed as plain sampling from the backbone.

    Arguments as in `verify_greedy`. Where tokens were chosen, a seed gives the text of plain sampling with that seed,
    token for token.
    """
    verdicts = []
    if draft.probabilities is not None or process is not None:
        for row, tokens in _rows(draft, rows):
            tree, stream = draft.trees[row], chances[row]
            target = partial(_node_probabilities, logits, draft, process, sampling, row, tokens)
            if draft.probabilities is not None:
                q = draft.probabilities[row]
                verdicts.append(accept_sampled(tokens, tree, q, target, stream.generator))
                continue
            verdicts.append(descend(tokens, tree, partial(_draw_at, target, tree, stream)))
            stream.use(len(verdicts[-1].tokens))
        return verdicts
    # A draw at every node in one call: the host waits once. Nodes of a depth share a number, but one path is taken.
    probabilities = sampling.probabilities(logits)
    ahead = [stream.ahead(tree.depth + 1)[tree.depths] for stream, tree in zip(chances, draft.trees, strict=True)]
    draws = draw(probabilities, torch.nn.utils.rnn.pad_sequence(ahead, batch_first=True).to(probabilities.device))
    drafted, wanted, broken = torch.stack([draft.tokens, draws, probabilities[..., 0].isnan()]).tolist()
    _refuse_nan(broken, rows)
    for row in rows:
        verdicts.append(descend(drafted[row], draft.trees[row], wanted[row].__getitem__))
        chances[row].use(len(verdicts[-1].tokens))
    return verdicts


def verify_typical(
    logits: Tensor,
    draft: Draft,
    rows: Sequence[int],
    process: Process | None = None,
    chances: Sequence[Chances] = (),
    *,
    sampling: Sampling,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> list[Verdict]:
    """Typical acceptance (Cai et al. 2024, section 2.3.1): lossy, faster at higher temperatures.

    A token x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of p in nats; the longest accepted
    path wins, and the token after it is a draw from p. The output is *not* distributed as the backbone's samples.
    """
    if draft.probabilities is not None:
        raise UserError("verifier typical takes chosen drafts; a sampling draft model needs verifier rejection")
    verdicts = []
    for row, tokens in _rows(draft, rows):
        tree = draft.trees[row]
        best: tuple[int, ...] = (0,)
        paths, seen = [best], dict[int, Tensor]()
        for path in paths:  # grows while it is walked: breadth first, best ranks first
            best = path if len(path) > len(best) else best
            p = seen[path[-1]] = _node_probabilities(logits, draft, process, sampling, row, tokens, path[-1])
            threshold = min(epsilon, delta * float(torch.exp(torch.special.entr(p).sum().neg())))
            paths += [(*path, child) for child in tree.children[path[-1]] if float(p[tokens[child]]) > threshold]
        verdicts.append(Verdict.of(best, tokens, int(draw(seen[best[-1]], chances[row].ahead(1)[0]))))
        chances[row].use(1)
    return verdicts


def descend(tokens: Sequence[int], tree: Tree, wanted: Callable[[int], int]) -> Verdict:
    """From the root, move to the child that holds the wanted token for as long as there is one.

    Several children may hold it (two sources drafted the same phrase): all their branches stay open.

    Args:
        tokens: the N drafted tokens, the root's first.
        wanted: node -> the token that the target wants after it; asked once per accepted node, root first.
    """
    open_nodes = [0]
    while True:
        token = wanted(open_nodes[0])
        below = [child for node in open_nodes for child in tree.children[node] if tokens[child] == token]
        if not below:
            return Verdict.of(tree.ancestors[open_nodes[0]], tokens, token)
        open_nodes = below


def accept_sampled(
    tokens: Sequence[int],
    tree: Tree,
    q: Tensor,
    target: Callable[[int], Tensor],
    generator: torch.Generator | None,
) -> Verdict:
    """Multi-round rejection sampling down one tree of sampled tokens.

    Args:
        tokens: the N drafted tokens, the root's first.
        q: ``(N, V)`` at each node, what its children were drawn from.
        target: node -> ``(V,)`` the target's probabilities there; asked once per accepted node, root first.
    """
    path = [0]
    while True:
        p = target(path[-1])
        accepted = None
        for child in tree.children[path[-1]]:
            drawn, chance = tokens[child], torch.rand((), generator=generator, device=p.device)
            # chance < p/q without the division; p = q is always accepted, because chance < 1 and q(drawn) > 0.
            if bool(chance * q[path[-1], drawn] < p[drawn]):
                accepted = child
                break
            residual = (p - q[path[-1]]).clamp(min=0)
            total = residual.sum()
            # No residual is left only when rounding rejected a token of two equal distributions.
            p = residual / total if bool(total > 0) else p
        if accepted is None:
            chance = torch.rand((), generator=generator, device=p.device, dtype=torch.float64)
            return Verdict.of(path, tokens, int(draw(p, chance)))
        path.append(accepted)


def _rows(draft: Draft, rows: Sequence[int]) -> list[tuple[int, list[int]]]:
    drafted = draft.tokens.tolist()
    return [(row, drafted[row]) for row in rows]


def _node_logits(
    logits: Tensor, draft: Draft, process: Process | None, row: int, tokens: Sequence[int], node: int
) -> Tensor:
    """``(V,)`` fp32 logits of one node, as the verifier should see them."""
    shaped = logits[row, node].float()
    if process is not None:
        shaped = process(row, [tokens[step] for step in draft.trees[row].ancestors[node][1:]], shaped)
    if bool(shaped.isnan().any()):
        raise NanLogitsError("the logits are NaN")
    return shaped


def _node_probabilities(
    logits: Tensor,
    draft: Draft,
    process: Process | None,
    sampling: Sampling,
    row: int,
    tokens: Sequence[int],
    node: int,
) -> Tensor:
    probabilities = sampling.probabilities(_node_logits(logits, draft, process, row, tokens, node))
    if bool(probabilities[0].isnan()):  # every token is forbidden, or one is infinitely likely
        raise NanLogitsError("the logits give no probabilities (all -inf, or +inf)")
    return probabilities


def _draw_at(target: Callable[[int], Tensor], tree: Tree, stream: Chances, node: int) -> int:
    depth = len(tree.ancestors[node]) - 1
    return int(draw(target(node), stream.ahead(depth + 1)[depth]))


def _then(at: Callable[[int], Tensor], choose: Callable[[Tensor], int]) -> Callable[[int], int]:
    return lambda node: choose(at(node))


def _refuse_nan(broken: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
    if any(any(broken[row]) for row in rows):
        raise NanLogitsError("the logits are NaN")
