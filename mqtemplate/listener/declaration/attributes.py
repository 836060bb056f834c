"""Shared parts of the listener decorators: declaration of attributes, the noted spec, and reading of values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import index
from typing import Any, TypeVar, get_type_hints

from mqtemplate.callables import lazy_kind, load_name, name_of_callable, own_mark, refuse_bare
from mqtemplate.durations import duration_ms, format_ms, warn_of_unit
from mqtemplate.errors import ListenerError
from mqtemplate.numbers import parse_number
from mqtemplate.user_code import did_you_mean, shown

Resolve = Callable[[str], str]
"""Function that replaces the placeholders of a text."""

_Target = TypeVar("_Target", bound=Callable[..., object])
_MAX_INT = 2**31 - 1
_UNIT = {1: "or milliseconds", 60_000: "or minutes"}
NOT_READABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of `Attribute.read` for a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """Default and allowed values of one attribute; it stands in the ``Annotated`` type of the attribute.

    Attributes:
        default: Value where the decorator does not name the attribute; it may hold placeholders.
        allowed: End of the sentence "… must be" for errors.
        read: Function that converts a value without placeholders. It raises one of `NOT_READABLE` otherwise.
        unit_ms: Unit of numbers, if a number draws a `UnitWarning` where the decorator has it; otherwise 0.
    """

    default: object
    allowed: str
    read: Callable[[Any], Any]
    unit_ms: int = 0


def as_written(default: object) -> Attribute:
    """Return an attribute that takes any value."""
    return Attribute(default, "", lambda value: value)


def text(default: str) -> Attribute:
    """Return an attribute that takes a text."""
    return Attribute(default, "a text", str.strip)


def flag(default: bool | str) -> Attribute:
    """Return an attribute that takes True, False, or these words as a text."""
    return Attribute(default, "true or false", lambda value: {"true": True, "false": False}[str(value).lower()])


def number(default: int | str | None, low: int, high: int = _MAX_INT) -> Attribute:
    """Return an attribute that takes a whole number, *low* and *high* included."""

    def read(value: int | str) -> int:
        # Not `int`: it accepts fractions, and takes minutes for Decimal("1e999999").
        whole = parse_number(value) if isinstance(value, str) else index(value)
        if whole is None or isinstance(value, bool) or not low <= whole <= high:
            raise ValueError(value)
        return whole

    return Attribute(default, f"a whole number from {low} to {high}", read)


def duration(default: int | str, low: int, high: int = _MAX_INT, *, unit_ms: int = 1) -> Attribute:
    """Return an attribute that takes a duration, ``"1h 30m"`` or a timedelta, or a number of units.

    Args:
        low: Shortest value in units, included; *high* is the longest.
        unit_ms: Unit of numbers and of the value that `Attribute.read` returns.
    """

    def read(value: Any) -> float:
        milliseconds = duration_ms(value, unit_ms)
        if not low * unit_ms <= milliseconds <= high * unit_ms:
            raise ValueError(value)
        return milliseconds / unit_ms if milliseconds % unit_ms else milliseconds // unit_ms

    end = f" to {format_ms(high * unit_ms)}" if high < _MAX_INT else ""
    return Attribute(
        default, f"a duration from {format_ms(low * unit_ms)}{end} ('90s', a timedelta, {_UNIT[unit_ms]})", read
    )


def choice(default: Enum) -> Attribute:
    """Return an attribute that takes a member of the enum of *default*, or the name of one."""
    kind = type(default)

    def read(value: Enum | str) -> Enum:
        return value if isinstance(value, kind) else kind[value.upper()]  # type: ignore[union-attr]

    return Attribute(default, f"one of {', '.join(kind.__members__)}", read)


def exceptions() -> Attribute:
    """Return an attribute that takes classes of exceptions, or their dotted names; one of them, or several."""
    allowed = "classes of exceptions, such as (ValueError,), or their names: 'shop.errors.OrderError'"
    return Attribute((), allowed, read_exceptions)


def read_exceptions(value: Any) -> tuple[type[BaseException], ...]:
    """Return the classes of exceptions for classes, or for their dotted names; a name without a dot is Python's own.

    Raises:
        ValueError: A module does not exist, or an item is not a class of exceptions.
        AttributeError: A module has no such name.
    """
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    found = tuple(load_name(item, "builtins") if isinstance(item, str) else item for item in items if item != "")
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in found):
        raise ValueError(value)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSpec:
    """Arguments of one listener decorator. Placeholders ``${key:default}`` are not replaced yet.

    Attributes:
        attributes: Attributes that the decorator names, beside topic and group.
    """

    topics: tuple[str, ...]
    consumer_group: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ListenerDecorator:
    """Kind of listener decorator. It notes a `ListenerSpec` on the decorated object and does nothing else.

    Attributes:
        name: Name of the decorator in errors, such as ``@message_listener``.
        mark: Attribute of a decorated object that holds its tuple of specs.
        method: Method that a decorated class must have.
        signature: Signature of the method, for errors.
        is_handler: Function that returns True if an object that is not a class can be decorated.
        declaration: ``TypedDict`` of the attributes, each one ``Annotated`` with its `Attribute`.
        has_other_methods: Function that returns True if a class without *method* handles messages by other methods.
    """

    name: str
    mark: str
    method: str
    signature: str
    is_handler: Callable[[object], bool]
    declaration: type
    has_other_methods: Callable[[type], bool] = lambda kind: False

    def note(self, topic: object, consumer_group: str | None, given: Mapping[str, Any]) -> Callable[[_Target], _Target]:
        """Return a decorator that notes a spec on its object and returns the object unchanged.

        Raises:
            TypeError: An attribute has an unknown name.
            ListenerError: A topic is not a name, or is named twice; or there are no arguments.
        """
        form = f"{self.name}(topic='orders', consumer_group='billing')"
        refuse_bare(self.name, topic, form, ListenerError)
        if consumer_group is None:
            raise ListenerError(
                f"{self.name} needs the group whose members share the messages of {shown(topic)}; write {form}"
            )
        self.check_names(given)
        self._warn_of_units(given)
        spec = ListenerSpec(topics=self.topics_of(topic), consumer_group=consumer_group, attributes=given)

        def decorate(target: _Target) -> _Target:
            self._check_target(target)
            # The lowest decorator runs first. The tuple is in the order of the source text.
            try:
                setattr(target, self.mark, (spec, *self.specs(target)))
            except (AttributeError, TypeError) as error:
                raise ListenerError(
                    f"{self.name}: {name_of_callable(target)} is a {type(target).__name__}, which no decorator can "
                    "mark; decorate the method inside of its class, a function that calls it, or functools.partial(it)"
                ) from error
            return target

        return decorate

    def specs(self, target: object) -> tuple[ListenerSpec, ...]:
        """Return the specs noted on this very class or function; specs of a base class do not count."""
        specs: tuple[ListenerSpec, ...] = own_mark(target, self.mark) or ()
        return specs

    def read(self, listener: str, spec: ListenerSpec, resolve: Resolve) -> dict[str, Any]:
        """Return the value of every attribute, with placeholders replaced.

        Args:
            listener: Name of the listener, for errors.

        Raises:
            ListenerError: A value is not allowed.
        """
        table = _table(self.declaration)
        given = {name: attribute.default for name, attribute in table.items()} | dict(spec.attributes)
        return {name: _read(listener, name, table[name], value, resolve) for name, value in given.items()}

    def read_value(self, listener: str, name: str, value: object) -> Any:
        """Return the value of one attribute, without placeholders.

        Raises:
            ListenerError: The value is not allowed.
        """
        return _read(listener, name, _table(self.declaration)[name], value, str)

    def check_names(self, given: Iterable[str]) -> None:
        """Raise `TypeError` for the first unknown name."""
        table = _table(self.declaration)
        for name in given:
            if name not in table:
                hint = did_you_mean(name, table, f"known attributes are {', '.join(table)}")
                raise TypeError(f"{self.name} has no attribute {name!r}; {hint}")

    def _warn_of_units(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            attribute = _table(self.declaration)[name]
            if attribute.unit_ms and _is_readable(attribute, value):
                is_several = isinstance(value, list | tuple) or (isinstance(value, str) and "," in value)
                parts = value.split(",") if isinstance(value, str) else value if is_several else [value]
                for part in parts:
                    warn_of_unit(f"{name}: {{}}" if is_several else f"{name}={{}}", part, attribute.unit_ms)

    def topics_of(self, topic: Any) -> tuple[str, ...]:
        """Return the names of topics that a decorator gives; raise `ListenerError` if they are not names."""
        is_list = isinstance(topic, Iterable) and not isinstance(topic, str)
        topics = tuple(topic) if is_list else (topic,)
        if not topics or not all(isinstance(name, str) and name.strip() for name in topics):
            raise ListenerError(f"{self.name}: topic must be a name or a list of names, got {shown(topic)}")
        if len(set(topics)) < len(topics):
            raise ListenerError(f"{self.name}: topic {shown(list(topics))} names one topic twice; name each once")
        return topics

    def _check_target(self, target: object) -> None:
        name = getattr(target, "__qualname__", repr(target))
        if isinstance(getattr(target, "__wrapped__", None), type):
            raise ListenerError(
                f"{self.name}: {name} is a class that @inject turned into a function; "
                "remove @inject from the class: the application injects its constructor by the types it names "
                "(or put @inject on __init__)"
            )
        if isinstance(target, type):
            if not callable(getattr(target, self.method, None)) and not self.has_other_methods(target):
                raise ListenerError(f"{self.name}: class {name} has no method {self.method}; write '{self.signature}'")
            check_handler(getattr(target, self.method, None), f"{self.name}: {name}.{self.method}")
        elif isinstance(target, classmethod | functools.partialmethod):
            return  # it can be called through its class
        elif not self.is_handler(target):
            raise ListenerError(
                f"{self.name}: {name} cannot be called; decorate a function, or a class with {self.method}"
            )
        check_handler(target, f"{self.name}: {name_of_callable(target)}")


def check_handler(handler: object, where: str) -> None:
    """Refuse a function whose call runs nothing: its messages would be acknowledged unhandled.

    Raises:
        ListenerError: It contains ``yield``, or wraps a function that does.
    """
    kind = None if isinstance(handler, type) else lazy_kind(handler)
    if kind is not None:
        raise ListenerError(
            f"{where} has a 'yield', so it is {'an' if kind[0] == 'a' else 'a'} {kind}: a call of it runs nothing, and "
            "its messages would be acknowledged unhandled; write 'return', such as 'return [Send(...), Send(...)]' for "
            "several messages; for what opens and closes around a call use Depends or a middleware"
        )


@cache
def _table(declaration: type) -> dict[str, Attribute]:
    hints = get_type_hints(declaration, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def _is_readable(attribute: Attribute, value: object) -> bool:
    """Return True for an allowed value; False for one that is refused later, and for one with placeholders."""
    try:
        attribute.read(value)
    except NOT_READABLE:
        return False
    return True


def _read(listener: str, name: str, attribute: Attribute, given: object, resolve: Resolve) -> Any:
    value = resolve(given).strip() if isinstance(given, str) else given
    try:
        return attribute.read(value)
    except NOT_READABLE:
        source = f" from {shown(given)}" if isinstance(given, str) and "${" in given else ""
        raise ListenerError(f"{listener}: {name} must be {attribute.allowed}, got {shown(value)}{source}") from None
