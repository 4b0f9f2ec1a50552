"""Writes what is made from the code: run it after a change of the recipe's keys, the recipes, or the estimates.

`tests/unit/test_generated.py` fails while a file differs from what this would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from medusa_train.estimate import A100, Needs, needs, published_config, shape_of
from medusa_train.recipe import load_recipe
from medusa_train.recipe_reference import keys_markdown, schema_json

ROOT = Path(__file__).resolve().parents[1]
MODELS = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "accelerate")
ESTIMATE = re.compile(r"^# Estimated: .*$", re.MULTILINE)
EXPECTED = re.compile(r"^# Expected: (.*)$", re.MULTILINE)


def generated() -> dict[Path, str]:
    """File -> what it is to hold."""
    readme = ROOT / "recipes" / "README.md"
    estimates = dict(sorted(((path, _needs(path)) for path in MODELS), key=lambda pair: pair[1].parameters))
    text = _between(readme.read_text(encoding="utf-8"), "keys", keys_markdown())
    return {
        ROOT / "recipes" / "schema.json": schema_json(),
        readme: _between(text, "recipes", _table(estimates)),
        **{
            path: ESTIMATE.sub(f"# Estimated: {_line(need)}", path.read_text(encoding="utf-8"))
            for path, need in estimates.items()
        },
    }


def _needs(path: Path) -> Needs:
    recipe = load_recipe(path)
    return needs(recipe, shape_of(published_config(recipe.backbone.source)))


def _line(need: Needs) -> str:
    more = " and the activations of the backbone's backward pass" if need.activations else ""
    return (
        f"GPU memory {_gigabytes(need.distill_bytes)} while answers are written, {_gigabytes(need.train_bytes)}{more} "
        f"in training; disk up to {_gigabytes(need.disk_bytes)}; {_hours(need)} on one {A100.name}."
    )


def _table(estimates: dict[Path, Needs]) -> str:
    rows = ["| folder | file | GPU memory | disk, up to | one A100, about | expected |\n|---|---|---|---|---|---|\n"]
    for path, need in estimates.items():
        expected = EXPECTED.search(path.read_text(encoding="utf-8"))
        memory = max(need.distill_bytes, need.train_bytes)
        rows.append(
            f"| {path.parent.name} | {path.stem} | {_gigabytes(memory)}"
            f"{' and more' if need.activations else ''} | {_gigabytes(need.disk_bytes)} | {_hours(need)} | "
            f"{expected.group(1).rstrip('.') if expected else ''} |\n"
        )
    return "".join(rows)


def _gigabytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"


def _hours(need: Needs) -> str:
    seconds = (need.distill_seconds or 0) + (need.train_seconds or 0)
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.0f} hours"


def _between(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the marks that docs include a section by."""
    start, end = (f"<!-- --8<-- [{edge}:{name}] -->" for edge in ("start", "end"))
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"recipes/README.md has no marks around {name}")
    return f"{before}{start}\n\n{content}\n{end}{after}"


if __name__ == "__main__":
    for file, content in generated().items():
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            file.write_text(content, encoding="utf-8")
            print(file.relative_to(ROOT))
