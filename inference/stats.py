"""What one generation did, counted where it happened.

A *step* is one backbone pass after prefill. Prefill chooses the first token; every other token is emitted by a step, so
``tokens = prefill_tokens + sum(emitted)`` always holds. A block that the budget or an end token cuts short counts only
what was emitted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """Counters of one or more generations.

    Attributes:
        prefill_tokens: tokens chosen by prefill (one per generation, none with a budget of 0).
        emitted: tokens emitted by each step, in order.
        prefill_seconds, draft_seconds, forward_seconds, verify_seconds, commit_seconds: where the time went.
    """

    prefill_tokens: int = 0
    emitted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.emitted)

    @property
    def step_tokens(self) -> int:
        """Tokens emitted by steps, i.e. without prefill's."""
        return sum(self.emitted)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens emitted by steps / steps; None without a step (not 1.0: nothing was measured)."""
        return self.step_tokens / self.steps if self.emitted else None

    @property
    def decode_seconds(self) -> float:
        """Everything after prefill."""
        return self.draft_seconds + self.forward_seconds + self.verify_seconds + self.commit_seconds

    def histogram(self) -> dict[int, int]:
        """Tokens emitted by a step -> number of steps."""
        return dict(sorted(Counter(self.emitted).items()))

    def add(self, other: DecodeStats) -> None:
        """Add another generation's counters to these."""
        self.prefill_tokens += other.prefill_tokens
        self.emitted += other.emitted
        for name in ("prefill_seconds", "draft_seconds", "forward_seconds", "verify_seconds", "commit_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
