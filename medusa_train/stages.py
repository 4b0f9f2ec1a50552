"""The stages of a run, each a function of a `Job`: prompts, distill, cache, train, tree, eval.

Every stage reads what the one before it wrote, writes its own subfolder of the run, and can be run again: a finished
stage is left alone, an interrupted one goes on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, TrainerState, set_seed

from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.dataset import HeadsDataset, draft_vocabulary
from medusa_train.data.distill import answer_again, distill, take_conversations
from medusa_train.data.hidden_states import KeptStates, Shard, read_cache, write_cache
from medusa_train.data.packing import PackedRows, answer_tokens, check_packing
from medusa_train.data.prompts import load_prompts, synthesize_prompts
from medusa_train.data.rows import SPLITS, Row, Split, append_jsonl, first_rows, read_prompts, read_rows
from medusa_train.eval.acceptance import token_ranks
from medusa_train.eval.calibration import fit_temperatures
from medusa_train.eval.drift import measure_drift
from medusa_train.eval.evaluate import evaluate
from medusa_train.eval.heads_quality import first_positions
from medusa_train.eval.report import write_report
from medusa_train.eval.speed import measure_step_seconds
from medusa_train.eval.step_curve import fit_step_times
from medusa_train.eval.tree_search import TreeChoice, best_tree, choose_tree, count_prefixes, expected_tokens
from medusa_train.inference.adaptive import Calibration
from medusa_train.inference.attention import check_tree_attention
from medusa_train.inference.backbone import Backbone, load_backbone
from medusa_train.inference.checkpoint import ADAPTER, load_heads, save_heads, save_tree
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_json
from medusa_train.inference.heads import HeadsConfig, MedusaHeads
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.step import Step
from medusa_train.inference.tree import Tree
from medusa_train.joint import JointHeads, JointTrainer, check_launch
from medusa_train.losses import LossWeights
from medusa_train.model_card import write_model_card
from medusa_train.online import OnlineHeads
from medusa_train.recipe import Recipe
from medusa_train.run_folder import RunFolder
from medusa_train.trainer import Evaluation, HeadsForTraining, HeadsTrainer, train_heads, whole_heads
from medusa_train.training_callbacks import check_tracker

ROWS_PER_SHARD = 64
STEP_TIME_CONTEXT = 96  # tokens already read when steps are timed; steps stay in one bucket of compiled shapes


class Job:
    """A recipe, its folder, and the backbone, loaded once when a stage first needs it.

    With ``lora`` there are two of them, one in memory at a time: ``backbone`` writes the data and is trained;
    ``decoding_backbone``, with the trained adapter merged, is what trees and reports are made for.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folder = RunFolder(recipe)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_chat_tokenizer(self.recipe.backbone.source, self.recipe.backbone.chat_template)

    @cached_property
    def backbone(self) -> Backbone:
        return self._load(trainable=self.recipe.lora is not None)

    @cached_property
    def decoding_backbone(self) -> Backbone:
        if self.recipe.lora is None:
            return self.backbone
        self.__dict__.pop("backbone", None)
        return self._load(adapter=self.folder.heads / ADAPTER)

    def _load(self, adapter: Path | None = None, trainable: bool = False) -> Backbone:
        section = self.recipe.backbone
        backbone = load_backbone(
            section.source, section.dtype, section.device, section.quantization, section.trust_remote_code,
            adapter, trainable,
        )  # fmt: skip
        check_tree_attention(backbone)  # before hours are spent on heads that could not be used
        return backbone

    @cached_property
    def step(self) -> Step:
        """How the backbone's passes are made; kept, so that a shape is compiled once."""
        return Step(self.decoding_backbone, self.recipe.inference.compile)

    def rows(self, split: Split) -> list[Row]:
        return read_rows(self.folder.stage("distill") / "rows.jsonl", split)

    def measured(self, split: Split) -> list[Shard]:
        """Cached states and answers of the backbone that decodes; an adapted one's are of the tree stage."""
        return read_cache(self.folder.stage("tree" if self.recipe.lora else "cache") / split)

    def medusa_model(self) -> MedusaModel:
        """The trained heads on the job's backbone, with their tree if one was chosen."""
        checkpoint = load_heads(self.folder.heads)
        backbone = self.decoding_backbone
        backbone.check_probe(checkpoint.probe, str(self.folder.heads))
        return MedusaModel(backbone, checkpoint.heads, checkpoint.tree, checkpoint.calibration, self.step)


def run_prompts(job: Job) -> dict[str, Any]:
    """Write ``prompts/prompts.jsonl``."""
    data = job.recipe.data
    path = job.folder.begin("prompts") / "prompts.jsonl"
    if data.conversations:
        return {"prompts": 0, "source": data.conversations}
    if data.prompts == "synthesize":
        tokenizer = job.tokenizer  # first: it is small, and may have no chat template
        synthesize_prompts(
            job.backbone, tokenizer, path, data.num_prompts or 1000, data.prompt_max_tokens,
            data.prompt_temperature, data.prompt_top_k, data.batch_size, job.recipe.seed,
        )  # fmt: skip
    else:
        prompts = load_prompts(data.prompts, data.prompts_split, data.num_prompts)
        path.unlink(missing_ok=True)
        append_jsonl(path, prompts)
    return {"prompts": len(read_prompts(path)), "source": data.prompts}


