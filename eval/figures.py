"""From answers to figures: pure functions of what was counted and timed.

Two conventions of speedup are in use and both are given. *Total*: all tokens / all seconds of one arm over those of
another. *Per prompt*: the mean over prompts of tokens / seconds, over the same mean of the other arm, as Spec-Bench
computes it (Xia et al. 2024); it weighs every prompt alike, however long its answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medusa_train.eval.answers import PARTS, Answer, Answers
from medusa_train.eval.questions import Question
from medusa_train.eval.speed import Spread, decode_speed
from medusa_train.inference.stats import DecodeStats

RESAMPLES = 2000
NOISY = 0.15  # (fastest - slowest) / median repeat beyond which a machine is called noisy
MODEL_GAP = 0.10
SIMULATION_GAP = 0.05


@dataclass(frozen=True)
class Interval:
    """A ratio and its 95 % interval; no interval where a single prompt was asked, nothing where none took time."""

    value: float | None
    low: float | None
    high: float | None


def total(answers: Sequence[Answer]) -> DecodeStats:
    """The counters of some answers together."""
    stats = DecodeStats()
    for answer in answers:
        stats.add(answer.stats)
    return stats


def tokens_per_step(answers: Sequence[Answer]) -> float | None:
    """Tokens emitted by steps / steps; from a server's own counters where there are any; None where nobody counted."""
    drafts = sum(turn.drafting.get("drafts", 0) for answer in answers for turn in answer.turns)
    if drafts:
        return 1 + sum(turn.drafting["accepted"] for answer in answers for turn in answer.turns) / drafts
    return total(answers).tokens_per_step


def acceptance(answers: Sequence[Answer], depth: int, tree_size: int) -> dict[str, Any]:
    """What the steps of a static tree accepted.

    Args:
        answers: of one repeat.
        depth, tree_size: of the tree, root included in its size.
    """
    stats = total(answers)
    reached = [stats.accepted_at(d) for d in range(depth + 1)]
    return {
        "tokens_per_step": stats.tokens_per_step,
        "accepted_drafts_per_step": None if stats.tokens_per_step is None else stats.tokens_per_step - 1,
        "steps": stats.steps,
        "prefill_tokens": stats.prefill_tokens,
        "emitted_by_steps": stats.step_tokens,
        "histogram": dict(sorted(stats.histogram.items())),
        "accepted_at_depth": [ratio(reached[d], stats.steps) for d in range(1, depth + 1)],
        "accepted_at_depth_given_parent": [ratio(reached[d], reached[d - 1]) for d in range(1, depth + 1)],
        "accepted_per_drafted_node": ratio(stats.step_tokens - stats.steps, stats.steps * (tree_size - 1)),
    }


def speed_row(answers: Answers, bases: Mapping[str, Answers | None]) -> dict[str, Any]:
    """Everything about one arm's time.

    Args:
        bases: name -> the arm that it is compared with; one that did not run gives None.
    """
    speeds = Spread.of([decode_speed(repeat) for repeat in answers])
    step = step_seconds(answers)
    first = [turn.prefill_seconds * 1000 for repeat in answers for answer in repeat for turn in answer.turns]
    return {
        "decode_tokens_per_second": asdict(speeds),
        "noise": (speeds.maximum - speeds.minimum) / speeds.median,
        "end_to_end_tokens_per_second": asdict(Spread.of([_end_to_end(repeat) for repeat in answers])),
        "time_to_first_token_ms": asdict(Spread.of(first)),
        "tokens_per_step": tokens_per_step(answers[0]),
        "ms_per_step": step and step * 1000,
        **{f"over_{name}": speedup(base, answers) if base else None for name, base in bases.items()},
    }


