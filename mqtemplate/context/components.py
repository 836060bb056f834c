"""Components of an application: classes, functions, objects, and modules to search."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from types import FunctionType, ModuleType
from typing import get_origin
from weakref import WeakValueDictionary

from mqtemplate.callables import name_of_callable
from mqtemplate.calls.middlewares import MIDDLEWARE_ATTRIBUTE, middleware_order
from mqtemplate.context.injection.marks import SERVICE_ATTRIBUTE, name_of, service_mark
from mqtemplate.context.templates import EXT_TEMPLATE_ATTRIBUTE
from mqtemplate.errors import DependencyError
from mqtemplate.listener.declaration.decorator import (
    LISTENER_ATTRIBUTE,
    SPARK_LISTENER_ATTRIBUTE,
    is_itself_marked,
    listener_specs,
)
from mqtemplate.listener.declaration.hooks import ENHANCER_ATTRIBUTE
from mqtemplate.scheduling.decorator import SCHEDULED_ATTRIBUTE, schedule_specs
from mqtemplate.template.transactions import TRANSACTION_LISTENER_ATTRIBUTE

_MARKS = (
    EXT_TEMPLATE_ATTRIBUTE,
    SERVICE_ATTRIBUTE,
    LISTENER_ATTRIBUTE,
    MIDDLEWARE_ATTRIBUTE,
    SCHEDULED_ATTRIBUTE,
    SPARK_LISTENER_ATTRIBUTE,
    TRANSACTION_LISTENER_ATTRIBUTE,
    ENHANCER_ATTRIBUTE,
)


def collect_components(given: Iterable[object]) -> tuple[object, ...]:
    """Return the components, each once, in order; a module is replaced by the marked classes and functions in it.

    A text is the name of a module: ``MQApplication(__name__)``.

    Raises:
        DependencyError: A value is not a component.
    """
    found: dict[int, object] = {}
    for component in given:
        parts = _components_of(component) if isinstance(component, ModuleType | str) else [_checked(component)]
        found |= {id(part): part for part in parts}
    return tuple(found.values())


_claimed: WeakValueDictionary[int, object] = WeakValueDictionary()  # by id: not all of them can be hashed


def claim(components: Iterable[object]) -> None:
    """Note that an application of this process has the components, or objects of them."""
    for component in components:
        for each in (component, type(component), getattr(component, "__func__", component)):
            with suppress(TypeError):  # an object with slots has no references; its class has
                _claimed[id(each)] = each


def unclaimed_listeners(components: Iterable[object], *modules: str) -> list[str]:
    """Return the names of the listeners that no application of this process was given.

    Args:
        components: Their modules are searched.
        modules: Names of further modules to search.
    """
    homes = {getattr(each, "__module__", None) or type(each).__module__ for each in components}
    found = [
        f"{home}.{name_of(each)}"
        for home in sorted({*homes, *modules} & sys.modules.keys())
        for each in _marked_in(sys.modules[home])
        if id(each) not in _claimed and (is_listener(each) or is_spark_listener(each) or is_handler(each))
    ]
    return list(dict.fromkeys(found))


def is_injectable(component: object) -> bool:
    """Return True for classes, objects, and functions marked ``@service`` or ``@middleware``, which build an object."""
    is_marked = service_mark(component) is not None or middleware_order(component) is not None
    return is_marked or not (inspect.isroutine(component) or isinstance(component, functools.partial))


def is_handler(component: object) -> bool:
    """Return True for a function, a partial or an object that is marked itself: it is called, and no method."""
    return is_itself_marked(component) or (not inspect.isclass(component) and bool(schedule_specs(component)))


def is_listener(component: object) -> bool:
    """Return True for a mark ``@message_listener`` on a function, a class, one of its methods, or an object's class."""
    if inspect.isroutine(component) or is_itself_marked(component):
        return bool(listener_specs(component))
    kind = component if inspect.isclass(component) else type(component)
    if listener_specs(kind):
        return True
    return any(listener_specs(member) for base in inspect.getmro(kind) for member in vars(base).values())


def is_spark_listener(component: object) -> bool:
    """Return True if a function, a class, or an object's class is marked ``@spark_listener``."""
    holder = component if inspect.isclass(component) or inspect.isroutine(component) else type(component)
    return SPARK_LISTENER_ATTRIBUTE in vars(holder)


def _module(given: ModuleType | str) -> ModuleType:
    if isinstance(given, ModuleType):
        return given
    try:
        return sys.modules.get(given) or import_module(given)
    except ModuleNotFoundError as exc:
        raise DependencyError(f"MQApplication was given {given!r}, and there is no module of that name: {exc}") from exc


def _components_of(given: ModuleType | str) -> list[object]:
    """Return what is marked in a module; refuse a module in which nothing is."""
    module = _module(given)
    found = list(_marked_in(module))
    if not found and module.__name__ != "__main__":  # a script may only want the template
        raise DependencyError(
            f"MQApplication was given the module {module.__name__!r} ({getattr(module, '__file__', 'built in')}), "
            "and nothing in it is marked with @message_listener, @scheduled, @spark_listener, @transaction_listener, "
            "@ext_template, @middleware, @listener_enhancer or @service; "
            "mark a class or function there, or give the module that defines them"
        )
    return found


def _marked_in(module: ModuleType) -> Iterator[object]:
    """Yield what is marked in a module; for a package also what its ``__init__`` imports from modules inside it.

    Other imports of the module do not count: the application gets them if it is given their own module.
    """
    for value in list(vars(module).values()):
        if not issubclass(type(value), (type, FunctionType)):  # isinstance would evaluate a proxy: Django's settings
            if _is_marked_object(value):  # a partial or an object does not know its module
                yield value
            continue
        defined_in = getattr(value, "__module__", None)
        if not isinstance(defined_in, str):
            continue
        is_own = defined_in == module.__name__ or defined_in.startswith(f"{module.__name__}.")
        if is_own and any(mark in vars(value) for mark in _MARKS):
            yield value


def _is_marked_object(value: object) -> bool:
    try:
        own = object.__getattribute__(value, "__dict__")  # a proxy, such as one of Flask, would forward it
    except AttributeError:
        return False
    return LISTENER_ATTRIBUTE in own or SCHEDULED_ATTRIBUTE in own


def _checked(component: object) -> object:
    """Return the component; refuse a value that was probably given by mistake."""
    if component is None or isinstance(component, int | float | bytes | dict | list | tuple | set):
        raise DependencyError(
            f"MQApplication was given {component!r}; components are classes, functions, objects and modules, "
            "one argument each (settings go into settings={...})"
        )
    if get_origin(component) is not None:
        raise DependencyError(
            f"MQApplication was given {component!r}, a class with arguments; give a class of your own: "
            f"class Mine({name_of(component)})"
        )
    is_function = inspect.isroutine(component) or isinstance(component, functools.partial)
    if is_function and not any(mark in getattr(component, "__dict__", {}) for mark in _MARKS):
        raise DependencyError(
            f"{name_of_callable(component)} is a plain function; mark it with @message_listener, @scheduled, "
            "@spark_listener, @middleware or @service"
        )
    return component
