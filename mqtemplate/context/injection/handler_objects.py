"""Objects of an application for its handlers: those that they take by type, and the middlewares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from mqtemplate.calls.middlewares import middleware_order
from mqtemplate.context.injection.definitions import Definition
from mqtemplate.context.injection.marks import read_parameter
from mqtemplate.context.injection.wiring import Wiring

T = TypeVar("T")


class Context(Protocol):
    """The parts of an `ApplicationContext` that handlers need."""

    @property
    def components(self) -> Sequence[object]:
        """Components of the application."""

    @property
    def configured_middlewares(self) -> Sequence[object]:
        """Middlewares that the configuration names."""

    def definition_of(self, component: object) -> Definition | None:
        """Return the definition of a component."""

    def build(self, definition: Definition) -> Any:
        """Return the object of a definition."""

    def call(self, target: Callable[..., T]) -> T:
        """Call a class with arguments by the types of its parameters."""


def ordered_middlewares(context: Context) -> list[Definition]:
    """Return the definitions of the middlewares of all listeners and of the template, the outermost first."""
    configured = context.configured_middlewares
    marked = [each for each in context.components if middleware_order(each) is not None and each not in configured]
    found = [(middleware_order(each) or 0, context.definition_of(each)) for each in (*configured, *marked)]
    return [definition for _, definition in sorted(found, key=lambda each: each[0]) if definition is not None]


class HandlerObjects:
    """Source of objects for the listeners of an application; an `ObjectSource`."""

    def __init__(self, context: Context, wiring: Wiring) -> None:
        self._context = context
        self._wiring = wiring

    def argument(self, target: Callable[..., object], parameter: inspect.Parameter, annotation: Any) -> object:
        """Return the object for a parameter.

        Raises:
            DependencyError: There is none, or several have the type.
        """
        return self._wiring.object_for(target, read_parameter(target, parameter, annotation))

    def middleware(self, kind: type) -> object:
        """Return the application's object of a class of middlewares; build one if it has none."""
        definition = self._context.definition_of(kind)
        return self._context.call(kind) if definition is None else self._context.build(definition)

    def middlewares(self) -> Sequence[object]:
        """Return the middlewares of all listeners, the outermost first."""
        return [
            self._context.build(each) for each in ordered_middlewares(self._context) if hasattr(each.kind, "consume")
        ]
