"""What the recipe's model says of itself: the JSON Schema for editors, and a table of every key for people."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from medusa_train.recipe import Recipe

TRAINER = "As in `transformers.TrainingArguments`"


def schema_json() -> str:
    """The JSON Schema of a recipe; editors complete and check keys with it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def keys_markdown() -> str:
    """Every key with its default and meaning, a table per section, those of no section last."""
    blocks, loose = [], []
    for name, field in Recipe.model_fields.items():
        section = section_of(field)
        if section is None:
            loose.append(_row(name, field))
            continue
        remark = f" {field.description}" if field.description else ""
        rows = [_row(f"{name}.{key}", inner) for key, inner in section.model_fields.items()]
        blocks.append(f"### {name}\n\n{section.__doc__}{remark}\n\n{_table(rows)}")
    return "\n".join([*blocks, f"### The run\n\n{_table(loose)}"])


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field of the recipe is or may be; None for a plain value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def yaml_value(value: Any) -> str:
    """A default as a recipe would spell it."""
    return value if isinstance(value, str) else json.dumps(value)


def meaning(field: FieldInfo) -> str:
    """What a key means, in a line; values that its docstring does not name are added."""
    text = field.description or f"{TRAINER}."
    missing = [value for value in _choices(field.annotation) if value not in text]
    return f"{text} One of {', '.join(missing)}." if missing else text


def _choices(annotation: Any) -> list[str]:
    """The values of a `Literal`, also of one inside a union."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for part in get_args(annotation) for value in _choices(part)]


def _row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else yaml_value(field.default)
    return f"| `{key}` | {default} | {meaning(field)} |\n"


def _table(rows: list[str]) -> str:
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)
