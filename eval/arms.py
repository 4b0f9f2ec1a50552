"""Ways of decoding that are compared, by name: our drafters, transformers' own, and a server.

One place for ``medusa-train eval`` and ``medusa-train bench``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from medusa_train.eval.speed import Decoder, drafter_decoder, generate_decoder
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.draft_model import DraftModelDrafter
from medusa_train.inference.drafters import Drafter, NoDrafter
from medusa_train.inference.errors import UserError
from medusa_train.inference.model import MedusaModel
from medusa_train.inference.prompt_lookup import MedusaLookupDrafter, PromptLookupDrafter

LOOKUP_TOKENS = 8  # copied tokens of the arms that look up alone, transformers' included

# Arm -> its drafter, made from the model with heads and the small model (None where none is given).
DRAFTERS: dict[str, Callable[[MedusaModel, Backbone | None], Drafter]] = {
    "plain": lambda model, small: NoDrafter(),
    "medusa": lambda model, small: model.drafter,
    "dynamic": lambda model, small: model.adaptive_drafter(_dynamic_size(model)),
    "adaptive": lambda model, small: model.adaptive_drafter(),
    "lookup": lambda model, small: PromptLookupDrafter(LOOKUP_TOKENS),
    "medusa-lookup": lambda model, small: MedusaLookupDrafter(model.drafter),
    "draft-model": lambda model, small: DraftModelDrafter(_given(small), model.backbone),
}
# Arm -> keywords of transformers' generate.
GENERATE: dict[str, Callable[[Backbone | None], dict[str, Any]]] = {
    "generate": lambda small: {},
    "generate-lookup": lambda small: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    "generate-assisted": lambda small: {"assistant_model": _given(small).model},
}
SERVER = "openai"  # an OpenAI-compatible server; see `server`
LABELS = {
    "generate": "transformers generate",
    "generate-lookup": "generate, prompt lookup",
    "generate-assisted": "generate, assisted by a small model",
    "plain": "our loop, one token per pass",
    "medusa": "our loop, heads and tree",
    "dynamic": "our loop, heads and copies, tree of the same size by confidence",
    "adaptive": "our loop, heads and copies, tree and size by confidence",
    "lookup": "our loop, prompt lookup",
    "medusa-lookup": "our loop, heads and prompt lookup",
    "draft-model": "our loop, small draft model",
    SERVER: "server",
}
ARMS = (*GENERATE, *DRAFTERS)  # those that run in this process
NEED_DRAFT_MODEL = ("generate-assisted", "draft-model")
NEED_CALIBRATION = ("dynamic", "adaptive")
BATCH_OF_ONE = ("generate-lookup", "generate-assisted")  # transformers' own limit


def make_decoder(arm: str, model: MedusaModel, draft_model: Backbone | None) -> Decoder:
    """The decoder of an arm.

    Raises:
        UserError: the arm cannot run with these models.
    """
    if arm in GENERATE:
        return generate_decoder(model.backbone, GENERATE[arm](draft_model))
    return drafter_decoder(model, DRAFTERS[arm](model, draft_model))


def _dynamic_size(model: MedusaModel) -> int:
    """The static tree's own size, as far as the superset reaches."""
    largest = model.calibration.superset.size if model.calibration else 2
    return max(2, min(model.tree.size, largest))


def _given(small: Backbone | None) -> Backbone:
    if small is None:
        raise UserError("this arm needs a small model of the same tokenizer; give --draft-model, or eval.draft_model")
    return small
