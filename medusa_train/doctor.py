"""``medusa-train doctor RECIPE``: what a run will need and what looks wrong, before hours are spent on it.

Reads the recipe, the backbone's config, the rows that are there already or the file they will be made of, and trains
stand-in heads of the recipe's size for a few steps. Nothing is written. The backbone itself is loaded only to prove
that it follows a tree, and only if its weights are on this machine and fit into its memory.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from medusa_train.data.chat import has_marks, load_chat_tokenizer
from medusa_train.data.packing import PackedRows
from medusa_train.data.statistics import pieces_of
from medusa_train.data_stages import namesake
from medusa_train.doctor_data import Data, find_data
from medusa_train.estimate import heads_config, training_positions, weight_bytes, written_tokens
from medusa_train.fused_loss import check_liger
from medusa_train.inference.adapter import Adapter
from medusa_train.inference.attention import check_layer_kinds
from medusa_train.inference.backbone import Backbone, native_dtype, resolve_device, resolve_dtype, resolve_source
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads import check_embeddings
from medusa_train.inference.heads_config import HeadsConfig
from medusa_train.job import Job
from medusa_train.preflight import (
    Finding,
    RowStatistics,
    cache_bytes,
    checkpoint_bytes,
    count_parameters,
    judge,
    optimizer_steps,
    survey,
    training_memory,
)
from medusa_train.recipe import Recipe
from medusa_train.run_folder import STAGE_KEYS, RunFolder
from medusa_train.step_time import time_online_step, time_training_step
from medusa_train.training_callbacks import check_tracker

SPARE = 1.2  # a model or a training step wants this much more memory than its tensors


@dataclass
class Report:
    """What was found.

    Attributes:
        figures: section -> name -> value, ready for JSON; names that end in ``estimate`` or ``at_most`` are such.
        findings: errors first.
        example: a row in pieces of ``(text, learnt)``, None while there are no rows.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    example: list[tuple[str, bool]] | None = None

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def tell(self, level: Any, message: str) -> None:
        self.findings.append(Finding(level, message))

    def to_json(self) -> dict[str, Any]:
        return {**self.figures, "findings": [asdict(finding) for finding in self.findings]}


def examine(recipe: Recipe) -> Report:
    """Look at everything that a run of this recipe depends on.

    Raises:
        UserError: the backbone has no readable config or no chat template, or the recipe asks for impossible heads.
            What else would stop a stage becomes a finding, so that all of it is told at once.
    """
    report = Report()
    section = recipe.backbone
    device = torch.device(resolve_device(section.device))
    dtype = resolve_dtype(section.dtype, device.type)
    skeleton, end_ids = read_skeleton(recipe)
    tokenizer = load_chat_tokenizer(section.source, section.chat_template)
    if tokenizer.eos_token_id is not None:
        end_ids = end_ids | {int(tokenizer.eos_token_id)}
    output = skeleton.get_output_embeddings()
    config = heads_config(recipe, output.in_features, output.out_features)
    check_embeddings(config, Backbone(skeleton, section.source, ()))

    _check_folder(recipe, report)
    recipe = _check_packages(recipe, Backbone(skeleton, section.source, ()), device, report)
    try:
        limit = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
        data = find_data(recipe, tokenizer, limit)
    except UserError as error:
        report.tell("error", str(error))
        data = Data([], "the rows cannot be known", Counter())
    if not data.rows and data.prompts in (0, None) and data.dropped:
        report.tell("error", f"{data.origin}: no record gives a row; each one's reason stands under data, left out")
    stats = survey(data.rows, config, end_ids) if data.rows else None
    if stats is not None:
        report.findings += judge(stats, config, 0 if recipe.eval.benchmark else recipe.eval.num_prompts)
        report.example = pieces_of(next((row for row in data.rows if row.split == "train"), data.rows[0]), tokenizer)
    if not recipe.data.conversations and recipe.data.synthesized and (found := namesake()):
        report.tell("warning", found)
    _tokenizer_notes(tokenizer, report)
    backbone = _report_backbone(recipe, skeleton, device, dtype, report)
    _report_heads(recipe, config, report)
    _report_adapter(recipe, skeleton, report)
    positions = _report_data(recipe, data, stats, report)
    _report_disk(recipe, config, stats, positions, report)
    _report_training(recipe, config, data, positions, device, dtype, backbone, report)
    order = ("error", "warning", "note")
    report.findings.sort(key=lambda finding: order.index(finding.level))
    return report


