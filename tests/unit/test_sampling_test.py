"""The test of sampling is tested: unbiased samples pass at the nominal rate, biased ones are caught."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from medusa_train.eval.lossless import verdict
from medusa_train.eval.sampling_test import ENDED, chi_square, compare_samples, holm, permutation_p, table

PLAIN = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.02])


def draw(rng, probabilities, samples, length=1):
    return rng.choice(len(probabilities), p=probabilities, size=(samples, length)).tolist()


@pytest.fixture
def few_permutations(monkeypatch):
    """How many there are changes how fine a p-value is, not how often it is small."""
    monkeypatch.setattr("medusa_train.eval.sampling_test.PERMUTATIONS", 399)


def test_p_values_of_equal_distributions_are_calibrated(few_permutations):
    rng = np.random.default_rng(0)
    found = np.array(
        [permutation_p(table(*(rng.choice(7, p=PLAIN, size=120).tolist() for _ in range(2))), rng) for _ in range(400)]
    )
    for level in (0.05, 0.2, 0.5):
        rate, error = (found <= level).mean(), np.sqrt(level * (1 - level) / len(found))
        assert abs(rate - level) < 4 * error, (level, rate)


def test_false_alarms_of_a_whole_run_stay_within_the_level(few_permutations):
    rng = np.random.default_rng(1)
    runs = 60
    alarms = sum(
        any(
            test.adjusted_p < 0.1
            for test in compare_samples(*([draw(rng, PLAIN, 60, 3)] * 1 for _ in range(2)), 3, run)
        )
        for run in range(runs)
    )
    assert alarms <= runs * 0.1 + 4 * np.sqrt(runs * 0.1 * 0.9)


def test_a_biased_sampler_is_caught():
    rng = np.random.default_rng(2)
    biased = PLAIN.copy()
    biased[:2] += [0.15, -0.15]
    ours, theirs = [draw(rng, biased, 256, 2)], [draw(rng, PLAIN, 256, 2)]
    tests = compare_samples(ours, theirs, 2, seed=0)
    assert [(test.prompt, test.position) for test in tests] == [(0, 0), (0, 1)]
    assert all(test.adjusted_p < 0.01 for test in tests)


def test_rare_tokens_are_counted_as_one_and_an_end_is_a_token():
    counts = table([1] * 10 + [2, 3, 4], [1] * 10 + [5, 6, 7])
    assert counts.tolist() == [[10, 3], [10, 3]]
    assert permutation_p(counts, np.random.default_rng(0)) == 1
    assert table([1] * 3, [1] * 3).tolist() == [[3], [3]]
    twice = table([1] * 10 + [2, 3] * 2, [1] * 10 + [2, 3] * 3)
    assert twice.tolist() == [[10, 2, 2], [10, 3, 3]], "five are not rare"
    assert table([1] * 10 + [2] * 2, [1] * 10 + [2] * 2 + [3]).tolist() == [[10, 2], [10, 3]], "nor are rare ones lost"
    (test,) = compare_samples([[[1]] * 30], [[[1, 1]] * 30], 2, seed=0)
    assert (test.position, test.cells) == (1, 2), "the first token never varies, the second is missing in one sample"
    assert test.p < 0.001
    assert ENDED < 0


def test_the_statistic_is_that_of_a_contingency_table_of_any_two_sizes():
    counts = np.array([[9, 2, 14], [30, 31, 17]])
    found = chi_square(counts[0], counts.sum(axis=0), counts[0].sum() / counts.sum())
    assert found == pytest.approx(chi2_contingency(counts, correction=False).statistic)
    assert permutation_p(np.array([[5, 10], [20, 40]]), np.random.default_rng(0)) == 1, "the same shares"


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_corrects_upwards_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    assert all(0 <= p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    pairs = sorted(zip(p_values, adjusted, strict=True))
    assert [a for _, a in pairs] == sorted(a for _, a in pairs)


def test_holm_on_a_known_case():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_what_is_said_of_a_verifier():
    assert verdict("rejection", 12, 0).startswith("Consistent with lossless")
    assert verdict("rejection", 12, 1).startswith("NOT lossless: 1 of 12")
    assert "epsilon 0.09, delta 0.3" in verdict("typical", 12, 0)
    assert "lossy by design" in verdict("typical", 12, 0)
    assert "Nothing could be tested" in verdict("rejection", 0, 0)
