"""Files that are written from the code are what it would write now."""

import runpy
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from medusa_train.recipe_reference import keys_markdown

ROOT = Path(__file__).parents[2]
GENERATED = runpy.run_path(str(ROOT / "scripts" / "write_generated.py"))["generated"]()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_generated_file_is_current(path):
    assert path.read_text(encoding="utf-8") == GENERATED[path], "run: python scripts/write_generated.py"


def test_every_recipe_tells_editors_its_schema_and_people_what_it_takes():
    for path in (ROOT / "recipes").rglob("*.yaml"):
        if path.parent.name == "accelerate":
            continue
        first, *others = path.read_text(encoding="utf-8").splitlines()
        schema = first.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / schema).resolve() == ROOT / "recipes" / "schema.json", path
        if path.parent.name != "recipes":
            comments = [line.partition(":")[0] for line in others if line.startswith("# ")]
            assert {"# Estimated", "# Several GPUs", "# Expected"} <= set(comments), path


def test_what_a_recipe_expects_says_where_it_is_from():
    for path in (ROOT / "recipes").glob("*/*.yaml"):
        if path.parent.name != "accelerate":
            expected = next(line for line in path.read_text().splitlines() if line.startswith("# Expected: "))
            assert any(word in expected for word in ("(measured", "(published elsewhere", "not measured")), path


class _Documented(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Entry(_Documented):
    """One of several."""

    path: str
    """Where it is."""


class Inner(_Documented):
    """Inside."""

    way: Literal["up", "down"] = "up"
    """Where to."""


class Outer(_Documented):
    """Outside."""

    inner: Inner = Inner()
    several: str | list[Entry] | None = None
    """Some."""


class Whole(_Documented):
    outer: Outer = Outer()
    seed: int = 0
    """Of draws."""


def test_sections_inside_sections_and_entries_of_lists_have_tables_of_their_own(monkeypatch):
    monkeypatch.setattr("medusa_train.recipe_reference.Recipe", Whole)
    text = keys_markdown()
    for line in (
        "### outer\n\nOutside.",
        "| `outer.several` | null | Some. |",
        "### outer.inner\n\nInside.",
        "| `outer.inner.way` | up | Where to. One of up, down. |",
        "### Entries of `outer.several`\n\nOne of several.",
        "| `path` | required | Where it is. |",
        "| `seed` | 0 | Of draws. |",
    ):
        assert line in text
    assert "`outer.inner` |" not in text
