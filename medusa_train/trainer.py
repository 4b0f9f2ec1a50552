"""Training heads from the hidden-state cache with `transformers.Trainer`.

Everything about launching, precision, accumulation, schedules, checkpoints, early stopping and trackers is the
Trainer's; ours are the module that turns a batch into a loss, what heads are measured by, and going on exactly where a
kill or a preemption left off.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from medusa_train.data.dataset import IGNORED, HeadsDataset
from medusa_train.data.hidden_states import Shard
from medusa_train.data.packing import PackedRows
from medusa_train.eval.acceptance import token_ranks
from medusa_train.eval.heads_quality import decoded_tokens_per_step, heads_quality
from medusa_train.eval.tree_search import best_tree, count_prefixes
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads
from medusa_train.inference.model import MedusaModel
from medusa_train.losses import HeadsLoss, LossWeights, medusa_loss
from medusa_train.reporting import Preempted
from medusa_train.training_callbacks import ConsoleProgress, RememberBest, StopOnSigterm
from medusa_train.training_checkpoints import STATE, check_shapes, check_world_size, last_whole_checkpoint, read_state

NAMED_POSITIONS = 4  # of a batch that went wrong


@dataclass(frozen=True)
class Evaluation:
    """How heads are measured while they are trained.

    Attributes:
        shards: hidden states of calibration answers, which are neither trained on nor in the final report.
        tree_size: tokens per pass of the tree whose tokens per step are expected.
        max_rank: best tokens of a head that it may use.
        current: makes the states of these answers anew, where training changes what heads read; ``shards`` then hold
            the states that they imitate.
        prompts: ``(T,)`` token ids each, that an answer is decoded to.
    """

    shards: Sequence[Shard]
    tree_size: int = 16
    max_rank: int = 10
    current: Callable[[], Sequence[Shard]] | None = None
    prompts: Sequence[Tensor] = ()


class HeadsForTraining(nn.Module):
    """Heads together with what the loss needs of the backbone; its forward pass returns the loss.

    The backbone itself is not in here: cached hidden states and the rows of its projection are all that is used.
    """

    accepts_loss_kwargs = True  # the Trainer then passes the global count and does not divide by accumulation steps

    teacher_projection: Tensor
    column_of_token: Tensor

    def __init__(self, heads: MedusaHeads, backbone: Backbone, weights: LossWeights) -> None:
        super().__init__()
        self.heads, self.weights = heads, weights
        self.shape_logits: Callable[[Tensor], Tensor] = backbone.shape_logits
        self.embed = backbone.embed
        ids = heads.draft_token_ids
        columns = torch.full((heads.config.vocab_size,), IGNORED, device=ids.device)
        columns[ids] = torch.arange(len(ids), device=ids.device)
        self.register_buffer("column_of_token", columns, persistent=False)
        projection = backbone.projection_rows(ids).to(next(heads.parameters()))
        self.register_buffer("teacher_projection", projection, persistent=False)

    def forward(self, num_items_in_batch: Tensor | int | None = None, **batch: Tensor) -> dict[str, Tensor]:
        return self.loss_of(self.heads, **self.samples(batch), num_items=num_items_in_batch)._asdict()

    def samples(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What `loss_of` takes, from a batch of the dataset: here the batch itself."""
        return batch

    def loss_of(
        self,
        heads: MedusaHeads,
        hidden: Tensor,
        roots: Tensor,
        teacher_hidden: Tensor,
        labels: Tensor,
        copies: Tensor,
        num_items: Tensor | int | None = None,
    ) -> HeadsLoss:
        """The loss of any heads of this shape; see `medusa_loss`."""
        dtype = self.teacher_projection.dtype
        return medusa_loss(
            heads,
            hidden.to(dtype),
            roots,
            teacher_hidden.to(dtype),
            labels,
            copies,
            self.teacher_projection,
            self.column_of_token,
            self.weights,
            num_items,
            shape_logits=self.shape_logits,
            embed=self.embed,
        )


