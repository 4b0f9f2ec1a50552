"""Whether two greedy outputs are the same tokens, and where they part if they are not.

In fp32 they must be equal. In half precision a pass over N tokens rounds differently from a pass over one, which may
turn a near-tie; the gap between the two best logits at the first difference tells such a tie from an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.inference.backbone import Backbone


@dataclass(frozen=True)
class Divergence:
    """First difference of two outputs: its index, and the gap between the backbone's two best logits there."""

    index: int
    top2_gap: float


def first_divergence(
    backbone: Backbone, prompt: Tensor, ours: Sequence[int], reference: Sequence[int]
) -> Divergence | None:
    """None if the outputs are equal, token for token and in length."""
    if list(ours) == list(reference):
        return None
    pairs = zip(ours, reference, strict=False)
    shorter = min(len(ours), len(reference))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    text = torch.cat([prompt.view(-1), torch.tensor(list(reference[:index]), dtype=torch.long)])
    with torch.inference_mode():
        logits = backbone.logits(backbone.hidden_states(text[None].to(backbone.device))[0, -1]).float()
    best = logits.topk(2).values
    return Divergence(index, float(best[0] - best[1]))
