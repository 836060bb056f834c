"""The keys that a section declares: their names, which are maps, which are secret.

A section is a pydantic model or a pydantic dataclass.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from mqtemplate.context.config.masking import is_secret_name
from mqtemplate.context.config.tree import UNSET, ConfigNode, is_empty_text, kebab, same_key

Location = tuple[int | str, ...]
"""A position below a section in pydantic's form: field names, keys of maps, indices of lists."""


@dataclass(frozen=True, slots=True)
class FieldShape:
    """The keys that a field has below it.

    Attributes:
        section: The field is a section with keys of its own.
        map_depth: The field is a map with so many levels of keys that the user chooses; 0 for no map.
        item_section: The values of the map, or the items of the list, are sections.
        is_duration: The value is a timedelta, or the items of the map or the list are.
    """

    section: type | None = None
    map_depth: int = 0
    item_section: type | None = None
    is_duration: bool = False


def is_section(kind: Any) -> bool:
    """Return True for a class of sections."""
    return isinstance(kind, type) and (
        issubclass(kind, BaseModel) or is_pydantic_dataclass(kind) or _is_plain_section(kind)
    )


def _is_plain_section(kind: type) -> bool:
    """Return True for a dataclass of the engine that is a part of its settings: it has a configuration for pydantic."""
    has_configuration = dataclasses.is_dataclass(kind) and "__pydantic_config__" in vars(kind)
    return has_configuration and not is_pydantic_dataclass(kind)


def fields_of(section: type) -> Mapping[str, FieldInfo]:
    """Return the fields of a section by name."""
    plain: Any = section
    if _is_plain_section(section):
        return _plain_fields(plain)
    fields: Mapping[str, FieldInfo] = (
        section.model_fields if issubclass(section, BaseModel) else plain.__pydantic_fields__
    )
    return fields


@cache
def _plain_fields(section: Any) -> Mapping[str, FieldInfo]:
    hints = get_type_hints(section, include_extras=True)
    return {
        each.name: FieldInfo.from_annotated_attribute(hints[each.name], each.default)
        for each in dataclasses.fields(section)
    }


def shape_of(annotation: Any) -> FieldShape:
    """Return the shape of a field; ``Annotated`` and ``| None`` do not matter."""
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_section(annotation):
        return FieldShape(section=annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        below = shape_of(arguments[1])
        if below.map_depth:
            return dataclasses.replace(below, map_depth=1 + below.map_depth)
        return FieldShape(map_depth=1, item_section=below.section, is_duration=below.is_duration)
    if annotation is dict:
        return FieldShape(map_depth=1)
    if isinstance(origin, type) and issubclass(origin, Sequence) and arguments:
        below = shape_of(arguments[0])
        return FieldShape(item_section=below.section, is_duration=below.is_duration)
    return FieldShape(is_duration=annotation is timedelta)


def field_named(section: type, key: str) -> str | None:
    """Return the name of the field for a key in any spelling."""
    return next((name for name in fields_of(section) if same_key(name, key)), None)


def drop_empty(node: ConfigNode, section: type) -> ConfigNode:
    """Remove the values of a tree that are empty texts, and return it. Keys that the user chose are data, and stay."""
    for key, child in node.children.items():
        name = field_named(section, key)
        if name is None:
            continue
        shape = shape_of(fields_of(section)[name].annotation)
        if shape.section is not None:
            drop_empty(child, shape.section)
        if shape.section is not None or not shape.map_depth:
            child.value = UNSET if is_empty_text(child.value) else child.value
    return node


def all_fields(section: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldShape]]:
    """Yield every field at any depth, sections before the fields in them, with its path."""
    for name, field in fields_of(section).items():
        shape = shape_of(field.annotation)
        yield (*path, name), shape
        if shape.section is not None:
            yield from all_fields(shape.section, (*path, name))


def _fields_along(section: type, location: Location) -> Iterator[tuple[int | str, FieldInfo | None]]:
    """Yield each part of a location with its field; None for keys that the user chose and positions in lists."""
    current: type | None = section
    items: type | None = None
    for part in location:
        info = fields_of(current).get(str(part)) if current is not None else None
        yield part, info
        shape = shape_of(info.annotation) if info is not None else FieldShape(section=items)
        current, items = shape.section, shape.item_section


def section_at(section: type, location: Location) -> type | None:
    """Return the class of the section at a location; None if it is not a section."""
    current: type | None = section
    items: type | None = None
    for part in location:
        info = fields_of(current).get(str(part)) if current is not None else None
        shape = shape_of(info.annotation) if info is not None else FieldShape(section=items)
        current, items = shape.section, shape.item_section
    return current


def as_written(section: type, location: Location) -> Location:
    """Return a location as a file writes it: fields in kebab-case, keys that the user chose unchanged."""
    return tuple(
        kebab(part) if isinstance(part, str) and info is not None else part
        for part, info in _fields_along(section, location)
    )


def is_secret(section: type, location: Location) -> bool:
    """Return True if the value at a location must not be shown, because of its type or its name."""
    return any(
        (isinstance(part, str) and is_secret_name(part, is_declared=info is not None))
        or (info is not None and _holds_secret(info))
        for part, info in _fields_along(section, location)
    )


def _holds_secret(field: FieldInfo) -> bool:
    annotation = _bare(field.annotation)
    return isinstance(annotation, type) and issubclass(annotation, SecretStr | SecretBytes)


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    inner = without_none(annotation)
    return annotation if inner is annotation else _bare(inner)


def without_none(annotation: Any) -> Any:
    """Return X for ``X | None``, and any other annotation unchanged."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return annotation
