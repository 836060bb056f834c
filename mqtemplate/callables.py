"""Functions, methods and callable objects that users give: what a call of one does, and its annotations."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, ForwardRef, Generic, Protocol, TypeVar, get_args, get_origin

__all__ = [
    "arguments_of_bases",
    "bindings_of",
    "bound_in_constructor",
    "bound_of",
    "lazy_kind",
    "load_name",
    "name_of_callable",
    "own_mark",
    "refuse_bare",
    "resolved",
    "substituted",
    "takes_no_arguments",
    "unfinished",
    "variables_of",
]


def load_name(name: str, module: str = "") -> Any:
    """Return the object with a dotted name.

    Args:
        module: Module of a name without a dot.

    Raises:
        ValueError: There is no such module.
        AttributeError: The module has no such name.
    """
    found, _, attribute = name.strip().rpartition(".")
    try:
        return getattr(import_module(found or module), attribute)
    except ImportError as error:
        raise ValueError(name) from error


def refuse_bare(decorator: str, first: object, form: str, error: type[Exception]) -> None:
    """Refuse a decorator without parentheses, whose first argument is the object below it.

    Args:
        form: The decorator as it should be written.
        error: Class of the error.
    """
    if inspect.isclass(first) or inspect.isroutine(first):
        raise error(f"{decorator} above {name_of_callable(first)} has no arguments; write {form}")


# --- what a call does ------------------------------------------------------------------------------------


def _layers(function: Any) -> Iterator[Any]:
    """Yield what a callable consists of, from outside: partials, methods, objects, wrapped functions."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        if isinstance(function, functools.partial | functools.partialmethod):
            function = function.func
        elif isinstance(function, staticmethod | classmethod) or inspect.ismethod(function):
            function = function.__func__
        elif inspect.isroutine(function):
            function = getattr(function, "__wrapped__", None)
        elif inspect.isclass(function) or not callable(function):
            return
        else:
            function = type(function).__call__


def own_mark(target: object, name: str) -> Any:
    """Return what a decorator noted on this very function, class or object; None if it noted nothing.

    ``@staticmethod`` and ``@classmethod`` may stand above the decorator.
    """
    found = getattr(target, "__dict__", {}).get(name)
    if found is None and isinstance(target, staticmethod | classmethod):
        return own_mark(target.__func__, name)
    return found


def lazy_kind(function: Any) -> str | None:
    """Return the kind of a function whose call runs nothing: "generator" or "async generator"; None for any other.

    One that is wrapped counts too: wrappers return what the function returns.
    """
    for layer in _layers(function):
        if inspect.iscoroutinefunction(layer):
            return None
        if inspect.isasyncgenfunction(layer):
            return "async generator"
        if inspect.isgeneratorfunction(layer):
            code = getattr(layer, "__code__", None)
            # A function of `types.coroutine` is awaited.
            return None if code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE else "generator"
    return None


def name_of_callable(function: Any) -> str:
    """Return the name of a function, of a method, or of what a partial or an object calls."""
    for layer in _layers(function):
        name = getattr(layer, "__qualname__", None)
        if isinstance(name, str):
            return name.rpartition("<locals>.")[2]
        if not isinstance(layer, functools.partial | functools.partialmethod):
            return type(layer).__qualname__.rpartition("<locals>.")[2]
    return repr(function)


def unfinished(result: object) -> str | None:
    """Return the name of work in a result that is never done, such as "a coroutine"; None if it is done.

    Coroutines are closed: nothing awaits them later.
    """
    found = [
        reason
        for each in (result if isinstance(result, list | tuple | set | frozenset) else (result,))
        if (reason := _unfinished_one(each)) is not None
    ]
    return found[0] if found else None


def _unfinished_one(result: object) -> str | None:
    if inspect.iscoroutine(result):
        result.close()
        return "a coroutine that nothing awaits"
    if inspect.isawaitable(result):
        return f"a {type(result).__name__} that nothing awaits"
    return f"a {type(result).__name__} that nothing runs" if isinstance(result, Iterator | AsyncIterator) else None


# --- annotations -------------------------------------------------------------------------------------------


def substituted(annotation: Any, bound: Mapping[Any, Any]) -> Any:
    """Return an annotation with values in place of its type variables."""
    if isinstance(annotation, TypeVar):
        return bound.get(annotation, annotation)
    variables = variables_of(annotation)
    if not any(variable in bound for variable in variables):
        return annotation
    return annotation[tuple(bound.get(variable, variable) for variable in variables)]


