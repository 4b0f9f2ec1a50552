"""From measurements to something a person reads: ``report.json``, ``report.html`` and ``report.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from medusa_train.eval.arms import LABELS
from medusa_train.eval.plots import chosen_size, report_plots, tree_picture
from medusa_train.inference.errors import UserError
from medusa_train.inference.files import write_json, write_text

SCHEMA = 5  # of report.json; grows when a key changes its meaning or goes


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write the files of a report.

    Args:
        report: what `evaluate.evaluate` returned, with ``made`` (the ``run.json`` of every stage), ``environment``,
            ``peak_memory_gb``, and ``lossless`` and ``cost`` where these were measured.
    """
    context = {"lossless": None, "cost": None} | report | {
        "tree_given": report["made"]["tree"]["result"]["given"],
        "expected_tokens_per_step": chosen_size(report)["expected_tokens_per_step"],
        "labels": LABELS,
        "basis": basis_text(report["setting"]),
        "recipe": json.dumps(report["made"]["tree"]["recipe"], indent=2, ensure_ascii=False),
        "plots": report_plots(report),
        "tree_svg": tree_picture(report) if report["setting"]["tree_paths"] else "",
    }  # fmt: skip
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"figure": figure_text, "interval": interval_text, "percent": percent_text}
    template = environment.from_string(files("medusa_train.eval").joinpath("report.html.j2").read_text("utf-8"))
    write_text(folder / "report.html", template.render(context))
    write_text(folder / "report.md", summary_markdown(report))
    write_json(folder / "report.json", report)


def read_report(path: Path) -> dict[str, Any]:
    """A run's ``report.json``, named by its folder or itself.

    Raises:
        UserError: it is not there, or not a report of this version's ``medusa-train eval``.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; name a run's folder or its report.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not JSON ({error}); run medusa-train eval --overwrite") from error
    if not isinstance(report, dict) or not {"setting", "acceptance", "speed", "made"} <= report.keys():
        raise UserError(f"{file} is not a report of medusa-train eval")
    if report.get("schema") != SCHEMA:
        raise UserError(f"{file} was written by another version of medusa-train; run medusa-train eval --overwrite")
    return report


def figure_text(value: float | int | str | None) -> str:
    """A number for people; n/a for one that was not measured."""
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def percent_text(share: float | None) -> str:
    """A share for people."""
    return "n/a" if share is None else f"{share:.1%}".replace(".0%", "%").replace("%", " %")


def basis_text(setting: Mapping[str, Any]) -> str:
    """What times and counts are of."""
    prompts, timed, repeats = setting["prompts"], setting["timed_prompts"], setting["repeats"]
    rounds = f"{repeats} repeat{'s' if repeats > 1 else ''}"
    if timed == prompts:
        return f"speed and counts: all {prompts} prompts, {rounds}"
    return f"speed: {timed} of {prompts} prompts, {rounds}; counts: all {prompts}"


def interval_text(speedup: Mapping[str, float | None] | None, name: str = "") -> str:
    """A speedup and its 95 % interval; ``name`` is ``mean_prompt`` for the per-prompt convention."""
    if speedup is None:
        return "n/a"
    low, high = (speedup[f"{name}_{end}" if name else end] for end in ("low", "high"))
    text = figure_text(speedup[name or "median"])
    return text + ("" if low is None or high is None else f" ({figure_text(low)}–{figure_text(high)})")


def summary_markdown(report: Mapping[str, Any]) -> str:
    """The figures that a reader wants first, as a Markdown table; part of the model card."""
    setting, speed = report["setting"], report["speed"]
    identical = (report["losslessness"]["over_plain"] or {}).get("identical_share")

    def tokens_per_second(arm: str) -> str:
        return figure_text(speed[arm]["decode_tokens_per_second"]["median"] if arm in speed else None)

    lines = [
        f"| {setting['prompts']} prompts ({setting['asked']}), up to {setting['max_new_tokens']} tokens, batch 1, "
        f"temperature 0, {setting['dtype']} | |",
        "|---|---|",
        f"| what the figures are of | {basis_text(setting)} |",
        "| tokens per step (bonus token counted, plain decoding = 1) | "
        f"{figure_text(report['acceptance']['tokens_per_step'])} |",
        f"| the same, replayed over {report['replay']['answers']} held-out answers to their end | "
        f"{figure_text(report['replay']['tokens_per_step'])} |",
        "| decode speedup over transformers `generate` (95 % interval over prompts) | "
        f"{interval_text(report['speedup']['over_generate'])} |",
        "| decode speedup over one-token decoding in the same loop | "
        f"{interval_text(report['speedup']['over_plain'])} |",
        f"| decode tokens/s: heads, one token per pass, `generate` | {tokens_per_second('medusa')}, "
        f"{tokens_per_second('plain')}, {tokens_per_second('generate')} |",
        f"| tokens per verification pass | {setting['tree_size']} |",
        f"| identical to plain greedy decoding | {percent_text(identical)} of {setting['timed_prompts']} prompts |",
        "| every token the backbone's own greedy choice, read again | "
        f"{percent_text(report['read_again']['share'])} of {report['read_again']['prompts']} prompts |",
    ]
    if report["categories"]:
        lines += [
            "",
            "| category | prompts | tokens per step | timed prompts | speedup over one-token decoding |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['category']} | {row['prompts']} | {figure_text(row['arms']['medusa']['tokens_per_step'])} | "
            f"{row['timed_prompts']} | {interval_text(row['arms']['medusa']['over_plain'])} |"
            for row in report["categories"]
        ]
    lines += [f"\n> {warning}" for warning in report["warnings"]]
    return "\n".join(lines) + "\n"


def headline(folder: Path) -> str:
    """A run's result in a few lines, read from its ``report.json``."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder} has no report; run medusa-train eval first") from error
    speed, speedup = report["speed"], report["speedup"]
    identical = (report["losslessness"]["over_plain"] or {}).get("identical_share")

    def tokens_per_second(arm: str) -> str:
        return figure_text(speed[arm]["decode_tokens_per_second"]["median"] if arm in speed else None)

    return "\n".join(
        [
            f"tokens per step   {figure_text(report['acceptance']['tokens_per_step'])}"
            f"   (tree of {report['setting']['tree_size']}; replayed on all held-out answers "
            f"{figure_text(report['replay']['tokens_per_step'])})",
            f"decode tokens/s   {tokens_per_second('medusa')} medusa, {tokens_per_second('plain')} one token per pass, "
            f"{tokens_per_second('generate')} transformers generate",
            f"speedup           {interval_text(speedup['over_generate'])} over generate, "
            f"{interval_text(speedup['over_plain'])} over one-token decoding in the same loop",
            f"of                {basis_text(report['setting'])}",
            f"identical         {percent_text(identical)} of timed outputs equal plain greedy decoding token for token",
            f"read again        {percent_text(report['read_again']['share'])} of all outputs are greedy text",
            *(f"note              {warning}" for warning in report["warnings"]),
            f"report            {folder / 'report.html'}",
            f"heads             {folder / 'heads'}",
        ]
    )
