"""Drafting copies: rows with and without one, rows that end or move, and a copy below a Medusa tree."""

import pytest
import torch

from conftest import random_heads
from medusa_train.inference import MedusaDrafter, MedusaLookupDrafter, PromptLookupDrafter, Tree, UserError
from medusa_train.inference.drafters import Context


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


@pytest.mark.parametrize("tree", [Tree.root_only(), Tree.chain(2), Tree.from_paths([(0, 0, 1), (1, 0), (3,)])])
def test_a_copied_phrase_is_one_more_branch_below_the_medusa_tree(tree):
    medusa = MedusaDrafter(random_heads(), tree)
    both = MedusaLookupDrafter(medusa, PromptLookupDrafter(4, 2, 1))
    assert both.max_size == tree.size + 4
    texts = [[1, 2, 3, 9, 1, 2], [4, 5, 6, 7, 8, 3]]
    given_context = context(texts)
    drafting = both.start([torch.tensor(text) for text in texts], 9, [None, None])
    draft = drafting(given_context)
    heads = medusa.start([torch.tensor(text) for text in texts], 9, [None, None])(given_context)
    assert draft.tokens.shape == (2, both.max_size)
    for row, phrase in enumerate([[3, 9, 1, 2], None]):
        branches = {
            tuple(draft.tokens[row, node].item() for node in draft.trees[row].ancestors[leaf])
            for leaf in range(1, draft.trees[row].size) if not draft.trees[row].children[leaf]
        }  # fmt: skip
        expected = {
            tuple(heads.tokens[row, node].item() for node in tree.ancestors[leaf])
            for leaf in range(tree.size) if not tree.children[leaf] and leaf
        }  # fmt: skip
        assert branches == expected | ({(texts[row][-1], *phrase)} if phrase else set())
    nothing = both.start([torch.tensor([1])], 9, [None])(context([[1, 2, 3]]))
    assert nothing.trees[0] is tree  # without a copy only the heads' tree is verified


@pytest.mark.parametrize("bad", [(0, 3, 2), (4, 2, 3), (4, 2, 0)])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError, match="prompt lookup needs"):
        PromptLookupDrafter(*bad)
