"""Rows on disk: append-only JSON lines that survive a kill, and the split that a row belongs to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from medusa_train.data.chat import Message, Span
from medusa_train.inference.errors import UserError

Split = Literal["train", "calibration", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "calibration", "heldout")


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the assistant's answer.

    Attributes:
        id: hash of the messages.
        messages: OpenAI-style ``role``/``content`` messages, the last one a user's.
    """

    id: str
    messages: list[dict[str, str]]

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Prompt:
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        return cls(hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16], plain)


@dataclass(frozen=True)
class Row:
    """A text that heads learn from, as the token ids that the backbone wrote.

    Attributes:
        id: id of its prompt.
        split: see `split_of`.
        messages: the prompt, for people.
        input_ids: prompt and answer.
        spans: ``[start, end)`` of the ids that carry loss.
        finish_reason: ``stop`` or ``length`` for a distilled answer, ``given`` for a conversation from a file.
    """

    id: str
    split: Split
    messages: list[dict[str, str]]
    input_ids: list[int]
    spans: list[Span]
    finish_reason: str

    @property
    def learnt_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


def split_of(prompt_id: str, calibration_share: float, heldout_share: float) -> Split:
    """The split of a prompt, from its hash alone, so that it never moves when other prompts come or go."""
    point = int(hashlib.sha256(f"split:{prompt_id}".encode()).hexdigest()[:8], 16) / 0x1_0000_0000
    if point < heldout_share:
        return "heldout"
    return "calibration" if point < heldout_share + calibration_share else "train"


def append_jsonl(path: Path, records: Iterable[Prompt | Row]) -> None:
    """Append records in one write and wait until they are on the disk."""
    text = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def drop_torn_tail(path: Path) -> None:
    """Cut off a last line that a kill left unfinished, before anything is appended behind it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a file that `append_jsonl` wrote."""
    return [Prompt(**record) for record in _records(path)]


def read_rows(path: Path, split: Split | None = None) -> list[Row]:
    """Every row, or those of one split, in the order written.

    Raises:
        UserError: there is no row, or one has no token to learn.
    """
    rows = []
    for number, record in enumerate(_records(path), start=1):
        row = Row(**(record | {"spans": [tuple(span) for span in record["spans"]]}))
        if row.learnt_tokens < 1:
            raise UserError(f"{path} row {number} (id {row.id}) has no assistant token; remove it or distill again")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no row; run medusa-train distill first")
    return [row for row in rows if split is None or row.split == split]


def first_rows(rows: Sequence[Row], learnt_tokens: int) -> list[Row]:
    """The first of ``rows`` that hold about so many learnt tokens, one at least."""
    taken: list[Row] = []
    for row in rows:
        if taken and sum(row.learnt_tokens for row in taken) >= learnt_tokens:
            break
        taken.append(row)
    return taken


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:  # a kill may cut a line in the middle of a character
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return  # torn by a kill; see drop_torn_tail
                raise UserError(f"{path} line {number} is not JSON ({error}); remove the line") from error
