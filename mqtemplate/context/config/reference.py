"""The reference of all keys, made from the models that read them; ``docs/configuration.md`` holds it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mqtemplate.context.config.relaxed_keys import kebab
from mqtemplate.context.config.schema import FieldShape, shape_of
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.embedded_support import embedded_note


def configuration_reference() -> str:
    """A Markdown table for each section."""
    return "\n".join(_section(AppSettings, ""))


def _section(model: type[BaseModel], prefix: str) -> Iterator[str]:
    rows = []
    below: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{kebab(name)}"
        shape = shape_of(field.annotation)
        if shape.model is not None:
            below.append((key, shape.model))
        else:
            rows.append(_row(key, field, shape))
    if rows:
        yield from (f"### `{prefix.rstrip('.')}`", "", _first_line(model), "")
        yield from ("| Key | Default | What it does |", "| --- | --- | --- |", *rows, "")
    for key, section in below:
        yield from _section(section, f"{key}.")


def _row(key: str, field: FieldInfo, shape: FieldShape) -> str:
    name = key.rpartition(".")[2] + (".<group>.<topic>" if shape.map_depth == 2 else "")
    text = " ".join((field.description or "").split())
    if note := embedded_note(key):
        text += f" *Embedded broker: {note}.*"
    default = "`true`" if shape.map_depth == 2 else _default(field)
    return f"| `{name}` | {default} | {_for_a_cell(text)} |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, PydanticUndefined, (), {}):
        return "none"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _first_line(model: type[BaseModel]) -> str:
    return _for_a_cell((model.__doc__ or "").strip().splitlines()[0])


def _for_a_cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")
