"""A key/value cache for tree decoding on stock transformers models.

Columns of a layer, for every row of the batch::

    [ scratch: the nodes of one pass, right-aligned | committed text: 0 .. lengths[row]-1 | free ]

A verification pass writes its N nodes into the scratch columns, always at the same place whatever the rows' lengths,
and attention reads one slice: scratch and the committed part that any row uses. `commit` then copies each row's
accepted path behind that row's text, so rows accept different numbers of tokens and rejected nodes are overwritten by
the next pass. Keys carry their positions (rotary or learned), so the order of columns means nothing; masks decide.

Room is made for the request (tree + prompt + budget), not for the model's longest context: at once, or for compiled
passes as the text grows, so that their shapes do not depend on the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, ``(B, kv_heads, scratch + capacity, head_dim)``, allocated on first use."""

    is_sliding = False

    def __init__(self, scratch: int, capacity: int) -> None:
        super().__init__()
        self.scratch, self.capacity = scratch, capacity
        self.reading_prompt = True
        self.prefix = 0  # columns that were read before the rest of a prompt
        self.visible = 0  # committed columns that a pass can see

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        columns = self.scratch + self.capacity
        # Keys and values may differ in width (multi-head latent attention). Zeros: a masked NaN would still spread.
        self.keys, self.values = (
            torch.zeros(*states.shape[:2], columns, states.shape[3], dtype=states.dtype, device=states.device)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's positions; returns everything that it may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        count = key_states.shape[2]
        if self.reading_prompt:
            first, start = self.scratch, self.scratch + self.prefix
            end = stop = start + count
        else:
            first = start = self.scratch - count
            end, stop = self.scratch, self.scratch + self.visible
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, first:stop], self.values[:, :, first:stop]

    def reserve(self, capacity: int) -> None:
        """Have at least so many committed columns; what they hold stays."""
        more = capacity - self.capacity
        if more <= 0:
            return
        self.capacity = capacity
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (
                torch.nn.functional.pad(held, (0, 0, 0, more)) for held in (self.keys, self.values)
            )

    def share_prefix(self, length: int, rows: int) -> None:
        """Give each of ``rows`` rows the first ``length`` positions of the only row."""
        self.prefix = length
        if self.keys is None or self.values is None:
            return
        used = slice(self.scratch, self.scratch + length)
        shared = self.keys, self.values
        self.keys, self.values = (states.new_zeros(rows, *states.shape[1:]) for states in shared)
        for states, one in zip((self.keys, self.values), shared, strict=True):
            states[:, :, used] = one[:, :, used]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy columns ``source`` of ``rows`` to ``target``, each ``(m,)``."""
        if self.keys is None or self.values is None:  # a layer that shares another's keys
            return
        rows, source, target = (index.to(self.keys.device) for index in (rows, source, target))
        for states in (self.keys, self.values):
            states[rows, :, target] = states[rows, :, source]

    def keep(self, source: Tensor, target: Tensor, count: int) -> None:
        """Copy rows ``source`` ``(m,)`` to ``target``, then leave the first ``count``."""
        if self.keys is None or self.values is None:
            return
        source, target = source.to(self.keys.device), target.to(self.keys.device)
        used = self.scratch + self.visible
        for states in (self.keys, self.values):
            states[target, :, :used] = states[source, :, :used]
        self.keys, self.values = self.keys[:count], self.values[:count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length + self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self.prefix if self.reading_prompt else self.visible

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x


class TreeCache(Cache):
    """The whole model's cache for one request.

    Attributes:
        lengths: committed positions of each row.
        visible: committed columns that passes see: the longest row's, rounded up (see ``bucket``).
    """

    def __init__(self, num_layers: int, scratch: int, capacity: int, bucket: int | None = None) -> None:
        """Make an empty cache.

        Args:
            num_layers: decoder layers.
            scratch: most nodes of a pass.
            capacity: committed positions of a row that there is room for at first.
            bucket: passes see this many committed columns times a power of two, so that compiled code meets few
                shapes; None: exactly as many as the longest row.
        """
        self.scratch, self.bucket = scratch, bucket
        super().__init__(layers=[TreeCacheLayer(scratch, self._rounded(capacity)) for _ in range(num_layers)])
        self.lengths: list[int] = []

    def _rounded(self, length: int) -> int:
        if self.bucket is None:
            return length
        return self.bucket << max(0, (max(length, 1) - 1) // self.bucket).bit_length()

    @property
    def visible(self) -> int:
        return int(self.layers[0].visible)

    @property
    def capacity(self) -> int:
        return int(self.layers[0].capacity)

    def reserve(self, length: int) -> None:
        """Have room for so many committed positions of every row."""
        for layer in self.layers:  # one after the other: only a layer's old columns are held beside the new ones
            layer.reserve(self._rounded(length))

    def share_prefix(self, length: int, rows: int) -> None:
        """Between two passes over a prompt: make a batch of ``rows`` rows of the one whose positions were read."""
        for layer in self.layers:
            layer.share_prefix(length, rows)

    def keep(self, rows: Sequence[int]) -> None:
        """Leave only these rows, in this order; what stays in its place is not copied, and no memory is given back."""
        moved = [(old, new) for new, old in enumerate(rows) if old != new]
        source, target = torch.tensor(moved, dtype=torch.long).view(-1, 2).unbind(dim=1)
        for layer in self.layers:
            layer.keep(source, target, len(rows))
        self.set_lengths([self.lengths[row] for row in rows])

    def finish_prompt(self, lengths: Sequence[int]) -> None:
        """End of the prompt pass: row b's first ``lengths[b]`` positions are committed, the rest was padding."""
        self.set_lengths(lengths)
        for layer in self.layers:
            layer.reading_prompt = False

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Declare how many leading positions of each row are committed (fewer: the tail is forgotten)."""
        self.lengths = list(lengths)
        visible = self._rounded(max(self.lengths))
        for layer in self.layers:
            layer.visible = visible

    def commit(self, paths: Sequence[Sequence[int]], nodes: int) -> None:
        """Append each row's accepted nodes to its text.

        Args:
            paths: per row, indices of nodes of the last pass in order; empty for a row that stays as it is.
            nodes: how many nodes that pass had.
        """
        moves = [
            (row, self.scratch - nodes + node, self.scratch + place)
            for row, (path, length) in enumerate(zip(paths, self.lengths, strict=True))
            for place, node in enumerate(path, start=length)
        ]
        if not moves:
            return
        lengths = [length + len(path) for path, length in zip(paths, self.lengths, strict=True)]
        self.reserve(max(lengths))
        rows, sources, targets = torch.tensor(list(zip(*moves, strict=True)), device=self.layers[0].device).unbind()
        for layer in self.layers:
            layer.move(rows, sources, targets)
        self.set_lengths(lengths)
