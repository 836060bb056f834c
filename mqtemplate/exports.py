"""Late import of public names."""

from __future__ import annotations

import dataclasses
import typing
from importlib import import_module

__all__ = ["load_export"]


def load_export(package: str, module: str, name: str) -> object:
    """Import *name* from a module of *package*, and let it show the public path in errors, help and repr."""
    value = getattr(import_module(f"{package}.{module}"), name)
    if isinstance(value, type):
        _resolve_annotations(value)
    value.__module__ = package
    return value


def _resolve_annotations(kind: type) -> None:
    """Replace annotations in text form by types: tools resolve text in ``__module__``, which is another one from now on."""
    if not dataclasses.is_dataclass(kind):
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        field.type = hints[field.name]
    kind.__annotations__ = {name: hints[name] for name in kind.__annotations__}
