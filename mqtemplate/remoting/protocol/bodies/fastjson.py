"""fastjson's dialect of JSON, in which RocketMQ writes its bodies: the key of a map may be a number or an object.

::

    {0:"127.0.0.1:10911"}                                              a map by broker id
    {{"brokerName":"a","queueId":0,"topic":"T"}:{"maxOffset":5}}       a map by message queue

Reading: a number as a key becomes its text, the same as a number in quotes, and an object as a key becomes a tuple of
its pairs, sorted by name. Writing: an ``int`` as a key has no quotes, and a tuple of pairs becomes an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, TypeVar

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
        return json.loads(text)  # much faster than `_Reader`, and sufficient for most texts
    except ValueError:
        return _Reader(text).read()


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


class _Reader:
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
