"""Marks that a user writes for dependency injection, the parameters of constructors, and their names in errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints, overload

from mqtemplate.callables import bound_in_constructor, substituted
from mqtemplate.context.config.schema import without_none
from mqtemplate.errors import DependencyError, MQTemplateError

SERVICE_ATTRIBUTE = "__mqtemplate_service__"
"""Attribute of a decorated class or function that holds its `ServiceMark`."""

_Target = TypeVar("_Target", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class ServiceMark:
    """The attributes of one ``@service``.

    Attributes:
        name: Name by which a parameter selects the service; by default the name of the class or function.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """Annotation of a parameter with a value of the configuration: ``Annotated[int, Value("${shop.limit:10}")]``.

    Attributes:
        text: Text with placeholders. The resolved text is converted to the annotated type.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """Annotation of a parameter, a pydantic model, with a section: ``Annotated[Shop, Section("shop")]``."""

    key: str


@dataclass(frozen=True, slots=True)
class Named:
    """Annotation of a parameter with the object of a name: ``Annotated[RocketMQTemplate, Named("audit")]``.

    Attributes:
        name: Name of a further template (then also of its broker), or of a ``@service(name=...)``.
    """

    name: str


@overload
def service(target: _Target, /) -> _Target: ...


@overload
def service(*, name: str | None = None) -> Callable[[_Target], _Target]: ...


def service(target: _Target | None = None, /, *, name: str | None = None) -> _Target | Callable[[_Target], _Target]:
    """Mark a class or function: the application builds one object, with arguments by the types of the parameters.

    The object is injected by the type of the class, its base classes and protocols; for a function, by its return type.
    The decorator only stores the mark, so a test may call the class with arguments of its own.

    Args:
        name: Distinguishes several services of one type: a parameter of that name gets this one.

    Raises:
        DependencyError: The target is neither a class nor a function.
    """

    def mark(marked: _Target) -> _Target:
        if inspect.isclass(getattr(marked, "__wrapped__", None)):
            raise DependencyError(
                f"@service: {name_of(marked)} is a class that @inject turned into a function; remove @inject, "
                "the application injects the constructor by its types"
            )
        if not inspect.isclass(marked) and not inspect.isfunction(marked):
            raise DependencyError(f"@service needs a class, or a function that builds an object, got {marked!r}")
        setattr(marked, SERVICE_ATTRIBUTE, ServiceMark(name))
        return marked

    return mark if target is None else mark(target)


def service_mark(target: object) -> ServiceMark | None:
    """Return the mark of this class or function; None if only a base class has one."""
    mark: ServiceMark | None = getattr(target, "__dict__", {}).get(SERVICE_ATTRIBUTE)
    return mark


def name_of(target: object) -> str:
    """Return the name of a type, class or function for error messages."""
    if target is None or target is type(None):
        return "None"
    if isinstance(get_origin(target), type) and get_args(target):
        return f"{name_of(get_origin(target))}[{', '.join(map(name_of, get_args(target)))}]"
    return str(getattr(target, "__qualname__", target)).rpartition("<locals>.")[2]


@contextmanager
def pointing_to(target: object) -> Iterator[None]:
    """Add the place where a class or function is defined to an error, unless it has a place already."""
    try:
        yield
    except MQTemplateError as exc:
        if exc.source is None:
            exc.source = _place_of(target)
        raise


def _place_of(target: object) -> str | None:
    for candidate in (target, getattr(target, "on_message", None), getattr(type(target), "on_message", None)):
        code = getattr(inspect.unwrap(candidate) if callable(candidate) else None, "__code__", None)
        if code is not None:
            return f"{code.co_filename}, line {code.co_firstlineno}"
    try:
        kind = target if isinstance(target, type) else type(target)
        _, line = inspect.getsourcelines(kind)
        return f"{inspect.getsourcefile(kind)}, line {line}"
    except (OSError, TypeError):  # it was defined in a console, or in C
        return None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a constructor or function.

    Attributes:
        wanted: The type, without ``| None``.
        many: True: it takes all objects of the type (``list[Handler]``).
        source: The configuration value or section it takes, if any.
        chosen: Name of the object that its annotation chooses; None if the type decides.
        is_optional: True: no object is needed, because it has a default or is ``| None``.
        has_default: True: its default is used if there is no object.
        is_positional: True: it can only be passed by position.
    """

    name: str
    wanted: Any
    many: bool
    source: Value | Section | None
    chosen: str | None
    is_optional: bool
    has_default: bool
    is_positional: bool


