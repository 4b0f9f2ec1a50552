"""What an arm said, how long it took, and the file that keeps it.

Each arm leads a conversation on its own: a second turn follows its own first answer.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import render_prompt
from medusa_train.data.rows import append_jsonl, drop_torn_tail
from medusa_train.eval.questions import Question
from medusa_train.eval.speed import Decoder, Run
from medusa_train.inference.backbone import Backbone
from medusa_train.inference.stats import DecodeStats

PARTS = ("draft", "forward", "verify", "commit")


@dataclass(frozen=True)
class Turn:
    """One answer of a conversation.

    Attributes:
        tokens: all that was emitted: ``prefill_tokens`` and what the steps emitted.
        prompt, ids: token ids; empty for a server, which does not tell them.
        histogram: tokens emitted by a step -> steps; empty where that is not known.
        blocks: per step, its tokens and how many of them were drafted.
        part_seconds: of ``PARTS``; empty where that is not known.
        drafting: a server's own counters: drafts, accepted, drafted.
    """

    tokens: int
    prefill_tokens: int
    prefill_seconds: float
    decode_seconds: float
    text: str
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    histogram: dict[int, int] = field(default_factory=dict)
    blocks: list[list[int]] = field(default_factory=list)
    part_seconds: dict[str, float] = field(default_factory=dict)
    drafting: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = sum(tokens * count for tokens, count in self.histogram.items())
        if self.histogram and self.tokens != self.prefill_tokens + steps:
            raise AssertionError(f"{self.tokens} tokens, but prefill and steps emitted {self.prefill_tokens} + {steps}")

    @classmethod
    def of(cls, prompt: Sequence[int], run: Run, row: int, text: str) -> Turn:
        """The turn of one row of a run; of the time that rows take together, each has an equal share."""
        rows = len(run.ids)
        blocks = [blocks[row] for blocks in run.blocks if blocks[row].tokens]
        if blocks:
            first, histogram = len(blocks[0].tokens), Counter(len(block.tokens) for block in blocks[1:])
        elif rows == 1:  # transformers' generate tells no blocks, but counts them
            first, histogram = run.stats.prefill_tokens, run.stats.histogram
        else:  # of several prompts, it emits one token of each per pass
            first, histogram = 1, Counter({1: len(run.ids[row]) - 1} if len(run.ids[row]) > 1 else {})
        return cls(
            len(run.ids[row]),
            first,
            run.prefill_seconds / rows,
            run.decode_seconds / rows,
            text,
            list(prompt),
            run.ids[row],
            dict(sorted(histogram.items())),
            [[len(block.tokens), block.drafted] for block in blocks],
            {part: getattr(run.stats, f"{part}_seconds") / rows for part in PARTS} if blocks else {},
        )


@dataclass(frozen=True)
class Answer:
    """What one arm said to one question in one repeat.

    Attributes:
        batch_size: timed questions that were answered together; 1 also where questions are only counted.
    """

    key: str
    question: str
    arm: str
    repeat: int
    turns: list[Turn]
    batch_size: int = 1

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Answer:
        turns = [
            Turn(**turn | {"histogram": {int(tokens): count for tokens, count in turn["histogram"].items()}})
            for turn in record["turns"]
        ]
        return cls(**record | {"turns": turns})

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def step_tokens(self) -> int:
        """Tokens after those of prefill: what ``decode_seconds`` were needed for."""
        return sum(turn.tokens - turn.prefill_tokens for turn in self.turns)

    @property
    def prefill_seconds(self) -> float:
        return sum(turn.prefill_seconds for turn in self.turns)

    @property
    def decode_seconds(self) -> float:
        return sum(turn.decode_seconds for turn in self.turns)

    @property
    def stats(self) -> DecodeStats:
        """Counters and times of all turns."""
        stats = DecodeStats()
        for turn in self.turns:
            stats.prefill_tokens += turn.prefill_tokens
            stats.histogram.update(Counter(turn.histogram))
            for part, seconds in turn.part_seconds.items():
                setattr(stats, f"{part}_seconds", getattr(stats, f"{part}_seconds") + seconds)
        return stats


Answers = Sequence[Sequence[Answer]]  # by repeat, then question
Ask = Callable[[Sequence[Question], int], list[list[Turn]]]  # (questions, budget of an answer) -> turns of each


def local_ask(decoder: Decoder, backbone: Backbone, tokenizer: PreTrainedTokenizerBase) -> Ask:
    """Lead conversations with a decoder, turn by turn, each turn as one batch.

    A conversation ends early when its next turn would not fit the backbone's context.
    """

    def ask(questions: Sequence[Question], max_new_tokens: int) -> list[list[Turn]]:
        messages = [list(question.messages) for question in questions]
        prompts = {number: prompt_ids(question, tokenizer) for number, question in enumerate(questions)}
        turns: list[list[Turn]] = [[] for _ in questions]
        while prompts:
            run = decoder([torch.tensor(prompt) for prompt in prompts.values()], max_new_tokens)
            following = {}
            for row, (number, prompt) in enumerate(prompts.items()):
                text = tokenizer.decode(run.ids[row], skip_special_tokens=True)
                turns[number].append(Turn.of(prompt, run, row, text))
                for follow_up in questions[number].follow_ups[len(turns[number]) - 1 :][:1]:
                    messages[number] += [
                        {"role": "assistant", "content": text},
                        {"role": "user", "content": follow_up},
                    ]
                    prompt = render_prompt(tokenizer, messages[number])
                    if fits(prompt, max_new_tokens, backbone):
                        following[number] = prompt
            prompts = following
        return turns

    return ask


def prompt_ids(question: Question, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a question's first turn."""
    return list(question.input_ids) if question.input_ids else render_prompt(tokenizer, question.messages)


def fits(prompt: Sequence[int], max_new_tokens: int, backbone: Backbone) -> bool:
    """Whether a prompt leaves room for the whole budget."""
    return backbone.max_positions is None or len(prompt) + max_new_tokens <= backbone.max_positions


def answers_key(*depends_on: Any) -> str:
    """Hash of all that answers and their times depend on, as JSON has it."""
    return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:16]


class AnswerFile:
    """A file of answers that all depend on the same things, as ``key`` says; others are thrown away.

    Without a path they are forgotten with this object.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self.key = path, key
        self._found: dict[tuple[str, str, int, int], Answer] = {}
        if path is None:
            return
        drop_torn_tail(path)
        if not path.exists():
            return
        with path.open(encoding="utf-8") as lines:
            answers = [Answer.from_json(json.loads(line)) for line in lines]
        if any(answer.key != key for answer in answers):
            path.unlink()
            return
        # The last one counts: a batch of which a kill kept a part was asked again.
        self._found = {(answer.question, answer.arm, answer.repeat, answer.batch_size): answer for answer in answers}

    def get(self, question: str, arm: str, repeat: int, batch_size: int = 1) -> Answer | None:
        return self._found.get((question, arm, repeat, batch_size))

    def add(self, question: str, arm: str, repeat: int, turns: list[Turn], batch_size: int = 1) -> Answer:
        """Keep an answer; it is in the file when this returns."""
        answer = Answer(self.key, question, arm, repeat, turns, batch_size)
        if self.path is not None:
            append_jsonl(self.path, [answer])
        self._found[question, arm, repeat, batch_size] = answer
        return answer
