"""Encoded properties with a gap for the message id, and properties that a broker adds without decoding the others.

Most producers send the same properties again and again, but for the message id and the keys. ``|`` are the ends of the
gaps, ``01`` and ``02`` the separators of a record::

    UNIQ_KEY 01 |7F000001A1| 02 WAIT 01 true 02 TAGS 01 paid 02 KEYS 01 |order-1| 02
    ^ front                  ^ between                                            ^ back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mqtemplate.hashes import tags_code
from mqtemplate.message import SPECIAL_PROPERTIES, Property
from mqtemplate.record.properties import (
    KEYS,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
)

_NEED_DECODING = SPECIAL_PROPERTIES | {Property.TRANSACTION_PREPARED}
_UNKNOWN: Any = object()
_ID_FRONT = PROPERTY_SEPARATOR + UNIQ_KEY + NAME_VALUE_SEPARATOR
_KEYS_FRONT = PROPERTY_SEPARATOR + KEYS + NAME_VALUE_SEPARATOR


@dataclass(frozen=True, slots=True)
class PropertiesTemplate:
    """Encoded properties of many messages: all of their bytes but the message id, and perhaps the keys.

    Attributes:
        front, back: The bytes before the first gap and after the last one.
        between: The bytes between two gaps.
        has_keys_first: The keys are before the message id.
    """

    front: bytes
    back: bytes
    between: bytes = b""
    has_keys_first: bool = False

    @classmethod
    def around(cls, encoded: bytes, *values: bytes, has_keys_first: bool = False) -> PropertiesTemplate | None:
        """Return the template that has gaps where *values* are, one or two; None if one does not occur exactly once.

        An id that occurs twice, for instance in the keys as well, has no single gap: the next message would get the
        id of this one there.
        """
        parts: list[bytes] = []
        for value in values:
            if encoded.count(value) != 1:
                return None
            part, _, encoded = encoded.partition(value)
            parts.append(part)
        return cls(parts[0], encoded, b"".join(parts[1:]), has_keys_first)

    @classmethod
    def appending(cls, encoded: bytes) -> PropertiesTemplate:
        """Return the template that adds the message id after *encoded*, which end with a separator or are empty."""
        return cls(encoded + UNIQ_KEY + NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR)

    @property
    def id_at(self) -> int:
        """Start of the message id in the encoded properties, if there is no gap for keys."""
        return len(self.front)

    def fill(self, unique_id: bytes, keys: bytes = b"") -> bytes:
        """Return the encoded properties of a message. A template has a gap for keys if and only if *keys* are given."""
        if not keys:
            return self.front + unique_id + self.back  # three parts are added faster than joined
        first, second = (keys, unique_id) if self.has_keys_first else (unique_id, keys)
        return b"".join((self.front, first, self.between, second, self.back))

    def id_in(self, encoded: bytes) -> bytes:
        """Return the id in properties that differ from this template in nothing else; empty without one."""
        front, back = self.front, self.back
        if encoded.startswith(front) and encoded.endswith(back):
            unique_id = encoded[len(front) : len(encoded) - len(back)]
            if unique_id.isalnum():  # ASCII, and no separator: so the gap has one value, and no property more
                return unique_id
        return b""


class CompleteProperties(NamedTuple):
    """Encoded properties of an ordinary message: without a delay, and not in a transaction.

    Attributes:
        encoded: With those that the broker adds.
        tags_code: Value for the consume queue unit.
    """

    encoded: bytes
    tags_code: int
    unique_id: str


class AddedProperties:
    """The properties that a broker adds to a message. What only a broker may set needs decoding.

    Properties without message id and keys are decoded once; the next ones that are equal but for these two need no
    decoding. Thread-safe.

    Args:
        added: The properties that the broker adds.
        decodes_all: Decode all properties: the fast path is off.
        max_known: Above this number of known texts all are forgotten.
    """

    def __init__(self, added: Mapping[str, str], *, decodes_all: bool = False, max_known: int = 1_000) -> None:
        self._added = added
        self._suffix = encode_properties(added)
        self._decodes_all = decodes_all
        self._max_known = max_known
        self._tags_codes: dict[
            bytes, int | None
        ] = {}  # text without id and keys -> tags code; None: decode such a text
        # The last text without keys, and its tags code: one tuple, since another thread may replace it meanwhile.
        # At first one that matches properties which are a message id, or none at all if all are decoded.
        first = PropertiesTemplate(b"\2\2", b"\2\2") if decodes_all else PropertiesTemplate.appending(b"")
        self._last = (first, tags_code(None))

    def complete(self, properties: dict[str, str]) -> dict[str, str]:
        """Complete decoded properties, and return them."""
        properties.update(self._added)
        return properties

    def complete_text(self, text: str | None) -> CompleteProperties | None:
        """Do the same as `complete_encoded` for the text of a request header."""
        return self.complete_encoded(text.encode()) if text and text.isascii() else None

    def complete_encoded(self, data: bytes) -> CompleteProperties | None:
        """Return what encoding `complete` of the decoded properties would return; None if they must be decoded."""
        template, code = self._last
        unique_id = template.id_in(data)
        if unique_id:
            return CompleteProperties(data + self._suffix, code, unique_id.decode())
        return None if self._decodes_all else self._complete_new(data)

    def _complete_new(self, data: bytes) -> CompleteProperties | None:
        """Do the same for properties that differ from the last ones in more than the message id."""
        if not data.isascii():  # only of ASCII it is known that decoding and encoding changes nothing
            return None
        if not data.endswith(PROPERTY_SEPARATOR):  # Java writes one at the end, clients of other languages do not
            data += PROPERTY_SEPARATOR
        text = PROPERTY_SEPARATOR + data  # so that a name is found as a whole: XKEYS is not KEYS
        id_at = text.find(_ID_FRONT) + len(_ID_FRONT)
        if id_at < len(_ID_FRONT):
            return None
        id_end = text.find(PROPERTY_SEPARATOR, id_at)
        unique_id, rest = text[id_at:id_end], text[:id_at] + text[id_end:]
        values = unique_id
        keys_at = rest.find(_KEYS_FRONT) + len(_KEYS_FRONT)
        if keys_at >= len(_KEYS_FRONT):
            keys_end = rest.find(PROPERTY_SEPARATOR, keys_at)
            values += rest[keys_at:keys_end]
            rest = rest[:keys_at] + rest[keys_end:]
            if keys_at == keys_end:
                return None
        if not unique_id or NAME_VALUE_SEPARATOR in values:
            return None
        code = self._tags_codes.get(rest, _UNKNOWN)
        if code is _UNKNOWN:
            code = self._learn(rest, data)
        if code is None:
            return None
        if values is unique_id:  # without keys: *data* is *text* without its first byte
            self._last = (PropertiesTemplate(data[: id_at - 1], data[id_end - 1 :]), code)
        return CompleteProperties(data + self._suffix, code, unique_id.decode())

    def _learn(self, rest: bytes, data: bytes) -> int | None:
        """Decode new properties, and keep what holds for all that are equal but for message id and keys."""
        properties = self.complete(decode_properties(data))
        is_ordinary = _NEED_DECODING.isdisjoint(properties)
        # They differ if a name occurs twice, has no value, or is one that the broker sets.
        is_regular = encode_properties(properties) == data + self._suffix
        code = tags_code(properties.get(Property.TAGS)) if is_ordinary and is_regular else None
        if len(self._tags_codes) >= self._max_known:
            self._tags_codes.clear()
        self._tags_codes[rest] = code
        return code
