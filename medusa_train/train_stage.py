"""The stage that trains: heads from hidden states, and with ``lora`` an adapter of the backbone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from torch import Tensor
from transformers import TrainerState, set_seed

from medusa_train.data.dataset import HeadsDataset, draft_vocabulary
from medusa_train.data.hidden_states import Shard, read_cache
from medusa_train.data.packing import PackedRows, answer_tokens, check_packing
from medusa_train.data.rows import first_rows
from medusa_train.estimate import heads_config
from medusa_train.eval.drift import measure_drift
from medusa_train.eval.heads_quality import first_positions
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.checkpoint import ADAPTER, save_heads
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import MedusaHeads
from medusa_train.job import Job
from medusa_train.joint import JointHeads, JointTrainer, check_launch
from medusa_train.losses import LossWeights
from medusa_train.online import OnlineHeads
from medusa_train.trainer import Evaluation, HeadsForTraining, HeadsTrainer, train_heads, whole_heads


def run_train(job: Job) -> dict[str, Any]:
    """Train heads, and with ``lora`` an adapter, into ``heads/``; every rank of a distributed launch runs this."""
    recipe, folder, state = job.recipe, job.folder, PartialState()
    training, online = recipe.training, recipe.training.mode == "online"
    if recipe.lora:
        check_launch()
    rows = job.rows("train") if online else []
    shards = [] if online else read_cache(folder.stage("cache") / "train")
    with state.main_process_first():
        if state.is_main_process:
            folder.begin("train")
    set_seed(recipe.seed)
    backbone = job.backbone
    if online:
        check_packing(backbone)
        _check_answers(max(end - start for row in rows for start, end in row.spans), recipe.heads.num_heads)
    else:
        _check_cache(job, shards)
    draft_size = recipe.heads.draft_vocab_size
    if draft_size > backbone.vocab_size:
        raise UserError(f"heads.draft_vocab_size={draft_size}, but the backbone has {backbone.vocab_size} tokens")
    config = heads_config(recipe, backbone.hidden_size, backbone.vocab_size)
    answers = answer_tokens(rows) if online else (shard.tokens for shard in shards)
    kept, _ = draft_vocabulary(answers, config.projection_size, backbone.vocab_size)
    heads = MedusaHeads.for_backbone(backbone, config, kept if draft_size else None)
    weights = LossWeights.of(training)
    joint = JointHeads(heads, backbone, weights, recipe.lora) if recipe.lora else None
    model = joint or (OnlineHeads if online else HeadsForTraining)(heads, backbone, weights)
    dataset: HeadsDataset | PackedRows = (
        PackedRows(rows, config.num_heads, training.pack_tokens, recipe.seed)
        if online
        else HeadsDataset(shards, config.num_heads)
    )
    evaluation = None
    if joint and training.steps_between_evaluations:
        answers_seen = first_rows(job.rows("calibration"), training.eval_positions)
        states = partial(joint.shards, answers_seen, recipe.data.cache_batch_tokens)
        # A fresh adapter changes nothing, so the first states are the backbone's own.
        evaluation = Evaluation(states(), training.eval_tree_size, recipe.inference.max_rank, states, _prompts(job))
    elif training.steps_between_evaluations:
        calibration = first_positions(read_cache(folder.stage("cache") / "calibration"), training.eval_positions)
        evaluation = Evaluation(calibration, training.eval_tree_size, recipe.inference.max_rank, prompts=_prompts(job))
    trainer = train_heads(
        model, backbone, dataset,
        folder.stage("train"),
        {
            **training.trainer_arguments(),
            "seed": recipe.seed,
            "bf16": backbone.dtype == torch.bfloat16,
            "use_cpu": backbone.device.type == "cpu" and state.distributed_type != DistributedType.DEEPSPEED,
            "run_name": folder.path.name,
            "project": "medusa-train",  # of trackio
        },
        evaluation,
        training.early_stopping_patience,
        JointTrainer if joint else HeadsTrainer,
    )  # fmt: skip
    trained, drift = whole_heads(trainer, heads), {}
    if trained and joint:
        joint.train(False)
        joint.lora.save(folder.heads / ADAPTER, backbone.source)
        backbone = Backbone.wrap(backbone.model, backbone.source)  # for the adapted model's probe
        drift = measure_drift(backbone, joint.lora.off, job.rows("heldout"))
    if trained:
        save_heads(folder.heads, trained, backbone, adapted=joint is not None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "positions": dataset.positions if isinstance(dataset, PackedRows) else len(dataset),
        "optimizer_steps": trainer.state.global_step,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "draft_vocabulary_coverage": _coverage(kept, read_cache(folder.stage("cache") / "calibration")),
        **_best(trainer.state, training.metric_for_best_model),
        **drift,
    }


def _prompts(job: Job) -> list[Tensor]:
    """What an evaluation decodes answers to: calibration texts up to their first answer."""
    count = job.recipe.training.eval_prompts
    return [torch.tensor(row.input_ids[: row.spans[0][0]]) for row in job.rows("calibration")[:count]] if count else []


def _coverage(kept: Tensor, shards: Sequence[Shard]) -> float:
    """Share of the calibration answers' tokens that heads can draft; they were not counted when it was chosen."""
    tokens = torch.cat([shard.tokens for shard in shards])
    return float(torch.isin(tokens, kept).float().mean())


def _best(state: TrainerState, metric: str) -> dict[str, Any]:
    """The best evaluation, and the step that the heads are of."""
    if state.best_metric is None:
        return {}
    return {"best_step": state.best_global_step, f"best_{metric}": state.best_metric}


def _check_cache(job: Job, shards: Sequence[Shard]) -> None:
    """Refuse hidden states that these heads cannot learn from.

    Raises:
        UserError: another backbone made them, or no answer is long enough for the last head.
    """
    backbone, folder, num_heads = job.backbone, job.folder.stage("cache"), job.recipe.heads.num_heads
    again = f"remove {folder} and run medusa-train cache again"
    width = shards[0].hidden.shape[1]
    if width != backbone.hidden_size or max(int(shard.tokens.max()) for shard in shards) >= backbone.vocab_size:
        raise UserError(
            f"{folder} was made by another backbone than {backbone.source} (hidden states of width {width}); {again}"
        )
    probe = job.folder.result("cache")["result"].get("backbone_probe")
    try:
        backbone.check_probe(probe and tuple(probe), str(folder))
    except UserError as error:
        raise UserError(f"{folder} was made by another backbone than {backbone.source}; {again}") from error
    _check_answers(max(int((shard.ends - torch.arange(len(shard.ends))).max()) for shard in shards), num_heads)


def _check_answers(longest: int, num_heads: int) -> None:
    """Refuse more heads than the longest answer, of so many tokens, can teach."""
    if longest <= num_heads:
        raise UserError(
            f"heads.num_heads={num_heads}, but the longest training answer has {longest} tokens, too few for head "
            f"{longest} and later ones; set heads.num_heads={max(1, longest - 1)} or make longer answers"
        )
