"""Medusa-2: heads and a LoRA adapter of the backbone, trained together.

After a warm-up of the heads alone, the loss of a step is::

    loss = KL(backbone without adapter || backbone with it) + weight * heads' loss

(Cai et al. 2024, "Medusa", section 2.2.2, with the first term of section 2.3.2). The model itself, with the adapter
switched off, is the reference, so that the backbone stays what it was. The heads read the adapted states and imitate
the backbone without adapter. Both terms have one denominator, the positions per head of
the global batch, so the gradient does not depend on how a batch is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from medusa_train.data.dataset import IGNORED
from medusa_train.data.hidden_states import Shard, shard_of
from medusa_train.data.rows import Row
from medusa_train.inference.adapter import Adapter
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads
from medusa_train.losses import LossWeights
from medusa_train.online import OnlineHeads, packed_samples
from medusa_train.recipe import LoraSection
from medusa_train.trainer import HeadsTrainer

Ramp = Literal["sine", "linear"]
HEADS_RATE = 4  # learning rate of the heads / of the adapter


def heads_weight(step: int, steps: int, warmup: int, ramp: Ramp) -> float:
    """What the heads' loss counts in a step: 1 while they warm up, then from near 0 up to 1 in the last step.

    Args:
        step: ``0..steps - 1``.
        warmup: steps of heads alone.
    """
    if step < warmup:
        return 1.0
    share = (step - warmup + 1) / (steps - warmup)
    return share if ramp == "linear" else math.sin(share * math.pi / 2)


class JointHeads(OnlineHeads):
    """Heads and the adapter of their backbone; the frozen weights are in neither its parameters nor its state."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, weights: LossWeights, section: LoraSection) -> None:
        super().__init__(heads, backbone, weights)
        self.section = section
        self.lora = Adapter.put_on(
            backbone.model, section.r, section.alpha, section.dropout, section.target_modules
        )  # a plain attribute, as the backbone is: its layers are the backbone's
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): parameter for name, parameter in self.lora.parameters().items()}
        )
        self.begin_step(0, 1)

    def begin_step(self, step: int, steps: int) -> None:
        """Say which of so many optimizer steps the next passes belong to."""
        share = self.section.warmup_steps
        warmup = int(share) if share >= 1 else math.ceil(steps * share)  # as in TrainingArguments
        self.warming_up = step < warmup
        self.heads_weight = heads_weight(step, steps, warmup, self.section.ramp)

    def train(self, mode: bool = True) -> JointHeads:
        """As in torch; of the backbone, only the adapter's dropout follows."""
        super().train(mode)
        self.lora.train(mode)
        return self

    def forward(self, num_items_in_batch: Tensor | int | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """The loss and its parts: those of `HeadsLoss`, and ``divergence`` ``(2,)``, summed KL and its positions."""
        with torch.no_grad(), self.lora.off():
            frozen = self.states(batch)
        # Without gradients of its own in the warm-up, the adapter has no optimizer state either.
        adapted = frozen if self.warming_up else self.states(batch)
        if num_items_in_batch is None:
            num_items_in_batch = (batch["labels"] != IGNORED).sum()
        heads = self.loss_of(self.heads, **packed_samples(batch, adapted, frozen), num_items=num_items_in_batch)
        outputs = heads._asdict()
        outputs["loss"] = self.heads_weight * heads.loss
        outputs["divergence"] = torch.zeros(2, device=frozen.device)
        if not self.warming_up:
            places = answer_places(batch["labels"]).flatten().nonzero()[:, 0]
            summed = summed_divergence(frozen[places], adapted[places], self.backbone.logits)
            positions = torch.as_tensor(num_items_in_batch).clamp(min=1) / self.heads.config.num_heads
            outputs["loss"] = outputs["loss"] + summed / positions.to(summed.device)
            outputs["divergence"] = torch.stack([summed.detach(), summed.new_tensor(len(places))])
        return outputs

    def shards(self, rows: Sequence[Row], batch_tokens: int) -> list[Shard]:
        """The states that heads read at the learnt tokens of some rows, with the adapter as it is now."""
        training = self.training
        self.train(False)
        made = [shard_of(self.backbone, rows, batch_tokens)]
        self.train(training)
        return made


def answer_places(labels: Tensor) -> Tensor:
    """Where the backbone predicts an answer's token, from the heads' labels: ``(N, L, K)`` -> ``(N, L)`` bool.

    Head 1 has a target at all of these places but an answer's last, the one before it ends.
    """
    targets = labels[:, :, 0] != IGNORED
    return targets | functional.pad(targets, (1, 0))[:, :-1]


def summed_divergence(frozen: Tensor, adapted: Tensor, logits: Callable[[Tensor], Tensor], chunk: int = 256) -> Tensor:
    """KL of the next-token distributions, summed over positions; differentiable in ``adapted``.

    Logits are made for ``chunk`` positions at a time and remade in the backward pass.

    Args:
        frozen: ``(T, hidden)`` states whose distributions are the reference.
        adapted: ``(T, hidden)``.
        logits: ``(T, hidden)`` -> ``(T, vocab)``.
    """

    def part(reference: Tensor, states: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = logits(reference).float().log_softmax(dim=-1)
        found = logits(states).float().log_softmax(dim=-1)
        return functional.kl_div(found, wanted, log_target=True, reduction="sum")

    summed = torch.zeros((), device=adapted.device)
    for reference, states in zip(frozen.split(chunk), adapted.split(chunk), strict=True):
        summed = summed + checkpoint(part, reference, states, use_reentrant=False)
    return summed


def check_launch() -> None:
    """Refuse launches that share parameters out: the adapter's are used inside the backbone, which is in no wrapper.

    Raises:
        UserError: this process was launched with DeepSpeed or FSDP.
    """
    if any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in ("DEEPSPEED", "FSDP")):
        raise UserError("lora trains on one device or under DDP; launch with cpu.yaml, ddp.yaml or multi_node.yaml")


class JointTrainer(HeadsTrainer):
    """The heads' trainer, with the adapter at a lower learning rate and the schedule of the two losses."""

    leaves_parameters_out = True  # the adapter's, while heads warm up

    model: JointHeads
    optimizer: torch.optim.Optimizer | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UserError(
                "lora: heads and adapter train on one device or under DDP; launch with ddp.yaml or cpu.yaml"
            )
        self._divergence = torch.zeros(2, device=self.args.device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in the Trainer, with two groups: all of the heads, biases too, and all of the adapter."""
        if self.optimizer is None:
            kind, keywords = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            rate, decay = self.args.learning_rate, self.args.weight_decay
            heads = [parameter for parameter in self.model.heads.parameters() if parameter.requires_grad]
            groups = [
                {"params": heads, "lr": rate, "weight_decay": decay},
                {"params": list(self.model.adapter.values()), "lr": rate / HEADS_RATE, "weight_decay": decay},
            ]
            self.optimizer = kind(groups, **keywords)
        return self.optimizer

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As in the Trainer, after the warm-up: before it the adapter has not moved, and the heads are unhindered."""
        return not self.model.warming_up and super()._determine_best_metric(metrics, trial)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As for heads; the weight of their loss is that of the step."""
        self.model.begin_step(self.state.global_step, self.state.max_steps)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._divergence += outputs["divergence"]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As for heads, with the mean KL to the backbone without adapter and what the heads' loss counts."""
        if "loss" in logs:
            summed, positions = self.accelerator.reduce(self._divergence, "sum").tolist()
            if positions:
                logs["kl_to_base"] = summed / positions
            logs["heads_weight"] = self.model.heads_weight
            self._divergence.zero_()
        super().log(logs, start_time)