def read_skeleton(recipe: Recipe) -> tuple[Any, set[int]]:
    """The backbone without weights (on the meta device) and the ids that end its answers; only configs are read.

    Raises:
        UserError: there is no config, or it is not that of a decoder-only language model.
    """
    section = recipe.backbone
    location, gguf_file = resolve_source(section.source)
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=section.trust_remote_code, **options)
        if config.is_encoder_decoder:
            raise UserError(f"backbone {section.source} is an encoder-decoder model; Medusa needs a decoder-only one")
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the config of backbone {section.source}: {reason}") from error
    if skeleton.get_output_embeddings() is None:
        raise UserError(f"backbone {section.source}: {type(skeleton).__name__} has no output projection for heads")
    try:
        eos = GenerationConfig.from_pretrained(location).eos_token_id
    except OSError:  # GGUF files bring none
        eos = None
    eos = config.get_text_config().eos_token_id if eos is None else eos
    return skeleton, set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def _check_folder(recipe: Recipe, report: Report) -> None:
    try:
        RunFolder(recipe).check(list(STAGE_KEYS), overwrite=False)
    except UserError as error:
        report.tell("error", str(error))


def _check_packages(recipe: Recipe, backbone: Backbone, device: torch.device, report: Report) -> Recipe:
    """Note what training lacks; returns the recipe without what cannot run, so that the rest can be timed."""
    training = recipe.training
    try:
        check_tracker(training.report_to)
    except UserError as error:
        report.tell("error", str(error))
    try:
        if training.use_liger_kernel:
            check_liger(backbone, device)
    except UserError as error:
        report.tell("error", str(error))
        return recipe.model_copy(update={"training": training.model_copy(update={"use_liger_kernel": False})})
    return recipe


def _tokenizer_notes(tokenizer: PreTrainedTokenizerBase, report: Report) -> None:
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        report.tell(
            "note",
            f"the padding token is the end token ({tokenizer.eos_token}); harmless here, masks come from lengths and "
            "spans and not from token values",
        )
    if not has_marks(tokenizer):
        report.tell(
            "note",
            "the chat template has no {% generation %} marks; the loss mask is found by rendering each conversation "
            "with and without its answers",
        )


def _report_backbone(
    recipe: Recipe, skeleton: Any, device: torch.device, dtype: torch.dtype, report: Report
) -> Backbone | None:
    """Note what the backbone takes; returns it if it could be loaded."""
    section = recipe.backbone
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    needed, available = weight_bytes(parameters, section.quantization, dtype), available_memory(device)
    report.figures["backbone"] = {
        "source": section.source,
        "class": type(skeleton).__name__,
        "parameters": parameters,
        "hidden_size": skeleton.get_output_embeddings().in_features,
        "vocab_size": skeleton.get_output_embeddings().out_features,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": needed,
        "memory_available_bytes": available,
    }
    if section.dtype != "auto" and dtype == torch.bfloat16 and native_dtype(device.type) != dtype:
        report.tell("warning", f"{device} has no bfloat16 instructions and emulates them; prefer backbone.dtype=auto")
    fits = needed * SPARE < available
    if not fits:
        report.tell(
            "warning",
            f"the backbone's weights take {needed / 1e9:.1f} GB, {device} has {available / 1e9:.1f} GB free; use "
            "another device, backbone.dtype or backbone.quantization",
        )
    try:
        check_layer_kinds(skeleton)
        if fits and _weights_are_here(section.source):
            backbone = Job(recipe).backbone
            report.figures["backbone"]["follows_a_tree"] = True
            return backbone
        report.tell("note", "the backbone was not loaded; a stage that loads it proves that it follows a tree")
    except UserError as error:
        report.tell("error", str(error))
    return None


def _weights_are_here(source: str) -> bool:
    location, _ = resolve_source(source)
    if Path(location).is_dir():
        return True
    names = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(location, name), str) for name in names)


