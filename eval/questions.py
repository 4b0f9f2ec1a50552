"""What an evaluation asks: a benchmark by name, or any file of prompts or conversations.

A benchmark is a small YAML file that says where its rows come from and how a row becomes questions; those that come
with the package lie in ``eval/benchmarks/``. Its version changes whenever the same rows would make other questions, so
that two reports of one name and version asked the same.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medusa_train.data.prompts import prompt_of
from medusa_train.data.sources import read_records
from medusa_train.inference.errors import UserError

FOLDER = Path(str(files("medusa_train.eval"))) / "benchmarks"
DATA_FILES = (".jsonl", ".json", ".parquet", ".gz")


@dataclass(frozen=True)
class Question:
    """One conversation that every arm leads on its own.

    Attributes:
        messages: what is said before the first answer; the last message is a user's.
        follow_ups: what the user says after each answer of the arm.
        category: the kind that its source says it is of; "" where it does not.
        input_ids: ``messages`` as token ids, where they were rendered before.
    """

    messages: list[dict[str, Any]]
    follow_ups: tuple[str, ...] = ()
    category: str = ""
    input_ids: tuple[int, ...] | None = None

    @property
    def id(self) -> str:
        """Hash of all that is asked."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


class Benchmark(BaseModel):
    """How the rows of a benchmark become questions; exactly one of ``prompt`` and ``turns``."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    version: int
    about: str
    """One line for people."""
    source: str = Field(alias="from")
    """Where a person finds the rows."""
    dataset: str | None = None
    """Hub id; null: only from a local file."""
    file: str | None = None
    """The one file of that dataset that holds the rows; null: as its card arranges them."""
    config: str | None = None
    """Configuration of the Hub dataset."""
    split: str = "test"
    """Split of the Hub dataset."""
    prompt: str | None = None
    """The question, with {fields} of the row."""
    turns: str | None = None
    """Field that lists what the user says, turn by turn."""
    category: str | None = None
    """Field that holds the question's kind."""
    max_new_tokens: int = Field(ge=2)
    """Budget of an answer, unless the recipe says otherwise."""


