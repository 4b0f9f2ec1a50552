"""Training samples with the backbone in the loop: whole rows, packed into sequences of one length.

A pack holds several texts behind each other. Positions start anew with every text, which is how transformers knows
that no text may see another; `check_packing` proves it for a model. Every place of a pack is a sample like those of the
hidden-state cache: its state, the token after it, and the tokens that heads 1..K should predict. Labels never reach
over the end of an answer, so the last K places of a text lose one head after the other and nothing leaks into the next.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medusa_train.data.dataset import IGNORED
from medusa_train.data.rows import Row
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.copies import NO_COPY, copies_in
from medusa_train.inference.errors import UserError
from medusa_train.inference.heads_config import MOST_COPIED

OPEN_PACKS = 64  # packs that still take rows; more would fill them better, and make packing slow


class PackedRows(Dataset[dict[str, Tensor]]):
    """One sample per pack of rows.

    A sample is ``index`` ``()``, its number; ``input_ids`` and ``position_ids`` ``(L,)``, zeros behind the last row;
    ``roots`` ``(L,)``, the token after each place; ``labels`` ``(L, K)``, the tokens after that, ``IGNORED`` where
    there is no loss; ``copies`` ``(L, MOST_COPIED)``, what followed the root's words before. All packs are of one
    length L: ``pack_tokens``, or the longest row.

    Args:
        seed: decides which rows share a pack; the order of packs is the sampler's.

    Attributes:
        positions: places of all packs that carry loss, as many as the samples of `HeadsDataset` would be.
    """

    def __init__(self, rows: Sequence[Row], num_heads: int, pack_tokens: int, seed: int) -> None:
        self.num_heads = num_heads
        self.length = max(pack_tokens, *(len(row.input_ids) for row in rows))
        self.positions = sum(max(0, end - start - 1) for row in rows for start, end in _answers(row))
        order = list(rows)
        random.Random(seed).shuffle(order)
        self.packs = _first_fit(order, self.length)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input_ids = torch.zeros(self.length, dtype=torch.long)
        position_ids = torch.zeros_like(input_ids)
        labels = torch.full((self.length, self.num_heads), IGNORED)
        copies = torch.full((self.length, MOST_COPIED), NO_COPY)
        start = 0
        for row in self.packs[index]:
            end = start + len(row.input_ids)
            input_ids[start:end] = torch.tensor(row.input_ids)
            position_ids[start:end] = torch.arange(end - start)
            labels[start:end] = row_labels(row, self.num_heads)
            for first, last in _answers(row):
                copies[start + first - 1 : start + last - 1] = copies_in(row.input_ids, first, last)
            start = end
        return {
            "index": torch.tensor(index),
            "input_ids": input_ids,
            "position_ids": position_ids,
            "roots": input_ids.roll(-1),  # read only where there are labels, and so a token behind
            "labels": labels,
            "copies": copies,
        }

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A collated batch: every tensor of a sample with a leading batch dimension, in the order asked."""
        samples = [self[index] for index in indices]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def place(self, index: int) -> str:
        """What a sample is made of, for messages: the ids of its rows."""
        return "+".join(row.id for row in self.packs[index])


def row_labels(row: Row, num_heads: int) -> Tensor:
    """``(len(row), K)``: what heads 1..K should predict at every place of a row, `IGNORED` where there is no loss."""
    ids = torch.tensor(row.input_ids)
    labels = torch.full((len(ids), num_heads), IGNORED)
    for start, end in _answers(row):
        for head in range(1, num_heads + 1):
            count = max(0, end - start - head)
            labels[start - 1 : start - 1 + count, head - 1] = ids[start + head : start + head + count]
    return labels


def answer_tokens(rows: Iterable[Row]) -> Iterable[Tensor]:
    """The tokens of each row that carry loss, for `draft_vocabulary`."""
    for row in rows:
        ids = torch.tensor(row.input_ids)
        yield torch.cat([ids[start:end] for start, end in _answers(row)])


def check_packing(backbone: Backbone) -> None:
    """Refuse a model whose texts would see each other in a pack.

    Raises:
        UserError: two texts in one pass do not give the hidden states of each read alone.
    """
    ids = [torch.arange(start, end, device=backbone.device) % backbone.vocab_size for start, end in ((1, 6), (6, 13))]
    positions = [torch.arange(len(part), device=backbone.device) for part in ids]
    with torch.inference_mode():
        alone = torch.cat([backbone.hidden_states(part[None])[0] for part in ids]).float()
        try:
            packed = backbone.hidden_states(torch.cat(ids)[None], position_ids=torch.cat(positions)[None])[0].float()
        except (TypeError, ValueError, RuntimeError) as error:
            packed = torch.full_like(alone, torch.nan)
            reason = f" ({' '.join(str(error).split())[:150]})"
        else:
            reason = ""
    if not torch.allclose(packed, alone, rtol=0.1, atol=0.05 * float(alone.abs().max())):
        raise UserError(
            f"{type(backbone.model).__name__} lets texts of one pack see each other{reason}; use training.mode: cached"
        )


def _answers(row: Row) -> list[tuple[int, int]]:
    """The spans that carry loss; the first token of a text has no state before it."""
    return [(max(start, 1), end) for start, end in row.spans]


def _first_fit(rows: Sequence[Row], length: int) -> list[list[Row]]:
    packs: list[list[Row]] = []
    room: list[int] = []
    for row in rows:
        size = len(row.input_ids)
        first = max(0, len(packs) - OPEN_PACKS)
        home = next((pack for pack in range(first, len(packs)) if room[pack] >= size), None)
        if home is None:
            packs.append([])
            room.append(length)
            home = len(packs) - 1
        packs[home].append(row)
        room[home] -= size
    return packs
