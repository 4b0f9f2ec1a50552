"""The hidden-state cache: what the backbone computed at every position that carries loss.

Heads read only the last hidden state, so one forward pass over the rows is all that training needs of the backbone.
Distillation makes that pass anyway, token by token: it keeps what it computed (`keep_states`, one file per batch), and
`write_cache` only arranges it, and computes what is missing. A position takes 2 bytes per dimension.

For a span of answer tokens c_0 .. c_{m-1} the cache keeps the m hidden states that predict them: entry i is the state
right before c_i. Head k at entry i learns c_{i+k}, and the backbone's own distribution there is the projection of entry
i+k: labels, hard and soft, are shifts within the cache and need no storage of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from medusa_train.data.chat import Span
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


def keep_states(path: Path, rows: Sequence[Row], states: Sequence[Tensor]) -> None:
    """Write the states before every learnt token of some rows, ``(learnt tokens, hidden)`` each, as one file.

    The tokens go with them, so that states can never be taken for those of another text.
    """
    tensors = {}
    for row, hidden in zip(rows, states, strict=True):
        tensors[f"{row.id}.hidden"] = hidden.to("cpu", CACHE_DTYPE)
        tensors[f"{row.id}.tokens"] = _learnt(row)
    write_tensors(path, tensors)


class KeptStates:
    """The states in a folder of `keep_states` files, by row; a folder that is not there holds none."""

    def __init__(self, folder: Path) -> None:
        self._home: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    self._home |= {name.rpartition(".")[0]: path for name in file.keys()}  # noqa: SIM118 not a dict
            except SafetensorError:
                continue  # damaged: its rows are computed again

    def of(self, row: Row) -> Tensor | None:
        """``(learnt tokens, hidden)`` bf16; None if there are none, or if they belong to other tokens."""
        if row.id not in self._home:
            return None
        with safe_open(self._home[row.id], framework="pt") as file:
            if not torch.equal(file.get_tensor(f"{row.id}.tokens"), _learnt(row)):
                return None
            hidden: Tensor = file.get_tensor(f"{row.id}.hidden")
            return hidden


def write_cache(
    backbone: Backbone,
    rows: Sequence[Row],
    kept: KeptStates,
    folder: Path,
    batch_tokens: int,
    rows_per_shard: int,
    name: str,
) -> None:
    """Write the shards of ``rows``; whole shards that are already there stay, so a killed run goes on.

    Args:
        kept: states that need not be computed.
        batch_tokens: padded tokens in one forward pass, a bound on memory.
        name: shown on the progress bar.
    """
    shards = [rows[start : start + rows_per_shard] for start in range(0, len(rows), rows_per_shard)]
    with tqdm(total=sum(len(row.input_ids) for row in rows), desc=f"cache {name}", unit="token") as bar:
        for number, members in enumerate(shards):
            path = folder / f"shard-{number:05d}.safetensors"
            if not path.exists():
                write_tensors(path, _shard_tensors(backbone, members, kept, batch_tokens))
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


def shard_of(backbone: Backbone, rows: Sequence[Row], batch_tokens: int) -> Shard:
    """The states of ``rows`` as a shard in memory."""
    return Shard(**_shard_tensors(backbone, rows, None, batch_tokens))


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


def _shard_tensors(
    backbone: Backbone, rows: Sequence[Row], kept: KeptStates | None, batch_tokens: int
) -> dict[str, Tensor]:
    states = [kept.of(row) if kept else None for row in rows]
    by_length = sorted((i for i, found in enumerate(states) if found is None), key=lambda i: len(rows[i].input_ids))
    while by_length:
        longest = len(rows[by_length[-1]].input_ids)
        batch = [by_length.pop() for _ in range(min(len(by_length), max(1, batch_tokens // longest)))]
        for i, hidden in zip(batch, hidden_states_of(backbone, [rows[i] for i in batch]), strict=True):
            pieces = [hidden[start - 1 : end - 1] for start, end in _pieces(rows[i])]
            states[i] = torch.cat(pieces).to("cpu", CACHE_DTYPE)
    ends, total = [], 0
    for row in rows:
        for start, end in _pieces(row):
            total += end - start
            ends.append(torch.full((end - start,), total))
    return {
        "hidden": torch.cat([hidden for hidden in states if hidden is not None]),
        "tokens": torch.cat([_learnt(row) for row in rows]),
        "ends": torch.cat(ends),
    }


def _pieces(row: Row) -> list[Span]:
    """Where a row's learnt tokens stand; the first token of a text has no state before it that could predict it."""
    return [(max(start, 1), end) for start, end in row.spans]


def _learnt(row: Row) -> Tensor:
    return torch.tensor([token for start, end in _pieces(row) for token in row.input_ids[start:end]])
