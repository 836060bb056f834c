"""Properties of a record as bytes: their names, and encoding, decoding and finding them."""

from __future__ import annotations

from collections.abc import Mapping

from mqtemplate.errors import MessageError
from mqtemplate.message import INTERNAL_PROPERTIES, ORIGIN_PROPERTIES, Property
from mqtemplate.record.layout import CHECK_NAME
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

NAME_VALUE_SEPARATOR = b"\x01"
PROPERTY_SEPARATOR = b"\x02"

DELAY = Property.DELAY.encode()
FOLLOWED = Property.FOLLOWED.encode()
CANCELS = Property.CANCELS.encode()
HAND_OVER_STAYS = Property.HAND_OVER_STAYS.encode()
KEYS = Property.KEYS.encode()
LEVEL_DELAY_MS = Property.LEVEL_DELAY_MS.encode()
PENDING_KEY = Property.PENDING_KEY.encode()
PENDING_SINCE = Property.PENDING_SINCE.encode()
PRODUCER_GROUP = Property.PRODUCER_GROUP.encode()
REAL_QID = Property.REAL_QID.encode()
REAL_TOPIC = Property.REAL_TOPIC.encode()
REPLACED_LEVEL = Property.REPLACED_LEVEL.encode()
SEQUENCE = Property.SEQUENCE.encode()
SHARDING_KEY = Property.SHARDING_KEY.encode()
TAGS = Property.TAGS.encode()
TIMER_DELAY_MS = Property.TIMER_DELAY_MS.encode()
TIMER_DELAY_SEC = Property.TIMER_DELAY_SEC.encode()
TIMER_DELIVER_MS = Property.TIMER_DELIVER_MS.encode()
TIMER_DEL_UNIQKEY = Property.TIMER_DEL_UNIQKEY.encode()
TIMER_DEQUEUE_MS = Property.TIMER_DEQUEUE_MS.encode()
TIMER_ENQUEUE_MS = Property.TIMER_ENQUEUE_MS.encode()
TIMER_OUT_MS = Property.TIMER_OUT_MS.encode()
TIMER_ROLL_TIMES = Property.TIMER_ROLL_TIMES.encode()
UNIQ_KEY = Property.UNIQ_KEY.encode()

PRIORITY_PROPERTY = "_SYS_MSG_PRIORITY_"
"""Name of the priority of a message, a number from 0 on. A larger one is more urgent. Applications may set it."""

_INTERNAL_OR_ORIGIN = INTERNAL_PROPERTIES | ORIGIN_PROPERTIES


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return ``name 0x01 value 0x02`` for each pair, in UTF-8."""
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()]).encode()


def decode_properties(data: bytes) -> dict[str, str]:
    """Return the pairs in *data*. RocketMQ drops a pair without name or value, and so does this."""
    properties = {}
    for pair in data.decode("utf-8", "replace").split("\x02"):
        name, _, value = pair.partition("\x01")
        if name and value:
            properties[name] = value
    properties.pop(CHECK_NAME, None)  # RocketMQ copied one of our records with its check
    return properties


def find_property(data: bytes, name: bytes) -> str | None:
    """Return the value of one property without decoding the others; None if it is missing or empty."""
    start = data.find(name + b"\x01")
    if start > 0 and data[start - 1] != 2:  # the end of a longer name, or of a value
        start = data.find(b"\x02" + name + b"\x01") + 1 or -1
    if start < 0:
        return None
    start += len(name) + 1
    end = data.find(b"\x02", start)
    value = data[start:end] if end >= 0 else data[start:]
    try:
        return value.decode() or None
    except UnicodeDecodeError:
        return value.decode("utf-8", "replace")


def value_spans(data: bytes, at: int) -> dict[bytes, slice]:
    """Return the position in *data* of each value of the properties that start at byte *at*.

    Return nothing if the properties are irregular: a name occurs twice, or a name has no value or two.
    """
    spans: dict[bytes, slice] = {}
    for pair in data[at:].removesuffix(PROPERTY_SEPARATOR).split(PROPERTY_SEPARATOR):
        name, _, value = pair.partition(NAME_VALUE_SEPARATOR)
        if not value or NAME_VALUE_SEPARATOR in value or name in spans:
            return {}
        spans[name] = slice(at + len(name) + 1, at + len(pair))
        at += len(pair) + 1
    return spans


def may_have_property(data: bytes, name: bytes) -> bool:
    """Return False if the property is certainly missing. A longer name that ends with *name* counts as well."""
    return name + NAME_VALUE_SEPARATOR in data


def property_format(name: bytes, value: bytes = b"%d") -> bytes:
    """Return an encoded property with a placeholder for ``%`` (or with a regular expression) as its value."""
    return name + NAME_VALUE_SEPARATOR + value + PROPERTY_SEPARATOR


def client_properties(properties: Mapping[str, str], topic: str) -> Mapping[str, str]:
    """Return the properties of a message for *topic* without those that a client or an application may not set.

    Every message that is not written by the broker itself passes here; the same object is returned if all is allowed.
    A consumer may forward a message with all properties that it received, so they are left out and no error is raised.

    Raises:
        MessageError: The message is a delete marker for a timer: without its mark it would be delivered.
    """
    if Property.TIMER_DEL_UNIQKEY in properties:
        raise MessageError(
            f"property {Property.TIMER_DEL_UNIQKEY} is one that only brokers write; to cancel a delayed message, pass "
            "its handle to cancel (Java: recallMessage)"
        )
    has_origin = topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))
    left_out = INTERNAL_PROPERTIES if has_origin else _INTERNAL_OR_ORIGIN
    if left_out.isdisjoint(properties):
        return properties
    return {name: value for name, value in properties.items() if name not in left_out}
