"""Late import of public names."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["late_import", "load_export"]


def late_import(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package whose names are imported when they are used.

    Args:
        modules: Name -> the module that defines it.
    """

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return load


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
