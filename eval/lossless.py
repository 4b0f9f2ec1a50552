"""Whether two greedy outputs are the same tokens, and where they part if they are not.

In fp32 they must be equal. In half precision a pass over N tokens rounds differently from a pass over one, which may
turn a near-tie; the gap between the two best logits at the first difference tells such a tie from an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.eval.answers import Answer
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


def compare_outputs(backbone: Backbone, reference: Sequence[Answer], ours: Sequence[Answer]) -> dict[str, Any]:
    """Share of prompts whose answers are equal token for token, and where the others part first.

    Of a conversation, the turns after a difference answer other questions and are not looked at.
    """
    differences = []
    for number, (base, answer) in enumerate(zip(reference, ours, strict=True)):
        for turn, (theirs, own) in enumerate(zip(base.turns, answer.turns, strict=False)):
            if found := first_divergence(backbone, torch.tensor(theirs.prompt), own.ids, theirs.ids):
                differences.append({"prompt": number, "turn": turn, **asdict(found)})
                break
    return {"identical_share": 1 - len(differences) / len(reference), "differences": differences}
