"""The figures of `bench` as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def bench_table(result: dict[str, Any]) -> str:
    """The figures of `bench` for people."""
    setting = result["setting"]
    compiled = any(row["over_plain+compiled"] for row in result["rows"])
    against = ["generate", "plain", *(["plain+compiled"] if compiled else [])]
    lines = [
        f"{setting['backbone']}, {setting['dtype']} on {setting['device']}, greedy, {setting['prompts']} prompts, "
        f"{setting['max_new_tokens']} tokens, {setting['repeats']} repeats: median [min..max]",
        f"{'arm':<23} {'batch':>5}  {'decode tokens/s':<21} {'tokens/step':>11}  "
        + "".join(f"{'x ' + base:<20}" for base in against)
        + f"{'ms/pass':>8} {'outside':>8} {'identical':>9}",
    ]
    lines += [
        f"{row['arm']:<23} {row['batch_size']:>5}  {_spread(row['tokens_per_second'], 1):<21} "
        f"{_number(row['tokens_per_step']):>11}  "
        + "".join(f"{_spread(row[f'over_{base}'], 2):<20}" for base in against)
        + f"{row['ms_per_pass']['median']:>8.2f} "
        f"{_percent(row['outside_forward']):>8} {_percent(row['identical_to_plain']):>9}"
        for row in sorted(result["rows"], key=lambda row: row["batch_size"])
    ]
    lines.append("outside: share of a step that is not the model's forward; identical: outputs equal to plain's")
    return "\n".join([*lines, *_category_lines(result["categories"])])


def _category_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = {(row["category"], row["arm"]): row for row in rows}
    pair = [arm for arm in ("medusa", "medusa-lookup") if any(row["arm"] == arm for row in rows)]
    if not pair:
        return
    yield ""
    yield f"{'category':<24} {'prompts':>7}" + "".join(f"  {arm + ' tokens/step, tokens/s':<37}" for arm in pair)
    for category in dict.fromkeys(row["category"] for row in rows):
        cells = [found[category, arm] for arm in pair]
        figures = (f"{_number(cell['tokens_per_step']):<5} {_spread(cell['tokens_per_second'], 1)}" for cell in cells)
        yield f"{category:<24} {cells[0]['prompts']:>7}" + "".join(f"  {text:<37}" for text in figures)


def _spread(spread: Mapping[str, float] | None, digits: int) -> str:
    if spread is None:
        return "n/a"
    return f"{spread['median']:.{digits}f} [{spread['minimum']:.{digits}f}..{spread['maximum']:.{digits}f}]"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.0%}"
