"""A run in progress: its recipe, its folder and the models that its stages share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.hidden_states import Shard, read_cache
from medusa_train.data.rows import Row, Split, open_rows
from medusa_train.inference.attention import check_tree_attention
from medusa_train.inference.backbone import Backbone, load_backbone
from medusa_train.inference.checkpoint import ADAPTER, load_heads
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.step import Step
from medusa_train.recipe import Recipe
from medusa_train.run_folder import RunFolder


class Job:
    """A recipe, its folder, and the backbone, loaded once when a stage first needs it.

    With ``lora`` there are two of them, one in memory at a time: ``backbone`` writes the data and is trained;
    ``decoding_backbone``, with the trained adapter merged, is what trees and reports are made for.

    Attributes:
        retry_failed: distillation asks prompts again that failed before.
    """

    def __init__(self, recipe: Recipe, retry_failed: bool = False) -> None:
        self.recipe, self.retry_failed = recipe, retry_failed
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

    def rows(self, split: Split) -> Sequence[Row]:
        """The rows of a split, read from the disk as they are used."""
        return open_rows(self.folder.stage("distill") / "rows.jsonl", split)

    def measured(self, split: Split) -> list[Shard]:
        """Cached states and answers of the backbone that decodes; an adapted one's are of the tree stage."""
        return read_cache(self.folder.stage("tree" if self.recipe.lora else "cache") / split)

    def medusa_model(self) -> MedusaModel:
        """The trained heads on the job's backbone, with their tree if one was chosen."""
        checkpoint = load_heads(self.folder.heads)
        backbone = self.decoding_backbone
        backbone.check_probe(checkpoint.probe, str(self.folder.heads))
        return MedusaModel(
            backbone, checkpoint.heads, checkpoint.tree, checkpoint.calibration, self.step, checkpoint.batch_trees
        )