class HeadsTrainer(Trainer):
    """The Trainer, with a loss per head, evaluation in tokens per step, and a stop at the first loss that is none."""

    leaves_parameters_out = False  # whether a step may leave some parameter without a gradient

    control: TrainerControl

    def __init__(
        self,
        model: HeadsForTraining,
        backbone: Backbone,
        dataset: HeadsDataset | PackedRows,
        evaluation: Evaluation | None,
        args: TrainingArguments,
    ) -> None:
        self.backbone, self.evaluation = backbone, evaluation
        num_heads = model.heads.config.num_heads
        calibration = HeadsDataset(evaluation.shards, num_heads) if evaluation else None
        super().__init__(
            model=model,
            args=args,
            train_dataset=dataset,
            eval_dataset=calibration,
            data_collator=_already_collated,
        )
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        # Since the last log: every head's summed loss and count, and when its first batch came.
        self._parts = torch.zeros(2, num_heads, device=args.device)
        self._positions, self._since = 0, time.monotonic()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As in the Trainer, and kept per head.

        Raises:
            UserError: the loss is NaN or infinite; the step and the batch's positions are named.
        """
        if not self._positions:
            self._since = time.monotonic()
        index = inputs.pop("index")
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if not torch.isfinite(loss):
            raise self._diverged(f"the loss is {loss.item()}", index, inputs.get("hidden"))
        self._parts += torch.stack([outputs["sums"], outputs["counts"]])
        self._positions += len(index)
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """As in the Trainer, which has no hook that sees the norm before the step is taken."""
        norm = super()._clip_grad_norm(model)
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            raise self._diverged(f"the gradient's norm is {float(norm)}")
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in the Trainer, with each head's mean loss and the speed since the last time."""
        if "loss" in logs:
            sums, counts = self.accelerator.reduce(self._parts, "sum").tolist()
            logs |= {
                f"loss_h{head}": total / count
                for head, (total, count) in enumerate(zip(sums, counts, strict=True), start=1)
                if count
            }
            logs["positions_per_second"] = counts[0] / (time.monotonic() - self._since)
            self._parts.zero_()
            self._positions = 0
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the heads on the calibration answers; see `heads_quality`, and the loss with its part per head.

        A copy of the heads is measured, as decoding would use it, by rank 0; neither the trained module nor any random
        state notices.
        """
        started = time.monotonic()
        with torch.random.fork_rng([self.args.device] if self.args.device.type == "cuda" else []):
            whole = whole_heads(self, self.model.heads)
            figures = [self._measure(whole) if whole else {}]
        broadcast_object_list(figures)
        metrics = {f"{metric_key_prefix}_{name}": figure for name, figure in figures[0].items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._since += time.monotonic() - started  # not training time
        return metrics

    @torch.no_grad()
    def _measure(self, heads: MedusaHeads) -> dict[str, float]:
        assert self.evaluation is not None
        heads.share_projection(self.backbone)
        shards = self.evaluation.current() if self.evaluation.current else self.evaluation.shards
        read = HeadsDataset(shards, heads.config.num_heads)
        ranks = token_ranks(MedusaModel(self.backbone, heads), shards)
        figures = heads_quality(ranks, self.evaluation.tree_size, self.evaluation.max_rank)
        if self.evaluation.prompts:
            training = self.model.training
            self.model.train(False)  # the adapter of a backbone that is trained as well has dropout
            tree = best_tree(count_prefixes(ranks.calibration(), self.evaluation.max_rank), self.evaluation.tree_size)
            decoding = MedusaModel(self.backbone, heads, tree)
            if decoded := decoded_tokens_per_step(decoding, self.evaluation.prompts):
                figures["decoded_tokens_per_step"] = decoded
            self.model.train(training)
        loss, parts = 0.0, torch.zeros_like(self._parts)
        with self.accelerator.autocast():
            for indices in torch.arange(len(self.eval_dataset)).split(self.args.eval_batch_size):
                batch = self.eval_dataset.__getitems__(indices)
                batch["hidden"] = read.__getitems__(indices)["hidden"]
                batch = self._prepare_inputs(batch)
                batch.pop("index")
                part = self.model.loss_of(heads, **batch)
                loss += float(part.loss * part.counts.sum())
                parts += torch.stack([part.sums, part.counts])
        figures["loss"] = loss / max(1.0, float(parts[1].sum()))
        means = (parts[0] / parts[1].clamp(min=1)).tolist()
        return figures | {f"loss_h{head}": mean for head, mean in enumerate(means, start=1)}

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in the Trainer; what a full disk cut off gives its space back. The one before it is still there."""
        try:
            super()._save_checkpoint(model, trial)
        except Exception:
            if self.args.should_save:
                shutil.rmtree(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}", ignore_errors=True)
            raise

    def planned_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps: int = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
        return steps

    def _diverged(self, what: str, index: Tensor | None = None, hidden: Tensor | None = None) -> UserError:
        """The error that says where training went wrong and what is left of it."""
        where = ""
        if index is not None:
            named, kind = index, "its batch"
            if hidden is not None and (damaged := ~torch.isfinite(hidden).all(dim=1)).any():
                named = index[damaged]
                kind = f"{len(named)} hidden states of its batch are not finite"
            places = ", ".join(self.train_dataset.place(i) for i in named[:NAMED_POSITIONS].tolist())
            more = ", …" if len(named) > NAMED_POSITIONS else ""
            where = f" ({kind}: {places}{more})"
        step, last = self.state.global_step + 1, self.state.global_step // self.args.save_steps * self.args.save_steps
        kept = f"checkpoint-{last} is kept" if last else "nothing was saved yet"
        return UserError(
            f"training stopped before step {step}: {what}{where}; {kept}; lower training.learning_rate, or remake the "
            "cache if its states are damaged, and use --overwrite"
        )


