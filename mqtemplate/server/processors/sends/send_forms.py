"""Headers of sends that are read without decoding them, because one of the same form was decoded before.

The headers of a producer mostly differ in few values: queue ID, time of birth, message id, business keys and opaque.
The header of a batch may have no id, since brokers 4.x would give it to each message. What remains without these values
is the *form* of a header. It determines all decisions about the message; they are taken once for each form: it is
decoded with other values in these places, which proves that they are the values of these fields. A header with an
unknown form, or with an unusual value, is decoded as any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.message import Property
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.json_header import decode_json_header
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.server.processors.sends.sent_properties import CompleteProperties, SentProperties
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_CODES = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_MAX_FORMS = 1_000
_MAX_FORMS_PER_CONNECTION = 4
_MAX_ATTEMPTS = 16
_ATTEMPT_INTERVAL = 1_000
"""A producer that sends another property in each message has a new form each time: most of these are not inspected."""

# In the order of `SendForm.groups`: what is before a value, the value, and what is after it. Numbers have fewer digits
# than would fit into their fields. Keys have bytes only that are equal in JSON and in a record, and that end no value.
_VALUES = {
    "queue_id": (rb'(?<="e":")', rb"[0-9]{1,9}", rb'(?=")'),
    "born": (rb'(?<="g":")', rb"[0-9]{1,18}", rb'(?=")'),
    "unique_id": (rb"(?<=UNIQ_KEY\\u0001)", rb"[0-9A-Za-z]+", rb'(?=\\u0002|")'),
    "opaque": (rb'(?<="opaque":)', rb"[0-9]{1,9}", rb"(?=[,}])"),
    "keys": (rb"(?<=KEYS\\u0001)", rb"[ !#-\[\]-~]+", rb"(?=\\u0002)"),
}
_FIND = re.compile(
    b"|".join(b"%b(?P<%b>%b)%b" % (front, name.encode(), value, back) for name, (front, value, back) in _VALUES.items())
)
_ALWAYS = {"queue_id", "born", "opaque"}
_PROBES = {
    "queue_id": b"123456789",
    "born": b"987654321987",
    "unique_id": b"0FORM0ID0",
    "opaque": b"234567891",
    "keys": b"1FORM1KEYS1",
}

_Key = tuple[bytes | str, ...]
"""The parts of a header, and between them the names of its values."""


@dataclass(frozen=True, slots=True)
class SendForm:
    """Common part of all sends of one form. Their messages are ordinary: without a delay, not in a transaction.

    What a batch contains is in its body: of its header only topic, sys flag and reconsume times count.

    Attributes:
        pattern: Matches the headers of this form.
        groups: Its groups in the order of queue ID, time of birth, message id, opaque and, if the form has them, keys.
            The message id is empty for the batches of a producer that gives them none.
        properties: Encoded properties, with those that the broker adds: the parts around message id and keys. Empty for
            batches.
        has_keys_first: The keys are before the message id.
    """

    pattern: re.Pattern[bytes]
    groups: tuple[int, ...]
    topic: str
    properties: tuple[bytes, ...]
    has_keys_first: bool
    tags_code: int
    flag: int
    sys_flag: int
    reconsume_times: int
    is_batch: bool

    def encode(self, unique_id: bytes, keys: list[bytes]) -> bytes:
        """Return the encoded properties of a message."""
        parts = self.properties
        if not keys:
            return b"".join((parts[0], unique_id, parts[1]))
        first, second = (keys[0], unique_id) if self.has_keys_first else (unique_id, keys[0])
        return b"".join((parts[0], first, parts[1], second, parts[2]))


class SendForms:
    """The known forms of all connections. Their number is limited: above the limit all are forgotten."""

    def __init__(self, properties: SentProperties) -> None:
        self._properties = properties
        self._forms: dict[_Key, SendForm | None] = {}

    def find(self, header: bytes, seen: set[int]) -> SendForm | None:
        """Return the form of *header*; None if it has to be decoded.

        Args:
            seen: Hashes of forms, to which an unknown form is added. It is decoded when it occurs the second time.
        """
        key = _key_of(header)
        if key is None:
            return None
        if key not in self._forms:
            if hash(key) not in seen:
                seen.add(hash(key))
                return None
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[key] = self._decode(key)
        return self._forms[key]

    def _decode(self, key: _Key) -> SendForm | None:
        """Decode a header with the values of `_PROBES`. Return None if it is not that of an ordinary message."""
        try:
            command = decode_json_header(b"".join(_PROBES[part] if isinstance(part, str) else part for part in key))
            if command.code not in _CODES or command.is_response or command.is_one_way:
                return None
            sent = command.header(SendMessageRequestHeaderV2)
        except RemoteProtocolError:
            return None
        numbers = (sent.queue_id, sent.born_timestamp, command.opaque)
        if numbers != tuple(int(_PROBES[name]) for name in ("queue_id", "born", "opaque")):
            return None
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            return None
        if sent.batch or command.code == RequestCode.SEND_BATCH_MESSAGE:
            return _batch_form(key, sent)
        complete = self._properties.complete_text(sent.properties)
        return None if complete is None else _message_form(key, sent, complete)


class ConnectionForms:
    """The forms of the headers that one connection sent last."""

    def __init__(self, forms: SendForms) -> None:
        self._all = forms
        self._forms: list[SendForm] = []
        self._seen: set[int] = set()
        self._misses = 0

    def match(self, header: bytes) -> tuple[SendForm, tuple[bytes, ...]] | None:
        """Return the form of a header in JSON and its values, see `SendForm.groups`; None if it has to be decoded."""
        for form in self._forms:
            found = form.pattern.fullmatch(header)
            if found is not None:
                if form is not self._forms[0]:
                    self._use(form)
                return form, found.group(*form.groups)
        return self._match_new(header)

    def _match_new(self, header: bytes) -> tuple[SendForm, tuple[bytes, ...]] | None:
        self._misses += 1
        if self._misses > _MAX_ATTEMPTS and self._misses % _ATTEMPT_INTERVAL:
            return None
        form = self._all.find(header, self._seen)
        found = None if form is None else form.pattern.fullmatch(header)
        if form is None or found is None:
            return None
        self._misses = 0
        self._seen.clear()
        self._use(form)
        return form, found.group(*form.groups)

    def _use(self, form: SendForm) -> None:
        """Try this form first."""
        self._forms = [form, *(other for other in self._forms if other is not form)][:_MAX_FORMS_PER_CONNECTION]


def _key_of(header: bytes) -> _Key | None:
    """Return the key of a header; None if a value is missing, unusual, or there twice."""
    parts: list[bytes | str] = []
    at = 0
    for found in _FIND.finditer(header):
        assert found.lastgroup is not None
        parts += header[at : found.start()], found.lastgroup
        at = found.end()
    names = parts[1::2]
    if len(set(names)) < len(names) or not _ALWAYS.issubset(names):
        return None
    return (*parts, header[at:])


def _batch_form(key: _Key, sent: SendMessageRequestHeaderV2) -> SendForm | None:
    """Return the form of the header of a batch; None if its id, or that it has none, is not known from the key."""
    probe = _PROBES["unique_id"].decode() if "unique_id" in _names(key) else None
    if decode_properties_text(sent.properties).get(Property.UNIQ_KEY) != probe:
        return None
    return _form(key, sent, is_batch=True)


def _message_form(key: _Key, sent: SendMessageRequestHeaderV2, complete: CompleteProperties) -> SendForm | None:
    """Return the form of the header of a message; None if its properties do not have the values of `_PROBES`."""
    names = [name for name in _names(key) if name in ("unique_id", "keys")]
    parts = tuple(_split(complete.encoded, [_PROBES[name] for name in names]))
    if complete.unique_id.encode() != _PROBES["unique_id"] or len(parts) != len(names) + 1:
        return None
    return _form(key, sent, parts, has_keys_first=names[0] == "keys", tags_code=complete.tags_code)


def _form(
    key: _Key,
    sent: SendMessageRequestHeaderV2,
    properties: tuple[bytes, ...] = (),
    *,
    has_keys_first: bool = False,
    tags_code: int = 0,
    is_batch: bool = False,
) -> SendForm:
    names = _names(key)
    values = [name for name in _VALUES if name in names or name == "unique_id"]
    return SendForm(
        pattern=_pattern_of(key),
        groups=tuple(1 + (names.index(name) if name in names else len(names)) for name in values),
        topic=sent.topic,
        properties=properties,
        has_keys_first=has_keys_first,
        tags_code=tags_code,
        flag=sent.flag,
        sys_flag=sent.sys_flag,
        reconsume_times=sent.reconsume_times or 0,
        is_batch=is_batch,
    )


def _names(key: _Key) -> list[str]:
    return [part for part in key if isinstance(part, str)]


def _pattern_of(key: _Key) -> re.Pattern[bytes]:
    """Return the pattern of the headers with this key: its groups are the values, and an empty one at the end."""
    values = [b"(%b)" % _VALUES[part][1] if isinstance(part, str) else re.escape(part) for part in key]
    return re.compile(b"".join(values) + b"()")


def _split(data: bytes, values: list[bytes]) -> Iterator[bytes]:
    """Yield the parts around *values*, which must occur once each, in this order."""
    for value in values:
        if data.count(value) != 1:
            return
        part, _, data = data.partition(value)
        yield part
    yield data
