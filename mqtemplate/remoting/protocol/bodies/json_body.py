"""One way to declare a JSON body: a frozen class whose fields know their names and types in the text.

::

    @body
    class TopicStatsTable(JsonBody):
        offset_table: dict[MessageQueue, TopicOffset]  # `offsetTable`; required
        topic_put_tps: float = 0.0  # meant where it is missing or null

Fields may be ``str``, ``int``, ``bool``, ``float``, another body, a `MessageQueue`, a list of these, a dict of these by
``str``, ``int`` or `MessageQueue`, each with ``| None``. As fastjson does it, names that nobody declared are passed
over, null is as good as missing, ``"5"`` will do for 5, and on the way out None is left out and names stand by the
alphabet.
Java's sets are lists here.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Self, TypeVar, Union, dataclass_transform, get_args, get_origin
from typing import get_type_hints as hints_of

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies import fastjson
from mqtemplate.remoting.protocol.headers.fields import camel_case, wire

_ClassT = TypeVar("_ClassT", bound="type[JsonBody]")


class JsonBody:
    """The base of all JSON bodies; see `body`."""

    __slots__ = ()

    def encode(self, *, standard: bool = False) -> bytes:
        """The body as text.

        Args:
            standard: As any JSON reader takes it, with quotes around numbers that are keys, in ASCII. Not for bodies
                that have message queues as keys: Java reads those in fastjson's way only.

        Raises:
            MessageError: A text in it cannot be written as UTF-8.
        """
        value = _write_object(type(self), self)
        try:
            return (fastjson.dumps_standard(value) if standard else fastjson.dumps(value)).encode()
        except ValueError as exc:
            raise MessageError(
                f"this {type(self).__name__} cannot be written: {exc}; give texts UTF-8 can say"
            ) from exc

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a body.

        Raises:
            RemoteProtocolError: It is no JSON, or something in it has another type; the text says where.
        """
        made: Self = _read_whole(cls, data, lambda value: _read_object(cls, value))
        return made

    @classmethod
    def decode_list(cls, data: bytes) -> list[Self]:
        """Read a body that is a list of these; it raises what `decode` does."""
        made: list[Self] = _read_whole(cls, data, _list_of(_Type(lambda value: _read_object(cls, value))).read)
        return made


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(wire, dataclasses.field))
def body(cls: _ClassT) -> _ClassT:
    """Make a class a frozen, slotted dataclass with keyword arguments that is read and written as JSON."""
    made: Any = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
    return made  # type: ignore[no-any-return]  # dataclass() makes the class anew for its slots


def encode_list(bodies: Sequence[JsonBody]) -> bytes:
    """A body that is a list; see `JsonBody.encode`."""
    return b"[%b]" % b",".join([one.encode() for one in bodies])


def _read_whole(cls: type[JsonBody], data: bytes, read: Callable[[Any], Any]) -> Any:
    try:
        value = fastjson.loads(data)
    except ValueError as exc:
        raise RemoteProtocolError(f"the body is no JSON, a {cls.__name__} was expected: {exc}") from exc
    try:
        return read(value)
    except _WrongError as exc:
        raise RemoteProtocolError(f"the body is no {cls.__name__}: {exc}") from exc


# --- from a declaration to a plan -------------------------------------------------------------------


class _WrongError(Exception):
    """Something has another type; on its way up it learns where it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text, self.path = text, ""

    def within(self, step: str) -> _WrongError:
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path.removeprefix('.') or 'it'} {self.text}"


class _Type(NamedTuple):
    """How values of one type are read from JSON's values, and written as such."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None


class _Entry(NamedTuple):
    attribute: str
    name: str
    type: _Type
    required: bool


