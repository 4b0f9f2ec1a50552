"""The recipe: one YAML file that says everything about a run.

Every key has a type, a default and a meaning; an unknown key is an error that names the nearest one. Training knobs
that `transformers.TrainingArguments` defines keep their names.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from medusa_train.inference.errors import UserError
from medusa_train.inference.heads_config import HeadsConfig

if TYPE_CHECKING:
    from medusa_train.data.sources import Source


SYNTHESIZE = "synthesize"  # the source of prompts that is not read: the backbone writes them


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class BackboneSection(_Section):
    """The frozen language model."""

    source: str
    """Hub id, local folder, .gguf file, or pkg://package/file.gguf."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 where the device computes in it, else float32."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    quantization: Literal["8bit", "4bit"] | None = None
    """Load through bitsandbytes. In 8bit a pass rounds its tokens together, so drafts can change greedy text."""
    chat_template: str | None = None
    """Jinja file, for a model that brings no chat template."""
    trust_remote_code: bool = False
    """Run Python code from the model repository."""


class HeadsSection(_Section):
    """What is trained."""

    kind: Literal["medusa", "hydra", "recurrent"] = "medusa"
    """medusa heads read the hidden state alone; hydra heads and a recurrent drafter also the tokens they continue."""
    num_heads: int = Field(3, ge=1, le=10)
    """K: how many tokens ahead of the backbone the heads reach."""
    num_layers: int = Field(1, ge=0, le=8)
    """Residual blocks per head."""
    lm_head: Literal["own", "shared"] = "own"
    """own: every head trains a projection; shared: all end in the backbone's, which makes heads small."""
    draft_vocab_size: int = Field(4096, ge=0)
    """Heads draft only the most frequent answer tokens; 0 for the whole vocabulary."""
    reads_copies: bool = False
    """Heads also read what followed when the text's last words came before; only this package decodes such heads."""

    @model_validator(mode="after")
    def _fit_together(self) -> HeadsSection:
        # Of any backbone: its own sizes are not known here.
        HeadsConfig(**dict(self), hidden_size=1, vocab_size=max(1, self.draft_vocab_size))
        return self


