"""A recipe to begin with: values that suit a model's sizes, every key explained by its own docstring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from medusa_train.estimate import Shape, published_config, shape_of
from medusa_train.inference.backbone import resolve_source
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads_config import HeadsKind
from medusa_train.preflight import cache_bytes
from medusa_train.recipe import Recipe
from medusa_train.recipe_reference import meaning, section_of

# What people change. Every other key is in the reference.
TOUCHED = {
    "backbone": ("source", "dtype", "device", "quantization", "chat_template"),
    "heads": ("kind", "num_heads", "num_layers", "draft_vocab_size", "reads_copies"),
    "data": (
        "prompts", "prompts_split", "num_prompts", "max_new_tokens", "batch_size", "calibration_share", "heldout_share",
    ),
    "training": (
        "mode", "learning_rate", "num_train_epochs", "per_device_train_batch_size", "save_steps", "report_to",
        "soft_share",
    ),
    "inference": ("compile", "tree_sizes"),
    "eval": ("num_prompts", "max_new_tokens", "repeats"),
}  # fmt: skip
MOST_PROMPTS = 40_000
MOST_CACHE_BYTES = 400e9
WIDE = 1024  # hidden size from which steps are made longer and rates lower
EVALUATIONS = 10  # in a run, about


@dataclass(frozen=True)
class Choice:
    """A value, and why it is not the default."""

    value: Any
    reason: str


def find_shape(source: str) -> Shape | None:
    """Sizes of a backbone, from its folder, its file, the recipes' own list or the Hub cache; nothing is downloaded.

    Returns:
        None for a model of the Hub that this machine knows nothing of.

    Raises:
        UserError: the folder or file is not there, or holds no config of a decoder-only language model.
    """
    location, gguf_file = resolve_source(source)
    local = gguf_file is not None or Path(location).is_dir()
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        config = published_config(source) or AutoConfig.from_pretrained(location, local_files_only=True, **options)
        if config.is_encoder_decoder:
            raise UserError(f"backbone {source} is an encoder-decoder model; Medusa needs a decoder-only one")
        return shape_of(config)
    except (OSError, ValueError, ImportError) as error:
        if not local:
            return None
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read the config of backbone {source}: {reason}") from error


def choose(shape: Shape, kind: HeadsKind) -> dict[str, Choice]:
    """``section.key`` -> a value for a model of these sizes."""
    chosen = {}
    answer = min(512, max(1, (shape.max_positions or 1024) // 2))
    if answer < 512:
        chosen["data.max_new_tokens"] = Choice(answer, f"the model reads {shape.max_positions} positions")
    # One training position per weight of a residual block, of answers half as long as they may be.
    wanted = math.ceil(shape.hidden_size**2 / (answer / 2))
    prompts = max(300, min(MOST_PROMPTS, round(wanted, -2)))
    chosen["data.num_prompts"] = Choice(
        prompts, f"about {wanted:,} give a training position per weight of a residual block"
    )
    if prompts >= 10_000:
        few = Choice(0.02, "enough of so many")
        chosen |= {"data.calibration_share": few, "data.heldout_share": few}
    vocabulary = 0 if shape.vocab_size <= 4096 else 4096 if shape.vocab_size < 100_000 else 8192
    if vocabulary != 4096:
        chosen["heads.draft_vocab_size"] = Choice(vocabulary, f"the model has {shape.vocab_size:,}")
    batch = 512
    if shape.hidden_size > WIDE:
        batch = 2048
        chosen["training.per_device_train_batch_size"] = Choice(batch, "fewer steps, each less noisy")
        chosen["training.learning_rate"] = Choice(1e-3, "what the original Medusa trains heads of 7B models with")
    steps = 2 * prompts * answer // batch
    chosen["training.save_steps"] = Choice(max(50, round(steps // EVALUATIONS, -1)), "about ten times in a run")
    if cache_bytes(prompts * answer, shape.hidden_size) > MOST_CACHE_BYTES:
        chosen["training.mode"] = Choice("online", "hidden states could take more than 400 GB")
        chosen["training.per_device_train_batch_size"] = Choice(1, "a packed sequence")
    if kind != "medusa":
        chosen["heads.kind"] = Choice(kind, "in this package only; medusa for vLLM and TGI")
        chosen["heads.reads_copies"] = Choice(True, "more tokens per step, and no engine serves this kind anyway")
        if kind == "recurrent":
            chosen["heads.num_layers"] = Choice(2, "of one set of weights")
    return chosen


def recipe_text(source: str, chosen: dict[str, Choice], heading: list[str]) -> str:
    """The YAML of a recipe with what its keys mean."""
    run = Path(source).name.removesuffix(".gguf").lower()
    lines = [
        f"# yaml-language-server: $schema={files('medusa_train.recipes') / 'schema.json'}",
        *(f"# {line}" for line in heading),
        f"output_dir: {_scalar('runs/' + run)}",
    ]
    given = chosen | {"backbone.source": Choice(source, "")}
    for name, keys in TOUCHED.items():
        section = section_of(Recipe.model_fields[name])
        assert section is not None
        lines += ["", f"# {section.__doc__}", f"{name}:"]
        for key in keys:
            field = section.model_fields[key]
            choice = given.get(f"{name}.{key}", Choice(field.default, ""))
            remark = f"  # {choice.reason}" if choice.reason else ""
            lines += [f"  # {meaning(field)}", f"  {key}: {_scalar(choice.value)}{remark}"]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """A value in one line of YAML."""
    readable = str(value).isprintable()  # YAML has more line breaks than it escapes on its own
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=readable).strip()[1:-1]
