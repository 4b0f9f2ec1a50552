"""Verification: greedy descends along the target's best tokens; rejection samples from the target, exactly."""

import itertools
from collections import Counter
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa_train.inference import Sampling, Tree, UserError
from medusa_train.inference.sampling import Chances, draw
from medusa_train.inference.verify import (
    Draft,
    NanLogitsError,
    Verdict,
    accept_sampled,
    verify_greedy,
    verify_rejection,
    verify_typical,
)

VOCAB = 5


def logits_for(tokens, vocab=VOCAB):
    """Logits whose best token at node i is ``tokens[i]``."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float() * 9


def one_row(tokens, tree):
    return Draft([tree], torch.tensor([tokens]))


def greedy(logits, tokens, tree, process=None):
    return verify_greedy(logits[None], one_row(tokens, tree), [0], process)[0]


def rejection(logits, tokens, tree, sampling, generator, process=None):
    draft = one_row(tokens, tree)
    return verify_rejection(logits[None], draft, [0], process, sampling=sampling, chances=[stream(generator)])[0]


def stream(generator=None):
    return Chances(generator, torch.device("cpu"))


def identity(row, path, logits):
    return logits


def same_distribution(counts, exact, rounds):
    """χ² of observed counts against exact probabilities; cells too rare for it are pooled."""
    assert abs(sum(exact.values()) - 1) < 1e-5
    assert all(exact[text] > 0 for text in counts), "a token that the target excludes was emitted"
    common = [text for text in exact if exact[text] * rounds >= 5]
    rare = sum(p for text, p in exact.items() if text not in common)
    observed = [counts[text] for text in common] + [rounds - sum(counts[text] for text in common)]
    expected = [exact[text] * rounds for text in common] + [rare * rounds]
    if rare * rounds < 5:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return chisquare(observed, [e * sum(observed) / sum(expected) for e in expected]).pvalue > 1e-3


@pytest.mark.parametrize("process", [None, identity])
def test_greedy_takes_the_longest_matching_branch(process):
    tree = Tree.from_paths([(0, 0), (1, 0, 0)])  # (), 0, 1, 00, 10, 100
    drafted = [9, 1, 2, 3, 3, 4]
    wanted = {(): 2, (0,): 3, (1,): 3, (0, 0): 1, (1, 0): 4, (1, 0, 0): 0}
    verdict = greedy(logits_for([wanted[path] for path in tree.paths]), drafted, tree, process)
    assert [tree.paths[node] for node in verdict.path] == [(), (1,), (1, 0), (1, 0, 0)]
    assert verdict.tokens == (2, 3, 4, 0)


def test_greedy_accepts_nothing_when_no_child_matches():
    assert greedy(logits_for([4, 0, 0]), [9, 1, 2], Tree.from_paths([(0,), (1,)])) == Verdict((0,), (4,))


def test_a_match_below_a_rejected_parent_is_not_taken():
    # The root wants 4; node (0, 0) holds 4 but its parent was not accepted.
    assert greedy(logits_for([4, 4, 4]), [9, 1, 4], Tree.chain(2)).path == (0,)


def test_two_branches_that_begin_alike_stay_open():
    # Both children of the root hold 2; only the second goes on with 3.
    tree = Tree.from_paths([(0, 0), (1, 0)])  # (), 0, 1, 00, 10
    verdict = greedy(logits_for([2, 3, 3, 0, 1]), [9, 2, 2, 4, 3], tree)
    assert verdict == Verdict((0, 2, 4), (2, 3, 1))


def test_rows_are_verified_apart_and_finished_ones_not_at_all():
    trees = [Tree.chain(2), Tree.from_paths([(0,), (1,)]), Tree.chain(2)]
    logits = torch.stack([logits_for([1, 2, 3]), logits_for([4, 0, 0]), torch.full((3, VOCAB), torch.nan)])
    draft = Draft(trees, torch.tensor([[0, 1, 2], [0, 3, 4], [0, 0, 0]]))
    expected = [Verdict((0, 1, 2), (1, 2, 3)), Verdict((0, 2), (4, 0))]
    assert verify_greedy(logits, draft, [0, 1]) == expected
    assert verify_greedy(logits, draft, [1]) == expected[1:]
    cold = {"sampling": Sampling(0.01), "chances": [stream() for _ in range(3)]}
    assert verify_rejection(logits, draft, [0, 1], **cold) == expected
    for rows in ([0, 2], [2]):
        for process in (None, identity):
            with pytest.raises(NanLogitsError):
                verify_greedy(logits, draft, rows, process)
            with pytest.raises(NanLogitsError):
                verify_rejection(logits, draft, rows, process, **cold)


def test_a_process_sees_the_visited_nodes_in_order_with_the_text_that_leads_there():
    tree, seen = Tree.from_paths([(0, 0), (1, 0)]), []

    def even_only(row, path, logits):
        seen.append((row, path))
        return logits.masked_fill(torch.arange(VOCAB) % 2 == 1, -torch.inf)

    # The root wants 3 and takes 2, its best even token; then 4.
    logits = torch.tensor([[0, 0, 2, 3, 1], [0] * 5, [0, 3, 0, 0, 2], [0] * 5, [2, 0, 0, 3, 0]]).float()
    verdict = greedy(logits, [9, 3, 2, 1, 4], tree, even_only)
    assert verdict == Verdict((0, 2, 4), (2, 4, 0))
    assert seen == [(0, []), (0, [2]), (0, [2, 4])]


TOKENS = 3
PREFIXES = [prefix for n in range(4) for prefix in itertools.product(range(TOKENS), repeat=n)]


def toy_target(seed):
    weights = torch.Generator().manual_seed(seed)
    return {prefix: 1.5 * torch.randn(TOKENS, generator=weights) for prefix in PREFIXES}


def joint(target, sampling):
    """Probability of every three-token text under the toy target."""
    exact = {}
    for text in itertools.product(range(TOKENS), repeat=3):
        probability = 1.0
        for i, token in enumerate(text):
            probability *= float(sampling.probabilities(target[text[:i]])[token])
        exact[text] = probability
    return exact


def emitted(tree, target, propose, verify):
    """Decode three tokens; ``propose(prefix of the parent, path) -> token`` drafts, ``verify(logits, tokens)``."""
    text: tuple[int, ...] = ()
    while len(text) < 3:
        tokens, prefixes = [0], [text]
        for path, parent in zip(tree.paths[1:], tree.parents[1:], strict=True):
            tokens.append(propose(prefixes[parent], path))
            prefixes.append((*prefixes[parent], tokens[-1]))
        logits = torch.stack([target[prefix] if len(prefix) < 4 else target[()] for prefix in prefixes])
        text += verify(logits, tokens, prefixes).tokens
    return text[:3]


SAMPLINGS = [Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.3, top_p=0.7), Sampling(1.0, min_p=0.3)]


@pytest.mark.parametrize(
    ("sampling", "process"), [*((sampling, None) for sampling in SAMPLINGS), (SAMPLINGS[0], identity)]
)
@pytest.mark.parametrize("paths", [[], [(0,), (1,), (2,)], [(0, 0, 0)], [(0, 0), (0, 1), (1, 0), (2,)]])
def test_rejection_of_chosen_trees_samples_the_exact_joint_distribution(paths, sampling, process):
    target, rounds = toy_target(1), 2000
    drafts = [[2, 0, 1], [1, 2, 0], [0, 1, 2]]
    tree, generator = Tree.from_paths(paths), torch.Generator().manual_seed(7)

    def once():
        return emitted(
            tree, target, lambda prefix, path: drafts[len(path) - 1][path[-1]],
            lambda logits, tokens, prefixes: rejection(logits, tokens, tree, sampling, generator, process),
        )  # fmt: skip

    assert same_distribution(Counter(once() for _ in range(rounds)), joint(target, sampling), rounds)


@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
@pytest.mark.parametrize("paths", [[(0, 0, 0)], [(0,), (1,), (2,)], [(0, 0), (0, 1), (1, 0)]])
def test_rejection_of_sampled_trees_samples_the_exact_joint_distribution(paths, sampling):
    """A draft model's chains and sampled siblings: multi-round rejection, the bonus token included."""
    target, draft_model, rounds = toy_target(1), toy_target(2), 2000
    tree, generator = Tree.from_paths(paths), torch.Generator().manual_seed(7)

    def q_at(prefix):
        return sampling.probabilities(draft_model[prefix if len(prefix) < 4 else ()])

    def verify(logits, tokens, prefixes):
        q = torch.stack([q_at(prefix) for prefix in prefixes])[None]
        draft = Draft([tree], torch.tensor([tokens]), q)
        return verify_rejection(logits[None], draft, [0], sampling=sampling, chances=[stream(generator)])[0]

    def once():
        return emitted(
            tree, target, lambda prefix, path: int(torch.multinomial(q_at(prefix), 1, generator=generator)), verify
        )

    assert same_distribution(Counter(once() for _ in range(rounds)), joint(target, sampling), rounds)


