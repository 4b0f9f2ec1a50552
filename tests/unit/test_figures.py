"""Figures from invented answers: closed forms, both conventions, intervals, flags, and what was not measured."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.eval.answers import Answer, Turn
from medusa_train.eval.figures import (
    acceptance,
    batch_speed_row,
    bootstrap_speedup,
    categories,
    part_shares,
    per_prompt,
    speed_row,
    speedup,
    step_model,
    step_seconds,
    tokens_per_step,
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


def test_every_figure_of_an_arms_time_has_its_closed_form():
    """Two prompts of 20 tokens, in 10 steps of two and 20 of one; a step takes 50 ms, 150 ms, 25 ms by repeat."""
    medusa = answers("medusa", [{2: 10}, {1: 20}], 50, (1.0, 3.0, 0.5))
    plain = answers("plain", [{1: 20}] * 2, 40, (1.0, 1.0, 2.0))
    row = speed_row(medusa, {"plain": plain, "generate": None})
    assert row["decode_tokens_per_second"] == pytest.approx(
        {"median": 40 / 1.5, "minimum": 40 / 4.5, "maximum": 80 / 1.5}
    )
    assert row["noise"] == pytest.approx((2 - 1 / 3) / 1)
    # Of each prompt the first token too, and its 50 ms of prefill.
    assert row["end_to_end_tokens_per_second"] == pytest.approx(
        {"median": 42 / 1.6, "minimum": 42 / 4.6, "maximum": 42 / 0.85}
    )
    assert row["time_to_first_token_ms"] == pytest.approx({"median": 50, "minimum": 50, "maximum": 50})
    assert row["tokens_per_step"] == pytest.approx(40 / 30)
    assert row["ms_per_step"] == pytest.approx(50), "the median repeat"
    # Ratios of a repeat's own pair: 1.5 s against 1.6, 4.5 against 1.6, 0.75 against 3.2.
    ratios = {"median": 1.6 / 1.5, "minimum": 1.6 / 4.5, "maximum": 3.2 / 0.75}
    assert {name: row["over_plain"][name] for name in ratios} == pytest.approx(ratios)
    # By prompt, the median repeat: 20 tokens in 0.5 s and in 1 s, against 0.8 s each.
    assert row["over_plain"]["mean_prompt"] == pytest.approx((40 + 20) / 2 / 25)
    assert row["over_generate"] is None
    together = batch_speed_row(medusa, {"plain": plain, "generate": None})
    assert together["over_plain"] == pytest.approx(ratios)
    assert together["over_generate"] is None
    for shared in ("decode_tokens_per_second", "noise", "tokens_per_step"):
        assert together[shared] == row[shared]


def test_an_interval_leaves_out_a_fortieth_at_either_end():
    """Of three prompts, a draw is of one alone with chance 1/27: more than 2.5 %, less than 5 %."""
    over, of = np.array([[8.0, 8.0]] * 3), np.array([[8.0, 8.0], [8.0, 4.0], [8.0, 2.0]])
    for found in bootstrap_speedup(over, of):
        assert (found.low, found.high) == (1, 4)


def test_the_per_prompt_convention_is_a_ratio_of_means_not_a_mean_of_ratios():
    """10 and 40 tokens/s became 20 and 40."""
    _, mean = bootstrap_speedup(np.array([[40.0, 4.0], [40.0, 1.0]]), np.array([[40.0, 2.0], [40.0, 1.0]]))
    assert mean.value == pytest.approx(30 / 25)


def test_prompts_are_drawn_in_pairs():
    """Speeds differ tenfold from prompt to prompt, and the heads double each of them."""
    seconds = np.geomspace(1, 10, 8)
    over, of = (np.stack([np.full(8, 20.0), seconds * share], axis=1) for share in (1, 0.5))
    for found in bootstrap_speedup(over, of):
        assert (found.value, found.low, found.high) == (pytest.approx(2),) * 3


def test_each_convention_has_its_own_interval():
    plain = answers("plain", [{1: 5 * n} for n in range(1, 9)], 40)
    medusa = answers("medusa", [{1: n * n % 5, 2: 5 * n - n * n % 5} for n in range(1, 9)], 50)
    total, mean = bootstrap_speedup(per_prompt(plain), per_prompt(medusa))
    found = speedup(plain, medusa)
    assert (found["low"], found["high"]) == (total.low, total.high)
    assert (found["mean_prompt_low"], found["mean_prompt_high"]) == (mean.low, mean.high)
    assert total.low != mean.low


def test_a_prompt_without_steps_is_left_out_of_intervals():
    over, of = np.array([[8.0, 4.0], [8.0, 4.0]]), np.array([[8.0, 2.0], [8.0, 2.0]])
    expected = bootstrap_speedup(over, of)
    for nothing in ([0.0, 0.0], [0.0, 1.0], [5.0, 0.0]):
        for pair in ((nothing, [8.0, 2.0]), ([8.0, 4.0], nothing)):
            more = [np.vstack([known, [row]]) for known, row in zip((over, of), pair, strict=True)]
            assert bootstrap_speedup(*more) == expected
    assert bootstrap_speedup(over[:0], of[:0])[0].value is None


def test_time_goes_to_parts_over_all_repeats():
    def spent(repeat, **seconds):
        return [Answer("k", "q", "medusa", repeat, [Turn(1, 1, 0.1, 9.0, "", part_seconds=seconds)] * 2)]

    found = part_shares([spent(0, draft=1.0, forward=3.0), spent(1, draft=1.0, forward=1.0, verify=2.0)])
    assert found == {"draft": 0.25, "forward": 0.5, "verify": 0.25, "commit": 0}
    assert set(part_shares([spent(0)]).values()) == {None}, "a share of nothing is not 0"


def test_a_servers_own_counters_count_before_its_steps():
    drafting = [{"drafts": 4, "accepted": 6, "drafted": 12}, {"drafts": 1, "accepted": 0, "drafted": 3}]
    turns = [Turn(9, 1, 0.1, 0.2, "", drafting=counters) for counters in drafting]
    assert tokens_per_step([Answer("k", "q", "openai", 0, turns)]) == pytest.approx(1 + 6 / 5)


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
    noisy["speed"]["plain"]["noise"] = 0.6
    assert "varied by up to 60% between" in warnings(noisy)[0]
    parted = copy.deepcopy(report)
    parted["categories"][0]["timed_prompts"] = 1
    parted["model"]["difference"] = -0.2
    parted["simulated"]["difference"] = 0.06
    told = " ".join(warnings(parted))
    assert "20% below tokens per step / overhead" in told
    assert "part by 6%" in told
    parted["model"]["difference"], parted["simulated"]["difference"] = 0.11, -0.06
    told = " ".join(warnings(parted))
    assert "11% above tokens per step / overhead" in told
    assert "part by 6%" in told
    assert "One prompt only: math." in told


def test_categories_count_all_prompts_and_time_the_timed_ones():
    kinds = ["qa", "qa", "math"]
    questions = [Question([{"role": "user", "content": f"question {n}"}], category=k) for n, k in enumerate(kinds)]
    ids = [question.id for question in questions]
    timed = {
        "plain": answers("plain", [{1: 12}], 40, ids=ids[1:]),
        "medusa": answers("medusa", [{2: 6}], 50, (1.0, 3.0, 0.5), ids=ids[1:]),
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
    timed["plain"] = answers("plain", [{}], 40, ids=ids[1:])
    qa, _ = categories(questions, timed, {"medusa": counted})
    assert qa["arms"]["medusa"]["decode_tokens_per_second"] == pytest.approx(2 / 0.05)
    assert qa["arms"]["medusa"]["over_plain"] is None, "plain decoding ended with its first token"


def test_categories_are_the_prompts_of_their_kind():
    rows = {row["category"]: row for row in synthetic_report()["categories"]}
    assert {kind: row["prompts"] for kind, row in rows.items()} == {"qa": 6, "writing": 5, "math": 1}
    assert rows["qa"]["arms"]["medusa"]["tokens_per_step"] == pytest.approx(20 / 12)
    assert rows["math"]["arms"]["medusa"]["over_plain"]["low"] is None
    assert turn({2: 3}, 10).tokens == 7
