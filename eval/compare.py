"""Two reports side by side: what got better or worse by more than the noise of its own measurement.

Times are noisy from repeat to repeat: two of them differ when their ranges over repeats do not meet. Tokens per step
is a mean over steps: two of them differ when their intervals of two standard errors do not meet. Figures without a
measure of their noise are shown and not judged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["better", "worse", "within noise", ""]
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Measured:
    """A figure with the interval that its noise allows; ``low`` and ``high`` are None where that is unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One figure in both runs."""

    name: str
    a: Measured
    b: Measured
    verdict: Verdict


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[Comparison]]:
    """What was set differently (named), and every figure of two reports."""
    settings = [
        f"{key}: {_short(a['setting'].get(key))} against {_short(b['setting'].get(key))}"
        for key in sorted(set(a["setting"]) | set(b["setting"]))
        if a["setting"].get(key) != b["setting"].get(key)
    ]
    first, second = a["made"]["tree"]["environment"], b["made"]["tree"]["environment"]
    settings += [
        f"{key}: {_short(first.get(key))} against {_short(second.get(key))}"
        for key in sorted(set(first) | set(second))
        if first.get(key) != second.get(key)
    ]
    return settings, [
        Comparison(name, (one := figure(a)), (other := figure(b)), judge(one, other, higher_is_better))
        for name, figure, higher_is_better in FIGURES
    ]


def judge(a: Measured, b: Measured, higher_is_better: bool) -> Verdict:
    """Whether ``b`` is better than ``a``; "" where one of them has no measure of its noise."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return ""
    if a.low <= b.high and b.low <= a.high:
        return "within noise"
    return "better" if (b.low > a.high) == higher_is_better else "worse"


def mean_of_histogram(histogram: Mapping[str, int]) -> Measured:
    """Mean emission of a step and `STANDARD_ERRORS` of it to either side, from size -> steps."""
    steps = sum(histogram.values())
    if not steps:
        return Measured(None)
    mean = sum(int(size) * count for size, count in histogram.items()) / steps
    variance = sum(count * (int(size) - mean) ** 2 for size, count in histogram.items()) / steps
    margin = STANDARD_ERRORS * math.sqrt(variance / steps)
    return Measured(mean, mean - margin, mean + margin)


def comparison_text(settings: list[str], figures: list[Comparison]) -> str:
    """The outcome for people."""
    lines = [f"differs: {setting}" for setting in settings] or ["same setting and machine"]
    lines.append(f"{'':<44} {'A':>20} {'B':>20}  B is")
    lines += [f"{row.name:<44} {_figure(row.a):>20} {_figure(row.b):>20}  {row.verdict}".rstrip() for row in figures]
    lines.append("[low..high]: range over repeats of a time, two standard errors to either side of a mean over steps")
    return "\n".join(lines)


def _spread(*keys: str) -> Callable[[Mapping[str, Any]], Measured]:
    def read(report: Mapping[str, Any]) -> Measured:
        spread = _at(report, *keys)
        return Measured(spread["median"], spread["minimum"], spread["maximum"]) if spread else Measured(None)

    return read


def _number(*keys: str | int) -> Callable[[Mapping[str, Any]], Measured]:
    return lambda report: Measured(_at(report, *keys))


def _at(report: Any, *keys: str | int) -> Any:
    """What stands there; None where a report lacks it (fewer heads, an older version)."""
    for key in keys:
        try:
            report = report[key]
        except (KeyError, IndexError, TypeError):
            return None
    return report


# Name, where it stands in a report, whether more of it is better.
FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], Measured], bool], ...] = (
    ("tokens per step", lambda report: mean_of_histogram(report["acceptance"]["histogram"]), True),
    ("tokens per step, replayed on held-out answers", _number("replay", "tokens_per_step"), True),
    *((f"best token of head {k + 1} is right", _number("recall", "top1", k), True) for k in range(3)),
    ("speedup over transformers generate", _spread("speedup", "over_generate"), True),
    ("speedup over one-token decoding", _spread("speedup", "over_plain"), True),
    *(
        (f"decode tokens/s, {arm}", _spread("speed", arm, "decode_tokens_per_second"), True)
        for arm in ("generate", "plain", "medusa")
    ),
    ("first token, ms, medusa", _spread("speed", "medusa", "time_to_first_token_ms"), False),
    ("medusa step / plain step", _number("overhead"), False),
    ("outputs identical to plain", _number("losslessness", "over_plain", "identical_share"), True),
    ("answer tokens trained on", _number("made", "cache", "result", "train"), True),
    ("training loss at the end", _number("made", "train", "result", "last_loss"), False),
    ("training, seconds", _number("made", "train", "wall_seconds"), False),
)


def _figure(measured: Measured) -> str:
    if measured.value is None:
        return "n/a"
    text = f"{measured.value:,.0f}" if measured.value >= 1000 else f"{measured.value:.3g}"
    return text if measured.low is None else f"{text} [{measured.low:.3g}..{measured.high:.3g}]"


def _short(value: Any) -> str:
    text = "n/a" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
