"""Decoding with Medusa heads: backbone, heads, tree, drafters, verification, cache and the loop.

The public names load lazily, so that importing the package costs no torch import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_train.inference.backbone import Backbone, load_backbone, load_tokenizer
    from medusa_train.inference.draft_model import DraftModelDrafter
    from medusa_train.inference.drafters import MedusaDrafter, NoDrafter
    from medusa_train.inference.errors import UserError
    from medusa_train.inference.heads import MedusaHeads
    from medusa_train.inference.heads_config import HeadsConfig
    from medusa_train.inference.model import Generation, MedusaModel
    from medusa_train.inference.prompt_lookup import MedusaLookupDrafter, PromptLookupDrafter
    from medusa_train.inference.sampling import Sampling
    from medusa_train.inference.stats import DecodeStats
    from medusa_train.inference.tree import Tree

_HOMES = {
    "Backbone": "backbone",
    "DecodeStats": "stats",
    "DraftModelDrafter": "draft_model",
    "Generation": "model",
    "HeadsConfig": "heads_config",
    "MedusaDrafter": "drafters",
    "MedusaHeads": "heads",
    "MedusaLookupDrafter": "prompt_lookup",
    "MedusaModel": "model",
    "NoDrafter": "drafters",
    "PromptLookupDrafter": "prompt_lookup",
    "Sampling": "sampling",
    "Tree": "tree",
    "UserError": "errors",
    "load_backbone": "backbone",
    "load_tokenizer": "backbone",
}

__all__ = [
    "Backbone",
    "DecodeStats",
    "DraftModelDrafter",
    "Generation",
    "HeadsConfig",
    "MedusaDrafter",
    "MedusaHeads",
    "MedusaLookupDrafter",
    "MedusaModel",
    "NoDrafter",
    "PromptLookupDrafter",
    "Sampling",
    "Tree",
    "UserError",
    "load_backbone",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
