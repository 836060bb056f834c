"""What an application is given: classes, functions, objects, and modules to look into."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType

from mqtemplate.context.injection.marks import SERVICE_ATTRIBUTE, name_of, service_mark
from mqtemplate.errors import DependencyError
from mqtemplate.listener.decorator import LISTENER_ATTRIBUTE, listener_specs
from mqtemplate.template import TRANSACTION_LISTENER_ATTRIBUTE

SPARK_LISTENER_ATTRIBUTE = "__mqtemplate_spark_listener__"
"""Where ``@spark_listener`` notes what it was told; read by name, since Spark is optional."""

_MARKS = (SERVICE_ATTRIBUTE, LISTENER_ATTRIBUTE, SPARK_LISTENER_ATTRIBUTE, TRANSACTION_LISTENER_ATTRIBUTE)


def collect_components(given: Iterable[object]) -> tuple[object, ...]:
    """Modules replaced by what is marked in them; everything once, in order.

    A text is the name of a module: ``MQApplication(__name__)``.

    Raises:
        DependencyError: Something is no component.
    """
    found: dict[int, object] = {}
    for component in given:
        parts = _marked_in(_module(component)) if isinstance(component, ModuleType | str) else [_checked(component)]
        found |= {id(part): part for part in parts}
    return tuple(found.values())


def is_injectable(component: object) -> bool:
    """Whether others may ask for it: a class, an object, and what a function marked ``@service`` builds."""
    return not inspect.isroutine(component) or service_mark(component) is not None


def is_listener(component: object) -> bool:
    """Whether a function, a class or one of its methods is marked ``@message_listener``; of an object, its class."""
    if inspect.isroutine(component):
        return bool(listener_specs(component))
    kind = component if inspect.isclass(component) else type(component)
    if listener_specs(kind):
        return True
    return any(listener_specs(member) for base in inspect.getmro(kind) for member in vars(base).values())


def is_spark_listener(component: object) -> bool:
    """Whether a function, a class, or an object's class is marked ``@spark_listener``."""
    holder = component if inspect.isclass(component) or inspect.isroutine(component) else type(component)
    return SPARK_LISTENER_ATTRIBUTE in vars(holder)


def _module(given: ModuleType | str) -> ModuleType:
    if isinstance(given, ModuleType):
        return given
    try:
        return sys.modules.get(given) or import_module(given)
    except ModuleNotFoundError as exc:
        raise DependencyError(f"MQApplication was given {given!r}, and there is no module of that name: {exc}") from exc


def _marked_in(module: ModuleType) -> Iterator[object]:
    """What is marked in a module itself; of a package also what its ``__init__`` takes from modules inside it.

    What a module merely imports from elsewhere belongs to whoever gives that module.
    """
    for value in list(vars(module).values()):
        home = getattr(value, "__module__", None)
        if not (inspect.isclass(value) or inspect.isfunction(value)) or not isinstance(home, str):
            continue
        own = home == module.__name__ or home.startswith(f"{module.__name__}.")
        if own and any(mark in vars(value) for mark in _MARKS):
            yield value


def _checked(component: object) -> object:
    """Refuse what was given by mistake, before it is taken for an object to inject."""
    if component is None or isinstance(component, int | float | bytes | dict | list | tuple | set):
        raise DependencyError(
            f"MQApplication was given {component!r}; components are classes, functions, objects and modules, "
            "one argument each (settings go into settings={...})"
        )
    if inspect.isfunction(component) and not any(mark in vars(component) for mark in _MARKS):
        raise DependencyError(
            f"{name_of(component)} is a plain function; mark it with @message_listener, @spark_listener or @service"
        )
    return component
