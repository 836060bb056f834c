"""What a user writes for dependency injection, and reading what a constructor asks for."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from dependency_injector.wiring import Closing, Provide, Provider

from mqtemplate.errors import DependencyError

SERVICE_ATTRIBUTE = "__mqtemplate_service__"
"""Where a decorated class or function keeps its `ServiceMark`."""

_Target = TypeVar("_Target", bound=Callable[..., object])
_MARKERS: tuple[type, ...] = tuple(marker for marker in (Provide, Provider, Closing) if isinstance(marker, type))


@dataclass(frozen=True, slots=True)
class ServiceMark:
    """What ``@service`` noted.

    Attributes:
        name: The name by which a parameter may ask for it; from the class or function if not given.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A parameter's value comes from the configuration: ``Annotated[int, Value("${shop.limit:10}")]``.

    Attributes:
        text: With placeholders; what comes out is converted to the annotated type.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """A parameter is a section of the configuration, a pydantic model: ``Annotated[Shop, Section("shop")]``."""

    key: str


@overload
def service(target: _Target, /) -> _Target: ...


@overload
def service(*, name: str | None = None) -> Callable[[_Target], _Target]: ...


def service(target: _Target | None = None, /, *, name: str | None = None) -> _Target | Callable[[_Target], _Target]:
    """Let the application build this: one object, from what the constructor's types ask for.

    On a class, the class is what others may ask for, and its bases and protocols. On a function, the function
    builds the object and its return type is what others may ask for. The decorator only notes that; a test
    calls the class with arguments of its own.

    Args:
        name: Tells two services of one type apart: a parameter of that name gets this one.

    Raises:
        DependencyError: The target is neither class nor function.
    """

    def note(marked: _Target) -> _Target:
        if inspect.isclass(getattr(marked, "__wrapped__", None)):
            raise DependencyError(
                f"@service: {name_of(marked)} is a class that @inject turned into a function; remove @inject, "
                "the application injects the constructor by its types"
            )
        if not inspect.isclass(marked) and not inspect.isfunction(marked):
            raise DependencyError(f"@service stands on a class, or on a function that builds an object, got {marked!r}")
        setattr(marked, SERVICE_ATTRIBUTE, ServiceMark(name))
        return marked

    return note if target is None else note(target)


def service_mark(target: object) -> ServiceMark | None:
    """What was noted on this very class or function; a base class's mark is that class's own."""
    mark: ServiceMark | None = getattr(target, "__dict__", {}).get(SERVICE_ATTRIBUTE)
    return mark


def name_of(target: object) -> str:
    """How errors name a type, class or function."""
    if target is None or target is type(None):
        return "None"
    return str(getattr(target, "__qualname__", target)).rpartition("<locals>.")[2]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One thing that a constructor asks for.

    Attributes:
        wanted: The type, ``| None`` taken off.
        many: Asks for all objects of that type: ``list[Handler]``.
        source: Where its value is, if it comes from the configuration.
        is_optional: May stay away: it has a default, or is ``| None``.
        has_default: Has a default of its own, which then counts.
        is_positional: Can only be passed by place.
    """

    name: str
    wanted: Any
    many: bool
    source: Value | Section | None
    is_optional: bool
    has_default: bool
    is_positional: bool


def read_parameters(target: Callable[..., object], known: Mapping[str, type]) -> list[Parameter]:
    """What a class's constructor or a function asks for.

    Args:
        known: Types by name, for annotations that name a class their module does not know at run time, such as
            one imported under ``TYPE_CHECKING`` or defined inside a function.

    Raises:
        DependencyError: An annotation is missing or cannot be read, or dependency-injector's own markers are used.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as exc:
        raise DependencyError(
            f"{name_of(target)} does not tell what it asks for; register an object of it instead"
        ) from exc
    hints = _type_hints(target, known)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        _read(target, parameter, hints.get(parameter.name, inspect.Parameter.empty))
        for parameter in signature.parameters.values()
        if parameter.kind not in variable
    ]


def _type_hints(target: Callable[..., object], known: Mapping[str, type]) -> dict[str, Any]:
    holder: Any = target
    if inspect.isclass(target):
        holder = target.__init__ if target.__init__ is not object.__init__ else target.__new__
        if holder is object.__new__:
            return {}
    elif not inspect.isroutine(target):
        holder = type(target).__call__
    try:
        return get_type_hints(holder, include_extras=True)
    except NameError:
        try:
            return get_type_hints(holder, localns=dict(known), include_extras=True)
        except NameError as exc:
            raise DependencyError(
                f"{name_of(target)}: the annotations name {exc.name!r}, which is not known at run time; import it "
                "outside of 'if TYPE_CHECKING', or register the class under that name"
            ) from exc
    except TypeError as exc:
        raise DependencyError(f"{name_of(target)}: an annotation cannot be read: {exc}") from exc


def _read(target: object, parameter: inspect.Parameter, annotation: Any) -> Parameter:
    where = f"{name_of(target)}: parameter {parameter.name!r}"
    has_default = parameter.default is not inspect.Parameter.empty
    if annotation is inspect.Parameter.empty and not has_default:
        raise DependencyError(
            f"{where} has no type annotation, so nobody knows what to inject; annotate it, or give it a default"
        )
    wanted: Any = annotation
    extras: list[Any] = []
    if get_origin(annotation) is Annotated:
        wanted, *extras = get_args(annotation)
    if isinstance(parameter.default, _MARKERS) or any(isinstance(extra, _MARKERS) for extra in extras):
        raise DependencyError(
            f"{where} carries a marker of dependency-injector, which acts only in modules wired to a container; "
            "annotate the type alone (the application injects by type), or use Annotated[..., Value('${key}')]"
        )
    wanted, allows_none = _without_none(wanted)
    source = next((extra for extra in extras if isinstance(extra, Value | Section)), None)
    many = source is None and _is_sequence(wanted)
    return Parameter(
        name=parameter.name,
        wanted=get_args(wanted)[0] if many else wanted,
        many=many,
        source=source,
        is_optional=has_default or allows_none,
        has_default=has_default,
        is_positional=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


def _is_sequence(annotation: Any) -> bool:
    """``list[T]`` and ``Sequence[T]`` of a class: all services of that type."""
    arguments = get_args(annotation)
    return get_origin(annotation) in (list, Sequence) and len(arguments) == 1 and isinstance(arguments[0], type)
