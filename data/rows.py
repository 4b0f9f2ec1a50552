"""Rows on disk: append-only JSON lines that survive a kill, and the split that a row belongs to."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeVar, overload

from medusa_train.data.chat import Message, Span
from medusa_train.inference.errors import UserError

Split = Literal["train", "calibration", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "calibration", "heldout")
Record = TypeVar("Record")


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the assistant's answer.

    Attributes:
        id: hash of the messages.
        messages: OpenAI-style ``role``/``content`` messages, the last one a user's or a tool's.
        follow_ups: what the user says next, each once the assistant's own answer to the one before is there.
    """

    id: str
    messages: list[dict[str, Any]]
    follow_ups: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, messages: Iterable[Message], follow_ups: Sequence[str] = ()) -> Prompt:
        kept = ("role", "content", "tools", "tool_calls", "tool_call_id", "reasoning_content")
        plain = [{name: message[name] for name in kept if name in message} for message in messages]
        turns = [*plain, *follow_ups]
        return cls(hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16], plain, list(follow_ups))


@dataclass(frozen=True)
class Row:
    """A text that heads learn from, as the token ids that the backbone wrote.

    Attributes:
        id: id of its prompt.
        split: see `split_of`.
        messages: what stands before the last answer, for people.
        input_ids: prompt and answer.
        spans: ``[start, end)`` of the ids that carry loss.
        finish_reason: of a distilled answer ``stop`` or ``length``; of a conversation from a file ``given``, or
            ``length`` where its last answer was cut.
        temperature: that of a distilled answer.
        mismatch: why the ids may not be those that the model wrote (its text was tokenized again); None if they are.
    """

    id: str
    split: Split
    messages: list[dict[str, Any]]
    input_ids: list[int]
    spans: list[Span]
    finish_reason: str
    temperature: float = 0.0
    mismatch: str | None = None

    @property
    def learnt_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


def split_of(prompt_id: str, calibration_share: float, heldout_share: float) -> Split:
    """The split of a prompt, from its hash alone, so that it never moves when other prompts come or go."""
    point = int(hashlib.sha256(f"split:{prompt_id}".encode()).hexdigest()[:8], 16) / 0x1_0000_0000
    if point < heldout_share:
        return "heldout"
    return "calibration" if point < heldout_share + calibration_share else "train"


class JsonLines(Sequence[Record], Generic[Record]):
    """The records of a file of JSON lines, read when they are asked for: 8 bytes of memory each.

    A last line that a kill left unfinished is passed over.
    """

    def __init__(self, path: Path, make: Callable[[dict[str, Any]], Record]) -> None:
        self.path, self._make = path, make
        self._offsets = array("q", [offset for offset, _ in whole_lines(path)])

    def keep(self, wanted: Callable[[Record], bool]) -> JsonLines[Record]:
        """Leave out the records that are not wanted."""
        self._offsets = array("q", [at for at, record in zip(self._offsets, self, strict=True) if wanted(record)])
        return self

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, place: int) -> Record: ...

    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...

    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        with self.path.open("rb") as file:
            if isinstance(place, slice):
                return [self._read(file, offset) for offset in self._offsets[place]]
            return self._read(file, self._offsets[place])

    def __iter__(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            for offset in self._offsets:
                yield self._read(file, offset)

    def _read(self, file: BinaryIO, offset: int) -> Record:
        file.seek(offset)
        return self._make(parse_line(file.readline(), f"{self.path} byte {offset}"))


def append_jsonl(path: Path, records: Iterable[Any]) -> list[int]:
    """Append dataclasses in one write and wait until they are on the disk; the offset of each one's line.

    A write that fails (full disk) leaves the file as it was.
    """
    lines = [
        (json.dumps(vars(record), ensure_ascii=False, default=asdict) + "\n").encode("utf-8", "surrogatepass")
        for record in records  # `asdict` for what is inside only: it copies everything it goes through
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        start = file.tell()
        try:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, start)
            raise
    return list(accumulate((len(line) for line in lines), initial=start))[:-1]


def drop_torn_tail(path: Path) -> None:
    """Cut off a last line that a kill left unfinished, before anything is appended behind it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = whole = file.seek(0, os.SEEK_END)
        while whole:
            start = max(0, whole - 65536)
            file.seek(start)
            found = file.read(whole - start).rfind(b"\n") + 1
            if found:
                whole = start + found
                break
            whole = start
        if whole < end:
            file.truncate(whole)


def open_prompts(path: Path) -> JsonLines[Prompt]:
    """The prompts of a file that `append_jsonl` wrote, left on the disk."""
    return JsonLines(path, lambda record: Prompt(**record))


def open_rows(path: Path, split: Split | None = None) -> JsonLines[Row]:
    """`read_rows`, but left on the disk."""
    rows = JsonLines(path, row_of)
    number = 0

    def wanted(row: Row) -> bool:
        nonlocal number
        number += 1
        _check_row(row, path, number)
        return split is None or row.split == split

    if not len(rows):
        raise UserError(f"{path} holds no row; run medusa-train distill first")
    return rows.keep(wanted)


def _check_row(row: Row, path: Path, number: int) -> None:
    if row.learnt_tokens < 1:
        raise UserError(f"{path} row {number} (id {row.id}) has no assistant token; remove it or distill again")


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a file that `append_jsonl` wrote."""
    return [Prompt(**record) for record in _records(path)]


def row_of(record: dict[str, Any]) -> Row:
    """A row from its JSON."""
    return Row(**(record | {"spans": [tuple(span) for span in record["spans"]]}))


def read_rows(path: Path, split: Split | None = None) -> list[Row]:
    """Every row, or those of one split, in the order written.

    Raises:
        UserError: there is no row, or one has no token to learn.
    """
    rows = []
    for number, record in enumerate(_records(path), start=1):
        row = row_of(record)
        _check_row(row, path, number)
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
    return (parse_line(line, f"{path} line {number}") for number, (_, line) in enumerate(whole_lines(path), start=1))


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The record of a line.

    Raises:
        UserError: it is not JSON.
    """
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); remove the line") from error
    return record


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with their offsets, without one that a kill left unfinished; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield offset, line
            offset += len(line)
