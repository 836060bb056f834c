"""Properties of sent messages, with those that the broker adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mqtemplate.brokers.embedded.draft import SPECIAL_PROPERTIES
from mqtemplate.hashes import tags_code
from mqtemplate.message import Property
from mqtemplate.record.properties import (
    KEYS,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
)

_NEED_DECODING = SPECIAL_PROPERTIES | {Property.TRANSACTION_PREPARED}
_MAX_FORMS = 1_000
_UNKNOWN: Any = object()
_ID_FRONT = PROPERTY_SEPARATOR + UNIQ_KEY + NAME_VALUE_SEPARATOR
_KEYS_FRONT = PROPERTY_SEPARATOR + KEYS + NAME_VALUE_SEPARATOR


class CompleteProperties(NamedTuple):
    """Encoded properties of an ordinary message: without a delay, and not in a transaction.

    Attributes:
        encoded: With those that the broker adds.
        tags_code: Value for the consume queue unit.
    """

    encoded: bytes
    tags_code: int
    unique_id: str


class SentProperties:
    """Adds the properties that a broker adds. Messages with properties that only a broker may set need decoding.

    Most producers send the same properties again and again, but for the message id and the keys. Such a *form* is
    decoded once; the next text of this form needs no decoding. Thread-safe.

    Args:
        added: The properties that the broker adds.
    """

    def __init__(self, added: Mapping[str, str]) -> None:
        self._added = added
        self._suffix = encode_properties(added)
        self._forms: dict[bytes, int | None] = {}  # text without id and keys -> tags code; None: decode such a text
        # The last text that had no keys: what is before its id, what is after it and its length, its tags code.
        self._last: tuple[bytes, bytes, int, int] = (b"\0", b"\0", 1, 0)

    def complete(self, properties: dict[str, str]) -> dict[str, str]:
        """Complete decoded properties, and return them."""
        properties.update(self._added)
        return properties

    def complete_text(self, text: str | None) -> CompleteProperties | None:
        """Do the same as `complete_encoded` for the text of a request header."""
        return self.complete_encoded(text.encode()) if text and text.isascii() else None

    def complete_encoded(self, data: bytes) -> CompleteProperties | None:
        """Return what encoding `complete` of the decoded properties would return; None if they must be decoded."""
        front, back, back_length, code = self._last
        if data.startswith(front) and data.endswith(back):
            unique_id = data[len(front) : len(data) - back_length]
            if unique_id.isalnum():  # ASCII, and no separator
                return CompleteProperties(data + self._suffix, code, unique_id.decode())
        return self._complete_new(data)

    def _complete_new(self, data: bytes) -> CompleteProperties | None:
        """Do the same for properties that differ from the last ones in more than the message id."""
        if not data.isascii():  # only of ASCII it is known that decoding and encoding changes nothing
            return None
        if not data.endswith(PROPERTY_SEPARATOR):
            data += PROPERTY_SEPARATOR
        text = PROPERTY_SEPARATOR + data
        id_at = text.find(_ID_FRONT) + len(_ID_FRONT)
        if id_at < len(_ID_FRONT):
            return None
        id_end = text.find(PROPERTY_SEPARATOR, id_at)
        unique_id, form = text[id_at:id_end], text[:id_at] + text[id_end:]
        values = unique_id
        keys_at = form.find(_KEYS_FRONT) + len(_KEYS_FRONT)
        if keys_at >= len(_KEYS_FRONT):
            keys_end = form.find(PROPERTY_SEPARATOR, keys_at)
            values += form[keys_at:keys_end]
            form = form[:keys_at] + form[keys_end:]
            if keys_at == keys_end:
                return None
        if not unique_id or NAME_VALUE_SEPARATOR in values:
            return None
        code = self._forms.get(form, _UNKNOWN)
        if code is _UNKNOWN:
            code = self._learn(form, data)
        if code is None:
            return None
        if values is unique_id:
            back = data[id_end - 1 :]  # *data* is *text* without its first byte
            self._last = (data[: id_at - 1], back, len(back), code)
        return CompleteProperties(data + self._suffix, code, unique_id.decode())

    def _learn(self, form: bytes, data: bytes) -> int | None:
        """Decode properties of a new form, and keep what holds for all of this form."""
        properties = self.complete(decode_properties(data))
        is_ordinary = _NEED_DECODING.isdisjoint(properties)
        # They differ if a name occurs twice, has no value, or is one that the broker sets.
        is_regular = encode_properties(properties) == data + self._suffix
        code = tags_code(properties.get(Property.TAGS)) if is_ordinary and is_regular else None
        if len(self._forms) >= _MAX_FORMS:
            self._forms.clear()
        self._forms[form] = code
        return code
