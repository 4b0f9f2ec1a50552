"""What is asked: which prompts, in which order, at which temperature and with which seed.

All of it follows from the prompts' ids alone, so it is the same on every machine, for every backend and after any kill.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import Span, render_prompt
from medusa_train.data.journal import Failure, as_number
from medusa_train.data.rows import Prompt, Row, Split, split_of
from medusa_train.inference.errors import UserError


@dataclass(frozen=True)
class Question:
    """A prompt that is ready to be answered.

    Attributes:
        prompt: what is asked.
        split: of its row.
        ids: token ids up to the opening of the assistant's first turn.
        temperature: 0 is greedy.
        seed: of the draws, from the prompt alone.
    """

    prompt: Prompt
    split: Split
    ids: list[int]
    temperature: float
    seed: int

    def row(self, ids: list[int], answers: Sequence[Span], reason: str, mismatch: str | None = None) -> Row:
        """The row that it ends as; ``answers`` are spans of ``ids``."""
        return Row(
            id=self.prompt.id,
            split=self.split,
            messages=self.prompt.messages,
            input_ids=ids,
            spans=list(answers),
            finish_reason=reason,
            temperature=self.temperature,
            mismatch=mismatch,
        )


@dataclass(frozen=True)
class Asking:
    """How a list of prompts is asked.

    Attributes:
        tokenizer: renders them.
        prompts: may lie on the disk; read as they are needed.
        max_new_tokens: longest answer.
        max_positions: longest text of the backbone; None if it does not say.
        answer_tokens: stop once this many have been written; None answers every prompt. Prompts of the calibration
            and held-out splits come first, so that stopping early never leaves those empty.
        calibration_share, heldout_share: see `split_of`.
        temperatures: each prompt gets one of them, by its hash.
        seed: of the run.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    max_new_tokens: int
    max_positions: int | None
    answer_tokens: int | None
    calibration_share: float
    heldout_share: float
    temperatures: Sequence[float] = (0.0,)
    seed: int = 0

    def ids(self) -> NDArray[np.uint64]:
        """The prompts' ids as numbers."""
        return np.fromiter((as_number(prompt.id) for prompt in self.prompts), np.uint64, len(self.prompts))

    def order(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Which prompt is asked when. An id is a hash, so within a split this is a fixed shuffle."""
        training = [self._split(f"{number:016x}") == "train" for number in ids.tolist()]
        return np.lexsort((ids, np.array(training, dtype=bool)))

    def question(self, prompt: Prompt) -> Question | Failure:
        """A prompt made ready, or why it cannot be asked."""
        try:
            json.dumps([prompt.messages, prompt.follow_ups], ensure_ascii=False).encode()
            ids = render_prompt(self.tokenizer, prompt.messages)
        except UserError as error:
            return Failure(prompt.id, str(error), skipped=True)
        except UnicodeEncodeError:
            return Failure(prompt.id, "the prompt holds half of a character (a lone surrogate)", skipped=True)
        if self.no_room(ids):
            return Failure(prompt.id, f"the prompt leaves no room for {self.max_new_tokens} tokens", skipped=True)
        draw = seed_of(self.seed, prompt.id)
        temperature = self.temperatures[draw % len(self.temperatures)]
        return Question(prompt, self._split(prompt.id), ids, temperature, draw)

    def no_room(self, ids: Sequence[int]) -> bool:
        """Whether an answer behind these ids could reach the end of the model's context."""
        return self.max_positions is not None and len(ids) + self.max_new_tokens > self.max_positions

    def next_turn(self, question: Question, ids: list[int], spans: Sequence[Span]) -> list[int] | None:
        """Token ids of a conversation up to the assistant's next turn; None if it ends here.

        It ends where the user has no more to say, where the context is full, and where the template shows earlier
        answers otherwise than the model wrote them (without their thoughts, or as other tokens): one sequence could
        not hold both.

        Args:
            ids: everything up to the last answer, its end token included.
            spans: of the answers so far.
        """
        follow_ups = question.prompt.follow_ups[: len(spans)]
        if len(follow_ups) < len(spans):
            return None
        messages = list(question.prompt.messages)
        for (start, end), said in zip(spans, follow_ups, strict=True):
            answer = self.tokenizer.decode(ids[start : end - 1], skip_special_tokens=False)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
        try:
            longer = render_prompt(self.tokenizer, messages)
        except UserError:
            return None
        return None if longer[: len(ids)] != ids or self.no_room(longer) else longer

    def _split(self, prompt_id: str) -> Split:
        return split_of(prompt_id, self.calibration_share, self.heldout_share)


def seed_of(seed: int, prompt_id: str, turn: int = 0) -> int:
    """Seed of an answer's draws: 31 bits, which every server takes."""
    return int(hashlib.sha256(f"{seed}:{prompt_id}:{turn}".encode()).hexdigest()[:8], 16) & 0x7FFFFFFF
