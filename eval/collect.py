"""Answers of every arm, asked in turns and kept one by one, so that a killed measurement goes on where it was.

Timing needs every arm and several repeats, counting needs one answer of the heads. So some questions are *timed*: all
arms answer them in every repeat, taking turns in an order that rotates. The others are only *counted*: answered once,
by the arms that are needed, several together. Counts depend on the seed and the device alone; times are what they were
when an answer was made, so those of a continued evaluation come from several sittings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from medusa_train.eval.answers import Answer, AnswerFile, Answers, Ask, Turn
from medusa_train.eval.questions import Question
from medusa_train.eval.speed import WARM_UP_TOKENS

TOGETHER = 8  # counted questions that are answered as one batch


@dataclass(frozen=True)
class Collected:
    """Every answer.

    Attributes:
        timed: questions together -> arm -> its answers to the timed questions that fill such batches.
        counted: needed arm -> its first answer to every question.
        unavailable: arm, or arm and batch -> why it has none.
        seconds: of decoding in this sitting.
    """

    timed: dict[int, dict[str, Answers]]
    counted: dict[str, list[Answer]]
    unavailable: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class _Round:
    """What is asked at once; ``batch_size`` as in `Answer`."""

    arm: str
    repeat: int
    batch: list[Question]
    batch_size: int

    @property
    def name(self) -> str:
        """Of what stands or falls together."""
        return self.arm if self.batch_size == 1 else f"{self.arm}, {self.batch_size} prompts together"


def collect(
    asks: Mapping[str, Ask],
    questions: Sequence[Question],
    timed: Sequence[int],
    max_new_tokens: int,
    repeats: int,
    kept: AnswerFile,
    together: Mapping[int, Collection[str]],
    needed: Collection[str] = (),
    compiled: Collection[str] = (),
) -> Collected:
    """Ask what is to be timed or counted, and keep what was kept before.

    Args:
        timed: places of the timed questions.
        together: numbers of questions -> arms that answer so many timed ones at once, in full batches.
        needed: arms that answer the other questions too, and whose errors end the evaluation; any other arm that
            fails is left out, with the reason.
        compiled: arms that answer every timed question once before it counts, because a shape is compiled when it is
            first met.
    """
    clocked, rounds = [questions[number] for number in timed], list[_Round]()
    for size, arms in together.items():
        full = [clocked[start : start + size] for start in range(0, len(clocked) - size + 1, size)]
        rounds += _turns([arm for arm in asks if arm in arms], full, repeats, size)
    # Of like length, so that little of a batch is padding.
    others = [question for number, question in enumerate(questions) if number not in timed]
    others.sort(key=lambda question: len(str(question.messages)))
    shared = [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]
    counting = [_Round(arm, 0, batch, 1) for arm in asks if arm in needed for batch in shared]
    unavailable: dict[str, str] = {}
    seconds = 0.0

    def attempt(asked: _Round, batch: Sequence[Question], budget: int) -> list[list[Turn]]:
        try:
            return [] if asked.name in unavailable else asks[asked.arm](batch, budget)
        except Exception as error:
            if asked.arm in needed:
                raise
            unavailable[asked.name] = " ".join(str(error).split())[:200] or type(error).__name__
            return []

    def is_kept(asked: _Round) -> bool:
        # A batch that was kept in part is asked whole: an answer's rounding depends on what is asked with it.
        return all(kept.get(question.id, asked.arm, asked.repeat, asked.batch_size) for question in asked.batch)

    left = [asked for asked in rounds + counting if not is_kept(asked)]
    total = sum(len(asked.batch) for asked in rounds + counting)
    with tqdm(total=total, desc="answers", unit="answer") as bar:
        bar.update(total - sum(len(asked.batch) for asked in left))
        warmed: set[str] = set()
        for asked in (asked for asked in rounds if asked.name in {each.name for each in left}):
            if asked.arm in compiled and asked.repeat == 0:
                attempt(asked, asked.batch, max_new_tokens)
            elif asked.name not in warmed:
                first = [replace(question, follow_ups=()) for question in asked.batch]
                attempt(asked, first, min(WARM_UP_TOKENS, max_new_tokens))
            warmed.add(asked.name)
        for asked in left:
            for question, turns in zip(asked.batch, attempt(asked, asked.batch, max_new_tokens), strict=False):
                made = kept.add(question.id, asked.arm, asked.repeat, turns, asked.batch_size)
                seconds += made.prefill_seconds + made.decode_seconds
            bar.update(len(asked.batch))

    def found(asked: Iterable[_Round]) -> list[Answer]:
        each = ((question.id, one.arm, one.repeat, one.batch_size) for one in asked for question in one.batch)
        return [answer for key in each if (answer := kept.get(*key))]

    answers: dict[int, dict[str, Answers]] = {}
    for size in dict.fromkeys(asked.batch_size for asked in rounds):
        arms = {asked.arm: asked.name for asked in rounds if asked.batch_size == size}
        answers[size] = {
            arm: [found(asked for asked in rounds if asked.name == name and asked.repeat == r) for r in range(repeats)]
            for arm, name in arms.items()
            if name not in unavailable
        }
    counted = {arm: found([_Round(arm, 0, list(questions), 1)]) for arm in asks if arm in needed}
    return Collected(answers, counted, unavailable, seconds)


def _turns(arms: Sequence[str], batches: Sequence[list[Question]], repeats: int, batch_size: int) -> list[_Round]:
    """Arms take turns on every batch, in an order that rotates."""
    return [
        _Round(arms[(turn + place + repeat) % len(arms)], repeat, batch, batch_size)
        for repeat in range(repeats)
        for place, batch in enumerate(batches)
        for turn in range(len(arms))
    ]