class ServerSection(_Section):
    """Where answers come from with data.backend: openai. A key is taken from the environment, MEDUSA_API_KEY."""

    urls: list[str] = []
    """Base URLs, such as http://gpu1:8000/v1; all serve the same model."""
    model: str | None = None
    """The name they serve it under; null: backbone.source."""
    api: Literal["completions", "chat"] = "completions"
    """completions: token ids are sent (vLLM, SGLang); chat: messages, for servers that take no ids (TGI, Ollama)."""
    concurrency: int = Field(64, ge=1)
    """Requests at a time, over all servers."""
    timeout: float = Field(600, gt=0)
    """Seconds until a request is given up."""
    retries: int = Field(6, ge=0)
    """How often a prompt is asked again, elsewhere if there is an elsewhere."""

    @field_validator("urls")
    @classmethod
    def _hold_no_secret(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise UserError("data.server.urls: a base URL begins with http:// or https:// and names a host")
            if parts.username or parts.password or parts.query:
                raise UserError("data.server.urls are stored, so they carry no key; set MEDUSA_API_KEY")
        return urls


class SourceSection(_Section):
    """One of several sources of text."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a folder of `datasets`, a Hub dataset; for prompts also synthesize."""
    split: str = "train"
    """Split of a dataset."""
    columns: dict[str, str] = {}
    """The name that a field has here, as {prompt: query}."""
    weight: float = Field(1.0, gt=0)
    """How much of data.num_prompts comes from here, beside the others."""


class DataSection(_Section):
    """Where the text comes from."""

    prompts: str | list[SourceSection] = SYNTHESIZE
    """synthesize (the backbone writes them), a file, a dataset, or a list of these."""
    prompts_split: str = "train"
    """Split of a dataset that is given by its name alone."""
    prompt_topics: list[str] | str | None = None
    """What synthesized prompts are about: a list, or a text file with one topic a line."""
    on_bad_rows: Literal["stop", "skip"] = "stop"
    """Records that nothing can be learnt from: stop at the first, or leave them out and count them."""
    num_prompts: int | None = Field(640, ge=1)
    """How many prompts to write or to take; null takes all of a file."""
    prompt_max_tokens: int = Field(48, ge=4)
    """Longest synthesized prompt."""
    prompt_temperature: float = Field(0.9, gt=0)
    """Temperature of synthesized prompts."""
    prompt_top_k: int = Field(50, ge=0)
    """Synthesized prompts are drawn from the k likeliest tokens; 0 for all."""
    conversations: str | list[SourceSection] | None = None
    """Finished conversations to learn from instead of distilling: sources as in data.prompts."""
    backend: Literal["transformers", "openai"] = "transformers"
    """Who answers: the backbone in this process, or servers (data.server)."""
    server: ServerSection = ServerSection()
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0], min_length=1)
    """Each prompt's answer is drawn at one of these, by its hash; 0 is greedy."""
    drop_mismatched: bool = True
    """Leave out answers whose text had to be tokenized again and may have got other tokens than the model wrote."""
    answer_tokens: int | None = Field(None, ge=1)
    """Stop distilling after this many answer tokens; null answers every prompt."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest answer; longer ones are cut and keep their tokens."""
    max_length: int = Field(4096, ge=2)
    """Conversations are cut here."""
    batch_size: int = Field(64, ge=1)
    """Prompts generated together."""
    cache_batch_tokens: int = Field(2048, ge=1)
    """Padded tokens in one pass when hidden states are cached."""
    cache_dtype: Literal["bfloat16", "float8"] = "bfloat16"
    """How hidden states are stored; float8 (e4m3, a scale per token) takes half the disk."""
    calibration_share: float = Field(0.08, gt=0, lt=0.5)
    """Share of prompts, by hash, that chooses the tree."""
    heldout_share: float = Field(0.08, gt=0, lt=0.5)
    """Share of prompts, by hash, that only evaluation sees."""

    @model_validator(mode="after")
    def _servers_are_named(self) -> DataSection:
        if self.backend == "openai" and not self.server.urls:
            raise UserError("data.backend=openai needs data.server.urls, such as [http://127.0.0.1:8000/v1]")
        return self

    @field_validator("prompts", "conversations", mode="before")
    @classmethod
    def _sources_may_be_names(cls, value: Any) -> Any:
        """A source on its own is a list of one, and a name in a list is a source."""
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            return value
        if not value:
            raise UserError("data.prompts and data.conversations: name one source at least")
        return [{"path": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _synthesis_is_told_how_much(self) -> DataSection:
        conversations = self.conversations if isinstance(self.conversations, list) else []
        if self.conversations == SYNTHESIZE or any(source.path == SYNTHESIZE for source in conversations):
            raise UserError("data.conversations: synthesize writes prompts, not conversations; name it in data.prompts")
        given = self.prompts if isinstance(self.prompts, list) else []
        written = [source for source in given if source.path == SYNTHESIZE]
        if written and self.num_prompts is None:
            raise UserError("data.prompts: synthesize writes a share of data.num_prompts, which is null; give a number")
        if len(written) > 1:
            raise UserError("data.prompts names synthesize more than once; name it once, with a weight")
        if any(source.columns or source.split != "train" for source in written):
            raise UserError("data.prompts: synthesize reads nothing, so it takes a weight, but no split and no columns")
        return self

    @model_validator(mode="after")
    def _weights_need_a_number(self) -> DataSection:
        weights = {source.weight for source in self.prompts} if isinstance(self.prompts, list) else set()
        if len(weights) > 1 and self.num_prompts is None:
            raise UserError("weights share out data.num_prompts, which is null; give a number")
        return self

    def sources(self, name: Literal["prompts", "conversations"]) -> list[Source]:
        """The sources of a field that are read, which those are not that the backbone writes."""
        from medusa_train.data.sources import Source

        given = getattr(self, name)
        if isinstance(given, str):
            return [] if given == SYNTHESIZE else [Source(given, self.prompts_split)]
        read = [source for source in given if source.path != SYNTHESIZE]
        return [Source(source.path, source.split, source.columns, source.weight) for source in read]

    @property
    def synthesized(self) -> int:
        """How many prompts the backbone writes itself."""
        from medusa_train.data.prompts import shares_of

        if isinstance(self.prompts, str):
            return self.num_prompts or 1000 if self.prompts == SYNTHESIZE else 0
        shares = shares_of([source.weight for source in self.prompts], self.num_prompts)
        return sum(share or 0 for source, share in zip(self.prompts, shares, strict=True) if source.path == SYNTHESIZE)


class TrainingSection(_Section):
    """How heads are trained; names as in transformers.TrainingArguments, then the loss."""

    mode: Literal["cached", "online"] = "cached"
    """cached: hidden states from the disk; online: computed for every step, for training longer than the disk."""
    pack_tokens: int = Field(2048, ge=2)
    """online: tokens of one packed sequence; a longer text gets a longer one."""
    learning_rate: float = Field(2e-3, gt=0)
    num_train_epochs: float = Field(2, gt=0)
    per_device_train_batch_size: int = Field(512, ge=1)
    """Positions, or online packed sequences; online it is 1 unless given."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    warmup_steps: float = Field(0.05, ge=0)
    """Below 1: a share of all steps."""
    lr_scheduler_type: Literal[
        "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial", "cosine_with_restarts"
    ] = "cosine"
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    logging_steps: int = Field(20, ge=1)
    save_steps: int = Field(100, ge=1)
    eval_steps: int | None = Field(None, ge=0)
    """Measure the heads on calibration answers this often; null: with every checkpoint; 0: never."""
    eval_positions: int = Field(4096, ge=2)
    """How many positions of the calibration answers an evaluation looks at."""
    eval_tree_size: int = Field(16, ge=1)
    """Tokens per pass of the tree whose tokens per step are measured."""
    eval_prompts: int = Field(0, ge=0)
    """In an evaluation, also decode answers of 64 tokens to so many calibration prompts; 0: count positions alone."""
    metric_for_best_model: Literal["tokens_per_step", "loss"] = "tokens_per_step"
    load_best_model_at_end: bool = True
    """Keep the best evaluated checkpoint and end with it; false, or without evaluation: the last."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Stop after so many evaluations in a row that were no better; null: never."""
    report_to: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """Tracker that gets all figures; each is an extra of the package."""
    loss_scale: float = Field(1.0, gt=0)
    """λ: weight of the whole loss."""
    loss_decay: float = Field(0.8, gt=0, le=1)
    """γ: head k counts γ^(k-1)."""
    soft_share: float = Field(0.8, ge=0, le=1)
    """α: 0 learns the tokens, 1 the backbone's distribution."""
    soft_temperature: float = Field(4.0, gt=0)
    """Temperature of the backbone's and the head's distributions in the soft part of the loss."""
    weight_by_acceptance: bool = False
    """Count head k's loss at a position by the chance that heads 1 to k-1 are right there."""
    use_liger_kernel: bool = False
    """The loss through liger-kernel's fused kernel, on a GPU; needs the extra liger."""

    @model_validator(mode="after")
    def _one_pack_unless_given(self) -> TrainingSection:
        if self.mode == "online" and "per_device_train_batch_size" not in self.model_fields_set:
            self.per_device_train_batch_size = 1
        return self

    @model_validator(mode="after")
    def _best_is_saved(self) -> TrainingSection:
        if self.compares and self.save_steps % self.steps_between_evaluations:
            raise ValueError("save_steps must be a multiple of eval_steps, so that the best can be kept")
        if self.early_stopping_patience and not self.steps_between_evaluations:
            raise ValueError("early_stopping_patience needs evaluations; leave out eval_steps: 0")
        if self.eval_prompts and not self.steps_between_evaluations:
            raise ValueError("eval_prompts needs evaluations; leave out eval_steps: 0")
        return self

    @model_validator(mode="after")
    def _positions_have_a_loss(self) -> TrainingSection:
        if self.weight_by_acceptance and self.use_liger_kernel:
            raise ValueError("use_liger_kernel gives no position's own loss; leave out weight_by_acceptance")
        return self

    @property
    def steps_between_evaluations(self) -> int:
        """0: never."""
        return self.save_steps if self.eval_steps is None else self.eval_steps

    @property
    def compares(self) -> bool:
        """Whether checkpoints are compared and the best one is taken."""
        return self.load_best_model_at_end and self.steps_between_evaluations > 0

    def trainer_arguments(self) -> dict[str, Any]:
        """What goes to `transformers.TrainingArguments`."""
        ours = {"mode", "pack_tokens", "eval_positions", "eval_tree_size", "eval_prompts", "early_stopping_patience"}
        loss = {"loss_scale", "loss_decay", "soft_share", "soft_temperature", "weight_by_acceptance"}
        return self.model_dump(exclude=ours | loss | {"use_liger_kernel"}) | {
            "eval_steps": self.steps_between_evaluations or None,
            "load_best_model_at_end": self.compares,
            "greater_is_better": self.metric_for_best_model == "tokens_per_step",
        }


class LoraSection(_Section):
    """Medusa-2: a LoRA adapter of the backbone, trained together with the heads."""

    r: int = Field(32, ge=1)
    """Rank."""
    alpha: int = Field(16, ge=1)
    """The adapter counts alpha / r."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout of what the adapter reads, in training."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of layers, as in peft; all-linear leaves out the output projection."""
    warmup_steps: float = Field(0.2, ge=0)
    """Steps of heads alone, before; below 1: a share of all steps."""
    ramp: Literal["sine", "linear"] = "sine"
    """How λ rises to training.loss_scale after them, up to the last step: sine or linear."""


class InferenceSection(_Section):
    """How the backbone's passes are made, and how the tree is chosen for them."""

    compile: bool = False
    """Compile the step: a minute or more at first, then faster passes, for plain decoding alike."""

    tree: list[list[int]] | None = None
    """Rank paths such as `[[0], [0, 0], [1]]`, or the path of a tree.json; null: chosen by measurement."""
    tree_sizes: list[int] = Field([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64], min_length=1)
    """Tokens per pass to try, root included."""
    batch_sizes: list[Annotated[int, Field(ge=1)]] = Field([1], min_length=1)
    """How many prompts are decoded together where steps are timed to choose a tree; others are reckoned."""
    max_rank: int = Field(10, ge=1)
    """Best tokens of a head that a tree may use."""
    step_time_steps: int = Field(6, ge=1)
    """Steps timed per tree and round."""
    step_time_rounds: int = Field(4, ge=1)
    """Rounds over all trees; from two on, their spread says which sizes are as fast as each other."""

    @field_validator("tree", mode="before", json_schema_input_type=list[list[int]] | str | None)
    @classmethod
    def _read_tree(cls, value: Any) -> Any:
        """The paths in a file, so that the resolved recipe says which tree it was whatever becomes of the file."""
        if not isinstance(value, str):
            return value
        from medusa_train.inference.tree import Tree  # torch: only for a recipe that needs it

        return Tree.load(value).to_json()["paths"]


Arm = Literal[
    "generate", "generate-lookup", "generate-assisted", "plain", "medusa", "dynamic", "adaptive", "lookup",
    "medusa-lookup", "draft-model", "openai",
]  # fmt: skip


class EvalSection(_Section):
    """How the result is measured."""

    benchmark: str | None = None
    """spec_bench, mt_bench, humaneval, gsm8k, alpaca_eval, or a file; null: the run's held-out prompts."""
    benchmark_file: str | None = None
    """The benchmark's rows on disk, instead of the Hub."""
    samples_per_category: int | None = Field(None, ge=1)
    """So many prompts of every category of a benchmark, instead of num_prompts."""
    num_prompts: int = Field(12, ge=1)
    """Prompts that are asked; a benchmark's categories take turns."""
    timed_questions: int | None = Field(None, ge=1)
    """How many of them, spread over categories, all arms answer in all repeats; null: all. Others are only counted."""
    max_new_tokens: int | None = Field(None, ge=2)
    """Budget of an answer; null: 128, or what the benchmark says."""
    batch_sizes: list[Annotated[int, Field(ge=1)]] = [1]
    """Timed prompts answered together; 1 is always measured, above it speeds alone are told."""
    repeats: int = Field(3, ge=1)
    """How often everything is timed; from three on, their spread says how noisy the machine is."""
    arms: list[Arm] = ["generate", "plain", "medusa"]
    """Ways of decoding to compare; one that cannot run here says why in the report."""
    draft_model: str | None = None
    """Small model of the same tokenizer, for draft-model and generate-assisted."""
    server_url: str | None = None
    """OpenAI-compatible server, for the arm openai."""
    server_model: str | None = None
    """Name of the model on that server."""

    @field_validator("arms")
    @classmethod
    def _has_medusa(cls, arms: list[Arm]) -> list[Arm]:
        if "medusa" not in arms:
            raise ValueError("medusa must be among the arms: it is what is evaluated")
        return list(dict.fromkeys(arms))

    @model_validator(mode="after")
    def _check_benchmark(self) -> EvalSection:
        """Refuse what could not be asked, before heads are trained."""
        if self.benchmark_file and not self.benchmark:
            raise UserError("eval.benchmark_file needs eval.benchmark: which benchmark's rows are these?")
        if self.benchmark:
            from medusa_train.eval.questions import check_benchmark  # torch: only for a recipe that needs it

            check_benchmark(self.benchmark, self.benchmark_file)
        return self


class Recipe(_Section):
    """Everything about a run."""

    backbone: BackboneSection
    heads: HeadsSection = HeadsSection()
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    lora: LoraSection | None = None
    """Null: no adapter, the heads are trained alone."""
    inference: InferenceSection = InferenceSection()
    eval: EvalSection = EvalSection()
    output_dir: str
    """The run's folder (`--out`)."""
    seed: int = 0
    """Seed of prompts, training and draws (`--seed`)."""

    @model_validator(mode="after")
    def _check_tree(self) -> Recipe:
        """Refuse a tree that the heads could not fill, before they are trained."""
        if self.inference.tree is not None:
            from medusa_train.inference.tree import Tree

            columns = self.heads.draft_vocab_size or sys.maxsize
            Tree.from_paths(self.inference.tree).check(self.heads.num_heads, columns)
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Recipe:
        if self.lora and self.training.mode != "online":
            raise UserError("lora changes the backbone's states while it trains; set training.mode: online")
        return self


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply ``section.field=value`` overrides (values are YAML).

    Raises:
        UserError: no such file, not YAML, an unknown key (the nearest is named), or a value of the wrong type.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"recipe {path}: expected sections such as backbone: and data:")
    for override in overrides:
        _apply(content, override)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{_origin(error, path, overrides)}: {_explain(error)}") from error


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default spelled out."""
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        hint = "; a recipe goes behind --recipe here" if override.endswith((".yaml", ".yml")) else ""
        raise UserError(f"override {override!r}: expected section.field=value{hint}")
    *sections, field = key.split(".")
    target = content
    for section in sections:
        if target.get(section) is None:  # also a section that is null
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise UserError(f"override {override!r}: {section} is not a section")
    try:
        target[field] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not YAML") from error


def _origin(error: ValidationError, path: Path, overrides: Sequence[str]) -> str:
    """What the wrong value was given in: the last override of that key, or else the file."""
    where = _key(error)
    for override in reversed(overrides):
        key = override.partition("=")[0]
        if where == key or where.startswith(f"{key}."):
            return f"override {override!r}"
    return f"recipe {path}"


def _key(error: ValidationError) -> str:
    return ".".join(str(part) for part in error.errors()[0]["loc"])


def _explain(error: ValidationError) -> str:
    first, where = error.errors()[0], _key(error)
    if first["type"] == "extra_forbidden":
        keys, name = _known_keys(Recipe), where.rpartition(".")[2]
        # The right key in the wrong section, or else a misspelt one.
        near = [key for key in keys if key.rpartition(".")[2] == name]
        near = near or difflib.get_close_matches(where, keys, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key {where}{hint}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] == "model_type":
        return f"{where}: a section of keys is expected, got {first['input']!r}"
    return f"{where}: {first['msg'].lower()}, got {first['input']!r}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _known_keys(kind, f"{prefix}{name}.")
    return keys
