"""When a row of a batch ends, to the token, also inside an accepted block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from medusa_train.inference.errors import UserError

FinishReason = Literal["stop", "length", "context", "steps"]
TAIL = 16  # tokens decoded beyond a stop string's bytes when looking for it


@dataclass(frozen=True)
class Block:
    """Tokens that a row emits together: prefill's one, or those of a step.

    Attributes:
        tokens: token ids, cut at the first end of any kind; empty for a row that had ended before.
        drafted: how many of them a drafter proposed (the rest the backbone chose itself).
        finish_reason: set on a row's last block; ``stop`` an end token or stop string, ``length`` the budget,
            ``context`` the model's longest sequence, ``steps`` the bound on passes.
    """

    tokens: tuple[int, ...]
    drafted: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Stopping:
    """What ends a generation.

    Attributes:
        max_new_tokens: budget of each row.
        eos_token_ids: any of these ends a row and is its last token.
        stop_strings: a row ends with the token that completes one of these in its generated text.
        max_steps: bound on backbone passes after prefill.
        tokenizer: needed to see stop strings.
    """

    max_new_tokens: int
    eos_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    max_steps: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        if self.stop_strings and self.tokenizer is None:
            raise UserError("stop_strings needs the tokenizer: pass tokenizer=...")
        if not all(self.stop_strings):
            raise UserError("stop_strings holds an empty string, which would end every text at once")

    def completes_stop_string(self, generated: Sequence[int]) -> bool:
        """Whether the last of these tokens completes a stop string."""
        if not self.stop_strings or self.tokenizer is None:
            return False
        # A token carries at least one byte, or is special and carries none.
        tail = TAIL + max(len(stop.encode()) for stop in self.stop_strings)
        text = self.tokenizer.decode(list(generated[-tail:]), skip_special_tokens=False)
        return any(stop in text for stop in self.stop_strings)


class Row:
    """One sequence of a batch while it grows.

    Attributes:
        text: prompt and emitted tokens.
        finish_reason: None while it generates.
    """

    def __init__(self, prompt: Sequence[int], stopping: Stopping, max_positions: int | None) -> None:
        """Begin after a prompt.

        Raises:
            UserError: the prompt is empty, or already fills the model's context.
        """
        if not len(prompt):
            raise UserError("the prompt holds no token; give at least one")
        if max_positions is not None and len(prompt) >= max_positions:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the backbone reads at most {max_positions - 1}; shorten it"
            )
        self.text, self.prompt_length, self.stopping = list(prompt), len(prompt), stopping
        self.room, self._at_limit = stopping.max_new_tokens, "length"
        if max_positions is not None and max_positions - len(prompt) < self.room:
            self.room, self._at_limit = max_positions - len(prompt), "context"
        self.finish_reason: FinishReason | None = None if self.room > 0 else "length"

    @property
    def new_tokens(self) -> list[int]:
        return self.text[self.prompt_length :]

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the row would end with one of these tokens, if they were emitted next."""
        if len(tokens) >= self.room > 0:
            return True
        return any(
            self._ends(self.new_tokens + list(tokens[:count]) if self.stopping.stop_strings else tokens[:count])
            for count in range(1, len(tokens) + 1)
        )

    def _ends(self, generated: Sequence[int]) -> bool:
        """Whether the last of these tokens ends the row."""
        return generated[-1] in self.stopping.eos_token_ids or self.stopping.completes_stop_string(generated)

    def take(self, tokens: Sequence[int], drafted: int, steps: int) -> Block:
        """Append what a pass emitted, up to the first end; ``steps`` passes have been made with it."""
        if self.finish_reason is not None:
            return Block((), 0, None)
        kept, stopping = 0, self.stopping
        for token in tokens[: self.room]:
            self.text.append(token)
            kept += 1
            if self._ends(self.new_tokens if stopping.stop_strings else [token]):
                self.finish_reason = "stop"
                break
        self.room -= kept
        if self.finish_reason is None:
            if self.room == 0:
                self.finish_reason = "length" if self._at_limit == "length" else "context"
            elif stopping.max_steps is not None and steps >= stopping.max_steps:
                self.finish_reason = "steps"
        return Block(tuple(tokens[:kept]), min(drafted, kept), self.finish_reason)
