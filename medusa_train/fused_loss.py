"""A head's loss through the fused kernel of liger-kernel; `losses.medusa_loss` without it is the reference.

At temperature 1, both terms of the loss are one divergence, from the mixture t = (1 - alpha) onehot(y) + alpha p of a
position's target token and the backbone's distribution p to the head's distribution q::

    (1 - alpha) CE(y) + alpha KL(p || q)  =  KL(t || q) + H(t) - alpha H(p)

The entropies H do not depend on the head. The kernel makes the gradients of KL(t || q) in the forward pass, so logits
are made once and kept nowhere; without it they are made a second time in the backward pass. At another temperature the
two terms are a divergence each.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from medusa_train.data.dataset import IGNORED
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError


def check_liger(backbone: Backbone, device: torch.device) -> None:
    """Refuse what the kernel cannot do.

    Args:
        device: where heads are trained; the backbone may be on the meta device.

    Raises:
        UserError: the package is missing, the device is no GPU, or the backbone caps its logits.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError(
            "training.use_liger_kernel needs a package that is missing; run: pip install 'medusa-train[liger]'"
        )
    # Triton compiles for GPUs alone; its interpreter runs anywhere, too slowly for anything but tests.
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError("training.use_liger_kernel needs a GPU; leave it out on this device")
    if backbone.caps_logits:
        raise UserError(f"training.use_liger_kernel cannot cap logits as {backbone.source} does; leave it out")


def fused_loss(
    states: Tensor,
    projection: Tensor,
    teacher: Tensor,
    teacher_projection: Tensor,
    columns: Tensor,
    soft_share: float,
    soft_temperature: float,
    logit_scale: float,
    chunk: int,
) -> Tensor:
    """Summed loss of a head over positions; differentiable, once, in its first two arguments.

    Args:
        states: ``(n, hidden)`` what the head makes of its inputs (`MedusaHeads.read`).
        projection: ``(V', hidden)`` its output projection.
        teacher: ``(n, hidden)`` backbone states of the soft labels.
        teacher_projection: ``(V', hidden)``.
        columns: ``(n,)`` columns of the target tokens, `IGNORED` outside the draft vocabulary.
        soft_share: alpha.
        soft_temperature: of both distributions of the soft term.
        logit_scale: what the backbone multiplies raw projections with.
        chunk: positions whose logits exist at a time.
    """
    # A scale of the logits is one of the states, whose gradient autograd then scales too.
    loss: Tensor = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        states * logit_scale, projection, teacher * logit_scale, teacher_projection, columns, soft_share,
        soft_temperature, chunk,
    )  # fmt: skip
    return loss


class _FusedLoss(torch.autograd.Function):
    """The kernel over chunks, whose gradients add up: its own chunks would need all targets at once."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        projection: Tensor,
        teacher: Tensor,
        teacher_projection: Tensor,
        columns: Tensor,
        soft_share: float,
        soft_temperature: float,
        chunk: int,
    ) -> Tensor:
        from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction

        total, factor = torch.zeros((), device=states.device), soft_share * soft_temperature**2
        weight = projection.detach().requires_grad_(ctx.needs_input_grad[1])
        by_states = torch.zeros_like(states)
        by_projection = torch.zeros_like(projection) if weight.requires_grad else None
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            wanted = columns[part]
            hard = torch.zeros(len(wanted), len(projection), device=states.device)
            known = (wanted != IGNORED).nonzero()[:, 0]
            hard[known, wanted[known]] = 1 - soft_share
            targets = [(hard, 1.0)] if soft_share < 1 else []
            if soft_share:
                logits = functional.linear(teacher[part], teacher_projection).float()
                soft = (logits / soft_temperature).softmax(dim=-1)
                total -= factor * torch.special.entr(soft).sum()
                soft *= factor
                targets = [(hard + soft, 1.0)] if soft_temperature == 1 else [*targets, (soft, soft_temperature)]
            inputs = states[part].detach().requires_grad_()
            for target, temperature in targets:
                total += torch.special.entr(target).sum()
                with torch.enable_grad():
                    divergence = LigerFusedLinearKLDivFunction.apply(
                        inputs, weight, target, None, "sum", IGNORED, temperature, 1e-30, torch.float32
                    )
                total += divergence.detach()
                gradients = torch.autograd.grad(divergence, (inputs, weight) if weight.requires_grad else (inputs,))
                by_states[part] += gradients[0]
                if by_projection is not None:
                    by_projection += gradients[1]
        ctx.save_for_backward(by_states, by_projection)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        by_states, by_projection = ctx.saved_tensors
        scaled = None if by_projection is None else by_projection * upstream
        return by_states * upstream, scaled, None, None, None, None, None, None