def benchmark_names() -> list[str]:
    """Benchmarks that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_benchmark(name: str) -> Benchmark | None:
    """A benchmark by name or by the path of its YAML file; None for a file of prompts or conversations.

    Raises:
        UserError: no such benchmark or file, or a YAML file that is no benchmark.
    """
    path = Path(name).expanduser()
    if path.suffix in DATA_FILES:
        return None
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name}.yaml"
        if name not in benchmark_names():
            near = difflib.get_close_matches(name, benchmark_names(), n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(benchmark_names())}, or name a file"
            raise UserError(f"benchmark {name!r} is unknown; {hint}")
    try:
        return Benchmark.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"benchmark {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"benchmark {path}: {where}: {first['msg'].lower()}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"benchmark {path} is not YAML: {' '.join(str(error).split())}") from error


def check_benchmark(name: str, file: str | None) -> None:
    """Refuse what can be seen to fail before anything is read.

    Raises:
        UserError: no such benchmark, or no such file.
    """
    benchmark = load_benchmark(name)
    if benchmark is None and file:
        raise UserError(f"benchmark {name} is a file of its own; leave out eval.benchmark_file={file}")
    path = file or (name if benchmark is None else None)
    if path and not Path(path).expanduser().is_file():
        raise UserError(f"benchmark {name}: {path}: no such file")
    if benchmark and not path and not benchmark.dataset:
        raise UserError(f"benchmark {name}: save {benchmark.source} and set eval.benchmark_file to its path")


def load_questions(name: str, file: str | None = None) -> list[Question]:
    """Every question of a benchmark or of a file, in order; repeated ones once.

    A record of a file that is no benchmark's holds ``messages`` (a final assistant turn is dropped), ``prompt``, or
    ``turns``; ``category`` is optional.

    Args:
        name: see `load_benchmark`.
        file: where the benchmark's rows are, instead of the Hub.

    Raises:
        UserError: the rows cannot be read, or one lacks what its question is made of (the line is named).
    """
    check_benchmark(name, file)
    benchmark = load_benchmark(name)
    source = name if benchmark is None else file or benchmark.dataset or ""
    found: dict[str, Question] = {}
    unit = "line" if ".jsonl" in source else "record"
    for number, record in enumerate(_records(benchmark, source), start=1):
        where = f"{source} {unit} {number}"
        question = _of_any_file(record, where) if benchmark is None else question_of(benchmark, record, where)
        found.setdefault(question.id, question)
    return list(found.values())


def question_of(benchmark: Benchmark, record: Mapping[str, Any], where: str) -> Question:
    """A row as the benchmark asks it.

    Args:
        where: names the row in errors.

    Raises:
        UserError: a field is missing or empty.
    """

    def field(name: str) -> Any:
        # A reader gives every record the fields of all of them, with nulls.
        if record.get(name) in (None, "", []):
            there = ", ".join(sorted(key for key, value in record.items() if value is not None))
            raise UserError(
                f"benchmark {benchmark.name}: {where} has no {name!r}, it has {there or 'no field at all'}; "
                f"its rows look like those of {benchmark.source}"
            )
        return record[name]

    if benchmark.turns:
        said = [str(turn) for turn in field(benchmark.turns)]
    elif benchmark.prompt:
        said = [benchmark.prompt.format_map(_Fields(field))]
    else:
        raise UserError(f"benchmark {benchmark.name} needs 'prompt' or 'turns', to make questions of rows")
    category = str(field(benchmark.category)) if benchmark.category else ""
    return Question([{"role": "user", "content": said[0]}], tuple(said[1:]), category)


class _Fields(dict[str, Any]):
    def __init__(self, field: Any) -> None:
        super().__init__()
        self._field = field

    def __missing__(self, name: str) -> Any:
        return self._field(name)


def _of_any_file(record: Mapping[str, Any], where: str) -> Question:
    turns = tuple(str(turn) for turn in (record.get("turns") or ())[1:])
    messages = prompt_of(record, where)
    if not messages:
        raise UserError(f"{where} needs 'prompt', 'messages' or 'turns' with some text")
    return Question(messages, turns, str(record.get("category") or ""))


def _records(benchmark: Benchmark | None, source: str) -> Iterator[Mapping[str, Any]]:
    if benchmark is None or source != benchmark.dataset:
        yield from read_records(source)
        return
    from datasets import load_dataset
    from huggingface_hub import hf_hub_download

    try:
        if benchmark.file:
            # Not load_dataset("json", ...): it asks the network every time, whatever is cached.
            rows = read_records(hf_hub_download(source, benchmark.file, repo_type="dataset"))
        else:
            rows = iter(load_dataset(source, benchmark.config, split=benchmark.split))
    except Exception as error:  # of many kinds: no network, no such dataset, a damaged download
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"benchmark {benchmark.name}: cannot read {source} ({reason}); "
            f"save {benchmark.source} and set eval.benchmark_file to its path"
        ) from error
    yield from rows


def spread(questions: Sequence[Question], count: int | None) -> list[int]:
    """Places of ``count`` questions, evenly spaced when they are lined up by category; None: of all."""
    order = list(dict.fromkeys(question.category for question in questions))
    lined_up = sorted(range(len(questions)), key=lambda place: order.index(questions[place].category))
    count = min(count or len(questions), len(questions))
    return sorted(lined_up[(2 * n + 1) * len(questions) // (2 * count)] for n in range(count))


def select(questions: Sequence[Question], count: int | None, per_category: int | None = None) -> list[Question]:
    """A subset that depends on the questions alone, in their order.

    Each category is shuffled by hash and gives its first ``per_category`` questions; without that, categories take
    turns until there are ``count``.
    """
    ranks: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for question in sorted(questions, key=lambda question: question.id):
        ranks[question.id] = seen[question.category]
        seen[question.category] += 1
    if per_category is not None:
        return [question for question in questions if ranks[question.id] < per_category]
    turns = sorted(range(len(questions)), key=lambda i: (ranks[questions[i].id], i))
    return [questions[i] for i in sorted(turns[:count])]
