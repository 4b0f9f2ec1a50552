"""A key/value cache for tree decoding on stock transformers models.

Columns of a layer, for every row of the batch::

    [ scratch: the nodes of one pass, right-aligned | committed text: 0 .. lengths[row]-1 | free ]

A verification pass writes its N nodes into the scratch columns, always at the same place whatever the rows' lengths,
and attention reads one slice: scratch and the committed part that any row uses. `commit` then copies each row's
accepted path behind that row's text, so rows accept different numbers of tokens and rejected nodes are overwritten by
the next pass. Keys carry their positions (rotary or learned), so the order of columns means nothing; masks decide.

Room is made for the request (tree + prompt + budget), not for the model's longest context: at once, or for compiled
passes as the text grows, so that their shapes do not depend on the budget. The keys of all layers lie in one tensor,
and so do the values: a commit copies the same columns everywhere, and two copies for all layers cost a small model a
tenth of two for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

Half = Literal["keys", "values"]


@dataclass
class Columns:
    """What all layers have in common: which columns there are, and which a pass writes and sees.

    Attributes:
        scratch: columns for the nodes of a pass.
        capacity: committed columns that there is room for.
        reading_prompt: no verification pass has begun yet.
        prefix: columns that were read before the rest of a prompt.
        visible: committed columns that a pass can see.
        compiled: passes are compiled: keys and values are marked as staying where they are (see `graphs`).
    """

    scratch: int
    capacity: int
    compiled: bool = False
    reading_prompt: bool = True
    prefix: int = 0
    visible: int = 0


@dataclass
class Stack:
    """The keys, or the values, of all layers where these have the same form.

    Attributes:
        half: which of the two.
        states: ``(layers, B, kv_heads, scratch + capacity, head_dim)``.
        used: how many of its layers are taken.
    """

    half: Half
    states: Tensor
    used: int = 0

    def holds(self, half: Half, like: Tensor, columns: int) -> bool:
        """Whether a layer with states ``like``, ``(B, kv_heads, n, head_dim)``, can be one of this stack's."""
        form = (*like.shape[:2], columns, like.shape[3])
        same = self.half == half and self.states.shape[1:] == form and self.used < len(self.states)
        return same and (self.states.dtype, self.states.device) == (like.dtype, like.device)