def available_memory(device: torch.device) -> int:
    """Bytes that a process could still take on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _report_heads(recipe: Recipe, config: HeadsConfig, report: Report) -> None:
    training = recipe.training
    width = training.pack_tokens if training.mode == "online" else 1
    memory = training_memory(config, training.per_device_train_batch_size * width)
    report.figures["heads"] = {
        **asdict(config),
        "parameters": count_parameters(config),
        "weight_bytes": memory.weights,
        "gradient_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
        "projection_bytes": memory.projections,
        "logit_bytes_estimate": memory.logits_estimate,
        "training_bytes_estimate": memory.total_estimate,
    }


def _report_adapter(recipe: Recipe, skeleton: Any, report: Report) -> None:
    section = recipe.lora
    if section is None:
        return
    adapter = Adapter.put_on(skeleton, section.r, section.alpha, section.dropout, section.target_modules)
    parameters = sum(parameter.numel() for parameter in adapter.parameters().values())
    # fp32, as heads: weights, gradients and the two moments of Adam.
    report.figures["adapter"] = {
        "parameters": parameters,
        "weight_bytes": 4 * parameters,
        "gradient_bytes": 4 * parameters,
        "optimizer_bytes": 8 * parameters,
    }


def _report_data(recipe: Recipe, data: Data, stats: RowStatistics | None, report: Report) -> dict[str, int | None]:
    """Note what is known of the rows; returns positions to cache and to train on, None where unknown."""
    section = recipe.data
    figures: dict[str, Any] = {"origin": data.origin, "dropped": dict(data.dropped)}
    report.figures["data"] = figures
    if stats is not None:
        figures |= asdict(stats)
        cached = sum(stats.positions.values())
        if recipe.training.mode == "online":
            cached -= stats.positions["train"]  # computed in every step instead
        return {"cached": cached, "training": stats.training_positions}
    if data.prompts is None:
        return {"cached": None, "training": None}
    longest = written_tokens(section, data.prompts)
    training = training_positions(section, longest)
    figures |= {"prompts": data.prompts, "positions_at_most": longest, "training_positions_at_most": training}
    report.tell("note", "no rows yet: lengths, coverage, endings and loops are judged once distill has written some")
    return {"cached": longest, "training": training}


def _report_disk(
    recipe: Recipe, config: HeadsConfig, stats: RowStatistics | None, positions: dict[str, int | None], report: Report
) -> None:
    folder = Path(recipe.output_dir).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    figures = {"folder": str(folder), "free_bytes": free, "checkpoint_bytes": checkpoint_bytes(config)}
    report.figures["disk"] = figures
    if positions["cached"] is None:
        return
    cache = cache_bytes(positions["cached"], config.hidden_size, recipe.data.cache_dtype)
    figures["cache_bytes" if stats is not None else "cache_bytes_at_most"] = cache
    already = sum(path.stat().st_size for path in (folder / "cache").rglob("*.safetensors"))
    if max(0, cache - already) + checkpoint_bytes(config) > free:
        report.tell(
            "error" if stats is not None else "warning",
            f"hidden states ({cache / 1e9:.1f} GB) and checkpoints ({checkpoint_bytes(config) / 1e9:.1f} GB) do not "
            f"fit on the disk of {folder} ({free / 1e9:.1f} GB free); use another --out or fewer prompts",
        )


def _report_training(
    recipe: Recipe, config: HeadsConfig, data: Data, positions: dict[str, int | None], device: torch.device,
    dtype: torch.dtype, backbone: Backbone | None, report: Report,
) -> None:  # fmt: skip
    training, online = recipe.training, recipe.training.mode == "online"
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    width = training.pack_tokens if online else 1
    figures: dict[str, Any] = {"epochs": training.num_train_epochs, "batch_positions": batch * accumulation * width}
    report.figures["train"] = figures
    needed, available = report.figures["heads"]["training_bytes_estimate"], available_memory(device)
    for part in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
        needed += report.figures.get("adapter", {}).get(part, 0)
    weights = 0 if backbone else report.figures["backbone"]["weight_bytes"]  # loaded, it is in the free memory
    if (needed + weights) * SPARE > available:
        report.tell(
            "warning",
            f"training takes about {needed / 1e9:.1f} GB and the backbone {weights / 1e9:.1f} GB more, {device} has "
            f"{available / 1e9:.1f} GB free; lower heads.draft_vocab_size or training.per_device_train_batch_size",
        )
    if needed * SPARE > available:
        return  # the step could not be timed either
    if online and backbone is None:
        report.tell("note", "online training is not timed: its steps are mostly passes of the backbone")
        return
    samples, known = positions["training"], bool(data.rows)
    if online:  # how many packs there will be depends on all texts
        rows = [row for row in data.rows if row.split == "train"]
        samples = len(PackedRows(rows, config.num_heads, training.pack_tokens, recipe.seed)) if rows else None
    step = (
        time_online_step(recipe, config, backbone)
        if online and backbone
        else time_training_step(recipe, config, device, dtype)
    )
    figures["step_seconds_estimate"] = step
    if samples is None:
        return
    steps = optimizer_steps(samples, batch, accumulation, training.num_train_epochs)
    figures["steps" if known else "steps_at_most"] = steps
    figures["train_seconds_estimate" if known else "train_seconds_estimate_at_most"] = steps * step
