"""Declaration of JSON bodies: a frozen class whose fields state their names and types in the text.

::

    class TopicStatsTable(JsonBody):
        offset_table: dict[MessageQueue, TopicOffset]  # `offsetTable`; required
        topic_put_tps: float = 0.0  # this default stands for a missing field

A field is a ``str``, ``int``, ``bool``, ``float``, another body, a `MessageQueue`, a list of these, or a dict of these
by ``str``, ``int`` or `MessageQueue`; each may be ``| None``. Java's sets are lists here.

As in fastjson, unknown names are ignored, null is the same as missing, and ``"5"`` is accepted for 5. None is left out
of the text, and names are in alphabetical order.

pydantic is somewhat faster (``bench/json_body.py``), but no body is on a hot path. Its rules for numbers, booleans and
null differ from fastjson's, so each of these types would need a validator there as well.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Self, dataclass_transform, get_args, get_origin

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies import fastjson
from mqtemplate.remoting.protocol.headers.fields import declared_fields, wire


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(wire, dataclasses.field))
class JsonBody:
    """Base class of all JSON bodies. A subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def encode(self, *, standard: bool = False) -> bytes:
        """Return the body as text.

        Args:
            standard: Write JSON that any reader accepts: numbers as keys in quotes, everything in ASCII. Not for bodies
                with message queues as keys, which Java reads in fastjson's form only.

        Raises:
            MessageError: A text in it is not valid Unicode, or a number is not finite.
        """
        value = self.to_json()
        try:
            return (fastjson.dumps_standard(value) if standard else fastjson.dumps(value)).encode()
        except ValueError as exc:
            raise MessageError(
                f"this {type(self).__name__} cannot be encoded: {exc}; use text that UTF-8 can encode"
            ) from exc

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the body that *data* contains.

        Raises:
            RemoteProtocolError: *data* is not JSON, or a value has another type; the error names its position.
        """
        try:
            value = fastjson.loads(data)
        except ValueError as exc:
            raise RemoteProtocolError(f"the body is not JSON, a {cls.__name__} was expected: {exc}") from exc
        return cls.from_json(value)

    def to_json(self) -> dict[str, Any]:
        """Return the body as values of JSON, in the forms that `fastjson.dumps` takes."""
        return _write_object(type(self), self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the body that *value* contains: values of JSON, as `fastjson.loads` returns them.

        Raises:
            RemoteProtocolError: A value has another type; the error names its position.
        """
        try:
            read: Self = _read_object(cls, value)
        except _TypeError as exc:
            raise RemoteProtocolError(f"the body is not a {cls.__name__}: {exc}") from exc
        return read


# --- from a declaration to a plan -------------------------------------------------------------------


class _TypeError(Exception):
    """A value has another type. Each level that the error passes adds its part of the path."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text, self.path = text, ""

    def within(self, step: str) -> _TypeError:
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path.removeprefix('.') or 'it'} {self.text}"


def _same(value: Any) -> Any:
    return value


class _Type(NamedTuple):
    """Conversion of one type's values from JSON's values, and to them."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = _same


class _Entry(NamedTuple):
    attribute: str
    name: str
    type: _Type
    required: bool


@cache
def _plan_of(cls: Any) -> list[_Entry]:
    """Return the fields in alphabetical order. The hints are resolved at first use: they may name later classes."""
    missing = dataclasses.MISSING
    plan = [
        _Entry(field.name, name, _type_of(hint), field.default is missing and field.default_factory is missing)
        for field, name, hint in declared_fields(cls)
    ]
    return sorted(plan, key=lambda entry: entry.name)


@cache
def _type_of(hint: Any) -> _Type:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list:
        return _list_of(_type_of(parts[0]))
    if origin is dict:
        return _map_of(_KEYS[parts[0]], _type_of(parts[1]))
    if isinstance(hint, type) and issubclass(hint, JsonBody):
        return _Type(lambda value: _read_object(hint, value), lambda value: _write_object(hint, value))
    return _SCALARS[hint]


def _list_of(item: _Type) -> _Type:
    def read(value: Any) -> list[Any]:
        items = []
        for index, element in enumerate(_checked(value, list, "a list")):
            try:
                if element is not None:
                    items.append(item.read(element))
            except _TypeError as exc:
                raise exc.within(f"[{index}]") from None
        return items

    return _Type(read, lambda items: [item.write(element) for element in items])


def _map_of(key: _Type, item: _Type) -> _Type:
    def read(value: Any) -> dict[Any, Any]:
        pairs = {}
        for name, element in _checked(value, dict, "an object").items():
            try:
                if element is not None:
                    pairs[key.read(name)] = item.read(element)
            except _TypeError as exc:
                raise exc.within(f"[{_shorten(name)}]") from None
        return pairs

    return _Type(read, lambda pairs: {key.write(name): item.write(element) for name, element in pairs.items()})


def _checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise _TypeError(f"must be {name}, got {_shorten(value)}")
    return value


# --- values -----------------------------------------------------------------------------------------


def _read_object(cls: Any, value: Any) -> Any:
    pairs = _checked(value, dict, "an object")
    arguments = {}
    for entry in _plan_of(cls):
        element = pairs.get(entry.name)
        if element is None:
            if entry.required:
                raise _TypeError("is missing").within(f".{entry.name}")
            continue
        try:
            arguments[entry.attribute] = entry.type.read(element)
        except _TypeError as exc:
            raise exc.within(f".{entry.name}") from None
    return cls(**arguments)


def _write_object(cls: Any, instance: JsonBody) -> dict[str, Any]:
    pairs = {}
    for entry in _plan_of(cls):
        value = getattr(instance, entry.attribute)
        if value is not None:
            pairs[entry.name] = entry.type.write(value)
    return pairs


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return fastjson.dumps(value)
    raise _TypeError(f"must be a text, got {_shorten(value)}")


def _read_int(value: Any) -> int:
    number = value
    if isinstance(value, str | float):
        try:
            number = int(value)
        except (ValueError, OverflowError):
            raise _TypeError(f"must be a number, got {_shorten(value)}") from None
    if isinstance(number, int) and not isinstance(number, bool) and -(1 << 63) <= number < 1 << 63:
        return number
    raise _TypeError(f"must be a number of 64 bits, got {_shorten(value)}")


def _read_float(value: Any) -> float:
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except (ValueError, OverflowError):
        pass  # refused below
    raise _TypeError(f"must be a number, got {_shorten(value)}")


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _TypeError(f"must be true or false, got {_shorten(value)}")


def _read_queue(value: Any) -> MessageQueue:
    queue = _checked(value, Mapping, "a message queue")
    try:
        return MessageQueue(_read_text(queue["topic"]), _read_text(queue["brokerName"]), _read_int(queue["queueId"]))
    except KeyError as exc:
        raise _TypeError(f"must be a message queue with topic, brokerName and queueId, {exc} is missing") from None


def _write_queue(queue: MessageQueue) -> dict[str, Any]:
    return {"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic}


def _read_queue_key(key: Any) -> MessageQueue:
    """Return the queue of an object as a key, or of an object in quotes, as writers of standard JSON need it."""
    if isinstance(key, str):
        try:
            return _read_queue(fastjson.loads(key.encode("utf-8", "replace")))
        except ValueError:
            raise _TypeError(f"must be a message queue, got {_shorten(key)}") from None
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
_KEYS = _SCALARS | {MessageQueue: _Type(_read_queue_key, _write_queue_key)}


def _shorten(value: Any) -> str:
    # A value with many or nested items is not written out: that takes long, or exceeds Python's limit of recursion.
    text = reprlib.repr(value) if isinstance(value, dict | list | tuple) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
