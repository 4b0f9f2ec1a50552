"""From measurements to something a person reads: ``report.json`` and a self-contained ``report.html``."""

from __future__ import annotations

import io
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_json, write_text

GREEN, BLUE, GREY = "#0a7d4f", "#2b5fb4", "#8890a0"


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write both files of a report.

    Args:
        report: what `evaluate.evaluate` returned, with ``made`` (the ``run.json`` of every stage).
    """
    context = report | {
        "environment": report["made"]["tree"]["environment"],
        "tree_given": report["made"]["tree"]["result"].get("chosen_by") == "recipe",
        "expected_tokens_per_step": _chosen(report)["expected_tokens_per_step"],
        "plots": [
            {"svg": _svg(figure), "caption": caption}
            for figure, caption in (
                (_by_tree_size(report), "Expected tokens per step and speedup of each tree size, from exact counts on "
                 "calibration answers and step times measured on this device. The ring is the chosen size."),
                (_recall(report), "Rank of the token that really came, on held-out answers" + (
                    "; the tokens before it were true too." if report["setting"]["kind"] == "hydra" else "."
                )),
                (_histogram(report), "Tokens emitted by a step."),
            )
        ],
    }  # fmt: skip
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["figure"] = figure_text
    template = environment.from_string(files("medusa_train.eval").joinpath("report.html.j2").read_text("utf-8"))
    write_text(folder / "report.html", template.render(context))
    write_json(folder / "report.json", report)


def figure_text(value: float | int | str | None) -> str:
    """A number for people; n/a for one that was not measured."""
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def headline(folder: Path) -> str:
    """A run's result in a few lines, read from its ``report.json``."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder} has no report; run medusa-train eval first") from error
    speed, speedup = report["speed"], report["speedup"]

    def tokens_per_second(arm: str) -> str:
        return figure_text(speed[arm]["decode_tokens_per_second"]["median"])

    return "\n".join(
        [
            f"tokens per step   {figure_text(report['acceptance']['tokens_per_step'])}"
            f"   (tree of {report['setting']['tree_size']}; replayed on all held-out answers "
            f"{figure_text(report['replay']['tokens_per_step'])})",
            f"decode tokens/s   {tokens_per_second('medusa')} medusa, {tokens_per_second('plain')} one token per pass, "
            f"{tokens_per_second('generate')} transformers generate",
            f"speedup           {figure_text(speedup['over_generate']['median'])} over generate, "
            f"{figure_text(speedup['over_plain']['median'])} over one-token decoding in the same loop",
            f"identical         {report['losslessness']['over_plain']['identical_share']:.0%} of outputs equal plain "
            "greedy decoding token for token",
            f"report            {folder / 'report.html'}",
            f"heads             {folder / 'heads'}",
        ]
    )


def _chosen(report: dict[str, Any]) -> dict[str, Any]:
    result = report["made"]["tree"]["result"]
    chosen: dict[str, Any] = next(row for row in result["sizes"] if row["size"] == result["chosen_size"])
    return chosen


def _by_tree_size(report: dict[str, Any]) -> Figure:
    rows = report["made"]["tree"]["result"]["sizes"]
    sizes = [row["size"] for row in rows]
    plain = rows[0]["expected_tokens_per_second"]  # sizes start with the smallest, the root alone where it was timed
    speedups = [row["expected_tokens_per_second"] / plain for row in rows]
    figure, left = _figure("tokens per pass (tree size)")
    left.plot(sizes, [row["expected_tokens_per_step"] for row in rows], "o-", color=GREEN)
    left.set_ylabel("tokens per step", color=GREEN)
    right = left.twinx()
    right.plot(sizes, speedups, "s--", color=BLUE)
    right.set_ylabel(f"expected speedup over size {sizes[0]}", color=BLUE)
    right.spines["top"].set_visible(False)
    chosen = sizes.index(_chosen(report)["size"])
    right.plot([sizes[chosen]], [speedups[chosen]], "o", color=BLUE, markersize=14, fillstyle="none")
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.minorticks_off()
    return figure


def _recall(report: dict[str, Any]) -> Figure:
    figure, axes = _figure("head")
    heads = range(1, report["setting"]["num_heads"] + 1)
    for offset, (name, color) in enumerate((("top1", GREEN), ("top5", BLUE), ("top10", GREY))):
        values = report["recall"][name]
        bars = axes.bar(
            [k + 0.27 * (offset - 1) for k in heads], values, 0.25, color=color, label=f"in best {name[3:]}"
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.set_xticks(list(heads))
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of tokens")
    axes.legend(frameon=False)
    return figure


def _histogram(report: dict[str, Any]) -> Figure:
    figure, axes = _figure("tokens emitted by a step")
    histogram = {int(tokens): steps for tokens, steps in report["acceptance"]["histogram"].items()}
    bars = axes.bar(list(histogram), list(histogram.values()), color=GREEN)
    axes.bar_label(bars, fontsize=9)
    axes.set_xticks(range(1, report["setting"]["num_heads"] + 2))
    axes.set_ylabel("steps")
    return figure


def _figure(xlabel: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(xlabel)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # Text stays text (small, sharp, searchable); a fixed salt keeps equal reports byte-identical.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "medusa-train", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
