"""Which message is being handled here and now, for logs and for code below the handler.

Setting it costs a fraction of a microsecond a message, as nothing is built until somebody asks; binding the
same fields into structlog's context for each message would cost several microseconds. So a log processor
(`add_current_message`) asks, and only for events that are really written.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from mqtemplate.message import MessageExt

CURRENT: ContextVar[tuple[str, MessageExt | Sequence[MessageExt]] | None] = ContextVar(
    "mqtemplate_current", default=None
)
"""Group, and the message or messages it is handling; for the listener's own use."""


def current_message() -> MessageExt | None:
    """The message that this thread or task is handling; None outside of handlers and in a batch of several."""
    messages = current_messages()
    return messages[0] if len(messages) == 1 else None


def current_messages() -> Sequence[MessageExt]:
    """The messages that this thread or task is handling; empty outside of handlers."""
    current = CURRENT.get()
    if current is None:
        return ()
    return (current[1],) if isinstance(current[1], MessageExt) else current[1]


def current_group() -> str | None:
    """The consumer group for which this thread or task is handling a message."""
    current = CURRENT.get()
    return current[0] if current else None


def log_fields(message: MessageExt) -> dict[str, object]:
    """The words by which logs tell one message from another."""
    return {
        "topic": message.topic,
        "tag": message.tags,
        "msg_id": message.msg_id,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "reconsume_times": message.reconsume_times,
    }


def add_current_message(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: give each event the fields of the message it is about, unless it has its own."""
    current = CURRENT.get()
    if current is not None:
        group, messages = current
        event.setdefault("group", group)
        if isinstance(messages, MessageExt):
            for name in ("topic", "tag", "msg_id"):
                if name not in event:
                    event[name] = log_fields(messages)[name]
        else:
            event.setdefault("batch_size", len(messages))
    return event
