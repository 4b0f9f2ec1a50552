"""Answers of every arm to every question, kept one by one, so that a killed evaluation goes on where it was.

Arms take turns on every question in an order that rotates, and each leads the conversation on its own: a second turn
follows the arm's own first answer. Counts depend on the seed and the device alone; times are what they were when an
answer was made, so those of a continued evaluation come from several sittings.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import render_prompt
from medusa_train.data.rows import append_jsonl, drop_torn_tail
from medusa_train.eval.questions import Question
from medusa_train.eval.speed import WARM_UP_TOKENS, Decoder, Run
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
    def of(cls, prompt: Sequence[int], run: Run, text: str) -> Turn:
        """The turn of a run over one prompt."""
        return cls(
            len(run.ids[0]),
            run.stats.prefill_tokens,
            run.prefill_seconds,
            run.decode_seconds,
            text,
            list(prompt),
            run.ids[0],
            dict(sorted(run.stats.histogram.items())),
            [[len(block.tokens), block.drafted] for (block,) in run.blocks],
            {part: getattr(run.stats, f"{part}_seconds") for part in PARTS} if run.blocks else {},
        )


@dataclass(frozen=True)
class Answer:
    """What one arm said to one question in one repeat."""

    key: str
    question: str
    arm: str
    repeat: int
    turns: list[Turn]

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
Ask = Callable[[Question, int], list[Turn]]  # (question, budget of each answer) -> the conversation's turns


def local_ask(decoder: Decoder, backbone: Backbone, tokenizer: PreTrainedTokenizerBase) -> Ask:
    """Lead conversations with a decoder; one ends early when its next turn would not fit the backbone's context."""

    def ask(question: Question, max_new_tokens: int) -> list[Turn]:
        messages = list(question.messages)
        prompt = prompt_ids(question, tokenizer)
        turns = []
        for follow_up in (*question.follow_ups, None):
            run = decoder([torch.tensor(prompt)], max_new_tokens)
            text = tokenizer.decode(run.ids[0], skip_special_tokens=True)
            turns.append(Turn.of(prompt, run, text))
            if follow_up is None:
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]
            prompt = render_prompt(tokenizer, messages)
            if not fits(prompt, max_new_tokens, backbone):
                break
        return turns

    return ask


def prompt_ids(question: Question, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a question's first turn."""
    return list(question.input_ids) if question.input_ids else render_prompt(tokenizer, question.messages)


def fits(prompt: Sequence[int], max_new_tokens: int, backbone: Backbone) -> bool:
    """Whether a prompt leaves room for the whole budget."""
    return backbone.max_positions is None or len(prompt) + max_new_tokens <= backbone.max_positions


class AnswerFile:
    """A file of answers that all depend on the same things, as ``key`` says; others are thrown away."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self._found: dict[tuple[str, str, int], Answer] = {}
        drop_torn_tail(path)
        if not path.exists():
            return
        with path.open(encoding="utf-8") as lines:
            answers = [Answer.from_json(json.loads(line)) for line in lines]
        if any(answer.key != key for answer in answers):
            path.unlink()
            return
        self._found = {(answer.question, answer.arm, answer.repeat): answer for answer in answers}

    def get(self, question: str, arm: str, repeat: int) -> Answer | None:
        return self._found.get((question, arm, repeat))

    def add(self, question: str, arm: str, repeat: int, turns: list[Turn]) -> Answer:
        """Keep an answer; it is on the disk when this returns."""
        answer = Answer(self.key, question, arm, repeat, turns)
        append_jsonl(self.path, [answer])
        self._found[question, arm, repeat] = answer
        return answer


@dataclass(frozen=True)
class Collected:
    """Every answer.

    Attributes:
        answers: arm -> its answers.
        unavailable: arm -> why it has none.
        seconds: of decoding that was timed in this sitting.
    """

    answers: dict[str, Answers]
    unavailable: dict[str, str]
    seconds: float


def collect(
    asks: Mapping[str, Ask],
    questions: Sequence[Question],
    max_new_tokens: int,
    repeats: int,
    kept: AnswerFile,
    needed: Collection[str] = (),
    compiled: Collection[str] = (),
) -> Collected:
    """Ask everything of every arm, and keep what was kept before.

    Args:
        needed: arms whose errors end the evaluation; any other arm that fails is left out, with the reason.
        compiled: arms that answer everything once before it counts, because a shape is compiled when it is first met.
    """
    unavailable: dict[str, str] = {}
    seconds = 0.0

    def attempt(arm: str, question: Question, budget: int) -> list[Turn]:
        try:
            return asks[arm](question, budget)
        except Exception as error:
            if arm in needed:
                raise
            unavailable[arm] = " ".join(str(error).split())[:200] or type(error).__name__
            return []

    order = [(repeat, number) for repeat in range(repeats) for number in range(len(questions))]
    names = list(asks)
    missing = {arm: [key for key in order if kept.get(questions[key[1]].id, arm, key[0]) is None] for arm in names}
    with tqdm(total=len(order) * len(names), desc="answers", unit="answer") as bar:
        bar.update(sum(len(order) - len(left) for left in missing.values()))
        for arm in (arm for arm in names if missing[arm]):
            if arm not in compiled:
                attempt(arm, replace(questions[0], follow_ups=()), min(WARM_UP_TOKENS, max_new_tokens))
                continue
            for question in questions:
                if arm not in unavailable:
                    attempt(arm, question, max_new_tokens)
        for repeat, number in order:
            question = questions[number]
            for turn in range(len(names)):
                arm = names[(turn + number + repeat) % len(names)]
                if arm in unavailable or kept.get(question.id, arm, repeat):
                    continue
                if turns := attempt(arm, question, max_new_tokens):
                    made = kept.add(question.id, arm, repeat, turns)
                    seconds += made.prefill_seconds + made.decode_seconds
                bar.update()
    return Collected(
        {
            arm: [
                [answer for question in questions if (answer := kept.get(question.id, arm, repeat))]
                for repeat in range(repeats)
            ]
            for arm in names
            if arm not in unavailable
        },
        unavailable,
        seconds,
    )
