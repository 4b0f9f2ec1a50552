"""``medusa-train data inspect``: what is in the rows of a run or in a file of chats, and what will be learnt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from medusa_train.data.chat import load_chat_tokenizer
from medusa_train.data.conversations import conversation_rows
from medusa_train.data.prompts import load_conversations
from medusa_train.data.rows import SPLITS, Row, open_rows
from medusa_train.data.sources import Source
from medusa_train.data.statistics import RowsSummary, percentiles, pieces_of, summarize
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_text
from medusa_train.recipe import DataSection, load_recipe
from medusa_train.row_text import printable, row_text


@dataclass
class Dataset:
    """Rows that are looked at.

    Attributes:
        origin: where they come from.
        backbone: whose token ids they hold.
        tokenizer: of that backbone.
        rows: read as they are needed, once.
        skipped: reason -> conversations that gave no row; complete once the rows were read.
    """

    origin: str
    backbone: str
    tokenizer: PreTrainedTokenizerBase
    rows: Iterable[Row]
    skipped: Counter[str] = field(default_factory=Counter)


def find_dataset(target: str, backbone: str | None, split: str = "train") -> Dataset:
    """The rows of a run folder, of its recipe, of a file of rows, or those that conversations would give.

    Args:
        backbone: for conversations, whose tokenizer and template make the rows; for rows, another tokenizer than that
            of the run.
        split: of a data set of conversations.

    Raises:
        UserError: there is nothing of this kind, or no backbone is known.
    """
    file = _rows_file(Path(target).expanduser())
    if file.name == "rows.jsonl" or _holds_rows(file):
        if not file.exists():
            raise UserError(f"{target} holds no rows; run medusa-train distill first")
        source, template = _made_by(file, backbone)
        return Dataset(str(file), source, load_chat_tokenizer(source, template), open_rows(file))
    if backbone is None:
        raise UserError(f"{target} is no run of medusa-train; name the --backbone whose chat template shows it")
    tokenizer, defaults, skipped = load_chat_tokenizer(backbone), DataSection(), Counter[str]()
    conversations = load_conversations([Source(target, split)], "skip", skipped)
    rows = conversation_rows(
        tokenizer, conversations, defaults.max_length, defaults.calibration_share, defaults.heldout_share, skipped
    )
    return Dataset(target, backbone, tokenizer, rows, skipped)


def _rows_file(path: Path) -> Path:
    """Where the rows of a recipe, a run, or a stage of it are; any other path as it is."""
    if path.suffix in (".yaml", ".yml"):
        return Path(load_recipe(path).output_dir) / "distill" / "rows.jsonl"
    candidates = (path / "rows.jsonl", path / "distill" / "rows.jsonl")
    return next((file for file in candidates if file.exists()), path)


def _holds_rows(file: Path) -> bool:
    if file.suffix != ".jsonl" or not file.is_file():
        return False
    with file.open("rb") as lines:
        try:
            first = json.loads(lines.readline())
        except ValueError:
            return False
    return isinstance(first, dict) and {"input_ids", "spans"} <= first.keys()


def _made_by(rows: Path, backbone: str | None) -> tuple[str, str | None]:
    """Source and template of the backbone that wrote rows."""
    if backbone is not None:
        return backbone, None
    try:
        recipe = json.loads((rows.parent / "recipe.json").read_text(encoding="utf-8"))
        return recipe["backbone.source"], recipe["backbone.chat_template"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"nothing beside {rows} says whose rows these are; name the --backbone") from error


def inspect(dataset: Dataset, shown: int, consistency_rows: int) -> tuple[RowsSummary, tuple[int, int] | None]:
    """Count the rows; and for so many of them, how many answer tokens the backbone would choose, and of how many.

    Raises:
        UserError: there is no row.
    """
    summary = summarize(dataset.rows, max(shown, consistency_rows))
    if not summary.total_rows:
        reasons = ", ".join(f"{count} ({reason})" for reason, count in dataset.skipped.most_common(3))
        raise UserError(f"{dataset.origin} holds nothing to learn from: {reasons or 'no record'}")
    if not consistency_rows:
        return summary, None
    from medusa_train.eval.self_consistency import self_consistency
    from medusa_train.inference.backbone import load_backbone

    found = self_consistency(load_backbone(dataset.backbone), summary.example[:consistency_rows])
    return summary, (sum(equal for equal, _ in found), sum(total for _, total in found))


def figures(dataset: Dataset, summary: RowsSummary, consistency: tuple[int, int] | None) -> list[tuple[str, str]]:
    """What was counted, as names and text."""
    rows = summary.total_rows

    def lengths(name: str) -> str:
        found = percentiles(getattr(summary, name))
        return f"median {found[50]:,}, 10 % below {found[10]:,}, 10 % above {found[90]:,}, longest {found[100]:,}"

    told = [
        ("from", dataset.origin),
        ("backbone", dataset.backbone),
        ("rows", f"{rows:,}: " + ", ".join(f"{split} {summary.rows[split]:,}" for split in SPLITS)),
        (
            "learnt tokens",
            f"{summary.total_learnt:,} in {summary.spans:,} answers: "
            + ", ".join(f"{split} {summary.learnt[split]:,}" for split in SPLITS),
        ),
        ("row lengths", lengths("row_lengths")),
        ("answer lengths", lengths("answer_lengths")),
        ("finish reasons", ", ".join(f"{reason} {count:,}" for reason, count in summary.finish_reasons.most_common())),
        ("duplicates", f"{summary.repeated_rows:,} rows, {summary.repeated_answers:,} answers"),
        ("looping", f"{summary.looping:,} ({summary.looping / rows:.0%}) answers repeat themselves"),
    ]
    if consistency:
        equal, total = consistency
        told.append(("self-consistency", f"{equal / max(1, total):.1%} of {total:,} tokens are the greedy choice"))
    if dataset.skipped:
        reasons = ", ".join(f"{count:,} ({reason})" for reason, count in dataset.skipped.most_common())
        told.append(("left out", reasons))
    return told


def show(dataset: Dataset, summary: RowsSummary, consistency: tuple[int, int] | None, shown: int) -> None:
    """Print it; plain text without a terminal or with NO_COLOR."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in figures(dataset, summary, consistency):
        table.add_row(name, Text(printable(text)))
    console.print(table)
    coverage = Table("draft vocabulary", "training answers", "other answers", box=None, padding=(0, 2))
    for size, train, others in summary.coverage():
        coverage.add_row(f"{size:,}", f"{train:.2%}", "n/a" if others is None else f"{others:.2%}")
    console.print(Text("\nshare of answer tokens that a draft vocabulary covers", style="bold"))
    console.print(coverage)
    in_colour = console.is_terminal and not console.no_color
    for row in summary.example[:shown]:
        legend = "green is learnt" if in_colour else "[[ ]] is learnt"
        console.print(Text(f"\nrow {row.id}, {row.split}, {row.finish_reason} ({legend})", style="bold"))
        console.print(row_text(pieces_of(row, dataset.tokenizer), in_colour), soft_wrap=True)


def write_page(
    path: Path, dataset: Dataset, summary: RowsSummary, consistency: tuple[int, int] | None, shown: int
) -> None:
    """Write one self-contained HTML page."""
    context: dict[str, Any] = {
        "origin": dataset.origin,
        "figures": figures(dataset, summary, consistency),
        "coverage": summary.coverage(),
        "rows": [(row, pieces_of(row, dataset.tokenizer)) for row in summary.example[:shown]],
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(files("medusa_train").joinpath("inspection.html.j2").read_text("utf-8"))
    write_text(path, template.render(context))
