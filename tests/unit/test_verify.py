"""Verification: greedy descends along the target's best tokens; rejection samples from the target, exactly."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from medusa_train.inference import Tree, UserError
from medusa_train.inference.verify import Sampling, verify_greedy, verify_rejection

VOCAB = 5


def logits_for(tokens, vocab=VOCAB):
    """Logits whose best token at node i is ``tokens[i]``."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float() * 9


def test_greedy_takes_the_longest_matching_branch():
    tree = Tree.from_paths([(0, 0), (1, 0, 0)])  # (), 0, 1, 00, 10, 100
    drafted = [9, 1, 2, 3, 3, 4]
    wanted = {(): 2, (0,): 3, (1,): 3, (0, 0): 1, (1, 0): 4, (1, 0, 0): 0}
    verdict = verify_greedy(logits_for([wanted[path] for path in tree.paths]), drafted, tree)
    assert [tree.paths[node] for node in verdict.path] == [(), (1,), (1, 0), (1, 0, 0)]
    assert verdict.next_token == 0


def test_greedy_accepts_nothing_when_no_child_matches():
    verdict = verify_greedy(logits_for([4, 0, 0]), [9, 1, 2], Tree.from_paths([(0,), (1,)]))
    assert verdict.path == (0,)
    assert verdict.next_token == 4


def test_a_match_below_a_rejected_parent_is_not_taken():
    # The root wants 4; node (0, 0) holds 4 but its parent was not accepted.
    verdict = verify_greedy(logits_for([4, 4, 4]), [9, 1, 4], Tree.chain(2))
    assert verdict.path == (0,)


def emitted(drafts, tree, target, sampling, generator):
    """Decode three tokens with a toy target ``target[prefix] -> logits`` and a draft ``drafts[prefix]``."""
    text: tuple[int, ...] = ()
    while len(text) < 3:
        tokens = [0]
        prefixes = [text]
        for path, parent in zip(tree.paths[1:], tree.parents[1:], strict=True):
            tokens.append(drafts[len(path) - 1][path[-1]])
            prefixes.append((*prefixes[parent], tokens[-1]))
        logits = torch.stack([target[prefix[:3]] if len(prefix) < 4 else target[()] for prefix in prefixes])
        verdict = verify_rejection(logits, tokens, tree, sampling, generator)
        text += (*(tokens[node] for node in verdict.path[1:]), verdict.next_token)
    return text[:3]


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.3, top_p=0.7)])
@pytest.mark.parametrize("paths", [[], [(0,), (1,), (2,)], [(0, 0, 0)], [(0, 0), (0, 1), (1, 0), (2,)]])
def test_rejection_samples_the_exact_joint_distribution(paths, sampling):
    """χ² of three tokens against the product of the target's conditionals, for several deterministic trees."""
    tokens, rounds = 3, 6000
    weights = torch.Generator().manual_seed(1)
    prefixes = [prefix for n in range(4) for prefix in itertools.product(range(tokens), repeat=n)]
    target = {prefix: 1.5 * torch.randn(tokens, generator=weights) for prefix in prefixes}
    drafts = [[2, 0, 1], [1, 2, 0], [0, 1, 2]]
    tree, generator = Tree.from_paths(paths), torch.Generator().manual_seed(7)
    counts = Counter(emitted(drafts, tree, target, sampling, generator) for _ in range(rounds))
    exact = {}
    for text in itertools.product(range(tokens), repeat=3):
        probability = 1.0
        for i, token in enumerate(text):
            probability *= float(sampling.probabilities(target[text[:i]])[token])
        exact[text] = probability
    assert abs(sum(exact.values()) - 1) < 1e-5
    assert all(exact[text] > 0 for text in counts), "a token that the target excludes was emitted"
    # Cells too rare for χ² are pooled into one.
    common = [text for text in exact if exact[text] * rounds >= 5]
    rare = sum(p for text, p in exact.items() if text not in common)
    observed = [counts[text] for text in common] + [rounds - sum(counts[text] for text in common)]
    expected = [exact[text] * rounds for text in common] + [rare * rounds]
    if rare * rounds < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    assert chisquare(observed, [e * sum(observed) / sum(expected) for e in expected]).pvalue > 1e-3


def test_top_k_two_never_emits_a_third_token():
    logits = torch.tensor([[3.0, 2.9, 2.8, 0.0, 0.0]] * 3)
    generator = torch.Generator().manual_seed(0)
    tree = Tree.from_paths([(0,), (1,)])
    for _ in range(200):
        verdict = verify_rejection(logits, [4, 2, 3], tree, Sampling(1.0, top_k=2), generator)
        assert verdict.path == (0,)  # drafts 2 and 3 are outside the two likeliest
        assert verdict.next_token in (0, 1)


def test_a_seeded_generator_repeats():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    tree = Tree.from_paths([(0,), (1,), (0, 0)])

    def once():
        generator = torch.Generator().manual_seed(5)
        return [verify_rejection(logits, [0, 1, 2, 3], tree, Sampling(), generator) for _ in range(20)]

    assert once() == once()


@given(
    st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=9),
    st.floats(0.1, 3),
    st.integers(0, 9),
    st.floats(0.05, 1.0),
)
def test_probabilities_sum_to_one_and_keep_the_likeliest(logits, temperature, top_k, top_p):
    row = torch.tensor(logits)
    probabilities = Sampling(temperature, top_k, top_p).probabilities(row)
    assert abs(float(probabilities.sum()) - 1) < 1e-4
    assert float(probabilities[row == row.max()].sum()) > 0  # of equal ones, any may stay
    if top_k:
        assert int((probabilities > 0).sum()) <= max(top_k, 1)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = Sampling(1.0, top_p=0.8).probabilities(row)
    assert torch.allclose(kept, torch.tensor([0.625, 0.375, 0, 0]), atol=1e-6)


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError, match="sampling needs"):
        Sampling(**bad)
