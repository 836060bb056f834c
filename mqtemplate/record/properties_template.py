"""Encoded properties with a gap for the message id, and properties that a broker adds without decoding the others.

Most producers send the same properties again and again, but for the message id, the keys and the sharding key. ``|``
are the ends of the gaps, ``01`` and ``02`` the separators of a record::

    UNIQ_KEY 01 |7F000001A1| 02 WAIT 01 true 02 TAGS 01 paid 02 KEYS 01 |order-1| 02
    ^ front                  ^ after the first value                              ^ back
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mqtemplate.hashes import tags_code
from mqtemplate.message import SPECIAL_PROPERTIES, Property
from mqtemplate.record.properties import (
    KEYS,
    NAME_VALUE_SEPARATOR,
    PRIORITY_PROPERTY,
    PROPERTY_SEPARATOR,
    SHARDING_KEY,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
)

_NEED_DECODING = SPECIAL_PROPERTIES | {Property.TRANSACTION_PREPARED, PRIORITY_PROPERTY}
_UNKNOWN: Any = object()
_ID_FRONT = PROPERTY_SEPARATOR + UNIQ_KEY + NAME_VALUE_SEPARATOR
_OTHER_FRONTS = tuple(PROPERTY_SEPARATOR + name + NAME_VALUE_SEPARATOR for name in (KEYS, SHARDING_KEY))


class PropertiesTemplate(NamedTuple):
    """Encoded properties of many messages: all of their bytes but the message id, and perhaps two other values.

    Attributes:
        front, back: The bytes before the first gap and after the last one.
        gaps: With other values: the number of the value in each gap, as `fill` takes them, and the bytes after it.
    """

    front: bytes
    back: bytes
    gaps: tuple[tuple[int, bytes], ...] = ()

    @classmethod
    def around(cls, encoded: bytes, unique_id: bytes, *others: bytes) -> PropertiesTemplate | None:
        """Return the template that has gaps where the values are; None if one does not occur exactly once.

        An id that occurs twice, for instance in the keys as well, has no single gap: the next message would get the
        id of this one there.

        Args:
            others: See `fill`.
        """
        starts: dict[int, int] = {}  # of the value with this number
        values = unique_id, *others
        for number, value in enumerate(values):
            if value or not number:
                if encoded.count(value) != 1:
                    return None
                starts[number] = encoded.index(value)
        in_order = sorted(starts, key=starts.__getitem__)
        ends = [*(starts[number] for number in in_order[1:]), len(encoded)]
        gaps = tuple(
            (number, encoded[starts[number] + len(values[number]) : end])
            for number, end in zip(in_order, ends, strict=True)
        )
        return cls(encoded[: starts[in_order[0]]], gaps[-1][1], gaps if len(gaps) > 1 else ())

    @classmethod
    def appending(cls, encoded: bytes) -> PropertiesTemplate:
        """Return the template that adds the message id after *encoded*, which end with a separator or are empty."""
        return cls(encoded + UNIQ_KEY + NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR)

    @property
    def id_at(self) -> int:
        """Start of the message id in the encoded properties, if there is no other gap."""
        return len(self.front)

    def fill(self, *values: bytes) -> bytes:
        """Return the encoded properties of a message.

        Args:
            values: The message id, the keys, the sharding key: those without a gap are empty or left out.
        """
        if not self.gaps:
            return self.front + values[0] + self.back  # three parts are added faster than joined
        parts = [self.front]
        for number, after in self.gaps:
            parts += values[number], after
        return b"".join(parts)

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

    Properties without message id, keys and sharding key are decoded once; the next ones that are equal but for these
    need no decoding. Thread-safe.

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
        ] = {}  # text without the values that differ -> tags code; None: decode such a text
        # The last text without keys and sharding key, and its tags code: one tuple, since another thread may replace
        # it. At first one that matches properties which are a message id, or none at all if all are decoded.
        first = PropertiesTemplate(b"\2\2", b"\2\2") if decodes_all else PropertiesTemplate.appending(b"")
        self._last = (first, tags_code(None))

    def complete(self, properties: dict[str, str]) -> dict[str, str]:
        """Complete decoded properties, and return them."""
        properties.update(self._added)
        return properties

    def complete_plain(self, encoded: bytes, unique_id: str, tag: str) -> CompleteProperties:
        """Complete encoded properties of an ordinary message that this process encoded itself: nothing is checked."""
        return CompleteProperties(encoded + self._suffix, tags_code(tag), unique_id)

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
        for front in _OTHER_FRONTS:
            at = rest.find(front) + len(front)
            if at >= len(front):
                end = rest.find(PROPERTY_SEPARATOR, at)
                if at == end:
                    return None
                values += rest[at:end]
                rest = rest[:at] + rest[end:]
        if not unique_id or NAME_VALUE_SEPARATOR in values:
            return None
        code = self._tags_codes.get(rest, _UNKNOWN)
        if code is _UNKNOWN:
            code = self._learn(rest, data)
        if code is None:
            return None
        if values is unique_id:  # without others: *data* is *text* without its first byte
            self._last = (PropertiesTemplate(data[: id_at - 1], data[id_end - 1 :]), code)
        return CompleteProperties(data + self._suffix, code, unique_id.decode())

    def _learn(self, rest: bytes, data: bytes) -> int | None:
        """Decode new properties, and keep what holds for all that differ in the same values only."""
        properties = self.complete(decode_properties(data))
        is_ordinary = _NEED_DECODING.isdisjoint(properties)
        # They differ if a name occurs twice, has no value, or is one that the broker sets.
        is_regular = encode_properties(properties) == data + self._suffix
        code = tags_code(properties.get(Property.TAGS)) if is_ordinary and is_regular else None
        if len(self._tags_codes) >= self._max_known:
            self._tags_codes.clear()
        self._tags_codes[rest] = code
        return code