def test_the_marginal_of_three_sampled_siblings_is_the_target_in_closed_form():
    """Every outcome enumerated: drawn siblings, acceptances and the residual draw; no sampling error."""
    p = torch.tensor([0.5, 0.1, 0.25, 0.15], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64)
    tree, marginal = Tree.from_paths([(0,), (1,), (2,)]), torch.zeros(4, dtype=torch.float64)
    for siblings in itertools.product(range(4), repeat=3):
        drawn = float(q[list(siblings)].prod())
        left, remaining = p, 1.0
        for token in siblings:
            accept = min(1.0, float(left[token] / q[token]))
            marginal[token] += drawn * remaining * accept
            remaining *= 1 - accept
            residual = (left - q).clamp(min=0)
            left = residual / residual.sum() if residual.sum() > 0 else left
        marginal += drawn * remaining * left
    assert torch.allclose(marginal, p, atol=1e-12)  # the algorithm is exact; is ours this algorithm?
    generator, rounds, counts = torch.Generator().manual_seed(0), 8000, Counter()
    for _ in range(rounds):
        siblings = torch.multinomial(q, 3, replacement=True, generator=generator).tolist()
        counts[accept_sampled([0, *siblings], tree, q.expand(4, 4), lambda node: p, generator).tokens[0]] += 1
    assert same_distribution(counts, dict(enumerate(p.tolist())), rounds)


