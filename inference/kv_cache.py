"""A key/value cache for tree decoding on stock transformers models.

Keys and values of the committed text lie at ``0 .. length-1``. A verification pass writes its N nodes behind them, and
`commit` moves the accepted path into place, so that rejected nodes are simply overwritten by the next pass. The cache
is allocated once, for the request (prompt + budget + tree) and not for the model's longest context, and hands
attention only the part that is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, ``(1, kv_heads, capacity, head_dim)``, allocated when the first ones arrive."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0  # committed positions

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # Keys and values may differ in width (multi-head latent attention).
        self.keys, self.values = (
            torch.zeros(*states.shape[:2], self.capacity, states.shape[3], dtype=states.dtype, device=states.device)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write N new positions behind the committed ones; returns everything that is in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def commit(self, path: Tensor | None, count: int) -> None:
        if path is not None and self.keys is not None and self.values is not None:
            source = path.to(self.keys.device) + self.length
            for states in (self.keys, self.values):
                # Indexing copies before it is written back, so a path may overlap its own target.
                states[:, :, self.length : self.length + count] = states[:, :, source]
        self.length += count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x


class TreeCache(Cache):
    """The whole model's cache for one request of batch size 1."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[TreeCacheLayer(capacity) for _ in range(num_layers)])
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Committed positions."""
        return int(self.layers[0].length)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the given nodes of the last pass, in this order, as the next committed positions.

        ``path`` holds node indices of the pass, root first; ``range(n)`` keeps the first n and moves nothing.
        """
        indices = None if list(path) == list(range(len(path))) else torch.tensor(path)
        for layer in self.layers:
            layer.commit(indices, len(path))
