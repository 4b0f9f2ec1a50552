"""What became of every prompt while a distillation runs: append-only, and compact in memory.

Answers come in any order, from any number of processes, and a kill may come at any moment. So every process appends
what it has to a file of its own, a whole line per prompt, and nothing is ever changed. When all is said, the rows are
copied into ``rows.jsonl`` in the order of the prompts, the failures into ``failed.jsonl``, and the appended files go.
In memory a prompt costs some 30 bytes: its id as a number, what became of it, and where that stands.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medusa_train.data.rows import Row, append_jsonl, drop_torn_tail, parse_line, row_of, whole_lines
from medusa_train.inference.files import write_atomically

WAITING, DONE, FAILED = 0, 1, 2
ROWS, FAILURES, APPENDED = "rows.jsonl", "failed.jsonl", "appended"


@dataclass(frozen=True)
class Failure:
    """A prompt that got no answer to learn from.

    Attributes:
        id: id of the prompt.
        failed: the reason, in words that are the same for every prompt it holds for.
        skipped: it was never asked, and never can be.
    """

    id: str
    failed: str
    skipped: bool = False


class Journal:
    """The outcomes of one list of prompts; those of other prompts in the folder are passed over.

    Attributes:
        status: ``(n,)`` `WAITING`, `DONE` or `FAILED` for each prompt; an answer outweighs an earlier failure.
        tokens: ``(n,)`` learnt tokens of those that are done.
    """

    def __init__(self, folder: Path, ids: NDArray[np.uint64], rank: int = 0, retry_failed: bool = False) -> None:
        """Read what is there.

        Args:
            ids: of the prompts, as numbers (`as_number`).
            rank: names the file that this process appends to.
            retry_failed: failures before now count as waiting.
        """
        self.folder = folder
        self._own = folder / APPENDED / f"rank-{rank:05d}.jsonl"
        self._order = np.argsort(ids)
        self._sorted = ids[self._order]
        self.status = np.zeros(len(ids), np.uint8)
        self.tokens = np.zeros(len(ids), np.int32)
        self._file = np.zeros(len(ids), np.int32)
        self._offset = np.zeros(len(ids), np.int64)
        self._paths: list[Path] = []
        drop_torn_tail(self._own)
        self._read(retry_failed)

    def place(self, prompt_id: str) -> int | None:
        """Which of the prompts has this id."""
        number = as_number(prompt_id)
        found = int(np.searchsorted(self._sorted, number))
        if found == len(self._sorted) or self._sorted[found] != number:
            return None
        return int(self._order[found])

    def append(self, outcomes: Sequence[Row | Failure]) -> None:
        """Keep outcomes for good, in one write; a row that is there already stays as it is.

        Raises:
            OSError: the disk is full; nothing was written.
        """
        fresh = [(place, outcome) for outcome in outcomes if (place := self._fresh(outcome)) is not None]
        if not fresh:
            return
        offsets = append_jsonl(self._own, [outcome for _, outcome in fresh])
        if self._own not in self._paths:
            self._paths.append(self._own)
        file = self._paths.index(self._own)
        for (place, outcome), offset in zip(fresh, offsets, strict=True):
            self._note(place, outcome, file, offset)

    def finish(self, chosen: Iterable[int]) -> None:
        """Write ``rows.jsonl`` with the answers to the ``chosen`` prompts in that order, and ``failed.jsonl``."""
        files = {number: path.open("rb") for number, path in enumerate(self._paths)}

        def copy(target: Path, places: Iterable[int]) -> None:
            with target.open("wb") as out:
                for place in places:
                    file = files[int(self._file[place])]
                    file.seek(int(self._offset[place]))
                    out.write(file.readline())

        try:
            failed = np.flatnonzero(self.status == FAILED)
            if len(failed):
                write_atomically(self.folder / FAILURES, lambda target: copy(target, failed))
            done = (place for place in chosen if self.status[place] == DONE)
            write_atomically(self.folder / ROWS, lambda target: copy(target, done))
        finally:
            for file in files.values():
                file.close()
        if not len(failed):
            (self.folder / FAILURES).unlink(missing_ok=True)
        shutil.rmtree(self.folder / APPENDED, ignore_errors=True)

    def _fresh(self, outcome: Row | Failure) -> int | None:
        place = self.place(outcome.id)
        return place if place is not None and self.status[place] != DONE else None

    def _note(self, place: int, outcome: Row | Failure, file: int, offset: int) -> None:
        self.status[place] = DONE if isinstance(outcome, Row) else FAILED
        self.tokens[place] = outcome.learnt_tokens if isinstance(outcome, Row) else 0
        self._file[place], self._offset[place] = file, offset

    def _read(self, retry_failed: bool) -> None:
        appended = sorted((self.folder / APPENDED).glob("rank-*.jsonl"))
        self._paths = [path for path in (self.folder / ROWS, self.folder / FAILURES, *appended) if path.exists()]
        for file, path in enumerate(self._paths):
            for offset, line in whole_lines(path):
                record = parse_line(line, f"{path} byte {offset}")
                outcome = Failure(**record) if "failed" in record else row_of(record)
                if (place := self._fresh(outcome)) is not None and not (retry_failed and isinstance(outcome, Failure)):
                    self._note(place, outcome, file, offset)


def as_number(prompt_id: str) -> np.uint64:
    """A prompt's id, 16 hexadecimal digits, in 8 bytes; numbers sort as ids do."""
    return np.uint64(int(prompt_id, 16))