def run_distill(job: Job) -> dict[str, Any]:
    """Write ``distill/rows.jsonl``, and ``distill/states/`` for the cache, which online training hardly has."""
    data, folder = job.recipe.data, job.folder
    stage = folder.begin("distill")
    path = stage / "rows.jsonl"
    if data.conversations:
        take_conversations(
            job.tokenizer, data.conversations, data.prompts_split, path, data.max_length,
            data.calibration_share, data.heldout_share,
        )  # fmt: skip
    else:
        tokenizer = job.tokenizer
        states = stage / "states" if job.recipe.training.mode == "cached" else None
        distill(
            job.backbone, tokenizer, read_prompts(folder.stage("prompts") / "prompts.jsonl"), path,
            states, data.answer_tokens, data.max_new_tokens, data.batch_size,
            data.calibration_share, data.heldout_share,
        )  # fmt: skip
    rows = read_rows(path)
    return {
        "rows": len(rows),
        "answer_tokens": sum(row.learnt_tokens for row in rows),
        "cut_by_length": sum(row.finish_reason == "length" for row in rows),
        **{f"{split}_rows": sum(row.split == split for row in rows) for split in SPLITS},
    }


def run_cache(job: Job) -> dict[str, Any]:
    """Write ``cache/<split>/shard-*.safetensors``; takes over what distillation kept, and removes it there.

    Online training needs no hidden states of its own rows.
    """
    folder, states = job.folder.begin("cache"), job.folder.stage("distill") / "states"
    kept = KeptStates(states)
    splits = [split for split in SPLITS if split != "train" or job.recipe.training.mode == "cached"]
    for split in splits:
        write_cache(
            job.backbone, job.rows(split), kept, folder / split, job.recipe.data.cache_batch_tokens, ROWS_PER_SHARD,
            split,
        )  # fmt: skip
    shutil.rmtree(states, ignore_errors=True)  # twice the disk is used until here, and not for longer
    positions = {split: sum(len(shard.tokens) for shard in read_cache(folder / split)) for split in splits}
    return positions | {"backbone_probe": list(job.backbone.probe)}


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
    config = HeadsConfig(
        recipe.heads.num_heads, recipe.heads.num_layers, backbone.hidden_size, backbone.vocab_size, draft_size,
        recipe.heads.kind, recipe.heads.lm_head,
    )  # fmt: skip
    answers = answer_tokens(rows) if online else (shard.tokens for shard in shards)
    kept, coverage = draft_vocabulary(answers, config.projection_size, backbone.vocab_size)
    heads = MedusaHeads.for_backbone(backbone, config, kept if draft_size else None)
    weights = LossWeights(training.loss_scale, training.loss_decay, training.soft_share)
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
        evaluation = Evaluation(states(), training.eval_tree_size, recipe.inference.max_rank, states)
    elif training.steps_between_evaluations:
        calibration = first_positions(read_cache(folder.stage("cache") / "calibration"), training.eval_positions)
        evaluation = Evaluation(calibration, training.eval_tree_size, recipe.inference.max_rank)
    trainer = train_heads(
        model, backbone, dataset,
        folder.stage("train"),
        {
            **training.trainer_arguments(),
            "seed": recipe.seed,
            "bf16": backbone.dtype == torch.bfloat16,
            "use_cpu": backbone.device.type == "cpu" and state.distributed_type != DistributedType.DEEPSPEED,
            "run_name": folder.path.name,
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
        "draft_vocabulary_coverage": coverage,
        **_best(trainer.state, training.metric_for_best_model),
        **drift,
    }


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


def run_tree(job: Job) -> dict[str, Any]:
    """Choose the tree, unless the recipe gives it; write it, and what adaptive drafting needs.

    Step times are measured either way, because adaptive drafting chooses among sizes while it decodes.
    """
    section, folder = job.recipe.inference, job.folder
    stage = folder.begin("tree")
    model = job.medusa_model()
    if job.recipe.lora:
        _measure_again(job)
    shards = job.measured("calibration")
    ranks = token_ranks(model, shards)
    max_rank = min(section.max_rank, model.heads.config.projection_size)
    prefixes = count_prefixes(ranks.calibration(), max_rank)
    # One token per pass is always measured: it is what every tree is compared with.
    trees = {size: best_tree(prefixes, size) for size in sorted({1, *section.tree_sizes})}
    candidates = {tree.size: tree for tree in trees.values()}
    given = Tree.from_paths(section.tree) if section.tree is not None else None
    if given:
        given.check(model.heads.config.num_heads, model.heads.config.projection_size)
        candidates[given.size] = given
    candidates = dict(sorted(candidates.items()))
    prompt = torch.tensor(job.rows("calibration")[0].input_ids[:STEP_TIME_CONTEXT])
    rounds = measure_step_seconds(
        model, list(candidates.values()), prompt, section.step_time_steps, section.step_time_rounds
    )
    times = fit_step_times(rounds)
    # A tree from the recipe may use ranks that the search leaves out.
    widest = max([max_rank, *(given.ranks_needed() if given else ())])
    counted = prefixes if widest == max_rank else count_prefixes(ranks.calibration(), widest)
    choices = {
        size: TreeChoice(tree, expected_tokens(counted, tree), seconds)
        for (size, tree), seconds in zip(candidates.items(), times.seconds, strict=True)
    }
    offered = {trees[size].size for size in section.tree_sizes}
    chosen = given or choose_tree([choices[size] for size in sorted(offered)], times.noise).tree
    largest = max(trees.values(), key=lambda tree: tree.size)
    step_seconds = {size: choice.step_seconds for size, choice in choices.items() if size <= largest.size}
    save_tree(folder.heads, chosen, Calibration(largest, fit_temperatures(model, shards), step_seconds))
    table = [
        {
            "size": size,
            "expected_tokens_per_step": choice.expected_tokens,
            "step_ms": choice.step_seconds * 1000,
            "measured_step_ms": min(found) * 1000,
            "expected_tokens_per_second": choice.tokens_per_second,
        }
        for (size, choice), found in zip(choices.items(), rounds, strict=True)
    ]
    write_json(stage / "sizes.json", table)
    return {
        "chosen_size": chosen.size,
        "chosen_by": "recipe" if given else "expected tokens per second",
        "step_time_noise": times.noise,
        "sizes": table,
        "calibration_positions": prefixes.positions,
    }


def _measure_again(job: Job) -> None:
    """Write what the adapted backbone answers to calibration and held-out prompts, and its states there.

    Conversations that were given keep their text.
    """
    data, stage = job.recipe.data, job.folder.stage("tree")
    for split in (split for split in SPLITS if split != "train"):
        rows, states = job.rows(split), stage / "states" / split
        shutil.rmtree(stage / split, ignore_errors=True)
        if not data.conversations:
            rows = answer_again(
                job.decoding_backbone, rows, stage / f"{split}.jsonl", states, data.max_new_tokens, data.batch_size
            )
        write_cache(
            job.decoding_backbone, rows, KeptStates(states), stage / split, data.cache_batch_tokens, ROWS_PER_SHARD,
            split,
        )  # fmt: skip
    shutil.rmtree(stage / "states", ignore_errors=True)


def run_eval(job: Job) -> dict[str, Any]:
    """Measure on held-out prompts; write ``report.json``, ``report.html`` and the model card."""
    section, folder = job.recipe.eval, job.folder
    folder.begin("eval")
    made = {stage: folder.result(stage) for stage in ("prompts", "distill", "cache", "train", "tree")}
    rows = job.rows("heldout")[: section.num_prompts]
    measured = evaluate(
        job.medusa_model(),
        job.tokenizer,
        [torch.tensor(row.input_ids[: row.spans[0][0]]) for row in rows],
        [row.messages[-1]["content"] for row in rows],
        job.measured("heldout"),
        section.max_new_tokens,
        section.repeats,
    )
    report = measured | {"made": made}
    write_report(folder.path, report)
    write_model_card(folder.heads, report)
    return {"report": str(folder.path / "report.html")}


STAGES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "prompts": run_prompts,
    "distill": run_distill,
    "cache": run_cache,
    "train": run_train,
    "tree": run_tree,
    "eval": run_eval,
}
# Stage -> what it reads, to be there before it starts and hashed into its run.json.
INPUTS: dict[str, Sequence[str]] = {
    "prompts": (),
    "distill": ("prompts",),
    "cache": ("distill",),
    "train": ("cache",),
    "tree": ("train", "cache"),
    "eval": ("tree", "cache"),
}


