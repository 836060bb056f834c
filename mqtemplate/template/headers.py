"""What a sender may say about a message beside its payload, as properties of the message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from mqtemplate.errors import MessageError
from mqtemplate.message import DELAY_PROPERTIES, RESERVED_PROPERTIES, Property, join_keys
from mqtemplate.template.delay_options import check_one_delay, delay_header, delay_properties

HEADER_PREFIX = "rocketmq_"
"""What rocketmq-spring puts before the names that mean something to RocketMQ. Source: ``RocketMQHeaders``."""

_FLAG = "FLAG"
_WAIT_STORE_MSG_OK = "WAIT_STORE_MSG_OK"
_LARGEST_FLAG = 2**31 - 1

_TOLD_ABOUT_RECEIVED = frozenset(
    {"TOPIC", "MESSAGE_ID", "BORN_TIMESTAMP", "BORN_HOST", "QUEUE_ID", "SYS_FLAG", "TRANSACTION_ID"}
)
_MEANT_FOR: dict[str, str] = {
    Property.UNIQ_KEY: "message ids are made for you; for an id of your own pass keys=",
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


class Extras(NamedTuple):
    """Properties and flag that a message gets beside payload and tag. Shared between messages: copy, never change."""

    properties: dict[str, str]
    flag: int | None


NO_EXTRAS = Extras({}, None)


def make_extras(
    delay_level: int,
    delay: timedelta | float | None,
    deliver_at: datetime | int | None,
    keys: str | Iterable[str],
    headers: Mapping[str, object] | None,
    now_ms: Callable[[], int],
) -> Extras:
    """All options of one call, checked; `NO_EXTRAS` itself for a plain send, which is to cost nothing.

    Raises:
        MessageError: A header that is reserved, given twice, or cannot be written.
        DelayError: Delays that contradict each other or cannot be read.
    """
    if not (delay_level or delay is not None or deliver_at is not None or keys or headers):
        return NO_EXTRAS
    options = delay_properties(delay_level, delay, deliver_at, now_ms())
    joined = _check_keys(keys)
    if joined:
        options[Property.KEYS] = joined
    own = Extras(options, None)
    return merge_extras(own, header_extras(headers, now_ms())) if headers else own


def merge_extras(first: Extras, second: Extras) -> Extras:
    """Both, if they do not contradict each other."""
    check_one_delay(dict.fromkeys((*first.properties, *second.properties)))
    for name, value in second.properties.items():
        if first.properties.get(name, value) != value:
            raise MessageError(f"{name} is given twice: {first.properties[name]!r} and {value!r}; give it once")
    if first.flag is not None and second.flag is not None and first.flag != second.flag:
        raise MessageError(f"{_FLAG} is given twice: {first.flag} and {second.flag}; give it once")
    return Extras({**first.properties, **second.properties}, second.flag if first.flag is None else first.flag)


def header_extras(headers: Mapping[str, object], now_ms: int) -> Extras:
    """Headers as rocketmq-spring reads them, with or without its prefix; what it drops silently is refused here."""
    if not isinstance(headers, Mapping):
        raise MessageError(f"headers must be a mapping of names to values, got {type(headers).__name__}")
    properties: dict[str, str] = {}
    flag: int | None = None
    for given, value in headers.items():
        if not isinstance(given, str):
            raise MessageError(f"header names must be text, got {type(given).__name__} {given!r}")
        name = given.removeprefix(HEADER_PREFIX)
        if name == _FLAG:
            if flag is not None:
                raise MessageError(f"header {_FLAG} is given twice, plain and as {HEADER_PREFIX}{_FLAG}; give it once")
            flag = _check_flag(value)
            continue
        entry = _header(given, name, value, now_ms)
        for twice in entry.keys() & properties.keys():
            raise MessageError(f"header {twice} is given twice, plain and as {HEADER_PREFIX}{twice}; give it once")
        properties |= entry
    return Extras(properties, flag)


def _header(given: str, name: str, value: object, now_ms: int) -> dict[str, str]:
    if name == Property.KEYS:
        return {name: keys} if (keys := _check_keys(value)) else {}
    if name == Property.TAGS:
        return {name: _check_text(name, value)}
    if name in DELAY_PROPERTIES:
        return delay_header(name, value, now_ms)
    if name in (_WAIT_STORE_MSG_OK, Property.WAIT):
        return {Property.WAIT: _check_bool(given, value)}
    if name in RESERVED_PROPERTIES:
        advice = _MEANT_FOR.get(name, "choose another name")
        raise MessageError(f"header {given!r} is reserved: {name} belongs to the broker and its clients; {advice}")
    if given != name and name in _TOLD_ABOUT_RECEIVED:
        raise MessageError(f"header {given!r} tells about a received message and cannot be sent; leave it out")
    if not given or "\x01" in given or "\x02" in given:
        raise MessageError(f"header name {given!r} is empty or holds the control characters \\x01 or \\x02")
    return {given: _check_text(given, value)}


def _check_keys(keys: object) -> str:
    """Business keys as one text, separated by blanks: the form RocketMQ keeps and indexes."""
    if isinstance(keys, str):
        return _check_control("keys", keys)
    if isinstance(keys, bytes | Mapping) or keys is None:
        raise MessageError(f"keys must be text or a sequence of texts, got {type(keys).__name__} {keys!r}")
    if not isinstance(keys, Iterable):
        return _check_control("keys", str(keys))
    texts = [str(key) for key in keys]
    for text in texts:
        if not text or text.split() != [text]:
            raise MessageError(f"key {text!r} is empty or holds a blank, which would make other keys of it")
    return _check_control("keys", join_keys(texts))


def _check_text(name: str, value: object) -> str:
    if value is None or isinstance(value, bytes | bytearray | memoryview):
        raise MessageError(f"header {name!r} must be text, a number or a truth value, got {type(value).__name__}")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not text:
        raise MessageError(f"header {name!r} is empty, and RocketMQ drops empty properties; leave it out")
    return _check_control(f"header {name!r}", text)


def _check_control(what: str, text: str) -> str:
    if "\x01" in text or "\x02" in text:
        raise MessageError(f"{what} holds \\x01 or \\x02, which separate properties in a record: {text[:60]!r}")
    return text


def _check_flag(value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.removeprefix("-").isdecimal() or abs(int(text)) > _LARGEST_FLAG:
        raise MessageError(f"header {_FLAG} must be a whole number of 32 bits, got {value!r}")
    return int(text)


def _check_bool(name: str, value: object) -> str:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise MessageError(f"header {name!r} must be true or false, got {value!r}")
    return text