def test_a_draft_equal_to_the_target_is_always_accepted_and_disjoint_ones_never():
    p, generator = torch.tensor([0.0, 0.25, 0.75, 0.0, 0.0]), torch.Generator().manual_seed(0)
    chain = Tree.chain(2)
    for _ in range(100):
        verdict = accept_sampled([0, 1, 2], chain, p.expand(3, 5), lambda node: p, generator)
        assert verdict.path == (0, 1, 2)
        assert verdict.tokens[2] in (1, 2)  # the bonus token is the target's own
        other = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5])
        verdict = accept_sampled([0, 3, 4], chain, other.expand(3, 5), lambda node: p, generator)
        assert verdict.path == (0,)
        assert verdict.tokens[0] in (1, 2)


def test_typical_accepts_by_the_entropy_threshold():
    tree = Tree.from_paths([(0,), (1, 0)])
    flat = [0.30, 0.25, 0.2, 0.15, 0.1]
    entropy = -sum(p * log(p) for p in flat)
    logits = torch.tensor([flat, [0.96, 0.01, 0.01, 0.01, 0.01], flat, flat]).log()  # (), 0, 1, 10
    tokens = [0, 3, 4, 3]  # p = 0.15 and 0.1 at the root, then 0.15 below the second

    def accepted(epsilon, delta):
        return verify_typical(
            logits[None], one_row(tokens, tree), [0], sampling=Sampling(), chances=[stream()],
            epsilon=epsilon, delta=delta,
        )[0].path  # fmt: skip

    assert accepted(0.09, 1.0) == (0, 2, 3)  # min(0.09, ..) lets 0.1 pass: the longer branch wins
    assert accepted(0.12, 1.0) == (0, 1)
    assert accepted(0.9, 0.9) == (0,)
    # The threshold delta * exp(-H) on both sides of 0.1 decides over the second branch.
    assert accepted(0.9, 0.101 * exp(entropy)) == (0, 1)
    assert accepted(0.9, 0.099 * exp(entropy)) == (0, 2, 3)


