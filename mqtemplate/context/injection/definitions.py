"""What a context can hand out: definitions, and which of them fit a wanted type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, get_origin

from dependency_injector import providers

from mqtemplate.context.injection.marks import Parameter, name_of


@dataclass(slots=True, eq=False)
class Definition:
    """One object that the context has, or will build.

    Attributes:
        name: Told apart by it: a parameter of this name gets this one.
        kind: Its type: the class, or what a building function promises to return.
        provider: dependency-injector's part: makes it once and keeps it.
        origin: Who gave it, for reports: ``application``, ``starter embedded``, ``built in``, ``override``.
        target: The class or function that makes it; None for a finished object.
        is_default: Steps back as soon as anybody else gives one of the kind.
        is_owned: The application stops it. What a test puts in as an override stays the test's.
        uses: What it is built from, known once the context is linked.
    """

    name: str
    kind: type
    provider: providers.Provider[Any]
    origin: str
    target: Callable[..., object] | None = None
    is_default: bool = False
    is_owned: bool = True
    parameters: list[Parameter] = field(default_factory=list)
    uses: list[Definition] = field(default_factory=list)

    @property
    def title(self) -> str:
        return name_of(self.target if self.target is not None else self.kind)


class Definitions:
    """All definitions of a context, in the order they were given."""

    def __init__(self) -> None:
        self._by_name: dict[str, Definition] = {}

    def __iter__(self) -> Iterator[Definition]:
        return iter(self._by_name.values())

    def named(self, name: str) -> Definition | None:
        return self._by_name.get(name)

    def add(self, definition: Definition) -> None:
        self._by_name[definition.name] = definition

    def fitting(self, wanted: Any) -> list[Definition]:
        """Those of a type; defaults only if there is nothing else."""
        found = [definition for definition in self if fits(definition.kind, wanted)]
        given = [definition for definition in found if not definition.is_default]
        return _most_explicit(given or found, wanted)

    def types_by_name(self) -> dict[str, type]:
        return {definition.kind.__name__: definition.kind for definition in self}


def _most_explicit(found: list[Definition], wanted: Any) -> list[Definition]:
    """Who names a protocol as a base means it; who merely has the right methods counts if nobody does."""
    named = [definition for definition in found if _is_subclass(definition.kind, wanted)]
    return named or found


def fits(kind: type, wanted: Any) -> bool:
    """Whether an object of *kind* may go where *wanted* is asked for: the class itself, a base, or a protocol."""
    wanted = get_origin(wanted) or wanted
    if not isinstance(wanted, type) or wanted is object:
        return False
    if _is_subclass(kind, wanted):
        return True
    if not getattr(wanted, "_is_protocol", False):
        return False
    members = list(_protocol_members(wanted))
    return bool(members) and all(_has_member(kind, member) for member in members)


def _is_subclass(kind: type, wanted: Any) -> bool:
    wanted = get_origin(wanted) or wanted
    return isinstance(wanted, type) and wanted in inspect.getmro(kind)


def _protocol_members(protocol: type) -> Iterable[str]:
    for base in inspect.getmro(protocol):
        if base in (object, Protocol, Generic) or not getattr(base, "_is_protocol", False):
            continue
        for name in (*vars(base), *getattr(base, "__annotations__", {})):
            if not name.startswith(("__", "_abc_", "_is_")) or name == "__call__":
                yield name


def _has_member(kind: type, name: str) -> bool:
    return hasattr(kind, name) or any(name in getattr(base, "__annotations__", {}) for base in inspect.getmro(kind))


def snake_case(class_name: str) -> str:
    """``AuditService`` -> ``audit_service``, ``SQLStore`` -> ``sql_store``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name.lstrip("_"))
    return words.lower()
