"""From step times of several rounds to a curve over tree sizes, and how far it can be trusted.

Other work on a machine only ever adds time, so a size's best round is its time, and the distance to its second best
round says how far off that may be. A single size that was lucky or unlucky must not decide. A pass over more tokens is
rarely cheaper, so where the curve falls by no more than the noise, the fall is taken for noise and levelled. It is not
levelled further: devices exist on which eight tokens really are cheaper than one (compiled CPU code, padded tiles).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_NOISE = 0.05  # beyond it the machine is too busy to call sizes equal; the best estimate is all there is


@dataclass(frozen=True)
class StepTimes:
    """Step times of several sizes.

    Attributes:
        seconds: per size, the levelled time of a step.
        noise: relative error of such a time; 0 if one round is all that is known.
    """

    seconds: tuple[float, ...]
    noise: float


def fit_step_times(rounds: Sequence[Sequence[float]]) -> StepTimes:
    """The curve that these measurements support.

    Args:
        rounds: per size, in ascending order, the seconds of a step in every round.
    """
    best = [min(found) for found in rounds]
    noise = min(relative_noise(rounds), MOST_NOISE)
    return StepTimes(tuple(level(best, noise)), noise)


def relative_noise(rounds: Sequence[Sequence[float]]) -> float:
    """How much the second best round of a size exceeds its best one: the median over sizes.

    For exponentially distributed disturbances this gap is as large as the best round's own expected error.
    """
    ordered = [sorted(found) for found in rounds if len(found) > 1]
    return statistics.median((second - first) / first for first, second, *_ in ordered) if ordered else 0.0


def level(seconds: Sequence[float], noise: float) -> list[float]:
    """Isotonic regression by pooling adjacent violators, but of falls within the noise only.

    A pool holds neighbours that lie within a factor of 1 + ``noise`` of each other, and gives each of them their mean
    (Barlow et al. 1972, "Statistical Inference under Order Restrictions", section 1.2); a larger fall is kept.
    """
    pools: list[list[float]] = []
    for value in seconds:
        pools.append([value])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            joined = pools[-2] + pools[-1]
            if max(joined) > min(joined) * (1 + noise):
                break
            pools[-2:] = [joined]
    return [statistics.fmean(pool) for pool in pools for _ in pool]


def timed_step_ms(sizes: Sequence[Mapping[str, Any]], batch_size: int) -> dict[int, float]:
    """Tokens per pass of a row -> milliseconds of a step of so many rows.

    Args:
        sizes: the table of the tree stage, a row per tree and batch size.
    """
    return {row["size"]: row["step_ms"] for row in sizes if row["batch_size"] == batch_size}
