"""Current message: the one that a handler is handling, for logs and for code below the handler.

Each call of a handler runs in a context of its own: a copy of the context in which the listener was started. So the
handler sees the variables that the program set before the start, and what it binds ends with the call.

structlog's context has ``group``, ``topic``, ``msg_id`` and ``attempt`` for the time of the call (``batch_size`` for a
batch). structlog itself would bind them in several microseconds a message, so this module sets its variables directly:
structlog reads each variable whose name begins with its prefix. Group and topic rarely change and are in the copied
context already.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any

from mqtemplate.event_log import STRUCTLOG_KEY_PREFIX
from mqtemplate.message import MessageExt

CURRENT: ContextVar[tuple[str, MessageExt | Sequence[MessageExt]] | None] = ContextVar(
    "mqtemplate_current", default=None
)
"""Consumer group, and the message or messages that it is handling. Only this package sets it."""


def _field(name: str) -> ContextVar[object]:
    return ContextVar(STRUCTLOG_KEY_PREFIX + name)


_GROUP, _TOPIC, _MSG_ID, _ATTEMPT, _BATCH_SIZE = map(_field, ("group", "topic", "msg_id", "attempt", "batch_size"))
_ABSENT = ...  # structlog's mark for a key that is not bound


def handler_context(group: str, topics: Sequence[str]) -> Context:
    """Return the context of which each call of a handler gets a copy: this thread's, with the listener's fields.

    Args:
        topics: Topics of the listener.
    """
    context = copy_context()
    context.run(_GROUP.set, group)
    context.run(_TOPIC.set, topics[0])
    context.run(_ATTEMPT.set, 1)
    return context


def enter_message(group: str, topics: Sequence[str], message: MessageExt) -> None:
    """Set the fields of a message, in a copy of `handler_context`."""
    CURRENT.set((group, message))
    _MSG_ID.set(message.msg_id)
    if message.topic != topics[0]:
        _TOPIC.set(message.topic)
    if message.reconsume_times:
        _ATTEMPT.set(message.reconsume_times + 1)


def enter_batch(group: str, messages: Sequence[MessageExt]) -> None:
    """Set the fields of a batch, in a copy of `handler_context`."""
    CURRENT.set((group, messages))
    topics = {message.topic for message in messages}
    _TOPIC.set(topics.pop() if len(topics) == 1 else _ABSENT)
    _ATTEMPT.set(_ABSENT)
    _BATCH_SIZE.set(len(messages))


def current_message() -> MessageExt | None:
    """Return the message that this thread or task is handling; None outside of handlers and in a larger batch."""
    messages = current_messages()
    return messages[0] if len(messages) == 1 else None


def current_messages() -> Sequence[MessageExt]:
    """Return the messages that this thread or task is handling; empty outside of handlers."""
    current = CURRENT.get()
    if current is None:
        return ()
    return (current[1],) if isinstance(current[1], MessageExt) else current[1]


def current_group() -> str | None:
    """Return the consumer group for which this thread or task is handling a message."""
    current = CURRENT.get()
    return current[0] if current else None


def add_current_message(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the fields of the current message to a log event. The event's own fields stay. A structlog processor."""
    current = CURRENT.get()
    if current is not None:
        group, messages = current
        event.setdefault("group", group)
        if isinstance(messages, MessageExt):
            event.setdefault("topic", messages.topic)
            event.setdefault("tag", messages.tags)
            event.setdefault("msg_id", messages.msg_id)
            event.setdefault("attempt", messages.reconsume_times + 1)
        else:
            event.setdefault("batch_size", len(messages))
    return event