def batch_speed_row(answers: Answers, bases: Mapping[str, Answers | None]) -> dict[str, Any]:
    """An arm's time where prompts were answered together; their answers share a clock, so prompts give no interval.

    Args:
        bases: as in `speed_row`, with as many prompts together.
    """
    speeds = Spread.of([decode_speed(repeat) for repeat in answers])
    return {
        "decode_tokens_per_second": asdict(speeds),
        "noise": (speeds.maximum - speeds.minimum) / speeds.median,
        "tokens_per_step": tokens_per_step(answers[0]),
        **{f"over_{name}": asdict(repeat_ratios(base, answers)) if base else None for name, base in bases.items()},
    }


def repeat_ratios(over: Answers, of: Answers) -> Spread:
    """Ratio of decode speeds, repeat by repeat: each pair ran in turns."""
    return Spread.of([decode_speed(ours) / decode_speed(base) for ours, base in zip(of, over, strict=True)])


def speedup(over: Answers, of: Answers) -> dict[str, float | None]:
    """Both conventions' speedups.

    Total over total: median, minimum and maximum of the repeats, each a ratio of runs that took turns; ``low`` and
    ``high`` are the 95 % interval over prompts. The per-prompt convention with its own interval: ``mean_prompt``.
    """
    spread = repeat_ratios(over, of)
    together, apart = bootstrap_speedup(per_prompt(over), per_prompt(of))
    return asdict(spread) | {
        "low": together.low,
        "high": together.high,
        "mean_prompt": apart.value,
        "mean_prompt_low": apart.low,
        "mean_prompt_high": apart.high,
    }


def per_prompt(answers: Answers) -> NDArray[np.float64]:
    """``(prompts, 2)``: tokens after the first, and the median over repeats of the seconds that they took."""
    tokens = [answer.step_tokens for answer in answers[0]]
    seconds = np.median([[answer.decode_seconds for answer in repeat] for repeat in answers], axis=0)
    return np.stack([np.asarray(tokens, dtype=np.float64), seconds], axis=1)


def bootstrap_speedup(over: NDArray[np.float64], of: NDArray[np.float64], seed: int = 0) -> tuple[Interval, Interval]:
    """Both conventions' speedups with 95 % percentile intervals; prompts are drawn anew in pairs (Efron 1979).

    Args:
        over, of: ``(prompts, 2)`` tokens and seconds of the same prompts; see `per_prompt`.
        seed: of the draws.
    """
    timed = (over[:, 0] > 0) & (of[:, 0] > 0) & (over[:, 1] > 0) & (of[:, 1] > 0)
    over, of = over[timed], of[timed]
    count = len(of)
    if not count:
        return Interval(None, None, None), Interval(None, None, None)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    # The first row counts every prompt once: the figure itself.
    weights = np.concatenate([np.ones((1, count), dtype=draws.dtype), draws])

    def interval(values: NDArray[np.float64]) -> Interval:
        low, high = np.quantile(values[1:], [0.025, 0.975]).tolist() if count > 1 else (None, None)
        return Interval(float(values[0]), low, high)

    sums_of, sums_over = weights @ of, weights @ over
    together = (sums_of[:, 0] / sums_of[:, 1]) / (sums_over[:, 0] / sums_over[:, 1])
    apart = (weights @ (of[:, 0] / of[:, 1])) / (weights @ (over[:, 0] / over[:, 1]))
    return interval(together), interval(apart)


def step_seconds(answers: Answers) -> float | None:
    """Median over repeats of seconds per step; None where steps were not counted."""
    per_repeat = [
        sum(answer.decode_seconds for answer in repeat) / steps for repeat in answers if (steps := total(repeat).steps)
    ]
    return statistics.median(per_repeat) if per_repeat else None


def part_shares(answers: Answers) -> dict[str, float | None]:
    """Where a step's time goes."""
    counted = total([answer for repeat in answers for answer in repeat])
    return {part: ratio(getattr(counted, f"{part}_seconds"), counted.decode_seconds) for part in PARTS}


