"""Reading files and data sets record by record: whatever their size, one record is in memory."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, cast

from medusa_train.data.records import MAX_CHARACTERS, BadRecord
from medusa_train.inference.errors import UserError

OnBad = Literal["stop", "skip"]
Made = TypeVar("Made")
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")


@dataclass(frozen=True)
class Source:
    """Where records come from.

    Attributes:
        path: a file with one of `ENDINGS`, a folder that `datasets` wrote or can read, or the name of a Hub dataset.
        split: of a dataset.
        columns: field that is looked for -> the name that it has here, as in ``{"prompt": "query"}``.
        weight: how much is taken of this source beside others.
    """

    path: str
    split: str = "train"
    columns: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0


def read_source(
    source: Source, make: Callable[[Mapping[str, Any]], Made], on_bad: OnBad, skipped: Counter[str]
) -> Iterator[Made]:
    """What ``make`` makes of each record; a `BadRecord` stops everything or is counted by its reason.

    Raises:
        UserError: the source cannot be read, holds no record, or holds a bad one that is not to be skipped.
    """
    empty = True
    for where, record in _numbered(source):
        empty = False
        try:
            if isinstance(record, BadRecord):
                raise record
            made = make(_renamed(record, source.columns))
        except BadRecord as error:
            if on_bad == "stop":
                raise UserError(
                    f"{source.path} {where}: {error}; correct it, or leave out such records with data.on_bad_rows=skip"
                ) from error
            skipped[error.reason] += 1
            continue
        yield made
    if empty:
        raise UserError(f"cannot read {source.path}: it holds no record; give at least one")


def read_records(path: str, split: str = "train") -> Iterator[Mapping[str, Any]]:
    """The records themselves; a damaged one stops everything.

    Raises:
        UserError: as in `read_source`.
    """
    return read_source(Source(path, split), lambda record: record, "stop", Counter())


def _renamed(record: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    if not columns:
        return record
    if missing := [column for column in columns.values() if column not in record]:
        raise BadRecord(f"there is no column {missing[0]}, found {', '.join(sorted(map(str, record)))}")
    return {name: record[column] for name, column in columns.items()}


def _numbered(source: Source) -> Iterator[tuple[str, Mapping[str, Any] | BadRecord]]:
    """Records, or what is wrong with them, and where each stands."""
    path = Path(source.path).expanduser()
    ending = next((ending for ending in ENDINGS if path.name.endswith(ending)), None)
    if ending is None and path.suffix and (path.is_file() or path.is_absolute()) and not path.is_dir():
        raise UserError(f"prompts {source.path}: files end in {', '.join(ENDINGS)}")
    if ending and not path.is_file():
        raise UserError(f"prompts {source.path}: no such file")
    if ending and path.stat().st_size == 0:
        raise UserError(f"prompts {source.path}: the file is empty; give at least one record")
    try:
        if ending is None or ending == ".parquet":
            for number, record in enumerate(_dataset(source, path, ending is not None), start=1):
                yield f"record {number}", record
        else:
            with cast(IO[bytes], gzip.open(path) if ending.endswith(".gz") else path.open("rb")) as file:
                kind = ending.removesuffix(".gz")
                yield from {".jsonl": _json_lines, ".json": _json, ".csv": _csv}[kind](file)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {source.path}: {' '.join(str(error).split())[:200]}") from error


def _json_lines(file: IO[bytes]) -> Iterator[tuple[str, Mapping[str, Any] | BadRecord]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.rstrip())  # so that columns count within the line
        except json.JSONDecodeError as error:
            yield f"line {number}, column {error.colno}", BadRecord("a line that is not JSON", f" ({error.msg})")
        except UnicodeDecodeError:
            yield f"line {number}", BadRecord("a line that is not UTF-8")
        except RecursionError:
            yield f"line {number}", BadRecord("a line of too many brackets within brackets")
        else:
            yield f"line {number}", record if isinstance(record, dict) else BadRecord("a line that is not an object")


def _json(file: IO[bytes]) -> Iterator[tuple[str, Mapping[str, Any] | BadRecord]]:
    """A list of records, or JSON lines under the other name."""
    try:
        content = json.load(file)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise
        file.seek(0)
        yield from _json_lines(file)
        return
    for number, record in enumerate(content if isinstance(content, list) else [content], start=1):
        yield f"record {number}", record if isinstance(record, dict) else BadRecord("a record that is not an object")


def _csv(file: IO[bytes]) -> Iterator[tuple[str, Mapping[str, Any] | BadRecord]]:
    csv.field_size_limit(4 * MAX_CHARACTERS)  # longer fields are refused with a reason, not as damage
    # Bytes that are not UTF-8 come through as halves of characters, which `check_turns` refuses by record.
    lines = (line.decode("utf-8-sig" if first else "utf-8", "surrogateescape") for first, line in _with_first(file))
    rows = csv.DictReader(lines)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield f"line {rows.line_num}", BadRecord("a row that is not CSV", f" ({error})")
            continue
        if row is None:
            return
        whole = None not in row and None not in row.values()
        fields = {name: value for name, value in row.items() if value}
        yield f"line {rows.line_num}", fields if whole else BadRecord("a row with another number of fields")


def _with_first(lines: IO[bytes]) -> Iterator[tuple[bool, bytes]]:
    return ((number == 0, line) for number, line in enumerate(lines))


def _dataset(source: Source, path: Path, is_parquet: bool) -> Iterator[Mapping[str, Any]]:
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        if is_parquet:
            yield from load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = load_from_disk(str(path))
            if isinstance(saved, DatasetDict):
                if source.split not in saved:
                    raise UserError(f"{source.path} has no split {source.split}, it has {', '.join(saved)}")
                saved = saved[source.split]
            yield from saved
        else:
            yield from load_dataset(str(path) if path.is_dir() else source.path, split=source.split)
    except (DatasetNotFoundError, DatasetGenerationError) as error:
        raise UserError(f"cannot read {source.path}: {' '.join(str(error).split())[:200]}") from error
