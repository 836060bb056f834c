"""Properties of a dead letter: why, where and when its message failed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from mqtemplate.message import MessageExt, Property, valid_time
from mqtemplate.numbers import parse_number
from mqtemplate.user_code import safe_text, type_name

EXCEPTION = "dead_letter_exception"
"""Class of the exception, with its module."""
MESSAGE = "dead_letter_message"
"""Text of the exception, at most 500 characters."""
LISTENER = "dead_letter_listener"
"""Id of the listener, or the method of the template that received the message."""
ATTEMPTS = "dead_letter_attempts"
"""Number of calls of the handler."""
FAILED_AT = "dead_letter_failed_at"
"""Time of the last failure, ISO 8601 in UTC."""
STACK = "dead_letter_stack"
"""The last frames of the stack outside this library; at most 2,000 characters."""
FIRST_FAILED_AT = "retry_first_failed_at"
"""Time of the first failure, if there was a retry whose delay is exact; a retry has it too, except by POP."""
CAUSES = frozenset({EXCEPTION, MESSAGE, LISTENER, ATTEMPTS, FAILED_AT, STACK, FIRST_FAILED_AT})
"""All of these names."""

_MAX_MESSAGE = 500
_MAX_STACK = 2_000
# RocketMQ stores the length of all properties in two bytes, with a sign; the broker adds some of its own.
_MAX_PROPERTIES_BYTES = 32_767 - 1_500
_SEPARATORS = dict.fromkeys(range(3), " ")  # RocketMQ separates properties by \x01 and \x02
_CAUSE = BaseException.__dict__["__cause__"]


def dead_letter_properties(
    listener: str, message: MessageExt, error: BaseException | None, now_ms: int, *, stack: str = ""
) -> dict[str, str]:
    """Return the properties that explain a dead letter, as many as the message has room for.

    Args:
        error: Exception of the handler, or of the conversion of the body; None if the handler returned
            ``RECONSUME_LATER``.
        stack: Where it was raised; empty if that is in this library, and explains nothing. Its end is kept.
    """
    properties = {
        LISTENER: listener,
        ATTEMPTS: str(message.reconsume_times + 1),
        FAILED_AT: iso_time(now_ms),
        EXCEPTION: "" if error is None else class_name(error),
        MESSAGE: "the handler returned RECONSUME_LATER" if error is None else safe_text(error, _MAX_MESSAGE),
        FIRST_FAILED_AT: _first_failed_at(message.properties, message.reconsume_times),
        STACK: stack.strip()[-_MAX_STACK:],
    }
    room = _MAX_PROPERTIES_BYTES - sum(_size(name, value) for name, value in message.properties.items())
    kept: dict[str, str] = {}
    for name, value in properties.items():
        text = value.encode("utf-8", "replace").decode().translate(_SEPARATORS)
        room -= _size(name, text)
        if text and room >= 0:
            kept[name] = text
    return kept


def expired_properties(
    properties: Mapping[str, str], reconsume_times: int, attempts: int, now_ms: int
) -> dict[str, str]:
    """Return the properties that explain the dead letter of a message that was received by POP and not acknowledged.

    Args:
        properties: Those of the message; it has room for others.
        reconsume_times: Of the record.
        attempts: Number of deliveries.
    """
    found = {
        ATTEMPTS: str(attempts),
        FAILED_AT: iso_time(now_ms),
        MESSAGE: "its invisible time was over, and no member had acknowledged it",
        FIRST_FAILED_AT: _first_failed_at(properties, reconsume_times),
    }
    return {name: value for name, value in found.items() if value}


def _first_failed_at(properties: Mapping[str, str], reconsume_times: int) -> str:
    """Return the time of the first failure; empty if it is not known.

    By POP the broker makes the copy for a retry, with the time at which the invisible time was changed for the last
    time: a member changes it when its handler fails.
    """
    pop_ms = parse_number(properties.get(Property.FIRST_POP_TIME)) if reconsume_times else None
    return properties.get(FIRST_FAILED_AT) or ("" if pop_ms is None else iso_time(valid_time(pop_ms)))


def class_name(error: BaseException) -> str:
    """Return the class of an exception with its module, as a traceback names it."""
    name, module = type_name(error, "__qualname__"), type_name(error, "__module__")
    return name if module == "builtins" else f"{module}.{name}"


def cause_of(error: BaseException) -> BaseException | None:
    """Return the cause of an exception, also if its class has a property of that name."""
    found: BaseException | None = _CAUSE.__get__(error)
    return found


def iso_time(time_ms: int) -> str:
    """Return a time as ISO 8601 in UTC, with milliseconds."""
    text = datetime.fromtimestamp(time_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _size(name: str, value: str) -> int:
    return len(name.encode()) + len(value.encode("utf-8", "replace")) + 2
