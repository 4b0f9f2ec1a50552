"""Figures from invented answers: closed forms, both conventions, intervals, flags, and what was not measured."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.eval.answers import Turn
from medusa_train.eval.figures import (
    acceptance,
    bootstrap_speedup,
    categories,
    speedup,
    step_model,
    step_seconds,
    warnings,
)
from medusa_train.eval.questions import Question
from medusa_train.inference import UserError
from synthetic import answers, synthetic_report, turn


def test_an_acceptance_pattern_gives_its_closed_form():
    """Each draft accepted with chance 1/2 down a chain of three: 1 + 1/2 + 1/4 + 1/8 tokens per step."""
    found = acceptance(answers("medusa", [{1: 8, 2: 4, 3: 2, 4: 2}] * 3, 10)[0], depth=3, tree_size=4)
    assert found["tokens_per_step"] == pytest.approx(1.875)
    assert found["accepted_drafts_per_step"] == pytest.approx(0.875)
    assert found["accepted_at_depth"] == pytest.approx([1 / 2, 1 / 4, 1 / 8])
    assert found["accepted_at_depth_given_parent"] == pytest.approx([1 / 2] * 3)
    assert found["accepted_per_drafted_node"] == pytest.approx(0.875 / 3)
    assert (found["steps"], found["prefill_tokens"], found["emitted_by_steps"]) == (48, 3, 90)


@given(st.dictionaries(st.integers(1, 6), st.integers(1, 50), min_size=1))
def test_depths_add_up_to_the_tokens(histogram):
    found = acceptance(answers("medusa", [histogram], 10)[0], depth=5, tree_size=9)
    assert sum(found["accepted_at_depth"]) == pytest.approx(found["accepted_drafts_per_step"])
    product = 1.0
    for share, conditional in zip(found["accepted_at_depth"], found["accepted_at_depth_given_parent"], strict=True):
        product *= conditional or 0
        assert product == pytest.approx(share)


def test_tokens_must_be_those_of_prefill_and_steps():
    with pytest.raises(AssertionError, match="9 tokens, but prefill and steps emitted 1 \\+ 6"):
        Turn(9, 1, 0.1, 0.2, "", histogram={2: 3})


def test_the_two_conventions_weigh_prompts_differently():
    """One short prompt at double speed and one ten times as long at the same speed."""
    plain = answers("plain", [{1: 10}, {1: 100}], 10)
    medusa = answers("medusa", [{2: 5}, {1: 100}], 10)
    found = speedup(plain, medusa)
    assert found["median"] == pytest.approx((110 / 1.05) / (110 / 1.1))
    assert found["mean_prompt"] == pytest.approx((200 + 100) / 2 / 100)
    assert found["low"] == pytest.approx(1)
    assert found["high"] == pytest.approx(2)


def test_an_interval_covers_the_true_ratio_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(150):
        tokens = rng.integers(20, 100, size=40).astype(float)
        slow = tokens * rng.uniform(0.9, 1.1, 40)
        fast = slow / rng.uniform(1.2, 1.8, 40)
        total, mean = bootstrap_speedup(np.stack([tokens, slow], 1), np.stack([tokens, fast], 1), seed=trial)
        # Seconds are divided by a factor f: totals give 1 / E[1/f].
        covered += total.low <= 0.6 / np.log(1.8 / 1.2) <= total.high
        assert mean.low < mean.value < mean.high
    assert 0.88 <= covered / 150 <= 0.99


def test_equal_arms_have_a_ratio_of_one_and_a_single_prompt_no_interval():
    same = answers("plain", [{1: 5}, {1: 9}, {1: 30}], 10)
    found = speedup(same, same)
    assert found["median"] == found["mean_prompt"] == found["low"] == found["high"] == pytest.approx(1)
    alone = answers("plain", [{1: 5}], 10)
    assert speedup(alone, alone)["low"] is None


def test_no_tokens_have_no_speed():
    nothing = answers("plain", [{}], 10)
    with pytest.raises(UserError, match="every answer ended with its first token"):
        speedup(nothing, nothing)
    assert step_seconds(nothing) is None
    assert acceptance(nothing[0], 2, 4)["tokens_per_step"] is None


def test_the_model_is_tokens_per_step_over_overhead():
    found = step_model(1.8, 1.2, 1.35)
    assert found["speedup"] == pytest.approx(1.5)
    assert found["difference"] == pytest.approx(-0.1)
    assert step_model(None, 1.2, 1.3)["speedup"] is None
    assert step_model(1.8, None, 1.3)["difference"] is None


def test_a_report_is_flagged_where_it_should_be():
    report = synthetic_report()
    assert [text.partition(":")[0].partition(" ")[0] for text in report["warnings"]] == ["One", "openai"]
    noisy = synthetic_report(repeats=(1.0, 1.1, 0.9))
    assert noisy["warnings"][0].startswith(
        "Noisy machine: tokens/s of generate, plain, medusa, plain in batches of 4, "
    )
    parted = copy.deepcopy(report)
    parted["model"]["difference"] = -0.2
    parted["simulated"]["difference"] = 0.06
    told = " ".join(warnings(parted))
    assert "20% below tokens per step / overhead" in told
    assert "part by 6%" in told
    assert "One prompt only: math." in told


def test_categories_count_all_prompts_and_time_the_timed_ones():
    kinds = ["qa", "qa", "math"]
    questions = [Question([{"role": "user", "content": f"question {n}"}], category=k) for n, k in enumerate(kinds)]
    ids = [question.id for question in questions]
    timed = {
        "plain": answers("plain", [{1: 12}], 40, ids=ids[1:]),
        "medusa": answers("medusa", [{2: 6}], 50, ids=ids[1:]),
    }
    counted = answers("medusa", [{4: 2}, {2: 6}, {3: 4}], 50, ids=ids)[0]
    qa, math = categories(questions, timed, {"medusa": counted})
    assert (qa["prompts"], qa["timed_prompts"]) == (2, 1)
    assert qa["arms"]["medusa"]["tokens_per_step"] == pytest.approx(20 / 8), "of sums, not the mean of 4 and 2"
    assert qa["arms"]["medusa"]["decode_tokens_per_second"] == pytest.approx(2 / 0.05)
    assert qa["arms"]["medusa"]["over_plain"]["median"] == pytest.approx(1.6)
    assert (math["prompts"], math["timed_prompts"]) == (1, 0)
    assert math["arms"]["medusa"]["tokens_per_step"] == pytest.approx(3)
    assert math["arms"]["medusa"]["over_plain"] is math["arms"]["medusa"]["decode_tokens_per_second"] is None
    assert math["arms"]["plain"]["tokens_per_step"] is None, "nobody counted"


def test_categories_are_the_prompts_of_their_kind():
    rows = {row["category"]: row for row in synthetic_report()["categories"]}
    assert {kind: row["prompts"] for kind, row in rows.items()} == {"qa": 6, "writing": 5, "math": 1}
    assert rows["qa"]["arms"]["medusa"]["tokens_per_step"] == pytest.approx(20 / 12)
    assert rows["math"]["arms"]["medusa"]["over_plain"]["low"] is None
    assert turn({2: 3}, 10).tokens == 7