def test_typical_refuses_sampled_drafts():
    draft = Draft([Tree.chain(1)], torch.tensor([[0, 1]]), torch.full((1, 2, VOCAB), 0.2))
    with pytest.raises(UserError, match="typical takes chosen drafts"):
        verify_typical(torch.zeros(1, 2, VOCAB), draft, [0], sampling=Sampling(), chances=[stream()])


@pytest.mark.parametrize("process", [None, identity])
def test_top_k_two_never_emits_a_third_token(process):
    logits = torch.tensor([[3.0, 2.9, 2.8, 0.0, 0.0]] * 3)
    generator = torch.Generator().manual_seed(0)
    tree = Tree.from_paths([(0,), (1,)])
    for _ in range(200):
        verdict = rejection(logits, [4, 2, 3], tree, Sampling(1.0, top_k=2), generator, process)
        assert verdict.path == (0,)  # drafts 2 and 3 are outside the two likeliest
        assert verdict.tokens[0] in (0, 1)


def test_a_seeded_generator_repeats():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    tree = Tree.from_paths([(0,), (1,), (0, 0)])

    def once():
        generator = torch.Generator().manual_seed(5)
        return [rejection(logits, [0, 1, 2, 3], tree, Sampling(), generator) for _ in range(20)]

    assert once() == once()


@given(
    st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=9),
    st.floats(0.1, 3),
    st.integers(0, 9),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
)
def test_probabilities_sum_to_one_and_keep_the_likeliest(logits, temperature, top_k, top_p, min_p):
    row = torch.tensor(logits)
    probabilities = Sampling(temperature, top_k, top_p, min_p).probabilities(row)
    assert abs(float(probabilities.sum()) - 1) < 1e-4
    assert float(probabilities[row == row.max()].sum()) > 0  # of equal ones, any may stay
    if top_k:
        assert int((probabilities > 0).sum()) <= max(top_k, 1)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = Sampling(1.0, top_p=0.8).probabilities(row)
    assert torch.allclose(kept, torch.tensor([0.625, 0.375, 0, 0]), atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8, "min_p": 0.1}]
)
def test_warping_equals_transformers(changes):
    row = torch.randn(1, 12, generator=torch.Generator().manual_seed(4)) * 2
    scores = TemperatureLogitsWarper(0.8)(None, row)
    for key, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        scores = warper(changes[key])(None, scores) if key in changes else scores
    assert torch.allclose(Sampling(0.8, **changes).probabilities(row), scores.softmax(-1), atol=1e-6)


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0}]
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


def test_drawing_follows_the_probabilities_and_never_takes_a_zero():
    p = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([draw(p, torch.rand(2, generator=generator)) for _ in range(3000)])
    counts = Counter(draws[:, 0].tolist())
    assert same_distribution(counts, {i: float(x) for i, x in enumerate(p[0]) if x > 0}, 3000)
    assert draws[:, 1].unique().tolist() == [0]
    # On the border between two tokens, and before the first that is possible.
    borders = torch.tensor([0.0, 0.25, 0.5])
    assert draw(torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5]).expand(3, 5), borders).tolist() == [1, 3, 4]


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 99))
def test_numbers_ahead_stay_the_same_until_they_are_used(uses, seed):
    """However far one looks ahead, the numbers used are those that the seed gives."""
    expected = torch.rand(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chances, used = stream(torch.Generator().manual_seed(seed)), 0
    for turn, count in enumerate(uses):
        look = 1 + (turn * 5) % 7
        assert torch.equal(chances.ahead(look), expected[used : used + look])
        chances.use(count)
        used += count