@cache
def _plan_of(cls: Any) -> list[_Entry]:
    """The fields by the alphabet. Made when first needed: bodies may name others that stand below them."""
    hints = hints_of(cls)
    plan = [
        _Entry(
            field.name,
            field.metadata.get("name") or camel_case(field.name),
            _type_of(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    ]
    return sorted(plan, key=lambda entry: entry.name)


@cache
def _type_of(hint: Any) -> _Type:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (hint,) = (part for part in parts if part is not type(None))
        return _type_of(hint)
    if origin is list:
        return _list_of(_type_of(parts[0]))
    if origin is dict:
        return _map_of(parts[0], _type_of(parts[1]))
    if isinstance(hint, type) and issubclass(hint, JsonBody):
        return _Type(lambda value: _read_object(hint, value), lambda made: _write_object(hint, made))
    return _SCALARS[hint]


def _list_of(item: _Type) -> _Type:
    def read(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _WrongError(f"must be a list, got {_shorten(value)}")
        items = []
        for place, element in enumerate(value):
            try:
                if element is not None:
                    items.append(item.read(element))
            except _WrongError as exc:
                raise exc.within(f"[{place}]") from None
        return items

    write = item.write
    return _Type(read, list if write is None else lambda items: [write(element) for element in items])


def _map_of(key: type, item: _Type) -> _Type:
    read_key = _KEYS[key].read
    write_key, write_item = _KEYS[key].write or _as_it_is, item.write or _as_it_is

    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _WrongError(f"must be an object, got {_shorten(value)}")
        pairs = {}
        for name, element in value.items():
            try:
                if element is not None:
                    pairs[read_key(name)] = item.read(element)
            except _WrongError as exc:
                raise exc.within(f"[{_shorten(name)}]") from None
        return pairs

    return _Type(read, lambda pairs: {write_key(name): write_item(element) for name, element in pairs.items()})


def _as_it_is(value: Any) -> Any:
    return value


# --- values -----------------------------------------------------------------------------------------


def _read_object(cls: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _WrongError(f"must be an object, got {_shorten(value)}")
    arguments = {}
    for entry in _plan_of(cls):
        element = value.get(entry.name)
        if element is None:
            if entry.required:
                raise _WrongError("is missing").within(f".{entry.name}")
            continue
        try:
            arguments[entry.attribute] = entry.type.read(element)
        except _WrongError as exc:
            raise exc.within(f".{entry.name}") from None
    return cls(**arguments)


def _write_object(cls: Any, made: JsonBody) -> dict[str, Any]:
    pairs = {}
    for entry in _plan_of(cls):
        value = getattr(made, entry.attribute)
        if value is not None:
            write = entry.type.write
            pairs[entry.name] = value if write is None else write(value)
    return pairs


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return fastjson.dumps(value)
    raise _WrongError(f"must be a text, got {_shorten(value)}")


def _read_int(value: Any) -> int:
    number = value
    if isinstance(value, str | float):
        try:
            number = int(value)
        except (ValueError, OverflowError):
            raise _WrongError(f"must be a number, got {_shorten(value)}") from None
    if isinstance(number, int) and not isinstance(number, bool) and -(1 << 63) <= number < 1 << 63:
        return number
    raise _WrongError(f"must be a number of 64 bits, got {_shorten(value)}")


def _read_float(value: Any) -> float:
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except (ValueError, OverflowError):
        pass  # told below
    raise _WrongError(f"must be a number, got {_shorten(value)}")


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _WrongError(f"must be true or false, got {_shorten(value)}")


def _read_queue(value: Any) -> MessageQueue:
    if not isinstance(value, Mapping):
        raise _WrongError(f"must be a message queue, got {_shorten(value)}")
    try:
        return MessageQueue(_read_text(value["topic"]), _read_text(value["brokerName"]), _read_int(value["queueId"]))
    except KeyError as exc:
        raise _WrongError(f"must be a message queue with topic, brokerName and queueId, {exc} is missing") from None


def _write_queue(queue: MessageQueue) -> dict[str, Any]:
    return {"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic}


def _read_queue_key(key: Any) -> MessageQueue:
    """An object; or one within quotes, as a writer of standard JSON has to have it."""
    if isinstance(key, str):
        try:
            return _read_queue(fastjson.loads(key.encode("utf-8", "replace")))
        except ValueError:
            raise _WrongError(f"must be a message queue, got {_shorten(key)}") from None
    return _read_queue(dict(key))


def _write_queue_key(queue: MessageQueue) -> tuple[tuple[str, Any], ...]:
    return tuple(_write_queue(queue).items())


_SCALARS: dict[Any, _Type] = {
    str: _Type(_read_text),
    int: _Type(_read_int),
    float: _Type(_read_float),
    bool: _Type(_read_bool),
    MessageQueue: _Type(_read_queue, _write_queue),
}
_KEYS: dict[Any, _Type] = {
    str: _Type(_read_text),
    int: _Type(_read_int),
    MessageQueue: _Type(_read_queue_key, _write_queue_key),
}


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
