"""JSON as fastjson speaks it, which is how RocketMQ writes its bodies: the key of a map may be a number or an object.

::

    {0:"127.0.0.1:10911"}                                              a map by broker id
    {{"brokerName":"a","queueId":0,"topic":"T"}:{"maxOffset":5}}       a map by message queue

Here a key that is a number reads as its text, as it would with quotes, and one that is an object as a tuple of its
pairs, sorted by name. On the way out an ``int`` is written bare and a tuple of pairs as an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_DEEPEST = 200
_SCALAR = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?|true|false|null")
_BLANKS = re.compile(r"[ \t\r\n]*")
_WORDS = {"true": True, "false": False, "null": None}

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False).encode
_read_standard = json.JSONDecoder(strict=False).raw_decode
_encode_standard = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False).encode


def loads(data: bytes) -> Any:
    """Read a text: standard JSON quickly, the rest with patience.

    Raises:
        ValueError: It is neither, or is nested too deep.
    """
    text = data.decode()
    try:
        value = _load(text)
        if "\\ud" in text or "\\uD" in text:  # maybe half of a character: Java would write a question mark for it
            value = _load(dumps(value).encode("utf-8", "replace").decode())
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc
    return value


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return _Reader(text).read()


def dumps(value: Any) -> str:
    """Write a value as fastjson does. Keys: ``str``, ``int``, or a tuple of pairs."""
    if isinstance(value, dict):
        return "{" + ",".join([f"{_dump_key(key)}:{dumps(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ",".join([dumps(item) for item in value]) + "]"
    return _encode(value)


def dumps_standard(value: Any) -> str:
    """Write a value as any reader takes it: quotes around numbers that are keys, sorted, in ASCII. No tuples."""
    return _encode_standard(value)


def _dump_key(key: Any) -> str:
    return dumps(dict(key)) if isinstance(key, tuple) else _encode(key)


class _Reader:
    """Reads what `json` will not. One pass, each character looked at once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Any:
        value = self._value()
        if self._next() != "":
            raise self._wrong("nothing more")
        return value

    def _next(self) -> str:
        """The next character that is no blank; empty at the end."""
        found = _BLANKS.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        match self._next():
            case "{":
                return self._inside(self._object)
            case "[":
                return self._inside(self._array)
            case '"':
                return self._string()
        found = _SCALAR.match(self._text, self._at)
        if found is None:
            raise self._wrong("a value")
        self._at = found.end()
        whole, part, power = found.groups()
        if whole is None:
            return _WORDS[found[0]]
        return int(whole) if part is None and power is None else float(found[0])

    def _inside(self, read: Callable[[], Any]) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._wrong(f"at most {_DEEPEST} brackets inside each other")
        self._at += 1
        value = read()
        self._depth -= 1
        return value

    def _string(self) -> str:
        text: str
        text, self._at = _read_standard(self._text, self._at)
        return text

    def _object(self) -> dict[Any, Any]:
        pairs: dict[Any, Any] = {}
        if self._next() == "}":
            self._at += 1
            return pairs
        while True:
            key = self._key()
            self._expect(":")
            pairs[key] = self._value()
            if self._ends("}"):
                return pairs

    def _array(self) -> list[Any]:
        items: list[Any] = []
        if self._next() == "]":
            self._at += 1
            return items
        while True:
            items.append(self._value())
            if self._ends("]"):
                return items

    def _key(self) -> Any:
        self._next()
        begin = self._at
        key = self._value()
        if isinstance(key, str):
            return key
        if isinstance(key, dict):
            return tuple(sorted((str(name), _hashable(item)) for name, item in key.items()))
        if isinstance(key, list):
            raise self._wrong("a key")
        return self._text[begin : self._at]

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise self._wrong(repr(character))
        self._at += 1

    def _ends(self, bracket: str) -> bool:
        found = self._next()
        if found not in (",", bracket) or not found:
            raise self._wrong(f"',' or {bracket!r}")
        self._at += 1
        return found == bracket

    def _wrong(self, expected: str) -> ValueError:
        return json.JSONDecodeError(f"expected {expected}", self._text, self._at)


def _hashable(item: Any) -> Any:
    return dumps(item) if isinstance(item, dict | list) else item
