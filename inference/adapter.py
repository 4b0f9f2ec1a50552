"""LoRA on the backbone: put on for joint training, saved with the heads, merged where heads decode.

Weights in 4 or 8 bits could not hold a merged adapter without rounding most of it away, so theirs stays beside them.

The layers are peft's. What is loaded is what this package writes: a plain LoRA, from safetensors, name by name; nothing
is unpickled and nothing is left at its random start.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from medusa_train.inference.errors import UserError

CONFIG = "adapter_config.json"
# What may differ between equal adapters: where they come from, what only training looks at, what peft sets by itself.
_NOTES = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "peft_version",
    "revision",
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """The LoRA layers inside a model that is frozen otherwise.

    Attributes:
        model: peft's view of the model; the model itself is changed in place and can be used as before.
    """

    model: PeftModel

    @classmethod
    def put_on(
        cls,
        model: PreTrainedModel,
        r: int,
        alpha: int,
        dropout: float,
        target_modules: list[str] | Literal["all-linear"],
    ) -> Adapter:
        """Add fresh layers to ``model`` in place; its output stays what it was until they are trained.

        Raises:
            UserError: the model has no such layers, or they are its embedding or output projection.
        """
        try:
            adapted = get_peft_model(
                model, LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=target_modules)
            )
        except ValueError as error:
            raise UserError(f"LoRA cannot be put on {type(model).__name__}: {' '.join(str(error).split())}") from error
        # Heads start as copies of the projection, and where it is tied to the embedding, merging would change both.
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(layer, LoraLayer):
                raise UserError(
                    f"LoRA on the embedding or output projection of {type(model).__name__} is not supported; leave "
                    "them out of lora.target_modules"
                )
        return cls(adapted)

    def off(self) -> AbstractContextManager[None]:
        """The model without the adapter, inside a ``with``."""
        context: AbstractContextManager[None] = self.model.disable_adapter()
        return context

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def train(self, mode: bool) -> None:
        """Switch the adapter's dropout, and nothing else of the model."""
        for layer in self.model.modules():
            if isinstance(layer, LoraLayer):
                layer.lora_dropout.train(mode)

    def save(self, folder: Path, source: str) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json`` as peft reads them.

        Args:
            source: the backbone, as the user wrote it.
        """
        config = self.model.peft_config["default"]
        config.base_model_name_or_path = source
        config.target_modules = sorted(config.target_modules)
        self.model.save_pretrained(str(folder), save_embedding_layers=False)  # by default it would ask the Hub
        (folder / "README.md").unlink(missing_ok=True)  # an unfilled form


def load_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the adapter in ``folder`` to ``model``, in place: to its weights, or beside them where they are quantized.

    Raises:
        UserError: a file is missing or damaged, it is no plain LoRA, or it does not fit the model.
    """
    config, weights = _read_config(folder), folder / SAFETENSORS_WEIGHTS_NAME
    try:
        tensors = load_file(weights)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no {SAFETENSORS_WEIGHTS_NAME}; adapters in other files are not read") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{weights} is damaged ({error}); copy or train it again") from error
    adapter = Adapter.put_on(model, config.r, config.lora_alpha, 0.0, sorted(config.target_modules))
    expected = get_peft_model_state_dict(adapter.model, save_embedding_layers=False)
    for name in sorted(expected.keys() | tensors.keys()):
        ours, theirs = (tuple(found[name].shape) if name in found else None for found in (expected, tensors))
        if ours != theirs:
            raise UserError(f"{weights}: tensor {name} is {theirs}, {type(model).__name__} needs {ours}")
    set_peft_model_state_dict(adapter.model, tensors)
    if getattr(model, "hf_quantizer", None) is not None:
        return model
    merged: PreTrainedModel = adapter.model.merge_and_unload(safe_merge=True)
    return merged


def _read_config(folder: Path) -> LoraConfig:
    """The config, if it says nothing but rank, alpha and layers."""
    path = folder / CONFIG
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        names = content["target_modules"]
        if not isinstance(names, list):
            raise TypeError(f"target_modules={names!r} is no list of names")
        plain = LoraConfig(r=int(content["r"]), lora_alpha=int(content["lora_alpha"]), target_modules=names)
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no {CONFIG}; name a folder that medusa-train wrote") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the config of a LoRA adapter ({error!r})") from error
    # Everything else changes what an adapter computes or, at worst, what is imported to load it.
    defaults = plain.to_dict() | {"target_modules": names}
    for key in sorted(content.keys() - _NOTES):
        if content[key] != defaults.get(key):
            raise UserError(f"{path}: {key}={content[key]!r}; only plain LoRA, as medusa-train writes it, is loaded")
    return plain