@dataclass
class Memory:
    """The stacks of a cache: one of keys and one of values, unless layers differ in form or device.

    Attributes:
        layers: how many a new stack has room for.
    """

    layers: int
    stacks: list[Stack] = field(default_factory=list)

    def take(self, half: Half, like: Tensor, columns: int) -> tuple[Stack, int]:
        """Room for another layer, and its place there."""
        stack = next((stack for stack in self.stacks if stack.holds(half, like, columns)), None)
        if stack is None:
            # Zeros: a masked NaN would still spread.
            room = like.new_zeros(self.layers, *like.shape[:2], columns, like.shape[3])
            self.stacks.append(stack := Stack(half, room))
        stack.used += 1
        return stack, stack.used - 1


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, ``(B, kv_heads, scratch + capacity, head_dim)``, allocated on first use."""

    is_sliding = False

    def __init__(self, columns: Columns, memory: Memory) -> None:
        super().__init__()
        self.columns, self.memory = columns, memory
        self.places: dict[Half, tuple[Stack, int]] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        columns = self.columns.scratch + self.columns.capacity
        # Keys and values may differ in width (multi-head latent attention).
        self.places["keys"] = self.memory.take("keys", key_states, columns)
        self.places["values"] = self.memory.take("values", value_states, columns)
        self.is_initialized = True
        self.look_again()

    def look_again(self) -> None:
        """Find keys and values where they are now; a layer that shares another's has none."""
        for half, (stack, place) in self.places.items():
            states = stack.states[place]
            if self.columns.compiled:
                torch._dynamo.mark_static_address(states)
            setattr(self, half, states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's positions; returns everything that it may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        count, columns = key_states.shape[2], self.columns
        if columns.reading_prompt:
            first, start = columns.scratch, columns.scratch + columns.prefix
            end = stop = start + count
        else:
            first = start = columns.scratch - count
            end, stop = columns.scratch, columns.scratch + columns.visible
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, first:stop], self.values[:, :, first:stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length + self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self.columns.prefix if self.columns.reading_prompt else self.columns.visible

    def get_max_length(self) -> int:
        return self.columns.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x


class TreeCache(Cache):
    """The whole model's cache for one request.

    Attributes:
        lengths: committed positions of each row.
        columns: see `Columns`.
    """

    def __init__(
        self, num_layers: int, scratch: int, capacity: int, bucket: int | None = None, devices: int = 1
    ) -> None:
        """Make an empty cache.

        Args:
            num_layers: decoder layers.
            scratch: most nodes of a pass.
            capacity: committed positions of a row that there is room for at first.
            bucket: passes see this many committed columns times a power of two, so that compiled code meets few
                shapes; None: exactly as many as the longest row.
            devices: how many the layers are spread over, about evenly.
        """
        self.bucket = bucket
        self.columns = Columns(scratch, self._rounded(capacity), compiled=bucket is not None)
        self._memory = Memory(-(-num_layers // devices))
        super().__init__(layers=[TreeCacheLayer(self.columns, self._memory) for _ in range(num_layers)])
        self.lengths: list[int] = []

    def _rounded(self, length: int) -> int:
        if self.bucket is None:
            return length
        return self.bucket << max(0, (max(length, 1) - 1) // self.bucket).bit_length()

    @property
    def visible(self) -> int:
        return self.columns.visible

    @property
    def capacity(self) -> int:
        return self.columns.capacity

    def _change(self, change: Callable[[Stack], Tensor]) -> None:
        for stack in self._memory.stacks:  # one after the other: only one is held twice meanwhile
            stack.states = change(stack)
        for layer in self.layers:
            layer.look_again()

    def reserve(self, length: int) -> None:
        """Have room for so many committed positions of every row; what is held stays."""
        more = self._rounded(length) - self.columns.capacity
        if more > 0:
            self.columns.capacity += more
            self._change(lambda stack: torch.nn.functional.pad(stack.states, (0, 0, 0, more)))

    def share_prefix(self, length: int, rows: int) -> None:
        """Between two passes over a prompt: make a batch of ``rows`` rows of the one whose positions were read."""
        self.columns.prefix = length
        used = slice(self.columns.scratch, self.columns.scratch + length)

        def shared(stack: Stack) -> Tensor:
            states = stack.states
            whole = states.new_zeros(len(states), rows, *states.shape[2:])
            whole[:, :, :, used] = states[:, :, :, used]
            return whole

        self._change(shared)

    def keep(self, rows: Sequence[int]) -> None:
        """Leave only these rows, in this order; what stays in its place is not copied, and no memory is given back."""
        moved = [(old, new) for new, old in enumerate(rows) if old != new]
        source, target = torch.tensor(moved, dtype=torch.long).view(-1, 2).unbind(dim=1)
        used = self.columns.scratch + self.columns.visible

        def kept(stack: Stack) -> Tensor:
            states = stack.states
            if moved:
                states[:, target.to(states.device), :, :used] = states[:, source.to(states.device), :, :used]
            return states[:, : len(rows)]

        self._change(kept)
        self.set_lengths([self.lengths[row] for row in rows])

    def finish_prompt(self, lengths: Sequence[int]) -> None:
        """End of the prompt pass: row b's first ``lengths[b]`` positions are committed, the rest was padding."""
        self.set_lengths(lengths)
        self.columns.reading_prompt = False
        if any(stack.used < len(stack.states) for stack in self._memory.stacks):  # layers differ, or share their keys
            self._change(lambda stack: stack.states[: stack.used].clone())

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Declare how many leading positions of each row are committed (fewer: the tail is forgotten)."""
        self.lengths = list(lengths)
        self.columns.visible = self._rounded(max(self.lengths))

    def commit(self, paths: Sequence[Sequence[int]], nodes: int) -> None:
        """Append each row's accepted nodes to its text.

        Args:
            paths: per row, indices of nodes of the last pass in order; empty for a row that stays as it is.
            nodes: how many nodes that pass had.
        """
        scratch = self.columns.scratch
        moves = [
            (row, scratch - nodes + node, scratch + place)
            for row, (path, length) in enumerate(zip(paths, self.lengths, strict=True))
            for place, node in enumerate(path, start=length)
        ]
        if not moves:
            return
        lengths = [length + len(path) for path, length in zip(paths, self.lengths, strict=True)]
        self.reserve(max(lengths))
        columns = torch.tensor(list(zip(*moves, strict=True)))
        for stack in self._memory.stacks:
            rows, source, target = columns.to(stack.states.device).unbind()
            stack.states[:, rows, :, target] = stack.states[:, rows, :, source]
        self.set_lengths(lengths)
