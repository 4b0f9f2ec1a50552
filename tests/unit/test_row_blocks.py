"""Rows attend in the runs that cost least, and to all that they may see."""

import gc
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.inference.row_blocks import Blocks, row_blocks, seen_columns


def cost(runs, call):
    return sum(call + (rows.stop - rows.start) * columns for rows, columns in runs)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 100))
def test_no_other_runs_cost_less(ends, call):
    runs = row_blocks(ends, call)
    assert [row for rows, _ in runs for row in range(len(ends))[rows]] == list(range(len(ends)))
    assert all(columns == max(ends[rows]) for rows, columns in runs)
    every = []
    for cuts in itertools.product([False, True], repeat=len(ends) - 1):
        edges = [0, *(place for place, cut in enumerate(cuts, start=1) if cut), len(ends)]
        every.append([(slice(a, b), max(ends[a:b])) for a, b in itertools.pairwise(edges)])
    assert cost(runs, call) == min(cost(other, call) for other in every)


@pytest.mark.parametrize("additive", [False, True])
def test_sees_to_the_last_column_that_any_node_may_see(additive):
    allowed = torch.zeros(3, 1, 2, 7, dtype=torch.bool)
    allowed[0, 0, 0, 0] = allowed[0, 0, 1, 3] = allowed[1, 0, 0, 6] = True
    mask = torch.zeros(3, 1, 2, 7).masked_fill(~allowed, torch.finfo(torch.float32).min) if additive else allowed
    assert seen_columns(mask) == [4, 7, 1]


def test_a_mask_is_looked_at_once_and_forgotten_with_it(monkeypatch):
    find, mask = Blocks(), torch.ones(2, 1, 3, 900, dtype=torch.bool)
    mask[1, :, :, 20:] = False
    first = find(mask, 2)
    assert [(block.rows, block.columns) for block in first] == [(slice(0, 1), 900), (slice(1, 2), 20)]
    assert torch.equal(first[1].mask, mask[1:, :, [0, 1, 2, 0, 1, 2], :20])
    assert find(mask, 2) is first
    assert find(mask, 1) is not first
    assert find(mask.clone(), 2) is not first
    del mask
    gc.collect()
    assert not find._known


def test_rows_that_are_about_as_long_stay_together():
    mask = torch.ones(4, 1, 1, 200, dtype=torch.bool)
    mask[2:, ..., 150:] = False
    (block,) = Blocks()(mask, 3)
    assert block.columns == 200
    assert block.mask.shape == (4, 1, 3, 200)
