"""Headers and business keys as message properties."""

from __future__ import annotations

from mqtemplate.errors import MessageError
from mqtemplate.message import RESERVED_PROPERTIES, Property, joined_keys, storable
from mqtemplate.numbers import INT_MAX, parse_number
from mqtemplate.selectors.tags import tag_problem
from mqtemplate.user_code import shown

HEADER_PREFIX = "rocketmq_"
"""Prefix of rocketmq-spring for names that have a meaning in RocketMQ. Source: ``RocketMQHeaders``."""

FLAG = "FLAG"
"""Name of the header that sets the message's flag. It is a field of the record, not a property."""

_WAIT_STORE_MSG_OK = "WAIT_STORE_MSG_OK"

# With the prefix, rocketmq-spring sets these on received messages only.
_RECEIVED_HEADERS = frozenset(
    {"TOPIC", "MESSAGE_ID", "BORN_TIMESTAMP", "BORN_HOST", "QUEUE_ID", "SYS_FLAG", "TRANSACTION_ID"}
)
_INSTEAD_OF: dict[str, str] = {
    # reserved name -> the option that has the effect
    Property.UNIQ_KEY: "the client creates message ids; for an id of your own pass keys=",
    Property.SHARDING_KEY: "to order messages pass hash_key=",
    Property.REAL_TOPIC: "the destination names the topic",
    Property.REAL_QID: "to choose a queue pass hash_key= or queue=",
    Property.RETRY_TOPIC: "the destination names the topic",
    **dict.fromkeys(
        (
            Property.TIMER_OUT_MS,
            Property.TIMER_ENQUEUE_MS,
            Property.TIMER_DEQUEUE_MS,
            Property.TIMER_ROLL_TIMES,
            Property.TIMER_DEL_UNIQKEY,
        ),
        "to delay a message pass delay_level=, delay= or deliver_at=",
    ),
}


def header_property(given: str, name: str, value: object) -> dict[str, str]:
    """Return the property that a header sets; empty for a header without a value.

    Args:
        given: The header's name as the caller wrote it.
        name: The name without the prefix ``rocketmq_``.

    Raises:
        MessageError: The name is reserved or illegal, or the value has the wrong type.
    """
    if name == Property.KEYS:
        return {name: keys} if (keys := joined_keys(value)) else {}
    if name == Property.TAGS:
        tag = _checked_text(name, value)
        if (problem := tag_problem(tag)) is not None:
            raise MessageError(f"header {shown(given)}, {shown(tag)}: {problem}")
        return {name: tag}
    if name in (_WAIT_STORE_MSG_OK, Property.WAIT):
        return {Property.WAIT: _checked_bool(given, value)}
    if name in RESERVED_PROPERTIES:
        advice = _INSTEAD_OF.get(name, "choose another name")
        raise MessageError(f"header {shown(given)} is reserved: {name} belongs to the broker and its clients; {advice}")
    if given != name and name in _RECEIVED_HEADERS:
        raise MessageError(f"header {shown(given)} describes a received message and cannot be sent; leave it out")
    if not given:
        raise MessageError("the name of a header is empty; give it a name")
    storable("the name of a header", given)
    return {given: _checked_text(given, value)}


def checked_flag(value: object) -> int:
    """Return the value of the header ``FLAG``; raise `MessageError` if it is not a number of 32 bits."""
    number = None if isinstance(value, bool) else parse_number(storable(f"header {FLAG}", value))
    if number is None or abs(number) > INT_MAX:
        raise MessageError(f"header {FLAG} must be a whole number of 32 bits, got {shown(value)}")
    return number


def _checked_text(name: str, value: object) -> str:
    if type(value) is str and value.isalnum():  # what many are
        return value
    if value is None or isinstance(value, bytes | bytearray | memoryview):
        raise MessageError(f"header {shown(name)} must be text, a number or a boolean, got {type(value).__name__}")
    text = storable(f"header {shown(name)}", value)
    if not text:
        raise MessageError(f"header {shown(name)} is empty, and RocketMQ drops empty properties; leave it out")
    return text.lower() if isinstance(value, bool) else text


def _checked_bool(name: str, value: object) -> str:
    text = storable(f"header {name!r}", value).lower()
    if text not in ("true", "false"):
        raise MessageError(f"header {name!r} must be true or false, got {shown(value)}")
    return text
