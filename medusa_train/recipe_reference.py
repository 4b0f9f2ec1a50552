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
    sections = {name: field for name, field in Recipe.model_fields.items() if section_of(field)}
    loose = [_row(name, field) for name, field in Recipe.model_fields.items() if name not in sections]
    blocks = [block for name, field in sections.items() for block in _blocks(name, field)]
    return "\n".join([*blocks, f"### The run\n\n{_table(loose)}"])


def _blocks(name: str, field: FieldInfo) -> list[str]:
    """A section's table, and those of the sections and list entries inside it."""
    section = section_of(field)
    assert section is not None
    remark = f" {field.description}" if field.description else ""
    rows: list[str] = []
    inner: list[str] = []
    entries: dict[type[BaseModel], list[str]] = {}
    for key, part in section.model_fields.items():
        if section_of(part):
            inner += _blocks(f"{name}.{key}", part)
            continue
        rows.append(_row(f"{name}.{key}", part))
        for model in _models(part.annotation):
            entries.setdefault(model, []).append(f"`{name}.{key}`")
    for model, lists in entries.items():
        fields = [_row(key, part) for key, part in model.model_fields.items()]
        inner.append(f"### Entries of {', '.join(lists)}\n\n{model.__doc__}\n\n{_table(fields)}")
    return [f"### {name}\n\n{section.__doc__}{remark}\n\n{_table(rows)}", *inner]


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field of the recipe is or may be; None for a plain value."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models anywhere inside an annotation, such as a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def yaml_value(value: Any) -> str:
    """A default as a recipe would spell it."""
    return value if isinstance(value, str) else json.dumps(value)


def meaning(field: FieldInfo) -> str:
    """What a key means, in a line; its values are added if the docstring does not name them all."""
    text = field.description or f"{TRAINER}."
    choices = _choices(field.annotation)
    return text if all(choice in text for choice in choices) else f"{text} One of {', '.join(choices)}."


def _choices(annotation: Any) -> list[str]:
    """The values of a `Literal`, also of one inside a union."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for part in get_args(annotation) for value in _choices(part)]


def _row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else yaml_value(field.get_default(call_default_factory=True))
    return f"| `{key}` | {default} | {meaning(field)} |\n"


def _table(rows: list[str]) -> str:
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)
