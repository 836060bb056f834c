"""Types of payloads: the bodies that become them, and the unions whose members no body can tell apart.

Text and bytes are bodies as they are; everything else is structured, such as JSON. So an annotation has up to three
parts: ``Order | str | None`` takes text as ``str`` and JSON as ``Order | None``.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import inspect
import ipaddress
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from uuid import UUID

from mqtemplate.callables import bound_of
from mqtemplate.errors import ConversionError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


BINARY: Final = "application/octet-stream"
"""Content type of payloads that are bytes, as rocketmq-spring sets it."""

UTF8_BOM: Final = b"\xef\xbb\xbf"
"""Mark that some programs of Windows write before UTF-8."""

_TYPES = (
    "annotate the parameter with bytes, str, dict, list, int, float, bool, a dataclass, a pydantic model "
    "or a TypedDict, or give the application a converter"
)


@dataclasses.dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of the values that a body may hold, for formats in which few bytes can stand for very much.

    Attributes:
        depth: Number of values inside each other.
        items: Number of items of all arrays and maps together.
    """

    depth: int = 200
    items: int = 1_000_000

    def __post_init__(self) -> None:
        for name, low, high in (("depth", 1, 500), ("items", 1, 1_000_000_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


class Parts(NamedTuple):
    """An annotation, divided by the bodies that become it. None: it has no such part.

    Attributes:
        text: ``str``, ``StrEnum``, ``Literal["a"]``, and what else is sent as text.
        binary: ``bytes`` and the like.
        structured: Everything else.
    """

    text: Any = None
    binary: Any = None
    structured: Any = None

    @property
    def is_structured(self) -> bool:
        """True if no part of the annotation is text or bytes."""
        return self.text is None and self.binary is None


def parts_of(annotation: Any) -> Parts:
    """Return the parts of an annotation. One without text and bytes is its structured part, unchanged."""
    try:
        return _cached_parts(annotation)
    except TypeError:  # an annotation that cannot be hashed
        return _divide(annotation)


def _divide(annotation: Any) -> Parts:
    found: dict[str, list[Any]] = {"text": [], "binary": [], "structured": []}
    bare, extras = _bare(annotation)
    for member in _members(bare):
        for form, part in _forms(member):
            found[form].append(part)
    if not found["text"] and not found["binary"]:
        return Parts(structured=annotation)
    joined = {form: Union[tuple(parts)] for form, parts in found.items() if parts}  # noqa: UP007 (made at run time)
    return Parts(**{form: Annotated[(part, *extras)] if extras else part for form, part in joined.items()})


_cached_parts = lru_cache(maxsize=1_024)(_divide)


def _bare(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation without its names and ``Annotated``, and the extras of the latter."""
    extras: tuple[Any, ...] = ()
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            extras = (*more, *extras)
        elif isinstance(annotation, TypeVar):
            bound = bound_of(annotation)
            annotation = Any if bound is None else bound
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # of typing, or of typing_extensions
            annotation = annotation.__value__
        else:
            return annotation, extras


def members_of(annotation: Any) -> list[Any]:
    """Return the types of a union without their extras; of anything else the type alone."""
    return [_bare(member)[0] for member in _members(_bare(annotation)[0])]


def _members(bare: Any) -> Iterator[Any]:
    """Yield the members of a union and of the unions inside of it; anything else as it is."""
    if get_origin(bare) not in (Union, UnionType):
        yield bare
        return
    for argument in get_args(bare):
        inner, extras = _bare(argument)
        if extras:
            yield argument  # its extras belong to the whole argument
        else:
            yield from _members(inner)


def _forms(member: Any) -> Iterator[tuple[str, Any]]:
    kind = _bare(member)[0]
    if get_origin(kind) is Literal:
        values = [(_form_of_value(value), value) for value in get_args(kind)]
        for form in dict.fromkeys(form for form, _ in values):
            yield form, Literal[tuple(value for of, value in values if of == form)]
    elif isinstance(kind, type) and issubclass(kind, str):
        yield "text", member
    elif isinstance(kind, type) and issubclass(kind, bytes | bytearray | memoryview):
        yield "binary", member
    elif get_origin(kind) in (Union, UnionType):  # a union with extras inside of a union
        parts = parts_of(member)
        yield from ((form, part) for form, part in parts._asdict().items() if part is not None)
    else:
        yield "structured", member


def _form_of_value(value: object) -> str:
    return "text" if isinstance(value, str) else "binary" if isinstance(value, bytes) else "structured"


# --- reading -------------------------------------------------------------------------------------------


def read_parts(
    body: bytes, parts: Parts, content_type: str, charset: str, structured: Callable[[bytes, Any], object]
) -> object:
    """Return a body as an annotation that takes text or bytes.

    - A body without a content type is text if the annotation takes text, else bytes; ``text/*`` is the same.
    - ``application/octet-stream`` is bytes.
    - Any other body is structured.

    What does not fit is tried as the next form, since other producers may name no content type or a wrong one.

    Args:
        structured: Reads a body in the format of the converter as a type.

    Raises:
        ConversionError: The body fits none of the parts.
    """
    attempts = {
        "text": lambda: _as_text(body, parts.text, charset),
        "binary": lambda: _as_bytes(body, parts.binary),
        "structured": lambda: structured(body, parts.structured),
        "quoted": lambda: structured(body, parts.text),
    }
    first_error: ConversionError | None = None
    for form in _order(content_type, parts):
        try:
            return attempts[form]()
        except ConversionError as error:
            first_error = first_error or error
    assert first_error is not None  # there is at least one part
    raise first_error


def _order(content_type: str, parts: Parts) -> list[str]:
    is_text = not content_type or content_type.startswith("text/")
    if is_text:
        order = ["text", "binary", "structured", "quoted"]
    elif content_type.startswith(BINARY):
        order = ["binary", "structured", "text"]
    elif parts.structured is None or parts.structured is NoneType:
        order = ["structured", "quoted", "text", "binary"]
    else:
        order = ["structured", "quoted"]
    there = {"quoted": parts.text}
    return [form for form in order if there.get(form, getattr(parts, form, None)) is not None] or ["binary"]


def _as_text(body: bytes, part: Any, charset: str) -> object:
    try:
        text = body.decode(charset)
    except UnicodeDecodeError as exc:
        raise ConversionError(
            f"the body is not {charset.upper()} text: {exc.reason} at byte {exc.start}; use the type bytes instead"
        ) from exc
    return text if part is str else _validated(text, part)


def _as_bytes(body: bytes, part: Any) -> object:
    if part is bytes:
        return body
    # pydantic does not know bytearray and memoryview.
    plain = next((each for each in _members(_bare(part)[0]) if each in (bytes, bytearray, memoryview)), None)
    return _validated(body, part) if plain is None else plain(body)


def _validated(value: object, part: Any) -> object:
    from pydantic_core import ValidationError

    try:
        return adapter_of(part).validate_python(value)
    except ValidationError as exc:
        raise ConversionError(f"the body cannot be read as {kind_name(part)}: {first_errors(exc)}") from exc


def read_untyped(body: bytes, properties: Mapping[str, str], charset: str) -> object:
    """Return a body that is not structured, for ``object`` and ``Any``: text if it is text, else bytes."""
    if properties.get("contentType", "").startswith(BINARY):
        return body
    try:
        return body.decode(charset)
    except UnicodeDecodeError:
        return body


def adapter_of(target_type: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of a type.

    Raises:
        ConversionError: pydantic does not know the type.
    """
    try:
        return _cached_adapter(target_type)
    except TypeError:  # a type with unhashable annotations cannot be a key of the cache
        return _create_adapter(target_type)


def _create_adapter(target_type: Any) -> TypeAdapter[Any]:
    # Imported here: an application that sends and receives bytes and text only does not need it.
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(target_type)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as exc:
        reason = str(exc).partition("\n")[0] if "typing_extensions" in str(exc) else ""
        raise ConversionError(
            f"a body cannot become a {kind_name(target_type)}{f' ({reason})' if reason else ''}; {_TYPES}"
        ) from exc


_cached_adapter = lru_cache(maxsize=1_024)(_create_adapter)


def kind_name(target_type: Any) -> str:
    """Return the name of a type that an annotation has, for errors."""
    is_generic = not isinstance(target_type, type) or hasattr(target_type, "__args__")
    return str(target_type) if is_generic else str(target_type.__name__)


def first_errors(error: Any, count: int = 3) -> str:
    """Return the first few errors of pydantic, without the input, which may be secret."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    shown = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in errors[:count]]
    return "; ".join(shown) + (f"; and {len(errors) - count} more" if len(errors) > count else "")


# --- unions whose members no body can tell apart -------------------------------------------------------

_JSON_NATIVE = (NoneType, bool, int, float, str, list, dict)
_NUMBERS = (bool, int, float)
_ARRAYS: tuple[type, ...] = (list, tuple, set, frozenset, collections.deque)
_STRINGS = (str, bytes, datetime, date, time, timedelta, Decimal, UUID, PurePath, complex)
_STRINGS += (ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network)  # type: ignore[assignment]
_ABSTRACT: dict[Any, type] = {
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.Set: set,
    collections.abc.MutableSet: set,
    collections.abc.Mapping: dict,
    collections.abc.MutableMapping: dict,
}
_DISTINCT = {
    frozenset(pair)
    for pair in itertools.chain(
        itertools.combinations((date, datetime, time, UUID), 2),
        itertools.product((timedelta,), (date, datetime, UUID)),
        itertools.product((Decimal,), (UUID,)),
    )
}
"""Pairs of types that differ in each text of JSON: ``2026-01-01`` and ``12:00:00``."""


def check_parts(annotation: Any, check_structured: Callable[[Any], object]) -> None:
    """Refuse an annotation that no body can become, or in which a value can arrive as another one.

    ``list[int] | set[int]`` are both arrays of JSON. Text and bytes beside other types differ by the content
    type of the body. The fields of classes are read as pydantic does.

    Args:
        check_structured: Raises an error for a type that the converter does not know.

    Raises:
        ConversionError: It names the type, or two members of a union.
    """
    parts = parts_of(annotation)
    if parts.text is not None and parts.text is not str:
        adapter_of(parts.text)
    if parts.structured is not None:
        check_structured(parts.structured)
        _check(parts.structured)


def check_values(annotation: Any, converter: Any) -> None:
    """Refuse enums and literals that do not return from a body, such as an enum of tuples.

    Raises:
        ConversionError: It names the value.
    """
    for member in _members(_bare(annotation)[0]):
        kind = _bare(member)[0]
        if get_origin(kind) is Literal:
            values: list[Any] = list(get_args(kind))
        elif isinstance(kind, type) and issubclass(kind, Enum):
            values = list(kind)
        else:
            continue
        for value in values[:_CHECKED_VALUES]:
            if value is None or (not value and isinstance(value, str | bytes)):
                continue  # an empty body cannot be sent
            try:
                body, content_type = converter.to_body(value)
                found = converter.from_body(body, member, {"contentType": content_type} if content_type else {})
            except ConversionError:
                found = ...
            if found != value:
                raise ConversionError(
                    f"{value!r} of {kind_name(kind)} cannot be read back from its body; use an enum of texts or numbers"
                )


_CHECKED_VALUES = 1_000
"""Most enums have fewer; larger ones are checked by their first values."""


def _check(annotation: Any) -> None:
    bare, extras = _bare(annotation)
    members = list(_members(bare))
    if not any(getattr(extra, "discriminator", None) for extra in extras):
        for one, other in itertools.combinations(members, 2):
            if _is_confusable(one, other):
                raise ConversionError(
                    f"a body cannot tell {kind_name(one)} and {kind_name(other)} apart in {kind_name(annotation)}: "
                    "both have the same form in JSON, so a value could arrive as the other type; declare one of them, "
                    "give both a field such as kind: Literal['order'], or take MessageExt"
                )
    for member in members:
        kind = _bare(member)[0]
        if hasattr(kind, "get_secret_value"):
            raise ConversionError(f"a {kind_name(kind)} is written as asterisks, so its value cannot arrive; use str")
        if get_origin(kind) is Literal:
            continue
        arguments = [each for each in get_args(kind) if each is not ... and not isinstance(each, list)]
        if _plain_kind(kind) is dict and arguments:
            _check_keys(arguments[0], annotation)
        for argument in arguments:
            _check(argument)


def _check_keys(annotation: Any, mapping: Any) -> None:
    """Refuse keys of several types: the names in an object of JSON are text."""
    kinds = {_plain_kind(_bare(each)[0]) for each in _members(_bare(annotation)[0])}
    if len(kinds) > 1:
        raise ConversionError(
            f"a body cannot tell the keys of {kind_name(mapping)} apart: names in JSON are text; "
            "declare one type of keys"
        )


def _plain_kind(kind: Any) -> Any:
    """Return the class of a type without its arguments; a concrete one for an abstract collection."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return str if all(isinstance(value, str) for value in get_args(kind)) else Literal
    return _ABSTRACT.get(origin, NoneType if origin is None else origin)


def _is_confusable(one: Any, other: Any) -> bool:
    """Return True if a value of one type may be written as JSON that is read as another value of the other type."""
    if one == other:
        return False
    ones, others = list(_members(_bare(one)[0])), list(_members(_bare(other)[0]))
    if len(ones) > 1 or len(others) > 1:
        return any(_is_confusable(a, b) for a in ones for b in others)
    a, b = _plain_kind(_bare(one)[0]), _plain_kind(_bare(other)[0])
    if object in (a, b) or Any in (a, b):
        return not all(kind in (Any, object, *_JSON_NATIVE) for kind in (a, b))
    if not (shared := _families(one) & _families(other)):
        return False
    if "enum" in _families(one) | _families(other):
        return not (issubclass(a, b) or issubclass(b, a))
    if "object" in shared:
        return _are_objects_confusable(_bare(one)[0], _bare(other)[0])
    if "array" in shared:
        return a is not b or _are_items_confusable(get_args(_bare(one)[0]), get_args(_bare(other)[0]))
    if "string" in shared:
        return a is not b and frozenset((a, b)) not in _DISTINCT and not (_is_text(a) and _is_text(b))
    return False  # numbers that are equal, and null


def _is_text(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, str)


def _overlaps(one: Any, other: Any) -> bool:
    """Return True if some JSON may be a value of both types."""
    pairs = itertools.product(_members(_bare(one)[0]), _members(_bare(other)[0]))
    return any(_is_overlap(a, b) for a, b in pairs)


def _is_overlap(one: Any, other: Any) -> bool:
    one, other = _bare(one)[0], _bare(other)[0]
    if get_origin(one) is Literal and get_origin(other) is Literal:
        return not set(get_args(one)).isdisjoint(get_args(other))
    if any(each in (Any, object) for each in (one, other)):
        return True
    return bool(_families(one) & _families(other) - {"enum"})


def _families(annotation: Any) -> set[str]:
    """Return the forms that values of a type have in JSON; empty if unknown."""
    kind = _bare(annotation)[0]
    if get_origin(kind) is Literal:
        return {family for value in get_args(kind) for family in _families(type(value))}
    plain = _plain_kind(kind)
    if plain is NoneType:
        return {"null"}
    if not isinstance(plain, type):
        return set()
    if issubclass(plain, Enum):
        families = {family for member in plain for family in _families(type(member.value))}
        return families | (set() if issubclass(plain, str | int) else {"enum"})
    if issubclass(plain, _NUMBERS):
        return {"number"}
    if issubclass(plain, _STRINGS):
        return {"string"}
    if issubclass(plain, _ARRAYS):
        return {"array"}
    return {"object"} if issubclass(plain, Mapping) or _fields(plain) is not None else set()


def _are_items_confusable(ones: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    is_open = ... in ones or ... in others
    ones, others = (tuple(each for each in arguments if each is not ...) for arguments in (ones, others))
    if not ones or not others:
        return any(_is_confusable(each, Any) for each in (*ones, *others))
    if is_open:
        return any(_is_confusable(a, b) for a in ones for b in others)
    if len(ones) != len(others):
        return False
    pairs = list(zip(ones, others, strict=True))
    return all(_overlaps(a, b) for a, b in pairs) and any(_is_confusable(a, b) for a, b in pairs)


def _are_objects_confusable(one: Any, other: Any) -> bool:
    a, b = _plain_kind(one), _plain_kind(other)
    if issubclass(a, Mapping) and issubclass(b, Mapping) and not (typing.is_typeddict(a) or typing.is_typeddict(b)):
        return a is not b or _are_items_confusable(get_args(one)[1:], get_args(other)[1:])
    ones, others = _fields(a), _fields(b)
    if ones is None or others is None:
        return True  # each object of JSON is a dict
    return _may_be_read_as(ones, others) or _may_be_read_as(others, ones)


class _Field(NamedTuple):
    annotation: Any
    is_required: bool


def _may_be_read_as(one: Mapping[str, _Field], other: Mapping[str, _Field]) -> bool:
    """Return True if an object of one class has all its fields in the other too: pydantic chooses by their number."""
    required = {name for name, field in other.items() if field.is_required}
    is_covered = one.keys() <= other.keys() and required <= one.keys()
    return is_covered and all(_overlaps(field.annotation, other[name].annotation) for name, field in one.items())


def _fields(kind: type) -> Mapping[str, _Field] | None:
    """Return the fields of a class by their names in JSON; None if they are unknown."""
    models = getattr(kind, "model_fields", None)
    if isinstance(models, Mapping):
        return {
            each.serialization_alias or each.alias or name: _Field(each.annotation, each.is_required())
            for name, each in models.items()
        }
    if not dataclasses.is_dataclass(kind) and not typing.is_typeddict(kind):
        return None
    try:
        hints = typing.get_type_hints(kind)
    except NameError:
        hints = inspect.get_annotations(kind) | dict.fromkeys(inspect.get_annotations(kind), Any)
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return {
            each.name: _Field(hints.get(each.name, Any), each.default is missing and each.default_factory is missing)
            for each in dataclasses.fields(kind)
        }
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
    return {name: _Field(hint, name in required) for name, hint in hints.items()}
