"""Which rows of a batch attend together, so that short texts are not read to the end of the longest one.

Keys of a batch lie in one tensor, as wide as the longest text; what a shorter row has there is masked, and torch's
kernels on a CPU compute it all the same. Neighbouring rows that are about as long make one call, over the columns that
the longest of them has: a call costs something too, so rows of similar lengths stay together.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CALL = 400  # columns of one row that take as long as a call of their own does (a 135M model, 2 cores)


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of a batch.

    Attributes:
        rows: which.
        columns: how many leading columns hold all that they may see.
        mask: theirs, ``(R, 1, groups * N, columns)``, once below the other for each query head of a group.
    """

    rows: slice
    columns: int
    mask: Tensor


class Blocks:
    """The blocks of masks; all layers share a pass's masks, so that the first one finds them for all."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[weakref.ref[Tensor], list[Block]]] = {}

    def __call__(self, mask: Tensor, groups: int) -> list[Block]:
        """Blocks of a mask ``(B, 1, N, L)``, bool or additive; a single one unless several pay.

        Args:
            groups: query heads for each key head.
        """
        if torch.compiler.is_compiling():
            return [_block(mask, slice(None), mask.shape[-1], groups)]
        key = id(mask), groups
        known = self._known.get(key)
        if known is None or known[0]() is not mask:  # another one may have got its id
            found = [_block(mask, rows, columns, groups) for rows, columns in _row_blocks(mask)]
            known = self._known[key] = (weakref.ref(mask, lambda _: self._known.pop(key, None)), found)
        return known[1]


def _block(mask: Tensor, rows: slice, columns: int, groups: int) -> Block:
    # A copy even of one group: a view would keep the mask alive, which is how one is known to be gone.
    own = mask[rows, :, :, :columns]
    below = own.repeat(1, groups, 1, 1).view(len(own), 1, groups * own.shape[2], columns)
    return Block(rows, columns, below)


def _row_blocks(mask: Tensor) -> list[tuple[slice, int]]:
    if mask.shape[0] == 1 or mask.device.type != "cpu":
        return [(slice(None), mask.shape[-1])]
    found = row_blocks(seen_columns(mask))
    return found if len(found) > 1 else [(slice(None), mask.shape[-1])]


def seen_columns(mask: Tensor) -> list[int]:
    """For each row of a mask ``(B, 1, N, L)``, bool or additive, how many leading columns hold all that it may see."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    columns = torch.arange(1, mask.shape[-1] + 1)
    ends: list[int] = (allowed[:, 0].any(dim=1) * columns).amax(dim=1).clamp(min=1).tolist()
    return ends


def row_blocks(ends: Sequence[int], call: int = CALL) -> list[tuple[slice, int]]:
    """Split rows into runs of neighbours for which calls and columns cost least together.

    Args:
        ends: how many columns each row has to see.
        call: columns of one row that cost as much as a call.

    Returns:
        For each run, its rows and the most columns that one of them has to see.
    """
    # The least cost of the first n rows, and where the last of their runs begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for stop in range(1, len(ends) + 1):
        longest, options = 0, []
        for start in range(stop - 1, -1, -1):
            longest = max(longest, ends[start])
            options.append((best[start][0] + call + (stop - start) * longest, start))
        best.append(min(options))
    found: list[tuple[slice, int]] = []
    stop = len(ends)
    while stop:
        start = best[stop][1]
        found.insert(0, (slice(start, stop), max(ends[start:stop])))
        stop = start
    return found
