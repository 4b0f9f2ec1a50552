"""The figures of a report, as SVG that needs nothing from outside."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from medusa_train.inference.tree import Tree

GREEN, BLUE, GREY = "#0a7d4f", "#2b5fb4", "#8890a0"
LARGEST_TREE = 64  # nodes of a tree that is drawn whole


def report_plots(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """SVG and caption of every figure of a report."""
    before = "." if report["setting"]["kind"] == "medusa" else "; the tokens before it were true too."
    figures = {
        "Expected tokens per step and speedup of each tree size, from exact counts on calibration answers and step "
        "times measured on this device. The ring is the chosen size.": _by_tree_size(report),
    }
    if report["batches"]:
        caption = "Measured speedup where several prompts are answered together; bars reach over all repeats."
        figures[caption] = _by_batch_size(report)
    figures |= {
        "Rank of the token that really came, on held-out answers" + before: _head_recall(report),
        "Tokens emitted by a step.": _step_histogram(report),
    }
    if report["setting"]["tree_paths"]:
        caption = "Steps that accepted at least so many drafts, of all and of those that accepted one less."
        figures[caption] = _by_depth(report)
    return [{"svg": svg(figure), "caption": caption} for caption, figure in figures.items()]


def chosen_size(report: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the tree stage's table that was chosen for one prompt."""
    sizes = report["made"]["tree"]["result"]["sizes"]
    chosen: dict[str, Any] = next(row for row in sizes if row["batch_size"] == 1 and row["chosen"])
    return chosen


def _by_tree_size(report: Mapping[str, Any]) -> Figure:
    figure, left = _figure("tokens per pass of a row (tree size)")
    curves: dict[int, list[dict[str, Any]]] = {}
    for row in report["made"]["tree"]["result"]["sizes"]:
        curves.setdefault(row["batch_size"], []).append(row)
    ticks = [row["size"] for row in curves[1]]
    left.plot(ticks, [row["expected_tokens_per_step"] for row in curves[1]], "o-", color=GREEN)
    left.set_ylabel("tokens per step", color=GREEN)
    right = left.twinx()
    for number, (batch_size, rows) in enumerate(curves.items()):
        plain = rows[0]["expected_tokens_per_second"]  # sizes start with the smallest, the root alone
        speedups = [row["expected_tokens_per_second"] / plain for row in rows]
        # Darker, then lighter: more rows leave less of a pass free.
        shade = (*_rgb(BLUE), 1 - 0.6 * number / len(curves))
        right.plot(ticks, speedups, "s--", color=shade, label=f"batch size {batch_size}")
        place = next(place for place, row in enumerate(rows) if row["chosen"])
        right.plot([ticks[place]], [speedups[place]], "o", color=shade, markersize=14, fillstyle="none")
    right.set_ylabel(f"expected speedup over size {ticks[0]}", color=BLUE)
    right.spines["top"].set_visible(False)
    if len(curves) > 1:
        figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=len(curves))
    left.set_xscale("log", base=2)
    left.set_xticks(ticks, [str(size) for size in ticks])
    left.minorticks_off()
    return figure


def _by_batch_size(report: Mapping[str, Any]) -> Figure:
    figure, axes = _figure("prompts answered together (batch size)")
    rows = [(1, report["speed"]["medusa"])]
    rows += [(batch["batch_size"], batch["arms"]["medusa"]) for batch in report["batches"]]
    for base, color, label in (
        ("plain", GREEN, "over one-token decoding in the same loop"),
        ("generate", BLUE, "over transformers generate"),
    ):
        points = [(size, row[f"over_{base}"]) for size, row in rows if row[f"over_{base}"]]
        if points:
            middle = [found["median"] for _, found in points]
            below = [found["median"] - found["minimum"] for _, found in points]
            above = [found["maximum"] - found["median"] for _, found in points]
            sizes = [size for size, _ in points]
            axes.errorbar(sizes, middle, yerr=[below, above], fmt="o-", color=color, label=label, capsize=3)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks([size for size, _ in rows], [str(size) for size, _ in rows])
    axes.minorticks_off()
    axes.set_ylabel("speedup of the heads")
    axes.legend(frameon=False)
    return figure


