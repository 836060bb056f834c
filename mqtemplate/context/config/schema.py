"""What a model says about the keys it knows: their names, which hold maps, which are secret."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from mqtemplate.context.config.relaxed_keys import kebab, same_key

Location = tuple[int | str, ...]
"""A place below a model as pydantic names it: field names, keys of maps, indices of lists."""

_SECRET_NAME = re.compile(r"password|passwd|secret|token|credential|(access|api|private).?key", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FieldShape:
    """How the keys below a field are to be read.

    Attributes:
        model: The field is a section with keys of its own.
        map_depth: The field is a map, so many levels of keys that the user chooses; 0 for none.
        item_model: The values of the map, or the items of the list, are sections.
    """

    model: type[BaseModel] | None = None
    map_depth: int = 0
    item_model: type[BaseModel] | None = None


def shape_of(annotation: Any) -> FieldShape:
    """Read a field's annotation; ``Annotated`` and ``| None`` are looked through."""
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return FieldShape(model=annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        below = shape_of(arguments[1])
        if below.map_depth:
            return FieldShape(map_depth=1 + below.map_depth, item_model=below.item_model)
        return FieldShape(map_depth=1, item_model=below.model)
    if annotation is dict:
        return FieldShape(map_depth=1)
    if isinstance(origin, type) and issubclass(origin, Sequence) and arguments:
        return FieldShape(item_model=shape_of(arguments[0]).model)
    return FieldShape()


def field_named(model: type[BaseModel], key: str) -> str | None:
    """The field that a key means, in whatever spelling."""
    return next((name for name in model.model_fields if same_key(name, key)), None)


def field_shapes(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldShape]]:
    """Every field that takes a value or a map, sections gone through."""
    for name, field in model.model_fields.items():
        shape = shape_of(field.annotation)
        if shape.model is not None:
            yield from field_shapes(shape.model, (*path, name))
        else:
            yield (*path, name), shape


def known_paths(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key there is, sections too."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        if (below := shape_of(field.annotation).model) is not None:
            yield from known_paths(below, (*path, name))


def _fields_along(model: type[BaseModel], location: Location) -> Iterator[tuple[int | str, FieldInfo | None]]:
    """Each part of a place with the field it names; None for the user's own keys and for places in lists."""
    section: type[BaseModel] | None = model
    items: type[BaseModel] | None = None
    for part in location:
        info = section.model_fields.get(str(part)) if section is not None else None
        yield part, info
        shape = shape_of(info.annotation) if info is not None else FieldShape(model=items)
        section, items = shape.model, shape.item_model


def as_written(model: type[BaseModel], location: Location) -> Location:
    """A place as a file writes it: fields in kebab-case, the user's own keys as they are."""
    return tuple(
        kebab(part) if isinstance(part, str) and info is not None else part
        for part, info in _fields_along(model, location)
    )


def is_secret(model: type[BaseModel], location: Location) -> bool:
    """Whether what stands at a place must not be shown: by its type, or by its name."""
    return any(
        (isinstance(part, str) and _SECRET_NAME.search(part) is not None) or (info is not None and _holds_secret(info))
        for part, info in _fields_along(model, location)
    )


def _holds_secret(field: FieldInfo) -> bool:
    annotation = _bare(field.annotation)
    return isinstance(annotation, type) and issubclass(annotation, SecretStr | SecretBytes)


def _bare(annotation: Any) -> Any:
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            rest = [part for part in get_args(annotation) if part is not type(None)]
            if len(rest) != 1:
                return annotation
            annotation = rest[0]
        else:
            return annotation
