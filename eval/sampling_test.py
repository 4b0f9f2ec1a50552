"""Whether sampling with drafts and sampling without them have one distribution: a two-sample test on tokens.

Continuations of one prompt are drawn in both ways, from different seeds (with one seed the texts would be equal and
prove nothing). At every position the two samples' counts of tokens are compared by χ². Its p-value comes from what the
statistic would be if the labels were dealt out anew, so it holds for rare tokens too, where the χ² distribution does
not. All tests of a run are corrected together by Holm's method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 9_999
RARE = 5  # tokens that both samples together hold less often are counted as one
ENDED = -1  # what stands where a continuation is over

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class PositionTest:
    """One test: which tokens stand at a position of the continuations of a prompt.

    Attributes:
        position: 0 is the first token, which prefill chooses with and without drafts.
        cells: kinds of tokens that were told apart.
        p: of one distribution giving samples that differ so much.
        adjusted_p: p corrected for all tests of the run.
    """

    prompt: int
    position: int
    cells: int
    p: float
    adjusted_p: float


def compare_samples(
    ours: Sequence[Sequence[Sequence[int]]], theirs: Sequence[Sequence[Sequence[int]]], length: int, seed: int
) -> list[PositionTest]:
    """Test every position of every prompt where tokens vary.

    Args:
        ours, theirs: per prompt, continuations of up to ``length`` tokens.
        seed: of the permutations.
    """
    rng = np.random.default_rng(seed)
    found = []
    for prompt, samples in enumerate(zip(ours, theirs, strict=True)):
        for position in range(length):
            counts = table(*([at(continuation, position) for continuation in sample] for sample in samples))
            # Pooling looks at both samples together, so leaving such a position out favours neither outcome.
            if counts.shape[1] > 1:
                found.append((prompt, position, counts.shape[1], permutation_p(counts, rng)))
    adjusted = holm([p for *_, p in found])
    return [PositionTest(*test, corrected) for test, corrected in zip(found, adjusted, strict=True)]


def at(continuation: Sequence[int], position: int) -> int:
    """The token at a position, `ENDED` behind the last."""
    return continuation[position] if position < len(continuation) else ENDED


def table(ours: Sequence[int], theirs: Sequence[int]) -> Counts:
    """``(2, cells)`` counts of every token in two samples; rare ones are pooled."""
    first, second = Counter(ours), Counter(theirs)
    total = first + second
    common = sorted(token for token, count in total.items() if count >= RARE)
    columns = [[first[token], second[token]] for token in common]
    rest = [len(ours) - sum(a for a, _ in columns), len(theirs) - sum(b for _, b in columns)]
    return np.array([*columns, rest] if any(rest) else columns, dtype=np.int64).T


def chi_square(first: Counts, total: Counts, share: float) -> NDArray[np.float64]:
    """χ² of one sample's counts ``(..., cells)`` within both samples' ``(cells,)``, of which it is a ``share``."""
    expected = total * share
    # The other sample's deviations are these with the sign turned, over its own expected counts.
    deviations: NDArray[np.float64] = ((first - expected) ** 2 / (expected * (1 - share))).sum(axis=-1)
    return deviations


def permutation_p(counts: Counts, rng: np.random.Generator) -> float:
    """p-value of the χ² statistic of a ``(2, cells)`` table.

    Labels dealt out at random leave the first sample with hypergeometric counts. The table itself counts as one of
    the permutations, so that p is never below its nominal level (Phipson and Smyth 2010).
    """
    total, size = counts.sum(axis=0), int(counts[0].sum())
    share = size / int(total.sum())
    dealt = rng.multivariate_hypergeometric(total, size, size=PERMUTATIONS, method="marginals")
    seen = chi_square(counts[0], total, share)
    # Equal tables must count as equal, whatever the order of a sum does to their last bit.
    return float((1 + (chi_square(dealt, total, share) >= seen * (1 - 1e-9)).sum()) / (1 + PERMUTATIONS))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: below a level only if Holm's (1979) step-down procedure rejects there."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted
