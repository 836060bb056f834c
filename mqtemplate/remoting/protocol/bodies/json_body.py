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

The text is in fastjson's dialect of JSON, in which the key of a map may be a number or an object.

::

    {0:"127.0.0.1:10911"}                                              a map by broker id
    {{"brokerName":"a","queueId":0,"topic":"T"}:{"maxOffset":5}}       a map by message queue

Reading: a number as a key becomes its text, the same as a number in quotes, and an object as a key becomes a tuple of
its pairs, sorted by name. Writing: an ``int`` as a key has no quotes, and a tuple of pairs becomes an object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import itemgetter
from threading import RLock
from typing import Any, NamedTuple, Self, TypeVar, dataclass_transform, get_args, get_origin

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.headers.fields import declared_fields, wire
from mqtemplate.remoting.protocol.json_header import shorten

# --- fastjson's dialect ---------------------------------------------------------------------------


_T = TypeVar("_T")

_MAX_DEPTH = 200
_BLANKS = re.compile(r"[ \t\r\n]*")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False).encode
_read_standard = json.JSONDecoder(strict=False).raw_decode
_encode_standard = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False).encode


def loads(data: bytes) -> Any:
    """Return the value of a text in standard JSON, or else in fastjson's dialect.

    Raises:
        ValueError: The text is neither, or is nested too deep.
    """
    text = data.decode()
    try:
        value = _load(text)
        # A lone surrogate could never be encoded again. It becomes a question mark, which Java writes for it as well.
        if "\\ud" in text or "\\uD" in text:
            value = _load(dumps(value).encode("utf-8", "replace").decode())
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc
    return value


def _load(text: str) -> Any:
    try:
        return json.loads(text)  # much faster than `_DialectReader`, and sufficient for most texts
    except ValueError:
        return _DialectReader(text).read()


def dumps(value: Any) -> str:
    """Return a value in fastjson's dialect. A key is a ``str``, an ``int``, or a tuple of pairs."""
    if isinstance(value, dict):
        return "{" + ",".join([f"{_dump_key(key)}:{dumps(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ",".join([dumps(item) for item in value]) + "]"
    return _encode(value)


def dumps_standard(value: Any) -> str:
    """Return a value without tuples in standard JSON: numbers as keys in quotes, keys sorted, in ASCII."""
    return _encode_standard(value)


def _dump_key(key: Any) -> str:
    return dumps(dict(key)) if isinstance(key, tuple) else _encode(key)


class _DialectReader:
    """Reader of the dialect, in one pass; `json` reads the scalars."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Any:
        value = self._value()
        if self._next() != "":
            raise self._error("nothing more")
        return value

    def _next(self) -> str:
        """Skip blanks and return the next character, without consuming it; return "" at the end."""
        found = _BLANKS.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        match self._next():
            case "{":
                return dict(self._items("}", self._pair))
            case "[":
                return list(self._items("]", self._value))
        value, self._at = _read_standard(self._text, self._at)
        return value

    def _items(self, bracket: str, read: Callable[[], _T]) -> Iterator[_T]:
        """Yield what *read* returns for each item up to the closing *bracket*."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} nested brackets")
        self._at += 1
        if self._next() != bracket:
            yield read()
            while self._next() != bracket:
                self._expect(",")
                yield read()
        self._at += 1
        self._depth -= 1

    def _pair(self) -> tuple[Any, Any]:
        key = self._key()
        self._expect(":")
        return key, self._value()

    def _key(self) -> Any:
        self._next()
        start = self._at
        key = self._value()
        if isinstance(key, str):
            return key
        if isinstance(key, dict):
            return tuple(sorted(((str(name), _hashable(item)) for name, item in key.items()), key=itemgetter(0)))
        if isinstance(key, list):
            raise self._error("a key")
        return self._text[start : self._at]

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise self._error(repr(character))
        self._at += 1

    def _error(self, expected: str) -> ValueError:
        return json.JSONDecodeError(f"expected {expected}", self._text, self._at)


def _hashable(item: Any) -> Any:
    return dumps(item) if isinstance(item, dict | list) else item


# --- bodies ---------------------------------------------------------------------------------------


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(wire, dataclasses.field))
class JsonBody:
    """Base class of all JSON bodies. A subclass is a frozen dataclass from its first use on, see `complete`."""

    def __new__(cls, *_values: object, **_named: object) -> Self:
        complete(cls)
        return super().__new__(cls)

    @classmethod
    def complete_declaration(cls) -> None:
        """Make the class a dataclass, unless it is one."""
        complete(cls)

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
            return (dumps_standard(value) if standard else dumps(value)).encode()
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
            value = loads(data)
        except ValueError as exc:
            raise RemoteProtocolError(f"the body is not JSON, a {cls.__name__} was expected: {exc}") from exc
        return cls.from_json(value)

    def to_json(self) -> dict[str, Any]:
        """Return the body as values of JSON, in the forms that `dumps` takes."""
        return _write_object(type(self), self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the body that *value* contains: values of JSON, as `loads` returns them.

        Raises:
            RemoteProtocolError: A value has another type; the error names its position.
        """
        try:
            read: Self = _read_object(cls, value)
        except _TypeError as exc:
            raise RemoteProtocolError(f"the body is not a {cls.__name__}: {exc}") from exc
        return read


# --- from a declaration to a plan -------------------------------------------------------------------

_complete: set[type[JsonBody]] = set()
_completing = RLock()  # one body may name another


def complete(cls: type[JsonBody]) -> None:
    """Make a declared body a dataclass, unless that is done.

    It happens at the first use of a class, as for headers: a program uses a tenth of them, and all take a tenth of its
    start.
    """
    if cls in _complete:
        return
    with _completing:
        if cls in _complete:
            return
        for base in cls.__bases__:
            if issubclass(base, JsonBody) and base is not JsonBody:
                complete(base)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        _complete.add(cls)


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


class _BodyField(NamedTuple):
    attribute: str
    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    default: Callable[[], Any] | None  # None: the field is required


@cache
def _plan_of(cls: Any) -> list[_BodyField]:
    """Return the fields in alphabetical order. The hints are resolved at first use: they may name later classes."""
    plan = [
        _BodyField(field.name, name, *_type_of(hint), _default_of(field)) for field, name, hint in declared_fields(cls)
    ]
    return sorted(plan, key=lambda entry: entry.name)


def _default_of(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return None if field.default is dataclasses.MISSING else lambda: field.default


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
                raise exc.within(f"[{shorten(name)}]") from None
        return pairs

    return _Type(read, lambda pairs: {key.write(name): item.write(element) for name, element in pairs.items()})


def _checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise _TypeError(f"must be {name}, got {shorten(value)}")
    return value


# --- values -----------------------------------------------------------------------------------------


def _read_object(cls: Any, value: Any) -> Any:
    pairs = _checked(value, dict, "an object")
    instance = object.__new__(cls)
    # Straight into the dictionary: the frozen class refuses `instance.name = ...`, and its constructor takes longer. A
    # heartbeat may have hundreds of objects, and all threads share the interpreter with the one that reads it.
    fields = instance.__dict__
    for attribute, name, read, _, default in _plan_of(cls):
        element = pairs.get(name)
        if element is not None:
            try:
                fields[attribute] = read(element)
            except _TypeError as exc:
                raise exc.within(f".{name}") from None
        elif default is not None:
            fields[attribute] = default()
        else:
            raise _TypeError("is missing").within(f".{name}")
    return instance


def _write_object(cls: Any, instance: JsonBody) -> dict[str, Any]:
    pairs = {}
    for entry in _plan_of(cls):
        value = getattr(instance, entry.attribute)
        if value is not None:
            pairs[entry.name] = entry.write(value)
    return pairs


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return dumps(value)
    raise _TypeError(f"must be a text, got {shorten(value)}")


def _read_int(value: Any) -> int:
    number = value
    if isinstance(value, str | float):
        try:
            number = int(value)
        except (ValueError, OverflowError):
            raise _TypeError(f"must be a number, got {shorten(value)}") from None
    if isinstance(number, int) and not isinstance(number, bool) and -(1 << 63) <= number < 1 << 63:
        return number
    raise _TypeError(f"must be a number of 64 bits, got {shorten(value)}")


def _read_float(value: Any) -> float:
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except (ValueError, OverflowError):
        pass  # refused below
    raise _TypeError(f"must be a number, got {shorten(value)}")


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _TypeError(f"must be true or false, got {shorten(value)}")


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
            return _read_queue(loads(key.encode("utf-8", "replace")))
        except ValueError:
            raise _TypeError(f"must be a message queue, got {shorten(key)}") from None
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