def _head_recall(report: Mapping[str, Any]) -> Figure:
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


def _step_histogram(report: Mapping[str, Any]) -> Figure:
    figure, axes = _figure("tokens emitted by a step")
    histogram = {int(tokens): steps for tokens, steps in report["acceptance"]["histogram"].items()}
    bars = axes.bar(list(histogram), list(histogram.values()), color=GREEN)
    axes.bar_label(bars, fontsize=9)
    axes.set_xticks(range(1, report["setting"]["num_heads"] + 2))
    axes.set_ylabel("steps")
    return figure


def _by_depth(report: Mapping[str, Any]) -> Figure:
    figure, axes = _figure("accepted drafts, at least")
    accepted = report["acceptance"]
    series = (
        ("accepted_at_depth", GREEN, "of all steps"),
        ("accepted_at_depth_given_parent", BLUE, "of those that accepted one less"),
    )
    for offset, (name, color, label) in enumerate(series):
        values = accepted[name]
        places = [depth + 1 + 0.38 * (offset - 0.5) for depth in range(len(values))]
        bars = axes.bar(places, [value or 0 for value in values], 0.36, color=color, label=label)
        axes.bar_label(bars, ["n/a" if value is None else f"{value:.2f}" for value in values], fontsize=8, padding=2)
    axes.set_xticks(range(1, len(accepted["accepted_at_depth"]) + 1))
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of steps")
    axes.legend(frameon=False)
    return figure


def tree_picture(report: Mapping[str, Any]) -> str:
    """The chosen tree as SVG: numbers are ranks, colours how often a pass emits a node on calibration answers."""
    tree = Tree.from_paths(report["setting"]["tree_paths"])
    # Of a tree that is too large to be read, the first nodes: a prefix of the order is a tree as well.
    tree = Tree(tree.paths[:LARGEST_TREE])
    gains = {tuple(path): gain for path, gain in report["made"]["tree"]["result"]["gains"]}
    highest = max(gains.values(), default=0) or 1
    across = _places(tree)
    figure = Figure(figsize=(6, 1.2 + 0.85 * tree.depth), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    for node, path in enumerate(tree.paths):
        x, y, gain = across[node], -len(path), gains.get(path, 0)
        if path:
            above = tree.parents[node]
            axes.plot([across[above], x], [y + 1, y], color=GREY, linewidth=0.4 + 3 * gain / highest, zorder=1)
        shade = 0.08 + 0.92 * gain / highest if path else 0
        axes.scatter([x], [y], s=150, color=BLUE if not path else (*_rgb(GREEN), shade), edgecolors=GREEN, zorder=2)
        dark = not path or shade > 0.5
        label = str(path[-1]) if path else "•"
        axes.text(x, y, label, ha="center", va="center", fontsize=7, color="white" if dark else "#1c1e21", zorder=3)
    axes.set_ylim(-tree.depth - 0.5, 0.5)
    return svg(figure)


def _places(tree: Tree) -> list[float]:
    """Where nodes stand from left to right: leaves side by side, a parent above the middle of its children."""
    places = [0.0] * tree.size
    free = 0

    def place(node: int) -> None:
        nonlocal free
        below = tree.children[node]
        for child in below:
            place(child)
        if below:
            places[node] = (places[below[0]] + places[below[-1]]) / 2
        else:
            places[node], free = float(free), free + 1

    place(0)
    return places


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _figure(xlabel: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(xlabel)
    return figure, axes


def svg(figure: Figure) -> str:
    """A figure as an SVG element."""
    buffer = io.StringIO()
    # Text stays text (small, sharp, searchable); a fixed salt keeps equal reports byte-identical.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "medusa-train", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    content = buffer.getvalue()
    return content[content.index("<svg") :]
