"""What a recipe will need, from sizes alone: no weights, no rows, no device.

`doctor` looks at this machine and its data; this is for choosing a machine beforehand. Figures that depend on how long
answers become are upper bounds. Times are rough: they rest on the assumptions below, which no run has checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_train.inference.heads_config import HeadsConfig
from medusa_train.preflight import (
    cache_bytes,
    checkpoint_bytes,
    count_parameters,
    optimizer_steps,
    training_memory,
)
from medusa_train.recipe import DataSection, Recipe

COMPUTE_SHARE = 0.4  # of the peak, in matrix products of this kind
BANDWIDTH_SHARE = 0.6
HOST_SECONDS = 1e-3  # a layer's kernels are launched in about this time, which bounds small batches from below
PROMPT_TOKENS = 256  # a usual prompt with its template
OPTIMIZER_TRAFFIC = 28  # bytes per parameter and step: Adam reads four fp32 numbers and writes three


@dataclass(frozen=True)
class Accelerator:
    """A device: dense bf16 operations per second, and bytes per second of its memory."""

    name: str
    operations: float
    bandwidth: float


A100 = Accelerator("A100 80 GB", 312e12, 2.0e12)  # NVIDIA's data sheet


@dataclass(frozen=True)
class Shape:
    """The sizes of a backbone; ``cache_width`` is how many numbers a token leaves in the KV cache."""

    parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    cache_width: int
    max_positions: int | None


def shape_of(config: Any) -> Shape:
    """Sizes of the model that a transformers config describes; it is made without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text, output = config.get_text_config(), model.get_output_embeddings()
    attention_heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // attention_heads
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=text.num_hidden_layers,
        hidden_size=output.in_features,
        vocab_size=output.out_features,
        cache_width=2 * text.num_hidden_layers * key_heads * head_size,
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def published_config(source: str) -> Any:
    """The config of a model that recipes exist for, as far as sizes go; None for any other."""
    known = json.loads((files("medusa_train.recipes") / "backbones.json").read_text(encoding="utf-8"))
    if source not in known:
        return None
    numbers = dict(known[source])
    return AutoConfig.for_model(numbers.pop("model_type"), **numbers)


@dataclass(frozen=True)
class Needs:
    """What a run takes; ``None`` where the recipe does not say how many prompts there are.

    Attributes:
        parameters: of the backbone.
        distill_bytes: device memory while answers are written: bf16 weights and the keys and values of a full batch.
        train_bytes: device memory of training.
        activations: Medusa-2, whose backward pass keeps activations of the backbone that are not counted.
        disk_bytes: hidden states, twice while they are copied, or hidden states and checkpoints.
        distill_seconds: writing the answers with transformers, one process.
        train_seconds: training, one process.
    """

    parameters: int
    distill_bytes: int
    train_bytes: int
    activations: bool
    disk_bytes: int | None
    distill_seconds: float | None
    train_seconds: float | None


def needs(recipe: Recipe, shape: Shape, device: Accelerator = A100) -> Needs:
    """What a recipe takes on a backbone of these sizes, at most."""
    data, training = recipe.data, recipe.training
    config = heads_config(recipe, shape.hidden_size, shape.vocab_size)
    backbone = weight_bytes(shape.parameters, recipe.backbone.quantization, torch.bfloat16)
    width = training.pack_tokens if training.mode == "online" else 1
    batch = training.per_device_train_batch_size * width
    rows_bytes = 2 * shape.cache_width * data.batch_size * (PROMPT_TOKENS + data.max_new_tokens)
    train_bytes = backbone + training_memory(config, batch).total_estimate
    if data.num_prompts is None:
        return Needs(shape.parameters, backbone + rows_bytes, train_bytes, recipe.lora is not None, None, None, None)

    written = written_tokens(data, data.num_prompts)
    learnt = training_positions(data, written)
    cached = written - learnt if training.mode == "online" else written
    states = cache_bytes(cached, shape.hidden_size, data.cache_dtype)

    operations, bandwidth = device.operations * COMPUTE_SHARE, device.bandwidth * BANDWIDTH_SHARE
    pass_seconds = max(
        HOST_SECONDS * shape.num_layers,
        (backbone + rows_bytes) / bandwidth,
        2 * shape.parameters * data.batch_size / operations,
    )
    # Every position costs 2 operations per weight forward and 4 backward; a frozen backbone only the 2, and with LoRA
    # two passes forward and one backward, whose activations are made a second time.
    per_position = 6.0 * count_parameters(config)
    if training.mode == "online":
        per_position += (8 if recipe.lora else 2) * shape.parameters
    steps = optimizer_steps(learnt, batch, training.gradient_accumulation_steps, training.num_train_epochs)
    return Needs(
        parameters=shape.parameters,
        distill_bytes=backbone + rows_bytes,
        train_bytes=train_bytes,
        activations=recipe.lora is not None,
        disk_bytes=max(2 * states, states + checkpoint_bytes(config)),  # the cache stage copies what distillation kept
        distill_seconds=0.0 if data.conversations else written / data.batch_size * pass_seconds,
        train_seconds=learnt * training.num_train_epochs * per_position / operations
        + steps * OPTIMIZER_TRAFFIC * count_parameters(config) / bandwidth,
    )


def heads_config(recipe: Recipe, hidden_size: int, vocab_size: int) -> HeadsConfig:
    """The heads that a recipe trains on a backbone; recipe and config give their shape the same names."""
    chosen = {name: value for name, value in recipe.heads if name in HeadsConfig.__dataclass_fields__}
    return HeadsConfig(hidden_size=hidden_size, vocab_size=vocab_size, **chosen)


def weight_bytes(parameters: int, quantization: str | None, dtype: torch.dtype) -> int:
    """Bytes of a backbone's weights."""
    return int(parameters * {"8bit": 1.0, "4bit": 0.5}.get(quantization or "", float(dtype.itemsize)))


def written_tokens(section: DataSection, prompts: int) -> int:
    """Answer tokens that so many prompts give at most."""
    longest = prompts * section.max_new_tokens
    if section.answer_tokens is None:
        return longest
    return min(longest, section.answer_tokens + section.batch_size * section.max_new_tokens)


def training_positions(section: DataSection, positions: int) -> int:
    """How many of the positions are trained on."""
    return int(positions * (1 - section.calibration_share - section.heldout_share))
