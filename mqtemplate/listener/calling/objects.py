"""Interface of the application for handlers: it has the objects that they take by type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class ObjectSource(Protocol):
    """Source of objects for parameters, and of middlewares."""

    def argument(self, target: Callable[..., object], parameter: inspect.Parameter, annotation: Any) -> object:
        """Return the object for a parameter.

        Raises:
            DependencyError: There is none, or several have the type.
        """

    def middleware(self, kind: type) -> object:
        """Return the application's object of a class of middlewares; build one if it has none."""

    def middlewares(self) -> Sequence[object]:
        """Return the middlewares of all listeners, the outermost first."""
