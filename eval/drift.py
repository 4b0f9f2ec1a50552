"""How far an adapted backbone has moved from what it was, on the answers that it wrote before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from medusa_train.data.hidden_states import hidden_states_of
from medusa_train.data.rows import Row
from medusa_train.inference.backbone import Backbone

CHUNK = 256  # positions whose logits exist at once
# How far Medusa-2 may move a backbone that still goes by its name.
MAX_KL = 0.1  # nats per token
MAX_PERPLEXITY_DRIFT = 0.05


@torch.inference_mode()
def measure_drift(
    backbone: Backbone, adapter_off: Callable[[], AbstractContextManager[None]], rows: Sequence[Row]
) -> dict[str, float]:
    """Compare the distributions of a backbone with its adapter and without, at every learnt token of ``rows``.

    Returns:
        ``kl_to_base``: mean KL(without || with), in nats per token; ``base_perplexity`` and ``adapted_perplexity`` of
        the tokens; ``perplexity_drift``, by what share the second is above the first.
    """
    tokens, divergence, base_loss, adapted_loss = 0, 0.0, 0.0, 0.0
    for row in rows:
        (adapted,) = hidden_states_of(backbone, [row])
        with adapter_off():
            (base,) = hidden_states_of(backbone, [row])
        places = torch.tensor([place - 1 for start, end in row.spans for place in range(max(start, 1), end)])
        for part in places.split(CHUNK):
            theirs, ours = (_log_probabilities(backbone, states[part.to(states.device)]) for states in (base, adapted))
            targets = torch.tensor(row.input_ids)[part + 1].to(ours.device)
            divergence += float(functional.kl_div(ours, theirs, log_target=True, reduction="sum"))
            base_loss += float(functional.nll_loss(theirs, targets, reduction="sum"))
            adapted_loss += float(functional.nll_loss(ours, targets, reduction="sum"))
        tokens += len(places)
    tokens = max(1, tokens)
    return {
        "kl_to_base": divergence / tokens,
        "base_perplexity": math.exp(base_loss / tokens),
        "adapted_perplexity": math.exp(adapted_loss / tokens),
        "perplexity_drift": math.expm1((adapted_loss - base_loss) / tokens),
    }


def beyond_limits(result: Mapping[str, Any]) -> str | None:
    """In what way an adapted backbone, by `measure_drift`, is no longer the one it was; None if it still is.

    A frozen backbone has no such figures and is what it was.
    """
    if "kl_to_base" not in result:
        return None
    # Written so that NaN is beyond any limit.
    if not result["kl_to_base"] <= MAX_KL:
        return f"the adapted backbone is {result['kl_to_base']:.2g} nats per token from the original, over {MAX_KL}"
    if not result["perplexity_drift"] <= MAX_PERPLEXITY_DRIFT:
        drift = result["perplexity_drift"]
        return f"the adapted backbone's perplexity is {drift:.1%} above the original's, over {MAX_PERPLEXITY_DRIFT:.0%}"
    return None


def _log_probabilities(backbone: Backbone, hidden: Tensor) -> Tensor:
    return backbone.logits(hidden).float().log_softmax(dim=-1)
