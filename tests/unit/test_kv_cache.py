"""Path commit: accepted nodes move behind each row's text, per layer, nothing else changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.inference.kv_cache import TreeCache


def states(tags: list[float], count: int) -> torch.Tensor:
    """Keys that say where they come from: row b's position i holds ``tags[b] + i``, for 2 heads of width 3."""
    rows = torch.tensor(tags)[:, None] + torch.arange(count, dtype=torch.float32)
    return rows[:, None, :, None].expand(len(tags), 2, count, 3).clone()


@st.composite
def walks(draw):
    """Prompt lengths of some rows, and per pass (nodes, a path per row)."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    passes = []
    for _ in range(draw(st.integers(1, 5))):
        nodes = draw(st.integers(1, 6))
        path = st.lists(st.integers(0, nodes - 1), max_size=nodes, unique=True).map(sorted)
        passes.append((nodes, [draw(path) for _ in lengths]))
    return lengths, passes


@given(walks(), st.sampled_from([None, 1, 4, 16]))
def test_every_row_holds_its_prompt_and_its_accepted_nodes(walk, bucket):
    lengths, passes = walk
    rows = range(len(lengths))
    cache = TreeCache(num_layers=2, scratch=6, capacity=bucket or 64, bucket=bucket)
    cache.reserve(max(lengths))
    expected = [[float(100 * row + i) for i in range(lengths[row])] for row in rows]
    for layer in range(2):
        cache.update(
            states([100.0 * row for row in rows], max(lengths)), states([0.0] * len(rows), max(lengths)), layer
        )
    cache.finish_prompt(lengths)
    for turn, (nodes, paths) in enumerate(passes, start=1):
        tags = [1000.0 * turn + 100 * row for row in rows]
        for layer in range(2):
            keys, values = cache.update(states(tags, nodes), states([tag + 0.5 for tag in tags], nodes), layer)
            assert keys.shape[2] == values.shape[2] == nodes + cache.visible
            if bucket:  # a power of two of buckets, and no larger than needed
                assert (cache.visible // bucket).bit_count() == 1
                assert max(cache.lengths) <= cache.visible < 2 * max(max(cache.lengths), bucket)
                assert cache.capacity == cache.visible  # room grows with the text, whatever the request's budget
            else:
                assert cache.visible == max(cache.lengths)
                assert cache.capacity == 64
            for row in rows:
                # What attention sees: the nodes, then the committed text (then columns that masks close).
                assert keys[row, 1, :nodes, 2].tolist() == [tags[row] + node for node in range(nodes)]
                assert keys[row, 0, nodes : nodes + len(expected[row]), 0].tolist() == expected[row]
        cache.commit(paths, nodes)
        for row in rows:
            expected[row] += [tags[row] + node for node in paths[row]]
        assert cache.lengths == [len(row) for row in expected]
    for layer in cache.layers:
        for row in rows:
            assert layer.keys[row, 1, 6 : 6 + len(expected[row]), 2].tolist() == expected[row]
            new = expected[row][lengths[row] :]
            held = layer.values[row, 1, 6 + lengths[row] : 6 + len(expected[row]), 2].tolist()
            assert held == [tag + 0.5 for tag in new]


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_rows_that_are_kept_move_with_their_text_and_go_on(data, lengths):
    kept = data.draw(st.permutations(range(len(lengths))).flatmap(
        lambda order: st.integers(1, len(order)).map(lambda count: order[:count])))  # fmt: skip
    cache = TreeCache(num_layers=1, scratch=2, capacity=10)
    tags = [100.0 * row for row in range(len(lengths))]
    cache.update(states(tags, max(lengths)), states([tag + 0.5 for tag in tags], max(lengths)), 0)
    cache.finish_prompt(lengths)
    cache.keep(kept)
    assert cache.lengths == [lengths[row] for row in kept]
    assert cache.visible == max(cache.lengths)
    keys, values = cache.update(states([1000.0 + row for row in kept], 1), states([2000.0 + row for row in kept], 1), 0)
    cache.commit([[0]] * len(kept), 1)
    assert len(keys) == len(values) == len(kept)
    for place, row in enumerate(kept):
        text = [tags[row] + i for i in range(lengths[row])]
        assert cache.layers[0].keys[place, 1, 2 : 3 + lengths[row], 0].tolist() == [*text, 1000 + row]
        assert values[place, 0, 1 : 1 + lengths[row], 2].tolist() == [tag + 0.5 for tag in text]


def test_memory_follows_the_request_and_keys_may_be_wider_than_values():
    cache = TreeCache(num_layers=1, scratch=4, capacity=10, bucket=8)
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 5), 0)
    assert cache.layers[0].keys.shape == (1, 2, 4 + 16, 8)
    assert cache.layers[0].values.shape == (1, 2, 4 + 16, 5)
    assert cache.get_seq_length() == 0  # nothing is committed yet
    assert cache.get_mask_sizes(3, 0) == (3, 0)
    cache.finish_prompt([3])
    assert cache.lengths == [3]
    assert cache.visible == 8
    assert cache.get_mask_sizes(3, 0) == (11, 0)


def test_forgetting_the_tail_lets_it_be_overwritten():
    cache = TreeCache(num_layers=1, scratch=2, capacity=10)
    cache.update(states([0.0], 5), states([0.0], 5), 0)
    cache.finish_prompt([5])
    cache.set_lengths([3])
    keys, _ = cache.update(states([70.0], 2), states([70.0], 2), 0)
    assert keys[0, 0, :, 0].tolist() == [70, 71, 0, 1, 2]
    cache.commit([[0, 1]], 2)
    assert cache.layers[0].keys[0, 0, 2:7, 0].tolist() == [0, 1, 2, 70, 71]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_layers_of_different_forms_are_committed_alike_and_hold_no_spare_memory(devices):
    widths = [3, 3, 5, 3, None]  # the last layer shares another's keys and never writes its own
    cache = TreeCache(num_layers=len(widths), scratch=2, capacity=10, devices=devices)

    def write(count, first):
        for layer, width in enumerate(widths):
            if width:
                told = torch.arange(count).float() + first + 100 * layer
                cache.update(
                    told[None, None, :, None].expand(1, 2, count, width), torch.zeros(1, 2, count, width), layer
                )

    write(4, 0.0)
    cache.finish_prompt([4])
    write(2, 50.0)
    cache.commit([[0, 1]], 2)
    for layer, width in enumerate(widths):
        if width:
            keys = cache.layers[layer].keys
            assert keys.shape == (1, 2, 12, width)
            assert (keys[0, 1, 2:8, width - 1] - 100 * layer).tolist() == [0, 1, 2, 3, 50, 51]
    held = {layer.keys.untyped_storage().data_ptr(): layer.keys.untyped_storage().nbytes()
            for layer in cache.layers[:4]}  # fmt: skip
    assert sum(held.values()) == 4 * 2 * 12 * sum(width or 0 for width in widths)
