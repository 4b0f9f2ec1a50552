"""The exact tree search, against brute force."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.eval.acceptance import Ranks, recall, recalls, replay
from medusa_train.eval.evaluate import simulated
from medusa_train.eval.tree_search import (
    MISS,
    TreeChoice,
    best_tree,
    choice_reason,
    choose_tree,
    count_prefixes,
    expected_tokens,
    independent_tree,
    rank_shares,
)
from medusa_train.inference import Tree

rank = st.sampled_from([0, 1, 2, 3, MISS])
rank_rows = st.integers(1, 3).flatmap(
    lambda k: st.lists(st.lists(rank, min_size=k, max_size=k), min_size=1, max_size=30)
)


def accepted_by_walking(rows, tree):
    """Mean tokens of a step, by walking every position down the tree."""
    paths, total = set(tree.paths), 0
    for row in rows:
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in paths:
            depth += 1
        total += depth + 1
    return total / len(rows)


def all_trees(size, depth, ranks):
    """Every prefix-closed tree of exactly ``size`` nodes, root included."""
    nodes = [path for d in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(nodes, size - 1):
        members = {(), *chosen}
        if all(path[:-1] in members for path in chosen):
            yield Tree.from_paths(chosen)


@settings(deadline=None)
@given(rank_rows, st.integers(1, 12))
def test_expected_tokens_is_what_walking_gives(rows, size):
    prefixes = count_prefixes(torch.tensor(rows), max_rank=4)
    tree = best_tree(prefixes, size)
    assert tree.size <= size
    assert expected_tokens(prefixes, tree) == pytest.approx(accepted_by_walking(rows, tree))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, MISS]), min_size=2, max_size=2), min_size=1, max_size=25),
    st.integers(1, 5),
)
def test_no_tree_of_the_same_size_is_better(rows, size):
    prefixes = count_prefixes(torch.tensor(rows), max_rank=3)
    ours = expected_tokens(prefixes, best_tree(prefixes, size))
    best = max(accepted_by_walking(rows, tree) for tree in all_trees(size, depth=2, ranks=3))
    assert ours == pytest.approx(best)


def test_ranks_beyond_the_bound_and_misses_end_a_path():
    prefixes = count_prefixes(torch.tensor([[0, 5, 0], [0, MISS, 0], [0, 1, 0]]), max_rank=5)
    assert prefixes.counts == {(0,): 3, (0, 1): 1, (0, 1, 0): 1}


def test_shares_are_of_a_heads_targets_and_their_products_choose_the_independent_tree():
    ranks = torch.tensor([[0, 1], [0, MISS], [2, 0], [MISS, 0]])
    present = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    shares = rank_shares(ranks, present, max_rank=3)
    assert shares.tolist() == [[0.5, 0, 0.25], pytest.approx([2 / 3, 1 / 3, 0])]
    # Gains: 1/2, 1/3 below it, 1/4; then 1/6 below either, and 1/12. Nothing that no head ever said.
    assert independent_tree(shares, 1) == Tree.root_only()
    assert independent_tree(shares, 4) == Tree.from_paths([(0,), (0, 0), (2,)])
    every = [(0,), (0, 0), (2,), (0, 1), (2, 0), (2, 1)]
    assert independent_tree(shares, 99) == Tree.from_paths(every)


def test_the_fastest_choice_is_not_the_most_accepting_one():
    prefixes = count_prefixes(torch.tensor([[0], [0], [1], [2]]), max_rank=3)
    trees = [best_tree(prefixes, size) for size in (1, 2, 4)]
    choices = [
        TreeChoice(tree, expected_tokens(prefixes, tree), seconds)
        for tree, seconds in zip(trees, [1.0, 1.1, 3.0], strict=True)
    ]
    chosen = choose_tree(choices, noise=0.0)
    assert chosen.tree.size == 2
    assert chosen.tokens_per_second == pytest.approx(1.5 / 1.1)
    assert max(choices, key=lambda choice: choice.expected_tokens).tree.size == 4


def test_of_sizes_that_the_noise_cannot_tell_apart_the_most_accepting_one_is_chosen():
    tree = Tree.root_only()  # choosing looks at the figures alone
    choices = [TreeChoice(tree, tokens, seconds) for tokens, seconds in ((1.0, 1.0), (1.5, 1.2), (1.6, 1.29), (2, 3))]
    assert [choose_tree(choices, noise).expected_tokens for noise in (0.0, 0.005, 0.02, 0.5, 1.0)] == [
        1.5, 1.5, 1.6, 1.6, 2,
    ]  # fmt: skip


def test_a_choice_tells_its_reason():
    slow, fast = TreeChoice(Tree.chain(3), 1.6, 0.05), TreeChoice(Tree.chain(1), 1.65, 0.05)
    assert choice_reason([slow, fast], fast, 0.02) == (
        "the fastest of 2 sizes, 33.0 expected tokens/s a row: 1.65 tokens per step of 50 ms"
    )
    close = TreeChoice(Tree.chain(3), 1.66, 0.051)
    assert choice_reason([close, fast], close, 0.02) == (
        "32.5 expected tokens/s a row: 1.66 tokens per step of 51 ms; 2 tokens per pass come to 33.0, within the noise "
        "of 2.0%, with fewer tokens per step"
    )


def ranks_of(answers):
    """Ranks of answers, each a list of rank rows; head k has no target in the last k entries."""
    rows, present, ends, end = [], [], [], 0
    for answer in answers:
        end += len(answer)
        for place, row in enumerate(answer):
            inside = [place + k + 1 < len(answer) for k in range(len(row))]
            rows.append([rank if ok else MISS for rank, ok in zip(row, inside, strict=True)])
            present.append(inside)
            ends.append(end)
    return Ranks(torch.tensor(rows), torch.tensor(present), torch.tensor(ends))


def test_replay_counts_like_decoding():
    # A chain of 2 accepts two drafts at the first place, none at the next, one at the end of the answer.
    answer = [[0, 0], [9, 9], [9, 9], [MISS, 0], [0, 0], [0, 0]]
    stats = replay(ranks_of([answer, answer]), Tree.chain(2))
    assert stats.histogram == {3: 2, 1: 4}
    assert stats.prefill_tokens == 2
    assert stats.prefill_tokens + stats.step_tokens == 2 * len(answer)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.lists(rank, min_size=3, max_size=3), min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_replay_emits_every_token_once(answers, size):
    ranks = ranks_of(answers)
    tree = best_tree(count_prefixes(ranks.ranks, 4), size)
    stats = replay(ranks, tree)
    assert stats.prefill_tokens + stats.step_tokens == sum(map(len, answers))
    assert all(1 <= emitted <= tree.depth + 1 for emitted in stats.histogram)


def test_recall_divides_by_the_targets_of_each_head():
    ranks = ranks_of([[[0, 4], [3, MISS], [0, 0], [0, 0]]])
    assert recall(ranks, 1) == pytest.approx([2 / 3, 0 / 2])
    assert recall(ranks, 5) == pytest.approx([3 / 3, 1 / 2])
    assert recall(ranks, 4) == pytest.approx([3 / 3, 0 / 2]), "the fifth best is not among the best four"
    assert recalls(ranks_of([[[0], [1], [5], [9], [10], [0]]])) == {
        "top1": pytest.approx([1 / 5]), "top5": pytest.approx([2 / 5]), "top10": pytest.approx([4 / 5]),
    }  # fmt: skip


def test_what_ranks_give_is_set_against_what_was_measured():
    """A chain of one, in an answer of six tokens: prefill's, two, one, two."""
    ranks = ranks_of([[[0], [9], [9], [0], [0], [0]]])
    found = simulated(ranks, Tree.chain(1), 1.25)
    assert found["tokens_per_step"] == pytest.approx(5 / 3)
    assert found["difference"] == pytest.approx(5 / 3 / 1.25 - 1)
    assert found["recall"] == recalls(ranks)
    assert simulated(ranks, Tree.chain(1), None)["difference"] is None