def step_model(tokens: float | None, overhead: float | None, measured: float | None) -> dict[str, float | None]:
    """The speedup that tokens per step and a step's cost promise, beside the measured one.

    Args:
        tokens: per step.
        overhead: a step of this tree / a plain step, timed apart from the decoding that was measured.
        measured: speedup over plain decoding.
    """
    modelled = tokens / overhead if tokens and overhead else None
    return {
        "overhead": overhead,
        "speedup": modelled,
        "measured": measured,
        "difference": measured / modelled - 1 if measured and modelled else None,
    }


def categories(
    questions: Sequence[Question], timed: Mapping[str, Answers], counted: Mapping[str, Sequence[Answer]]
) -> list[dict[str, Any]]:
    """Tokens per step, tokens/s and speedup over plain of every arm on each category's prompts.

    Args:
        timed: arm -> its answers to the timed questions: what every time is from.
        counted: arm -> its answers to all questions, where it gave them: what its tokens per step are from.
    """
    rows = []
    for category in dict.fromkeys(question.category for question in questions if question.category):
        asked = {question.id for question in questions if question.category == category}
        chosen = {
            arm: [[answer for answer in repeat if answer.question in asked] for repeat in given]
            for arm, given in timed.items()
        }
        arms = {}
        for arm, given in chosen.items():
            # A few answers may all end with their first token; all of them together may not.
            moved, base = total_tokens(given[0]) > 0, chosen.get("plain")
            every = [answer for answer in counted[arm] if answer.question in asked] if arm in counted else given[0]
            arms[arm] = {
                "tokens_per_step": tokens_per_step(every),
                "decode_tokens_per_second": statistics.median(map(decode_speed, given)) if moved else None,
                "over_plain": speedup(base, given) if moved and base and total_tokens(base[0]) else None,
            }
        clocked = max(len(given[0]) for given in chosen.values())
        rows.append({"category": category, "prompts": len(asked), "timed_prompts": clocked, "arms": arms})
    return rows


def total_tokens(answers: Sequence[Answer]) -> int:
    """Tokens that decode time was needed for."""
    return sum(answer.step_tokens for answer in answers)


def warnings(report: Mapping[str, Any]) -> list[str]:
    """What a reader should know before trusting the figures of a report."""
    found = []
    noise = {arm: row["noise"] for arm, row in report["speed"].items()}
    for batch in report["batches"]:
        noise |= {f"{arm} in batches of {batch['batch_size']}": row["noise"] for arm, row in batch["arms"].items()}
    noisy = {arm: value for arm, value in noise.items() if value > NOISY}
    if noisy:
        worst = max(noisy, key=lambda arm: noisy[arm])
        found.append(
            f"Noisy machine: tokens/s of {', '.join(noisy)} varied by up to {noisy[worst]:.0%} between repeats "
            f"(a quiet one stays below {NOISY:.0%}); trust ratios of one repeat more than tokens/s."
        )
    gap = report["model"]["difference"]
    if gap is not None and abs(gap) > MODEL_GAP:
        found.append(
            f"The measured speedup over plain decoding is {abs(gap):.0%} {'above' if gap > 0 else 'below'} tokens per "
            "step / overhead: steps of the evaluation cost other than those timed when the tree was chosen."
        )
    gap = report["simulated"]["difference"]
    if gap is not None and abs(gap) > SIMULATION_GAP:
        found.append(
            f"Simulated and measured tokens per step part by {abs(gap):.0%}: heads, tree or verification may not be "
            "what the cached states say."
        )
    alone = [row["category"] for row in report["categories"] if row["prompts"] == 1]
    if alone:
        found.append(f"One prompt only: {', '.join(alone)}. Its figures describe that prompt, not the category.")
    found += [f"{arm} did not run: {reason}." for arm, reason in report["unavailable"].items()]
    return found


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide by."""
    return part / whole if whole else None


def _end_to_end(repeat: Sequence[Answer]) -> float:
    return sum(answer.tokens for answer in repeat) / sum(
        answer.prefill_seconds + answer.decode_seconds for answer in repeat
    )
