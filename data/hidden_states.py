"""The hidden-state cache: what the backbone computed at every position that carries loss.

Heads read only the last hidden state, so one forward pass over the rows is all that training needs of the backbone.
Distillation makes that pass anyway, token by token: it keeps what it computed (`keep_states`, one file per batch), and
`write_cache` only arranges it, and computes what is missing. A position takes 2 bytes per dimension in bf16, 1 in fp8
with a scale of its own; each shard has a checksum beside it.

For a span of answer tokens c_0 .. c_{m-1} the cache keeps the m hidden states that predict them: entry i is the state
right before c_i. Head k at entry i learns c_{i+k}, and the backbone's own distribution there is the projection of entry
i+k: labels, hard and soft, are shifts within the cache and need no storage of their own. What followed when the words
up to c_i last came, in the prompt too, is kept with each entry (`copies`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from medusa_train.data.chat import Span
from medusa_train.data.rows import Row
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.copies import copies_in
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_tensors, write_text
from medusa_train.inference.heads_config import MOST_COPIED

CACHE_DTYPE = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn
CacheDtype = Literal["bfloat16", "float8"]
CHECKSUM = ".crc32"  # ending of the file beside a shard


@dataclass(frozen=True)
class Shard:
    """Cached positions of some rows, memory-mapped.

    Attributes:
        hidden: ``(T, hidden)`` last hidden states as they are stored, bf16 or fp8; see `states`.
        tokens: ``(T,)`` the token that follows each of them.
        ends: ``(T,)`` index in this shard where each one's span ends (exclusive).
        copies: ``(T, MOST_COPIED)`` int32, see `copies_in`.
        scales: ``(T,)`` fp32, what fp8 states are multiplied with; None for bf16.
    """

    hidden: Tensor
    tokens: Tensor
    ends: Tensor
    copies: Tensor
    scales: Tensor | None = None

    def states(self, places: Tensor | slice) -> Tensor:
        """Hidden states to compute with: ``(..., hidden)``, bf16 if they are stored in fp8."""
        if self.scales is None:
            return self.hidden[places]
        stored = self.hidden.view(torch.uint8)[places].view(FLOAT8)  # fp8 tensors cannot be indexed everywhere
        return (stored.float() * self.scales[places][..., None]).to(CACHE_DTYPE)

    def first(self, positions: int) -> Shard:
        """The first positions alone; an answer that is cut ends there."""
        return Shard(
            self.hidden[:positions],
            self.tokens[:positions],
            self.ends[:positions].clamp(max=positions),
            self.copies[:positions],
            None if self.scales is None else self.scales[:positions],
        )


def to_float8(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """States ``(T, hidden)`` as e4m3 numbers, and each one's scale ``(T,)``, which brings its largest to 448.

    What comes back is within 1/16 of a number, or within 1/450,000 of the state's largest one where that is more.
    """
    scales = hidden.float().abs().amax(dim=1).clamp(min=1e-30) / torch.finfo(FLOAT8).max
    return (hidden.float() / scales[:, None]).to(FLOAT8), scales


def position_bytes(hidden_size: int, dtype: CacheDtype) -> int:
    """Bytes of one position on the disk: a state, two int64 (token, end of its span) and a copy."""
    return (2 * hidden_size if dtype == "bfloat16" else hidden_size + 4) + 8 + 8 + 4 * MOST_COPIED


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
    dtype: CacheDtype = "bfloat16",
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Write the shards of ``rows``; whole shards that are already there stay, so a killed run goes on.

    Args:
        kept: states that need not be computed.
        batch_tokens: padded tokens in one forward pass, a bound on memory.
        name: shown on the progress bar.
        rank, ranks: of this process; each writes every ``ranks``-th shard, the same one whatever their number.
    """
    mine = range(rank, -(-len(rows) // rows_per_shard), ranks)
    for number in tqdm(mine, desc=f"cache {name}", unit="shard", disable=rank > 0):
        path = shard_path(folder, number)
        if not is_whole(path):
            members = rows[number * rows_per_shard : (number + 1) * rows_per_shard]
            write_shard(path, _shard_tensors(backbone, members, kept, batch_tokens, dtype))


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard of a folder stands."""
    return folder / f"shard-{number:05d}.safetensors"


def is_whole(path: Path) -> bool:
    """Whether a shard was written to its end."""
    return path.exists() and path.with_suffix(CHECKSUM).exists()


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a shard, then its checksum: a shard that has none is not whole."""
    path.with_suffix(CHECKSUM).unlink(missing_ok=True)
    write_tensors(path, tensors)
    write_text(path.with_suffix(CHECKSUM), f"{_crc32(path):08x}\n")


def read_cache(folder: Path) -> list[Shard]:
    """Map the shards of a folder into memory, in order, once each one's checksum was found right.

    Raises:
        UserError: there is none, or one is damaged or of another version.
    """
    paths = sorted(folder.glob("shard-*.safetensors"))
    if not paths:
        raise UserError(f"{folder} holds no hidden states; run medusa-train cache first")
    for path in paths:
        status = path.stat()
        _check(path, status.st_size, status.st_mtime_ns)
    return [_map(path) for path in paths]


def _map(path: Path) -> Shard:
    tensors = load_file(path)  # safetensors maps the file, nothing is read until it is used
    if tensors.keys() - {"scales"} != {"hidden", "tokens", "ends", "copies"}:
        raise UserError(f"{path} is of another version; remove {path.parents[1]} and run that stage again")
    return Shard(**tensors)


@cache  # once per process and file: the stages of a run open the same shards again and again
def _check(path: Path, size: int, changed: int) -> None:
    try:
        expected = int(path.with_suffix(CHECKSUM).read_text(encoding="utf-8"), 16)
    except FileNotFoundError:
        return  # the file stands for the whole of the shard's writing, which is atomic; it may be lost alone
    except ValueError:
        expected = -1
    if _crc32(path) != expected:
        stage = path.parents[1]
        raise UserError(f"{path} is damaged: its checksum differs; remove {stage} and run that stage again")


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def shard_of(backbone: Backbone, rows: Sequence[Row], batch_tokens: int) -> Shard:
    """The states of ``rows`` as a shard in memory, in the backbone's own dtype."""
    return Shard(**_shard_tensors(backbone, rows, None, batch_tokens, None))


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
    backbone: Backbone, rows: Sequence[Row], kept: KeptStates | None, batch_tokens: int, dtype: CacheDtype | None
) -> dict[str, Tensor]:
    states = [kept.of(row) if kept else None for row in rows]
    by_length = sorted((i for i, found in enumerate(states) if found is None), key=lambda i: len(rows[i].input_ids))
    while by_length:
        longest = len(rows[by_length[-1]].input_ids)
        batch = [by_length.pop() for _ in range(min(len(by_length), max(1, batch_tokens // longest)))]
        for i, hidden in zip(batch, hidden_states_of(backbone, [rows[i] for i in batch]), strict=True):
            pieces = [hidden[start - 1 : end - 1] for start, end in _pieces(rows[i])]
            states[i] = torch.cat(pieces).to("cpu", CACHE_DTYPE if dtype == "bfloat16" else None)
    ends, total = [], 0
    for row in rows:
        for start, end in _pieces(row):
            total += end - start
            ends.append(torch.full((end - start,), total))
    copies = [copies_in(row.input_ids, start, end) for row in rows for start, end in _pieces(row)]
    labels = {
        "tokens": torch.cat([_learnt(row) for row in rows]),
        "ends": torch.cat(ends),
        "copies": torch.cat(copies),
    }
    hidden = torch.cat([hidden.float() if dtype == "float8" else hidden for hidden in states if hidden is not None])
    if dtype != "float8":
        return {"hidden": hidden, **labels}
    stored, scales = to_float8(hidden)
    return {"hidden": stored, "scales": scales, **labels}


def _pieces(row: Row) -> list[Span]:
    """Where a row's learnt tokens stand; the first token of a text has no state before it that could predict it."""
    return [(max(start, 1), end) for start, end in row.spans]


def _learnt(row: Row) -> Tensor:
    return torch.tensor([token for start, end in _pieces(row) for token in row.input_ids[start:end]])
