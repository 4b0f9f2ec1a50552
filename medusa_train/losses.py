"""The training loss, as a pure function of hidden states.

For head k at position t with target token y = x_{t+k+1}::

    loss = sum_k  lambda * gamma^(k-1) * mean over valid positions of
                  (1 - alpha) * CE(y)  +  alpha * T^2 * KL(backbone's distribution at t+k  ||  head k)

The weights gamma^(k-1) are those of Cai et al. 2024 ("Medusa", equation 1), where gamma is called lambda; the soft term
is distillation from the backbone's own next-token distribution, projected from its hidden state at t+k, both at
temperature T; T^2 keeps its gradients as large as at T = 1 (Hinton et al. 2015, section 2). The mean is
over the valid (position, head) pairs of the global batch, divided by K, so splitting a batch over accumulation steps
or ranks with unequal counts gives the same gradient. With ``by_acceptance`` a position counts in head k's mean by the
chance that its draft gets there: the product of the probabilities that heads 1 to k-1 give their targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from medusa_train.data.dataset import IGNORED
from medusa_train.fused_loss import fused_loss
from medusa_train.inference.candidates import Embed, embeddings
from medusa_train.inference.heads import MedusaHeads
from medusa_train.recipe import TrainingSection


@dataclass(frozen=True)
class LossWeights:
    """The knobs of the loss.

    Attributes:
        scale: lambda, the weight of the whole.
        decay: gamma, how much less each further head counts.
        soft_share: alpha, 0 for hard labels only, 1 for the backbone's distribution only.
        soft_temperature: T.
        by_acceptance: head k's loss at a position counts by the chance that heads 1 to k-1 are accepted there.
        fused: with the kernel of liger-kernel; see `fused_loss`.
    """

    scale: float = 1.0
    decay: float = 0.8
    soft_share: float = 0.5
    soft_temperature: float = 1.0
    by_acceptance: bool = False
    fused: bool = False

    @classmethod
    def of(cls, training: TrainingSection) -> LossWeights:
        """As a recipe says."""
        return cls(
            training.loss_scale, training.loss_decay, training.soft_share, training.soft_temperature,
            training.weight_by_acceptance, training.use_liger_kernel,
        )  # fmt: skip


class HeadsLoss(NamedTuple):
    """The loss to minimise, and what it is made of.

    Attributes:
        loss: scalar, differentiable.
        sums: ``(K,)`` detached: every head's loss summed over its valid positions as they count, before lambda and
            gamma. Sums and counts add up over accumulation steps and ranks; their quotient is a head's mean loss.
        counts: ``(K,)`` valid positions of each head.
    """

    loss: Tensor
    sums: Tensor
    counts: Tensor


def medusa_loss(
    heads: MedusaHeads,
    hidden: Tensor,
    roots: Tensor,
    teacher_hidden: Tensor,
    labels: Tensor,
    copies: Tensor,
    teacher_projection: Tensor,
    column_of_token: Tensor,
    weights: LossWeights,
    num_items: Tensor | int | None = None,
    chunk: int = 1024,
    shape_logits: Callable[[Tensor], Tensor] = lambda logits: logits,
    embed: Embed | None = None,
) -> HeadsLoss:
    """Loss of all heads over a batch of positions; differentiable in the heads' parameters.

    Logits are made for ``chunk`` positions of one head at a time, and remade in the backward pass unless gradients are
    made at once (`LossWeights.fused`), so the peak memory depends on neither the batch nor K.

    Args:
        hidden: ``(B, hidden)`` inputs of the heads.
        roots: ``(B,)`` the token after each; heads that read tokens read it and, in training, the true ones after it.
        teacher_hidden: ``(B, K, hidden)`` backbone states whose projections are the soft labels.
        labels: ``(B, K)`` token ids, `IGNORED` where there is no target, and then also for all later heads.
        copies: ``(B, m >= K)`` what followed the root's words before, for heads that read it.
        teacher_projection: ``(V', hidden)`` rows of the backbone's projection for the draft vocabulary.
        column_of_token: ``(V,)`` token id -> column of a head, `IGNORED` outside the draft vocabulary. Such targets
            carry no hard loss; the soft loss is over the draft vocabulary.
        num_items: valid (position, head) pairs of the global batch; those of this batch by default.
        shape_logits: what the backbone does to raw projections (`Backbone.shape_logits`).
        embed: the backbone's embedding, for heads that read tokens or copies.

    Returns:
        The loss, exactly zero with zero gradient for a batch without a valid position, and each head's part in it.
    """
    valid = labels != IGNORED
    if num_items is None:
        num_items = valid.sum()
    positions_per_head = torch.as_tensor(num_items, device=hidden.device).clamp(min=1) / heads.config.num_heads

    tokens = torch.cat([roots[:, None], labels], dim=1)

    # The chance that a position's draft gets to the head at hand.
    reached = torch.ones(len(labels), device=hidden.device) if weights.by_acceptance else None

    def chunk_loss(
        head: int,
        inputs: Tensor,
        before: Tensor,
        copied: Tensor,
        teacher: Tensor,
        columns: Tensor,
        count: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Summed loss of one head over a chunk of valid positions as they ``count``, and each target's probability."""
        read = embeddings(heads.config, embed, before, copied)
        logits = shape_logits(heads(inputs, head, *read)).float()
        hard = functional.cross_entropy(logits, columns, ignore_index=IGNORED, reduction="none")
        loss = (1 - weights.soft_share) * _total(hard, count)
        if weights.soft_share:
            temperature = weights.soft_temperature
            with torch.no_grad():
                wanted = shape_logits(functional.linear(teacher, teacher_projection)).float() / temperature
            divergence = functional.kl_div(
                (logits / temperature).log_softmax(dim=-1), wanted.softmax(dim=-1), reduction="none"
            )
            loss = loss + weights.soft_share * temperature**2 * _total(divergence.sum(dim=-1), count)
        # No draft gets past a target outside the heads' vocabulary.
        return loss, (-hard.detach()).exp() * (columns != IGNORED)

    def fused_part(
        head: int, inputs: Tensor, before: Tensor, copied: Tensor, teacher: Tensor, columns: Tensor, count: None
    ) -> tuple[Tensor, None]:
        """The same over any number of positions, which all count the same."""
        states = heads.read(inputs, head, *embeddings(heads.config, embed, before, copied))
        weight, scale = heads.projection(head).weight, float(shape_logits(torch.ones(())))
        loss = fused_loss(
            states, weight, teacher, teacher_projection, columns, weights.soft_share, weights.soft_temperature, scale,
            chunk,
        )  # fmt: skip
        return loss, None

    # As many parts on every rank, however many positions are valid there: ZeRO-3 gathers parameters for each of them,
    # and ranks that gather at different times wait for each other forever. A part without positions is computed too,
    # so that a batch without targets yields zeros and not missing gradients.
    parts = 1 if weights.fused else max(1, math.ceil(len(labels) / chunk))
    part_loss: Callable[..., tuple[Tensor, Tensor | None]] = fused_part if weights.fused else chunk_loss
    if parts > 1:  # a single chunk is the peak either way
        part_loss = partial(checkpoint, part_loss, use_reentrant=False)
    total = torch.zeros((), device=hidden.device)
    sums = []
    for head in range(heads.config.num_heads):
        rows = valid[:, head].nonzero()[:, 0]
        summed = torch.zeros((), device=hidden.device)
        for part in rows.tensor_split(parts):
            columns = column_of_token[labels[part, head]]
            loss, right = part_loss(
                head, hidden[part], tokens[part, : head + 1], copies[part], teacher_hidden[part, head], columns,
                None if reached is None else reached[part],
            )  # fmt: skip
            summed = summed + loss
            if reached is not None and right is not None:
                reached[part] *= right
        total = total + weights.scale * weights.decay**head * summed / positions_per_head
        sums.append(summed.detach())
    return HeadsLoss(total, torch.stack(sums), valid.sum(dim=0))


def _total(losses: Tensor, count: Tensor | None) -> Tensor:
    return losses.sum() if count is None else losses @ count