def variables_of(annotation: Any) -> tuple[Any, ...]:
    """Return the type variables of an annotation. A class that is not subscripted adds none."""
    if isinstance(annotation, TypeVar):
        return (annotation,)
    return () if get_origin(annotation) is None else getattr(annotation, "__parameters__", ())


def bindings_of(kind: type, alias: Any = None) -> dict[type, dict[Any, Any]]:
    """Return the values of the type variables of a class and of each of its bases.

    The same variable may have other values in each: ``class B(A[list[T]], Generic[T])``.

    Args:
        alias: The class with arguments, such as ``Repo[Order]``, if they are known.
    """
    found: dict[type, dict[Any, Any]] = {}

    def visit(owner: type, bound: dict[Any, Any]) -> None:
        if found.get(owner):  # a base that two bases have
            return
        found[owner] = bound
        for base in vars(owner).get("__orig_bases__", owner.__bases__):
            origin = get_origin(base) or base
            if isinstance(origin, type) and origin not in (Generic, Protocol, object):
                given = [substituted(_evaluated(each, owner), bound) for each in get_args(base)]
                visit(origin, dict(zip(getattr(origin, "__parameters__", ()), given, strict=False)))

    parameters = getattr(kind, "__parameters__", ())
    visit(kind, {} if alias is None else dict(zip(parameters, get_args(alias), strict=False)))
    return found


def arguments_of_bases(kind: type, base: type, alias: Any = None) -> tuple[Any, ...] | None:
    """Return the arguments with which a class extends a generic base; None if they are not known."""
    bound = bindings_of(kind, alias).get(base)
    parameters = getattr(base, "__parameters__", ())
    return None if not bound or not parameters else tuple(bound.get(each, each) for each in parameters)


def _evaluated(argument: Any, owner: type) -> Any:
    """Return the type of a name in quotes: ``class Orders(Repo["Order"])``."""
    if not isinstance(argument, ForwardRef):
        return argument
    try:
        return eval(argument.__forward_code__, vars(sys.modules[owner.__module__]))  # as typing does it
    except (NameError, KeyError):
        return argument


def resolved(hints: Mapping[str, Any], function: Any) -> dict[str, Any]:
    """Return the annotations of a method without the type variables that the class of its object binds.

    A variable that no class binds becomes its bound, or the union of its constraints, if it has one.
    """
    bound = _bound_for(function)
    hints = {name: substituted(annotation, bound) for name, annotation in hints.items()}
    left = {
        variable: bound_of(variable)
        for annotation in hints.values()
        for variable in variables_of(annotation)
        if isinstance(variable, TypeVar) and bound_of(variable) is not None
    }
    return {name: substituted(annotation, left) for name, annotation in hints.items()}


def bound_of(variable: TypeVar) -> Any:
    """Return the bound of a type variable, or the union of its constraints; None if it has neither."""
    if variable.__bound__ is not None:
        return variable.__bound__
    return typing.Union[variable.__constraints__] if variable.__constraints__ else None  # noqa: UP007 (at run time)


def _bound_for(function: Any) -> Mapping[Any, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.ismethod(function):
        holder, name = function.__self__, function.__name__
    elif inspect.isroutine(function) or inspect.isclass(function):
        return {}
    else:
        holder, name = function, "__call__"
    kind = holder if inspect.isclass(holder) else type(holder)
    owner = _owner_of(kind, name)
    return {} if owner is None else bindings_of(kind, getattr(holder, "__orig_class__", None)).get(owner, {})


def _owner_of(kind: type, name: str) -> type | None:
    return next((owner for owner in kind.__mro__ if name in vars(owner)), None)


def bound_in_constructor(kind: type, method: Callable[..., object], alias: Any = None) -> Mapping[Any, Any]:
    """Return the values of the type variables in the constructor of a class."""
    owner = _owner_of(kind, getattr(method, "__name__", "__init__"))
    return {} if owner is None else bindings_of(kind, alias).get(owner, {})


def takes_no_arguments(function: Callable[..., object]) -> bool:
    """Return True if a call without arguments is possible."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # an argument is missing, or a function in C shows no signature
        return False
    return True
