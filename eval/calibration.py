"""How far a head's probabilities can be trusted, measured on positions that it did not learn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.data.hidden_states import Shard
from medusa_train.inference.model import MedusaModel

POSITIONS = 2048  # are plenty for one number per head
TEMPERATURES = torch.logspace(-1, 2, 31, base=2)  # 0.5 to 4


@torch.inference_mode()
def fit_temperatures(model: MedusaModel, shards: Sequence[Shard]) -> tuple[float, ...]:
    """One temperature per head that makes its probabilities those of being right.

    Minimises the negative log likelihood of the tokens that really came (Guo et al. 2017, "On Calibration of Modern
    Neural Networks", section 4.2) over a grid; a head without a position to learn from gets 1.
    """
    config = model.heads.config
    column_of_token = torch.full((config.vocab_size,), -1)
    column_of_token[model.heads.draft_token_ids.cpu()] = torch.arange(config.projection_size)
    fitted = []
    for head in range(config.num_heads):
        hidden, before, copies, targets = _targets(shards, head + 1, column_of_token)
        losses = torch.zeros(len(TEMPERATURES))
        for part in torch.arange(len(targets)).split(256):
            raw = model.draft_logits(hidden[part], head, before[part], copies[part])
            logits = model.backbone.shape_logits(raw).float().cpu()
            own = targets[part]
            losses += torch.stack(
                [torch.nn.functional.cross_entropy(logits / t, own, reduction="sum") for t in TEMPERATURES]
            )
        fitted.append(float(TEMPERATURES[losses.argmin()]) if len(targets) else 1.0)
    return tuple(fitted)


def _targets(shards: Sequence[Shard], ahead: int, column_of_token: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Evenly spread hidden states, the ``ahead`` tokens after each, copies, and the draft column of what follows."""
    hidden, before, copies, targets = [], [], [], []
    for shard in shards:
        positions = torch.arange(len(shard.tokens))
        positions = positions[positions + ahead < shard.ends]
        columns = column_of_token[shard.tokens[positions + ahead]]
        drafted, columns = positions[columns >= 0], columns[columns >= 0]
        hidden.append(shard.states(drafted))
        before.append(shard.tokens[drafted[:, None] + torch.arange(ahead)])
        copies.append(shard.copies[drafted])
        targets.append(columns)
    all_targets = torch.cat(targets)
    kept = torch.linspace(0, max(len(all_targets) - 1, 0), min(POSITIONS, len(all_targets))).long()
    return torch.cat(hidden)[kept], torch.cat(before)[kept], torch.cat(copies)[kept], all_targets[kept]
