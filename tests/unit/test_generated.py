"""Files that are written from the code are what it would write now."""

import runpy
from pathlib import Path

import pytest

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
