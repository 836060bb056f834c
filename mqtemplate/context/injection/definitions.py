"""Definitions of the objects in an application, and the types by which they are injected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin

from dependency_injector import providers

from mqtemplate.callables import arguments_of_bases
from mqtemplate.context.injection.marks import name_of


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One object that the application has, or builds when it is needed.

    Attributes:
        name: Unique name. A parameter of this name gets this object if several have its type.
        kind: Type of the object: its class, or the return type of the function that builds it.
        provider: dependency-injector's provider, which builds the object once.
        origin: Source, for reports: ``application``, ``starter embedded``, ``built in``, ``override``.
        target: Class or function that builds the object; None for a finished object.
        is_default: True: another definition of the same type replaces it.
        replaced_by: Names of the definitions that replace a default; empty for any. Others stand beside it.
        is_owned: True: the application stops the object. A test owns its overrides itself.
        qualifier: Name of a further template: the object is chosen by this name or by its own class only.
        alias: The type with its arguments, such as ``Repo[Order]``, if they are known and the class does not name them.
    """

    name: str
    kind: type
    provider: providers.Provider[Any]
    origin: str
    target: Callable[..., object] | None = None
    is_default: bool = False
    replaced_by: frozenset[str] = frozenset()
    is_owned: bool = True
    qualifier: str | None = None
    alias: Any = None

    def is_called(self, name: str) -> bool:
        """Return True for the name of the object, as we write it or as Java does: ``audit_log``, ``auditLog``."""
        names = {self.name, self.qualifier, *self.replaced_by}
        return name in names or snake_case(name) in names

    @property
    def title(self) -> str:
        """Name of the class or function, for reports."""
        return name_of(self.target if self.target is not None else self.kind)

    @property
    def type_name(self) -> str:
        """Name of the type, with its arguments if they are known."""
        return name_of(self.kind if self.alias is None else self.alias)


class Definitions(dict[str, Definition]):
    """All definitions of an application by name, in the order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self._fitting: dict[Any, list[Definition]] = {}  # found before; a harness asks in each of its steps

    def add(self, definition: Definition) -> None:
        """Add a definition under its name."""
        self[definition.name] = definition
        self._fitting.clear()

    def fitting(self, wanted: Any) -> list[Definition]:
        """Return the definitions of a type; defaults only if none replaces them."""
        if wanted not in self._fitting:
            self._fitting[wanted] = self._find_fitting(wanted)
        return list(self._fitting[wanted])

    def _find_fitting(self, wanted: Any) -> list[Definition]:
        found = [definition for definition in self.values() if fits(definition.kind, wanted, definition.alias)]
        found = [definition for definition in found if not _is_replaced(definition, found)]
        if exact := [each for each in found if _known_arguments(each.kind, wanted, each.alias)]:
            return exact
        # A class that has a protocol as base class goes before one that merely has its methods.
        return [definition for definition in found if _is_subclass(definition.kind, wanted)] or found


def _is_replaced(definition: Definition, by: Iterable[Definition]) -> bool:
    """Return True for a default that one of the other definitions replaces."""
    if not definition.is_default:
        return False
    others = (other for other in by if not other.is_default)
    return any(
        not definition.replaced_by or other.origin == "override" or other.name in definition.replaced_by
        for other in others
    )


def fits(kind: type, wanted: Any, alias: Any = None) -> bool:
    """Return True if *kind* can be injected as *wanted*: it is the class, a subclass, or implements the protocol.

    ``Repo[Order]`` takes no ``Repo[User]``. It takes a ``Repo`` whose arguments are not known, if there is no other.

    Args:
        alias: *kind* with its arguments, if they are known.
    """
    given, wanted = wanted, get_origin(wanted) or wanted
    if not isinstance(wanted, type) or wanted is object:
        return False
    if _is_subclass(kind, wanted):
        arguments = _known_arguments(kind, given, alias)
        return arguments is None or all(map(_is_same, arguments, get_args(given)))
    if not getattr(wanted, "_is_protocol", False):
        return False
    members = list(_protocol_members(wanted))
    return bool(members) and all(_has_member(kind, member) for member in members)


def _known_arguments(kind: type, wanted: Any, alias: Any) -> tuple[Any, ...] | None:
    """Return the arguments of *kind* for a generic type; None if the type has none, or one of them is not known."""
    origin = get_origin(wanted)
    if not isinstance(origin, type) or not _is_subclass(kind, origin):
        return None
    arguments = arguments_of_bases(kind, origin, alias)
    is_known = arguments is not None and len(arguments) == len(get_args(wanted))
    return arguments if is_known and not any(isinstance(each, TypeVar) for each in arguments or ()) else None


def _is_same(argument: Any, wanted: Any) -> bool:
    return argument == wanted or any(each is Any or isinstance(each, TypeVar) for each in (argument, wanted))


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
    """Return a class name in snake_case: ``AuditService`` -> ``audit_service``, ``SQLStore`` -> ``sql_store``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name.lstrip("_"))
    return words.lower()
