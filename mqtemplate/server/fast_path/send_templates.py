"""Forms of the headers of sends: ordinary messages and batches. See `mqtemplate.remoting.protocol.header_forms`.

The headers of a producer mostly differ in queue ID, time of birth, message id, business keys and opaque. The header of
a batch may have no id, since brokers 4.x would give it to each message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mqtemplate.message import Property
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.header_forms import (
    OPAQUE,
    HeaderForms,
    HeaderKey,
    HeaderValue,
    field_value,
    value_names,
)
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.properties import decode_properties_text
from mqtemplate.server.processors.sends.sent_properties import CompleteProperties, SentProperties
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_CODES = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)

# Keys have bytes only that are equal in JSON and in a record, and that end no value.
_VALUES = {
    "queue_id": field_value("e", rb"[0-9]{1,9}", b"123456789"),
    "born": field_value("g", rb"[0-9]{1,14}", b"987654321987"),
    "unique_id": HeaderValue(
        rb"(?<=UNIQ_KEY\\u0001)", rb"[0-9A-Za-z]+", rb'(?=\\u0002|")', b"0FORM0ID0", is_optional=True
    ),
    "opaque": OPAQUE,
    "keys": HeaderValue(rb"(?<=KEYS\\u0001)", rb"[ !#-\[\]-~]+", rb"(?=\\u0002)", b"1FORM1KEYS1", is_optional=True),
}


@dataclass(frozen=True, slots=True)
class SendForm:
    """Common part of all sends of one form. Their messages are ordinary: without a delay, not in a transaction.

    The values are queue ID, time of birth, message id, opaque and keys. Without keys the last is empty, and so is the
    message id for the batches of a producer that gives them none. What a batch contains is in its body: of its header
    only topic, sys flag and reconsume times count.

    Attributes:
        properties: Encoded properties, with those that the broker adds: the parts around message id and keys. Empty for
            batches.
        has_keys_first: The keys are before the message id.
    """

    topic: str
    properties: tuple[bytes, ...]
    has_keys_first: bool
    tags_code: int
    flag: int
    sys_flag: int
    reconsume_times: int
    is_batch: bool

    def encode(self, unique_id: bytes, keys: bytes) -> bytes:
        """Return the encoded properties of a message."""
        parts = self.properties
        if not keys:
            return b"".join((parts[0], unique_id, parts[1]))
        first, second = (keys, unique_id) if self.has_keys_first else (unique_id, keys)
        return b"".join((parts[0], first, parts[1], second, parts[2]))


class SendForms(HeaderForms[SendForm]):
    """The known forms of sends. A message with another property in each send has a new form each time."""

    def __init__(self, properties: SentProperties) -> None:
        super().__init__(_VALUES)
        self._properties = properties

    def form_of(self, key: HeaderKey, request: RemotingCommand) -> SendForm | None:
        """Return the form; None if the message is not ordinary."""
        if request.code not in _CODES:
            return None
        sent = request.header(SendMessageRequestHeaderV2)
        if (sent.queue_id, sent.born_timestamp) != (int(_VALUES["queue_id"].probe), int(_VALUES["born"].probe)):
            return None
        if sent.topic.startswith(RETRY_TOPIC_PREFIX):
            return None
        if sent.batch or request.code == RequestCode.SEND_BATCH_MESSAGE:
            return _batch_form(key, sent)
        complete = self._properties.complete_text(sent.properties)
        return None if complete is None else _message_form(key, sent, complete)


def _batch_form(key: HeaderKey, sent: SendMessageRequestHeaderV2) -> SendForm | None:
    """Return the form of the header of a batch; None if its id, or that it has none, is not known from the key."""
    probe = _VALUES["unique_id"].probe.decode() if "unique_id" in key else None
    if decode_properties_text(sent.properties).get(Property.UNIQ_KEY) != probe:
        return None
    return _form(sent, is_batch=True)


def _message_form(key: HeaderKey, sent: SendMessageRequestHeaderV2, complete: CompleteProperties) -> SendForm | None:
    """Return the form of the header of a message; None if its properties do not have the probes."""
    names = [name for name in value_names(key) if name in ("unique_id", "keys")]
    parts = tuple(_split(complete.encoded, [_VALUES[name].probe for name in names]))
    if complete.unique_id.encode() != _VALUES["unique_id"].probe or len(parts) != len(names) + 1:
        return None
    return _form(sent, parts, has_keys_first=names[0] == "keys", tags_code=complete.tags_code)


def _form(
    sent: SendMessageRequestHeaderV2,
    properties: tuple[bytes, ...] = (),
    *,
    has_keys_first: bool = False,
    tags_code: int = 0,
    is_batch: bool = False,
) -> SendForm:
    return SendForm(
        topic=sent.topic,
        properties=properties,
        has_keys_first=has_keys_first,
        tags_code=tags_code,
        flag=sent.flag,
        sys_flag=sent.sys_flag & SysFlag.OF_CLIENTS,
        reconsume_times=max(sent.reconsume_times or 0, 0),
        is_batch=is_batch,
    )


def _split(data: bytes, values: list[bytes]) -> Iterator[bytes]:
    """Yield the parts around *values*, which must occur once each, in this order."""
    for value in values:
        if data.count(value) != 1:
            return
        part, _, data = data.partition(value)
        yield part
    yield data
