"""How many tokens a pass should hold, from what steps cost on this device and what their nodes promise."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, zip_longest

TRUST_DECAY = 0.95  # weight of the past, per step, in the ratio of accepted to expected drafts
PROBE_EVERY = 16  # plain steps before a probe
MOST_COSTLY = 2.0  # plain steps: a longer one would need two tokens to break even, which shorter ones get as well

# Rows of a batch -> tokens per row and pass -> seconds of a whole step on this device. One row is always among them,
# and so is one token, which is plain decoding; every batch knows the same sizes.
StepSeconds = Mapping[int, Mapping[int, float]]
TIMED_TEXT = 96  # tokens of text that each row has when those steps are timed
# Tokens per row and pass -> seconds that one more token of a row's text adds to the step.
TextSeconds = Mapping[int, float]


class SizeChooser:
    """The number of tokens per pass with the most expected tokens per second, step after step.

    Attributes:
        trust: what past passes accepted / what confidence promised; scales promised gains.
    """

    def __init__(self, step_seconds: StepSeconds, text_seconds: TextSeconds, sizes: Sequence[int]) -> None:
        self.step_seconds, self.text_seconds, self.sizes = step_seconds, text_seconds, sizes
        # Ten imaginary drafts that kept their promise, so that the first few steps do not decide.
        self._accepted = self._promised = 10.0
        self._pending = 0.0
        self._resting = 0
        self._timed = lru_cache(lambda rows: {size: reckon_seconds(step_seconds, size, rows) for size in (1, *sizes)})
        self._per_token = {size: _read_curve(text_seconds, size) for size in (1, *sizes)}

    @property
    def trust(self) -> float:
        return self._accepted / self._promised

    def observe(self, accepted: Sequence[int]) -> None:
        """Learn what the last pass accepted, per row that took part."""
        if self._pending > 0 and accepted:
            self._accepted = TRUST_DECAY * self._accepted + sum(accepted) / len(accepted)
            self._promised = TRUST_DECAY * self._promised + self._pending
            self._pending = 0.0

    def rests(self) -> bool:
        """Whether this step drafts nothing because drafting did not pay lately."""
        if self._resting > 1:
            self._resting -= 1
            return True
        return False

    def _seconds(self, texts: Sequence[int]) -> dict[int, float]:
        more = sum(texts) - TIMED_TEXT * len(texts)
        # Shorter texts than those timed save little, and may not make a step look free.
        return {size: timed + max(0, more) * self._per_token[size] for size, timed in self._timed(len(texts)).items()}

    def largest(self, texts: Sequence[int]) -> int:
        """The most tokens per row that a pass over rows with so long texts may hold (`MOST_COSTLY`)."""
        seconds = self._seconds(texts)
        worth = [size for size in self.sizes if size > 1 and seconds[size] <= MOST_COSTLY * seconds[1]]
        return max(worth, default=min(size for size in self.sizes if size > 1))

    def choose(self, chances: Sequence[Sequence[float]], texts: Sequence[int]) -> int:
        """Tokens per row and pass.

        Args:
            chances: of the nodes of each active row, best first.
            texts: lengths of the texts of all rows that pass, in tokens.
        """
        if len(self.sizes) == 1:
            return self.sizes[0]
        gains = [sum(column) / len(chances) for column in zip_longest(*chances, fillvalue=0.0)]
        promised = dict(enumerate(accumulate(gains, initial=0.0), start=1))  # of all sizes that these nodes make
        seconds = self._seconds(texts)
        speed = {
            size: (1 + self.trust * promised[size]) / seconds[size] for size in self.sizes if size <= max(promised)
        }
        best = max(speed, key=speed.__getitem__)
        if best == 1:
            if self._resting == 1:  # the rest is over: probe with the smallest tree
                best, self._resting = min(size for size in self.sizes if size > 1), 0
            else:
                self._resting = PROBE_EVERY
        else:
            self._resting = 0
        self._pending = promised[best]
        return best


def reckon_seconds(step_seconds: StepSeconds, size: int, rows: int) -> float:
    """Time of a step whose pass holds ``size`` tokens of each of ``rows`` rows: between and beyond the timed ones.

    Beyond the largest timed batch, rows are taken for nodes of its trees: weights are read once per pass, and
    products grow with its tokens, whatever row they are of.
    """
    batches = sorted(step_seconds)
    if rows > batches[-1]:
        return _read_curve(step_seconds[batches[-1]], size * rows / batches[-1])
    return _read_curve({batch: _read_curve(step_seconds[batch], size) for batch in batches}, rows)


def _read_curve(curve: Mapping[int, float], place: float) -> float:
    """A curve between its points, and beyond them along the slope of all of it."""
    points = sorted(curve)
    if place <= points[0] or len(points) == 1:
        return curve[points[0]]
    if place > points[-1]:
        # The last two may lie too close together to tell; the whole curve does not.
        slope = (curve[points[-1]] - curve[points[0]]) / (points[-1] - points[0])
        return curve[points[-1]] + slope * (place - points[-1])
    high = bisect_left(points, place)
    low = points[high - 1]
    return curve[low] + (curve[points[high]] - curve[low]) * (place - low) / (points[high] - low)
