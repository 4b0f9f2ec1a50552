"""Tokens per step of heads in training: never chosen on what it is measured on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import no_copies
from medusa_train.data.hidden_states import Shard
from medusa_train.eval.acceptance import Ranks
from medusa_train.eval.heads_quality import cross_fitted_tokens_per_step, first_positions, heads_quality
from medusa_train.eval.tree_search import MISS, best_tree, count_prefixes, expected_tokens


def make_ranks(answers):
    """Ranks of some answers, each a list of rank rows; the last position of an answer has no target."""
    rows, present, ends, end = [], [], [], 0
    for answer in answers:
        end += len(answer) + 1
        rows += [*answer, [MISS] * len(answer[0])]
        present += [[True] * len(answer[0])] * len(answer) + [[False] * len(answer[0])]
        ends += [end] * (len(answer) + 1)
    return Ranks(torch.tensor(rows), torch.tensor(present), torch.tensor(ends))


def test_a_tree_that_fits_only_its_own_answer_gains_nothing():
    ranks = make_ranks([[[7, 7]] * 5, [[3, 3]] * 5])
    assert cross_fitted_tokens_per_step(ranks, tree_size=3, max_rank=10) == 1
    prefixes = count_prefixes(ranks.calibration(), 10)
    assert expected_tokens(prefixes, best_tree(prefixes, 3)) == 2, "counted on itself it would look like two"


def test_what_all_answers_have_in_common_counts():
    ranks = make_ranks([[[0, 0]] * 4, [[0, 0]] * 6, [[0, MISS]] * 2])
    assert cross_fitted_tokens_per_step(ranks, tree_size=3, max_rank=10) == pytest.approx(1 + (12 + 10) / 12)


def test_a_single_answer_is_measured_with_its_own_tree():
    assert cross_fitted_tokens_per_step(make_ranks([[[2, 0]] * 3]), tree_size=3, max_rank=10) == pytest.approx(3)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.lists(st.lists(st.sampled_from([0, 1, 2, MISS]), min_size=2, max_size=2), min_size=1, max_size=6),
        min_size=1, max_size=6,
    ),
    st.integers(1, 6),
)  # fmt: skip
def test_it_is_between_plain_decoding_and_the_best_tree_of_all_positions(answers, size):
    ranks = make_ranks(answers)
    prefixes = count_prefixes(ranks.calibration(), 10)
    best = expected_tokens(prefixes, best_tree(prefixes, size))
    assert 1 <= cross_fitted_tokens_per_step(ranks, size, 10) <= best + 1e-9


def test_recall_is_named_by_head():
    figures = heads_quality(make_ranks([[[0, 3], [4, MISS]]]), 4, 10)
    assert figures.keys() == {"tokens_per_step", "top1_h1", "top1_h2", "top5_h1", "top5_h2"}
    assert [figures[name] for name in ("top1_h1", "top1_h2", "top5_h1", "top5_h2")] == [0.5, 0, 1, 0.5]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 100))
def test_every_shard_gives_its_share_of_the_positions(first, second, positions):
    shards = [
        Shard(torch.zeros(length, 4), torch.arange(length), torch.full((length,), length), no_copies(length))
        for length in (first, second)
    ]
    thinned = first_positions(shards, positions)
    kept = [len(shard.tokens) for shard in thinned]
    assert min(positions, first + second) <= sum(kept) <= positions + 2
    assert all(int(s.ends.max()) == len(s.tokens) == len(s.hidden) == len(s.copies) for s in thinned)
    assert kept[0] / first == pytest.approx(kept[1] / second, abs=1 / min(first, second))
