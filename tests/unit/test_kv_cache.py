"""Path commit: accepted nodes move into place, per layer, nothing else changes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.inference.kv_cache import TreeCache


def states(tag: float, count: int) -> torch.Tensor:
    """Keys that say where they come from: ``tag + i`` at position i, for 2 heads of width 3."""
    return (tag + torch.arange(count, dtype=torch.float32))[None, None, :, None].expand(1, 2, count, 3).clone()


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), min_size=1, max_size=4))
def test_committed_positions_hold_the_accepted_nodes(paths):
    cache = TreeCache(num_layers=2, capacity=64)
    expected: list[float] = []
    for turn, path in enumerate(paths):
        path = sorted(path)  # a path's nodes have rising indices
        for layer in range(2):
            tag = 1000 * (layer + 1) + 100 * turn
            keys, _ = cache.update(states(tag, 6), states(tag + 0.5, 6), layer)
            assert keys.shape[2] == cache.length + 6
        cache.commit(path)
        expected += [100 * turn + node for node in path]
        assert cache.length == len(expected)
    for layer in range(2):
        held = cache.layers[layer]
        assert held.keys[0, 1, : len(expected), 2].tolist() == [1000 * (layer + 1) + e for e in expected]
        assert held.values[0, 0, : len(expected), 0].tolist() == [1000 * (layer + 1) + e + 0.5 for e in expected]


def test_memory_follows_the_request_and_keys_may_be_wider_than_values():
    cache = TreeCache(num_layers=1, capacity=10)
    cache.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 5), 0)
    assert cache.layers[0].keys.shape == (1, 2, 10, 8)
    assert cache.layers[0].values.shape == (1, 2, 10, 5)
    assert cache.get_seq_length() == 0  # nothing is committed yet
    cache.commit(range(4))
    assert cache.get_seq_length() == 4
    assert cache.get_mask_sizes(3, 0) == (7, 0)
