"""Drafting copies: rows with and without one, rows that end or move, and a copy within a Medusa tree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import random_heads
from medusa_train.inference import MedusaDrafter, MedusaLookupDrafter, PromptLookupDrafter, Tree, UserError
from medusa_train.inference.copies import NgramIndex
from medusa_train.inference.drafters import Context
from medusa_train.inference.verify import Draft


def context(texts, active=None, accepted=None):
    rows = len(texts)
    roots = torch.tensor([text[-1] for text in texts])
    return Context(texts, torch.zeros(rows, 32), roots, active or range(rows), accepted or [0] * rows, range(rows))


def test_rows_without_a_copy_are_padded_and_none_at_all_costs_no_nodes():
    drafting = PromptLookupDrafter(3, 2, 1).start([torch.tensor([1]), torch.tensor([1])], 9, [None, None])
    draft = drafting(context([[1, 2, 3], [4, 5, 6]]))
    assert draft.tokens.tolist() == [[3], [6]]
    assert draft.trees[0].size == 1
    draft = drafting(context([[1, 2, 3, 1], [4, 5, 6, 7]]))
    assert draft.tokens.tolist() == [[1, 2, 3, 1], [7, 7, 7, 7]]
    assert [tree.paths for tree in draft.trees] == [Tree.chain(3).paths, Tree.root_only().paths]
    assert draft.probabilities is None


def test_finished_rows_are_not_looked_up():
    drafting = PromptLookupDrafter(2, 2, 1).start([torch.tensor([1]), torch.tensor([1])], 9, [None, None])
    draft = drafting(context([[1, 2, 1], [3, 4, 5]], active=[1]))
    assert draft.trees[0].size == 1


def test_a_row_that_moved_is_looked_up_in_its_own_text():
    drafting = PromptLookupDrafter(2, 2, 1).start([torch.tensor([1])] * 3, 9, [None] * 3)
    drafting(context([[1, 2], [3, 4], [5, 1, 7]]))
    left = Context([[5, 1, 7, 5], [3, 4, 3]], torch.zeros(2, 32), torch.tensor([5, 3]), [0, 1], [0, 0], [2, 1])
    assert drafting(left).tokens.tolist() == [[5, 1, 7], [3, 4, 3]]


def test_requests_do_not_share_what_they_have_read():
    drafter = PromptLookupDrafter(2, 1, 1)
    first, second = (drafter.start([torch.tensor([1])], 9, [None]) for _ in range(2))
    assert first(context([[1, 2, 1]])).tokens.tolist() == [[1, 2, 1]]
    assert second(context([[2, 3, 1]])).tokens.tolist() == [[1]]


class Tokens:
    """In place of heads: fills the tree with given tokens."""

    def __init__(self, tree, rows):
        self.trees, self.rows = {1: tree}, rows

    def start(self, prompts, max_new_tokens, generators):
        return lambda context: Draft([self.trees[1]] * len(self.rows), torch.tensor(self.rows))


def lines(draft, row):
    """The token strings from the root to every node of a row's tree; a string that stands twice is an error."""
    tokens, tree = draft.tokens[row].tolist(), draft.trees[row]
    told = [tuple(tokens[ancestor] for ancestor in line) for line in tree.ancestors]
    assert len(set(told)) == len(told)
    return set(told)


@given(st.data())
def test_a_copied_phrase_goes_on_where_the_heads_tree_leads_to_its_tokens(data):
    paths = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=5))
    tree, num_tokens = Tree.from_paths(paths), data.draw(st.integers(1, 6))
    text = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=12))
    rows = []
    for _ in range(2):
        tokens = [text[-1]]
        for path, parent in zip(tree.paths[1:], tree.parents[1:], strict=True):
            siblings = {tokens[other] for other in tree.children[parent] if other < len(tokens)}
            tokens.append(data.draw(st.sampled_from([token for token in range(6) if token not in siblings])))
            assert path
        rows.append(tokens)
    both = MedusaLookupDrafter(Tokens(tree, rows), PromptLookupDrafter(num_tokens, 2, 1))
    new = [7, 8, text[-1]]  # what came before this text says nothing of it: the second row has no copy
    draft = both.start([torch.tensor([1])] * 2, 9, [None, None])(context([text, [9, *new[:2], 6]]))
    alone = [lines(Draft([tree], torch.tensor([row])), 0) for row in rows]
    copy = NgramIndex(2, 1)
    copy.extend(text)
    copied = copy.continuation(tree.depth + num_tokens)
    assert lines(draft, 1) == alone[1]
    if copied is None:
        assert draft.tokens.tolist() == rows
        return
    length = max(1, num_tokens - tree.depth)
    known = max(depth for depth in range(tree.depth + 1) if (text[-1], *copied[:depth]) in alone[0])
    phrase = [(text[-1], *copied[:depth]) for depth in range(known + length + 1)]
    assert lines(draft, 0) == alone[0] | set(phrase)
    assert draft.tokens.shape == (2, tree.size + length)
    assert both.max_size == tree.size + length


def test_without_a_copy_only_the_heads_tree_is_verified():
    tree = Tree.chain(2)
    both = MedusaLookupDrafter(MedusaDrafter(random_heads(), tree), PromptLookupDrafter(4, 2, 1))
    assert both.start([torch.tensor([1])], 9, [None])(context([[1, 2, 3]])).trees[0] is tree


@pytest.mark.parametrize("bad", [(0, 3, 2), (4, 2, 3), (4, 2, 0)])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError, match="prompt lookup needs"):
        PromptLookupDrafter(*bad)
