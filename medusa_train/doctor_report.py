"""What `doctor` found, on a terminal or in a log."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from medusa_train.doctor import Report
from medusa_train.row_text import row_text

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show(report: Report) -> None:
    """Print figures, the example row and the findings; plain text without a terminal or with NO_COLOR."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, lines in _lines(report.figures).items():
        table.add_row(name, Text("\n".join(lines)))
    console.print(table)
    if report.example:
        in_colour = console.is_terminal and not console.no_color
        legend = "green is learnt" if in_colour else "[[ ]] is learnt"
        console.print(Text(f"\na training row ({legend})", style="bold"))
        console.print(row_text(report.example, in_colour), soft_wrap=True)
    console.print()
    for finding in report.findings:
        console.print(Text(f"{finding.level}: ", style=STYLES[finding.level]) + Text(finding.message), soft_wrap=True)
    if not any(finding.level in ("error", "warning") for finding in report.findings):
        console.print("nothing looks wrong")


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _lines(figures: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Section -> what is said of it; "about" and "at most" stand wherever a figure is an estimate or a bound."""
    backbone, heads, data, disk, train = (figures[name] for name in ("backbone", "heads", "data", "disk", "train"))
    copies = " that read copies" if heads["reads_copies"] else ""
    lines = {
        "backbone": [
            f"{backbone['source']}: {backbone['class']}, {backbone['parameters'] / 1e6:,.1f} M parameters, hidden size "
            f"{backbone['hidden_size']:,}, vocabulary {backbone['vocab_size']:,}",
            f"{size(backbone['weight_bytes'])} of weights ({backbone['dtype']}) on {backbone['device']}, where "
            f"{size(backbone['memory_available_bytes'])} are free",
        ],
        "heads": [
            f"{heads['num_heads']} {heads['kind']} heads{copies}, layers {heads['num_layers']}, {heads['lm_head']} "
            f"projection to {heads['draft_vocab_size'] or heads['vocab_size']:,} tokens: "
            f"{heads['parameters'] / 1e6:,.2f} M parameters",
            f"fp32 weights {size(heads['weight_bytes'])}, gradients {size(heads['gradient_bytes'])}, Adam "
            f"{size(heads['optimizer_bytes'])}, frozen projection {size(heads['projection_bytes'])}, logits "
            f"about {size(heads['logit_bytes_estimate'])}: about {size(heads['training_bytes_estimate'])} in all",
        ],
        **({"adapter": [_adapter_line(figures["adapter"])]} if "adapter" in figures else {}),
        "data": [data["origin"], *_data_lines(data, heads)],
        "disk": [_disk_line(disk)],
        "train": [_train_line(train)],
    }
    for reason, count in data["dropped"].items():
        if count:
            lines["data"].append(f"left out: {count:,}, {reason}")
    return lines


def _adapter_line(adapter: dict[str, Any]) -> str:
    return (
        f"LoRA of {adapter['parameters'] / 1e6:,.2f} M parameters: fp32 weights {size(adapter['weight_bytes'])}, "
        f"gradients {size(adapter['gradient_bytes'])}, Adam {size(adapter['optimizer_bytes'])}; its backward pass "
        "keeps activations of the backbone, which are not counted"
    )


def _data_lines(data: dict[str, Any], heads: dict[str, Any]) -> list[str]:
    if "rows" not in data:
        if "prompts" not in data:
            return ["nothing is known of the rows"]
        return [
            f"{data['prompts']:,} prompts: at most {data['positions_at_most']:,} answer tokens, "
            f"{data['training_positions_at_most']:,} of them to train on"
        ]
    total = sum(data["rows"].values())
    splits = ", ".join(f"{split} {data['rows'][split]:,} ({data['positions'][split]:,})" for split in data["rows"])
    targets = ", ".join(f"{count:,}" for count in data["targets"])
    lines = [
        f"{total:,} rows (positions that carry loss): {splits}",
        f"training targets of heads 1 to {heads['num_heads']}: {targets}",
        f"answers that hold an end token {data['with_end']:,}, cut by length {data['cut']:,}, looping "
        f"{data['looping']:,}, duplicates {data['duplicates']:,}",
    ]
    if heads["draft_vocab_size"]:
        unseen = data["unseen_coverage"]
        lines.append(
            f"head vocabulary covers {data['coverage']:.1%} of training answer tokens"
            + ("" if unseen is None else f", {unseen:.1%} of the others")
        )
    return lines


def _disk_line(disk: dict[str, Any]) -> str:
    if "cache_bytes" in disk:
        cache = f"hidden states {size(disk['cache_bytes'])}"
    elif "cache_bytes_at_most" in disk:
        cache = f"hidden states at most {size(disk['cache_bytes_at_most'])}"
    else:
        cache = "hidden states: not known yet"
    return f"{cache}, checkpoints {size(disk['checkpoint_bytes'])}, free {size(disk['free_bytes'])} at {disk['folder']}"


def _train_line(train: dict[str, Any]) -> str:
    if "step_seconds_estimate" not in train:
        return "not timed"
    step = f"about {_seconds(train['step_seconds_estimate'])} a step of {train['batch_positions']:,} positions"
    if "steps" in train:
        return f"{train['steps']:,} steps, {step}: about {_seconds(train['train_seconds_estimate'])} in one process"
    if "steps_at_most" in train:
        most = _seconds(train["train_seconds_estimate_at_most"])
        return f"at most {train['steps_at_most']:,} steps, {step}: at most about {most} in one process"
    return step
