"""Training heads from the hidden-state cache with `transformers.Trainer`.

Everything about launching, precision, accumulation, schedules, checkpoints and trackers is the Trainer's; ours are the
module that turns a batch into a loss, and picking a checkpoint that a kill left whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from medusa_train.data.dataset import IGNORED
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.heads import MedusaHeads
from medusa_train.losses import LossWeights, medusa_loss


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

    def forward(
        self,
        hidden: Tensor,
        roots: Tensor,
        teacher_hidden: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
    ) -> dict[str, Tensor]:
        dtype = self.teacher_projection.dtype
        return medusa_loss(
            self.heads,
            hidden.to(dtype),
            roots,
            teacher_hidden.to(dtype),
            labels,
            self.teacher_projection,
            self.column_of_token,
            self.weights,
            num_items_in_batch,
            shape_logits=self.shape_logits,
            embed=self.embed,
        )._asdict()


def train_heads(
    heads: MedusaHeads,
    backbone: Backbone,
    dataset: Dataset[dict[str, Tensor]],
    weights: LossWeights,
    folder: Path,
    arguments: dict[str, Any],
) -> Trainer:
    """Train ``heads`` in place; goes on from the last whole checkpoint in ``folder``.

    Args:
        arguments: for `transformers.TrainingArguments`, under their own names.
    """
    training_arguments = TrainingArguments(
        output_dir=str(folder),
        remove_unused_columns=False,  # samples are tensors, not dataset columns
        save_strategy="steps",
        save_total_limit=2,
        logging_strategy="steps",
        **arguments,
    )
    trainer = Trainer(
        model=HeadsForTraining(heads, backbone, weights),
        args=training_arguments,
        train_dataset=dataset,
        data_collator=_already_collated,
    )
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder))
    return trainer


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end; unfinished ones are removed.

    The Trainer writes ``trainer_state.json`` last, so a checkpoint without a readable one is torn.
    """
    whole = []
    for checkpoint in folder.glob("checkpoint-*"):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(checkpoint, ignore_errors=True)
        else:
            whole.append(checkpoint)
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def _already_collated(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`HeadsDataset.__getitems__` returns whole batches."""
    return batch
