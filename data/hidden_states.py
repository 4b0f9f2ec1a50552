"""The hidden-state cache: what the backbone computed at every position that carries loss.

Heads read only the last hidden state, so one forward pass over the rows is all that training needs of the backbone.
For a span of answer tokens c_0 .. c_{m-1} the cache keeps the m hidden states that predict them: entry i is the state
right before c_i. Head k at entry i learns c_{i+k}, and the backbone's own distribution there is the projection of entry
i+k: labels, hard and soft, are shifts within the cache and need no storage of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from medusa_train.data.rows import Row
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_tensors

CACHE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shard:
    """Cached positions of some rows, memory-mapped.

    Attributes:
        hidden: ``(T, hidden)`` bf16 last hidden states.
        tokens: ``(T,)`` the token that follows each of them.
        ends: ``(T,)`` index in this shard where each one's span ends (exclusive).
    """

    hidden: Tensor
    tokens: Tensor
    ends: Tensor


def write_cache(
    backbone: Backbone, rows: Sequence[Row], folder: Path, batch_tokens: int, rows_per_shard: int, name: str
) -> None:
    """Write the shards of ``rows``; whole shards that are already there are kept, so a killed run goes on.

    Args:
        batch_tokens: padded tokens in one forward pass, a bound on memory.
        name: shown on the progress bar.
    """
    shards = [rows[start : start + rows_per_shard] for start in range(0, len(rows), rows_per_shard)]
    with tqdm(total=sum(len(row.input_ids) for row in rows), desc=f"cache {name}", unit="token") as bar:
        for number, members in enumerate(shards):
            path = folder / f"shard-{number:05d}.safetensors"
            if not path.exists():
                write_tensors(path, _shard_tensors(backbone, members, batch_tokens))
            bar.update(sum(len(row.input_ids) for row in members))


def read_cache(folder: Path) -> list[Shard]:
    """Map the shards of a folder into memory, in order.

    Raises:
        UserError: there is none.
    """
    paths = sorted(folder.glob("shard-*.safetensors"))
    if not paths:
        raise UserError(f"{folder} holds no hidden states; run medusa-train cache first")
    return [Shard(**load_file(path)) for path in paths]  # safetensors maps the file, nothing is read until it is used


def hidden_states_of(backbone: Backbone, rows: Sequence[Row]) -> list[Tensor]:
    """Last hidden states of every row in one right-padded pass: a list of ``(len(row), hidden)``."""
    longest = max(len(row.input_ids) for row in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.input_ids)] = torch.tensor(row.input_ids)
        mask[i, : len(row.input_ids)] = 1
    with torch.inference_mode():
        hidden = backbone.hidden_states(input_ids.to(backbone.device), attention_mask=mask.to(backbone.device))
    return [hidden[i, : len(row.input_ids)] for i, row in enumerate(rows)]


def _shard_tensors(backbone: Backbone, rows: Sequence[Row], batch_tokens: int) -> dict[str, Tensor]:
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    kept: list[tuple[Tensor, Tensor]] = [None] * len(rows)  # type: ignore[list-item]
    spans: list[list[int]] = [[] for _ in rows]
    while by_length:
        longest = len(rows[by_length[-1]].input_ids)
        batch = [by_length.pop() for _ in range(min(len(by_length), max(1, batch_tokens // longest)))]
        for i, hidden in zip(batch, hidden_states_of(backbone, [rows[i] for i in batch]), strict=True):
            ids = torch.tensor(rows[i].input_ids)
            # The state before a token predicts it; the first token of a text has none before it.
            pieces = [(max(start, 1), end) for start, end in rows[i].spans]
            states = [hidden[start - 1 : end - 1].to("cpu", CACHE_DTYPE) for start, end in pieces]
            kept[i] = (torch.cat(states), torch.cat([ids[start:end] for start, end in pieces]))
            spans[i] = [end - start for start, end in pieces]
    ends, total = [], 0
    for lengths in spans:
        for length in lengths:
            total += length
            ends.append(torch.full((length,), total))
    return {
        "hidden": torch.cat([hidden for hidden, _ in kept]),
        "tokens": torch.cat([tokens for _, tokens in kept]),
        "ends": torch.cat(ends),
    }