def run_stages(job: Job, names: Sequence[str], overwrite: bool = False) -> None:
    """Run the named stages in order, skipping finished ones.

    Raises:
        UserError: an earlier stage is missing, or the folder belongs to another recipe.
    """
    folder, state = job.folder, PartialState()
    order = list(STAGES)
    with state.main_process_first():
        if state.is_main_process:
            folder.check(order[: order.index(names[-1]) + 1], overwrite)
    if "train" in names:
        check_tracker(job.recipe.training.report_to)
    for name in names:
        if folder.done(name):
            if state.is_main_process:
                tqdm.write(f"{name}: done, kept ({folder.stage(name)})")
            continue
        for needed in INPUTS[name]:
            folder.result(needed)
        started = time.time()
        try:
            result = STAGES[name](job)
        except Exception:
            if state.is_main_process:
                folder.abandon(name)
            raise
        state.wait_for_everyone()
        if state.is_main_process:
            folder.finish(name, started, [folder.stage(needed) for needed in INPUTS[name]], result)
            tqdm.write(f"{name}: {_summary(result)} ({time.time() - started:.0f} s)")
    state.wait_for_everyone()


def _summary(result: dict[str, Any]) -> str:
    parts = []
    for key, value in result.items():
        if isinstance(value, float):
            parts.append(f"{key.replace('_', ' ')} {value:.3g}")
        elif not isinstance(value, list):
            parts.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)
