"""How much of an answer is what the backbone would write now, greedily, behind the same words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_train.data.hidden_states import hidden_states_of
from medusa_train.data.rows import Row
from medusa_train.inference.backbone import Backbone

BATCH_TOKENS = 2048  # padded, in one pass
CHUNK = 1024  # positions whose logits exist at once


def self_consistency(backbone: Backbone, rows: Sequence[Row]) -> list[tuple[int, int]]:
    """For each row, how many answer tokens equal the backbone's greedy choice, and of how many.

    1 for greedy answers of this backbone but for rounding; lower for sampled ones, and for another model's. Nothing
    predicts a text's first token, so that one is not counted.
    """
    found: list[tuple[int, int]] = [(0, 0)] * len(rows)
    by_length = sorted(range(len(rows)), key=lambda place: len(rows[place].input_ids))
    while by_length:
        longest = len(rows[by_length[-1]].input_ids)
        batch = [by_length.pop() for _ in range(min(len(by_length), max(1, BATCH_TOKENS // longest)))]
        states = hidden_states_of(backbone, [rows[place] for place in batch])
        for place, hidden in zip(batch, states, strict=True):
            row = rows[place]
            positions = torch.tensor([at for start, end in row.spans for at in range(max(start, 1), end)])
            targets = torch.tensor(row.input_ids)[positions]
            with torch.inference_mode():
                equal = sum(
                    int((backbone.logits(hidden[some - 1]).argmax(-1).cpu() == wanted).sum())
                    for some, wanted in zip(positions.split(CHUNK), targets.split(CHUNK), strict=True)
                )
            found[place] = (equal, len(positions))
    return found
