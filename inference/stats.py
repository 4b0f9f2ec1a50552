"""What generation did, counted where it happened.

A *step* is one row's share of one backbone pass after prefill: a pass over a batch is one step of every row that still
generates, so that tokens per step means the same at every batch size. Prefill chooses the first token; every other
token is emitted by a step, so tokens = ``prefill_tokens + step_tokens`` always holds. A block that the budget or an end
cuts short counts only what was emitted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

TIMES = ("prefill_seconds", "draft_seconds", "forward_seconds", "verify_seconds", "commit_seconds")


@dataclass
class DecodeStats:
    """Counters of one or more generations; their size does not grow with the number of steps.

    Attributes:
        prefill_tokens: tokens chosen by prefill (one per row, none with a budget of 0).
        histogram: tokens emitted by a step -> number of steps.
        passes: backbone passes after prefill.
        pass_sizes: tokens per row of a pass (tree size, root included) -> number of passes.
        last_pass_size: that of the latest pass; 0 before the first.
        prefill_seconds, draft_seconds, forward_seconds, verify_seconds, commit_seconds: where the time went.
    """

    prefill_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    passes: int = 0
    pass_sizes: Counter[int] = field(default_factory=Counter)
    last_pass_size: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0

    @property
    def steps(self) -> int:
        return sum(self.histogram.values())

    @property
    def step_tokens(self) -> int:
        """Tokens emitted by steps, i.e. without prefill's."""
        return sum(tokens * steps for tokens, steps in self.histogram.items())

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens emitted by steps / steps; None without a step (not 1.0: nothing was measured)."""
        return self.step_tokens / self.steps if self.histogram else None

    @property
    def decode_seconds(self) -> float:
        """Everything after prefill."""
        return self.draft_seconds + self.forward_seconds + self.verify_seconds + self.commit_seconds

    def accepted_at(self, depth: int) -> int:
        """Steps that emitted at least ``depth`` drafted tokens (and the one that the backbone chose itself)."""
        return sum(steps for tokens, steps in self.histogram.items() if tokens > depth)

    def add(self, other: DecodeStats) -> None:
        """Add another generation's counters to these."""
        self.prefill_tokens += other.prefill_tokens
        self.passes += other.passes
        self.histogram.update(other.histogram)
        self.pass_sizes.update(other.pass_sizes)
        self.last_pass_size = other.last_pass_size or self.last_pass_size
        for name in TIMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))
