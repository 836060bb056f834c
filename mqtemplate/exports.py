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
    """Replace annotations that are text by types. Tools resolve text in the module of the class, which changes now."""
    if "__annotations__" not in vars(kind):
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    kind.__annotations__ = {name: hints[name] for name in kind.__annotations__}
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            field.type = hints[field.name]