def train_heads(
    model: HeadsForTraining,
    backbone: Backbone,
    dataset: HeadsDataset | PackedRows,
    folder: Path,
    arguments: dict[str, Any],
    evaluation: Evaluation | None = None,
    early_stopping_patience: int | None = None,
    trainer_class: type[HeadsTrainer] = HeadsTrainer,
) -> HeadsTrainer:
    """Train the heads of ``model`` in place; goes on from the last whole checkpoint in ``folder``.

    Args:
        arguments: for `transformers.TrainingArguments`, under their own names.
        evaluation: measure the heads every ``eval_steps``; by default never.
        early_stopping_patience: stop after so many evaluations without a better one.
        trainer_class: for training that is more than heads.

    Raises:
        Preempted: SIGTERM came; a checkpoint was saved, and the same call goes on from it.
        UserError: the loss is not finite, or the checkpoint is of other heads or another number of processes.
    """
    training_arguments = TrainingArguments(
        output_dir=str(folder),
        remove_unused_columns=False,  # samples are tensors, not dataset columns
        save_strategy="steps",
        save_total_limit=2,  # the last and, if they are compared, the best
        logging_strategy="steps",
        logging_nan_inf_filter=False,  # such a loss ends the training
        eval_strategy="steps" if evaluation else "no",
        restore_callback_states_from_checkpoint=True,  # the patience of early stopping
        # The loss touches every parameter of heads, whatever the batch holds.
        ddp_find_unused_parameters=trainer_class.leaves_parameters_out,
        ddp_broadcast_buffers=False,  # the backbone's projection rows are the same everywhere
        **arguments,
    )
    # One process drives one device; several in one process would be torch's DataParallel.
    training_arguments._n_gpu = min(training_arguments.n_gpu, 1)
    # Otherwise the last batch of an epoch is filled up with samples from its start, and how many depends on the ranks.
    batch = training_arguments.per_device_train_batch_size * training_arguments.world_size
    training_arguments.dataloader_drop_last = len(dataset) >= batch
    trainer = trainer_class(model, backbone, dataset, evaluation, training_arguments)
    sigterm, progress = StopOnSigterm(), ConsoleProgress()
    for callback in (sigterm, progress, RememberBest(folder)):
        trainer.add_callback(callback)
    if early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience))
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    if model.weights.fused and (trainer.is_fsdp_enabled or (plugin and plugin.zero_stage == 3)):
        raise UserError(
            "training.use_liger_kernel needs whole projections; launch with ddp.yaml, zero1.yaml or zero2.yaml"
        )
    checkpoint = last_whole_checkpoint(folder, sharded)
    if checkpoint:
        check_world_size(checkpoint, training_arguments.world_size)
        if not sharded:
            check_shapes(checkpoint, {name: tensor.shape for name, tensor in trainer.model.state_dict().items()})
            if _is_over(read_state(checkpoint), trainer.planned_steps()):
                return _load_finished(trainer, checkpoint)
    try:
        # Nothing is unpickled: transformers reads weights with safetensors, and optimizer, schedule and random states
        # with torch.load(weights_only=True).
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        sigterm.restore()
        progress.close()
    if sigterm.stopped:
        raise Preempted(
            f"stopped by SIGTERM after step {trainer.state.global_step} of {trainer.state.max_steps}, saved in "
            f"{folder}; the same command goes on from here"
        )
    return trainer


def whole_heads(trainer: HeadsTrainer, heads: MedusaHeads) -> MedusaHeads | None:
    """The heads that ``trainer`` trained, gathered from all ranks; every rank calls this, rank 0 gets them.

    Under ZeRO-3 and FSDP the parameters of ``heads`` are one rank's shares, or empty.
    """
    prefix = next(name for name, module in trainer.model.named_modules() if module is heads) + "."
    tensors = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.is_world_process_zero():
        return None
    whole = MedusaHeads(heads.config, tensors[prefix + "draft_token_ids"])
    whole.load_state_dict({name: tensors[prefix + name] for name in whole.state_dict()}, assign=True)
    whole.to(trainer.args.device).share_projection(trainer.backbone)
    return whole


def _is_over(state: dict[str, Any], planned_steps: int) -> bool:
    """Whether a checkpoint was the run's last: the Trainer, resumed from it, would take one more step."""
    early = state["stateful_callbacks"].get("EarlyStoppingCallback")
    if early:
        patience = early["args"]["early_stopping_patience"]
        if early["attributes"]["early_stopping_patience_counter"] >= patience:
            return True
    return bool(state["global_step"] >= planned_steps)


def _load_finished(trainer: HeadsTrainer, checkpoint: Path) -> HeadsTrainer:
    """What `Trainer.train` leaves behind, from the last checkpoint of a run that was killed after it."""
    trainer.state = TrainerState.load_from_json(str(checkpoint / STATE))
    best = checkpoint.parent / f"checkpoint-{trainer.state.best_global_step}"
    use_best = trainer.args.load_best_model_at_end and best.exists()
    trainer._load_from_checkpoint(str(best if use_best else checkpoint))
    return trainer


def _already_collated(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`HeadsDataset.__getitems__` returns whole batches."""
    return batch
