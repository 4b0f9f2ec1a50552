"""One line that tells how far a distillation is; it moves with every token or answer, and goes to logs."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tqdm import tqdm

LOG_SECONDS = 15.0  # between lines where nobody looks at a moving one
FRAME_SECONDS = 0.1  # between changes of that one; tokens come faster


class AnswerProgress:
    """Answers, tokens per second and the time left; a context manager.

    On a terminal a moving bar, elsewhere a plain line every `LOG_SECONDS` and a last one.
    """

    def __init__(self, total: int, wanted_tokens: int | None, answered: int = 0, tokens: int = 0) -> None:
        """Begin.

        Args:
            total: prompts.
            wanted_tokens: distillation stops when so many tokens are there; None answers every prompt.
            answered: prompts that were answered, or failed, before.
            tokens: answer tokens that were there before.
        """
        self.total, self.wanted_tokens = total, wanted_tokens
        self.answered, self.tokens, self.failed, self.skipped, self.retries = answered, tokens, 0, 0, 0
        self._new_tokens, self._new_answers = 0, 0
        self._started = self._shown = time.monotonic()
        console = Console(stderr=True)
        columns = (TextColumn("distill"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=answered)

    def __enter__(self) -> AnswerProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.update(self._task, completed=self.answered)
        self._bar.stop()
        if self._new_answers and kind is None:
            tqdm.write(f"distill: {self.line()}")

    def advance(self, tokens: int, answers: int = 1, failed: bool = False) -> None:
        """So many more prompts are answered, with so many tokens in all, or one has failed."""
        self.answered += answers
        self.tokens += tokens
        self.failed += failed
        self._new_answers += answers
        self._new_tokens += tokens
        self._show()

    def write(self, tokens: int) -> None:
        """So many more tokens of answers that are not whole yet."""
        self.tokens += tokens
        self._new_tokens += tokens
        self._show()

    def skip(self) -> None:
        """One more prompt cannot be asked; that says nothing about how long the others take."""
        self.answered += 1
        self.skipped += 1
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < (LOG_SECONDS if self._bar.disable else FRAME_SECONDS):
            return
        self._shown = now
        if self._bar.disable:
            tqdm.write(f"distill: {self.line()}")
        else:
            self._bar.update(self._task, completed=self.answered, description=self.line())

    def line(self) -> str:
        """All of it in words."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        left = (self.total - self.answered) / self._new_answers * seconds if self._new_answers else math.inf
        if self.wanted_tokens is not None and self._new_tokens:
            left = min(left, max(self.wanted_tokens - self.tokens, 0) / self._new_tokens * seconds)
        parts = [
            f"{self.answered} of {self.total} prompts, {self.tokens} answer tokens",
            f"{self._new_tokens / seconds:.0f} tokens/s",
        ]
        parts += [f"{left / 60:.1f} minutes left"] if math.isfinite(left) else []
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self.skipped} skipped"] if self.skipped else []
        parts += [f"{self.retries} tried again"] if self.retries else []
        return ", ".join(parts)