def read_parameters(target: Callable[..., object], known: Mapping[str, type]) -> list[Parameter]:
    """Return the parameters of a constructor or function.

    Args:
        known: Types by name, for annotations that the module cannot resolve at run time: a class that is imported under
            ``TYPE_CHECKING``, or defined inside a function.

    Raises:
        DependencyError: An annotation is missing or cannot be read, or is a marker of dependency-injector.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as exc:
        raise DependencyError(f"{name_of(target)} has no readable signature; register an object of it instead") from exc
    hints = type_hints(target, known)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        _read(target, parameter, hints.get(parameter.name, inspect.Parameter.empty))
        for parameter in signature.parameters.values()
        if parameter.kind not in variable
    ]


def type_hints(target: Callable[..., object], known: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Return the annotations of a function or constructor; *known* as for `read_parameters`.

    Raises:
        DependencyError: An annotation cannot be read.
    """
    holder: Any = target
    bound: Mapping[Any, Any] = {}
    if inspect.isclass(target):
        holder = target.__init__ if target.__init__ is not object.__init__ else target.__new__
        if holder is object.__new__:
            return {}
        bound = bound_in_constructor(target, holder)
    elif not inspect.isroutine(target):
        holder = type(target).__call__
    try:
        hints = get_type_hints(holder, include_extras=True)
    except NameError:
        try:
            hints = get_type_hints(holder, localns=dict(known or {}), include_extras=True)
        except NameError as exc:
            raise DependencyError(
                f"{name_of(target)}: the annotations name {exc.name!r}, which is not known at run time; import it "
                "outside of 'if TYPE_CHECKING', or register the class under that name"
            ) from exc
    except TypeError as exc:
        raise DependencyError(f"{name_of(target)}: an annotation cannot be read: {exc}") from exc
    return {name: substituted(annotation, bound) for name, annotation in hints.items()}


def read_parameter(target: object, parameter: inspect.Parameter, annotation: Any) -> Parameter:
    """Return one parameter of a constructor or function.

    Raises:
        DependencyError: It has no annotation, or a marker of dependency-injector.
    """
    return _read(target, parameter, annotation)


def _read(target: object, parameter: inspect.Parameter, annotation: Any) -> Parameter:
    where = f"{name_of(target)}: parameter {parameter.name!r}"
    has_default = parameter.default is not inspect.Parameter.empty
    if annotation is inspect.Parameter.empty and not has_default:
        raise DependencyError(
            f"{where} has no type annotation, so it is unknown what to inject; annotate it, or give it a default"
        )
    wanted, *extras = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if any(map(_is_marker, (parameter.default, *extras))):
        raise DependencyError(
            f"{where} carries a marker of dependency-injector, which acts only in modules wired to a container; "
            "annotate the type alone (the application injects by type), or use Annotated[..., Value('${key}')]"
        )
    annotated, wanted = wanted, without_none(wanted)
    source = next((extra for extra in extras if isinstance(extra, Value | Section)), None)
    many = source is None and _is_sequence(wanted)
    return Parameter(
        name=parameter.name,
        wanted=get_args(wanted)[0] if many else wanted,
        many=many,
        source=source,
        chosen=next((extra.name for extra in extras if isinstance(extra, Named)), None),
        is_optional=has_default or wanted is not annotated,
        has_default=has_default,
        is_positional=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
    )


def _is_marker(value: object) -> bool:
    """Return True for a marker of dependency-injector. Its module is imported before one can be written."""
    markers = sys.modules.get("dependency_injector.wiring")
    return markers is not None and isinstance(value, (markers.Provide, markers.Provider, markers.Closing))


def _is_sequence(annotation: Any) -> bool:
    """Return True for ``list[T]`` and ``Sequence[T]`` of a class, which take all services of the type."""
    arguments = get_args(annotation)
    items = [get_origin(each) or each for each in arguments]
    return get_origin(annotation) in (list, Sequence) and len(items) == 1 and isinstance(items[0], type)
