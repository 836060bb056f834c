"""Destinations ``topic`` and ``topic:tag``, and the queue of a hash key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from mqtemplate.calls.send import SendCall, SendNext
from mqtemplate.errors import DestinationError, MessageError, MQTemplateError, SendError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.hashes.java_hash import java_string_hash
from mqtemplate.message import Message, MessageQueue, Property, property_text
from mqtemplate.results import SendResult
from mqtemplate.selectors.tags import tag_problem
from mqtemplate.topics import check_topic
from mqtemplate.user_code import shown

MessageQueueSelector: TypeAlias = Callable[[Sequence[MessageQueue], Message, str], MessageQueue]
"""Selects the queue for a message with a hash key: (queues of the topic, message, hash key) -> one of the queues."""


class Destination(NamedTuple):
    """A parsed destination.

    Attributes:
        properties: Message properties that the tag sets. Messages share them: copy before a change.
    """

    topic: str
    tag: str | None
    properties: dict[str, str]


def parse_destination(destination: str) -> Destination:
    """Parse ``"topic"`` or ``"topic:tag"``; the first colon separates them, so a tag may contain colons.

    Raises:
        DestinationError: It is not text, a part is empty, or a part is not a legal name.
    """
    if not isinstance(destination, str):
        raise _not_text(destination)
    return _parse(destination)


@lru_cache(maxsize=4_096)
def _parse(destination: str) -> Destination:
    topic, colon, tag = destination.partition(":")
    if not topic:
        raise DestinationError(f"destination {shown(destination)} has no topic; give 'topic' or 'topic:tag'")
    check_topic(topic)
    if not colon:
        return Destination(topic, None, {})
    _check_tag(destination, topic, tag)
    return Destination(topic, tag, {Property.TAGS: tag})


def _check_tag(destination: str, topic: str, tag: str) -> None:
    """Refuse a tag that no selector expression can name: no consumer could select the message."""
    if not tag:
        raise DestinationError(f"destination {destination!r} has an empty tag; without a tag write {topic!r}")
    if (problem := tag_problem(tag)) is not None:
        raise DestinationError(f"destination {shown(destination)}: {problem}")


def _not_text(destination: object) -> DestinationError:
    return DestinationError(
        f"the destination must be text, 'topic' or 'topic:tag', got {type(destination).__name__}; "
        "the order of arguments is (destination, payload, timeout, delay_level)"
    )


def hash_key_text(hash_key: object) -> str:
    """Return a hash key as text, as ``keys`` does: ``7`` is ``"7"``.

    Raises:
        MessageError: It is empty, or not one value.
    """
    text = property_text("hash_key", hash_key)
    if not text:
        raise MessageError("hash_key is empty, which would send all such messages to one queue; pass None for no order")
    return text


def select_queue_by_hash(queues: Sequence[MessageQueue], message: Message, hash_key: str) -> MessageQueue:
    """Return the queue that a Java client selects for this key: ``|hashCode % queues|``.

    Java's remainder has the sign of the dividend, so its absolute value is the remainder of the absolute value.

    Source: RocketMQ ``SelectMessageQueueByHash``.
    """
    return queues[abs(java_string_hash(hash_key)) % len(queues)]


# --- sends by hash_key whose queue disappears: they go on with a queue of the brokers that are left ---------

Select: TypeAlias = Callable[[Message], MessageQueue | None]
"""Selects the queue of a message by its key, among the queues that the topic has now."""


def reselected(call: SendCall, select: Select, error: BaseException) -> SendCall | None:
    """Return the call with another queue and the rest of the timeout; None if the send failed for another reason."""
    if not (isinstance(error, SendError) and error.queue_is_away) or error.left_ms <= 0:
        return None
    return call.to_queue(select(call.messages[0]), error.left_ms)


def send_again(call: SendCall, select: Select, send: SendNext, error: SendError) -> SendResult:
    """Send again after *error* with other queues, as long as their brokers stop; raise the error of the last try."""
    while (changed := reselected(call, select, error)) is not None:
        try:
            return send(changed)
        except SendError as exc:
            call, error = changed, exc
    raise error


def send_async_again(call: SendCall, select: Select, send: SendNext) -> AwaitableFuture[SendResult]:
    """Send without waiting, and again with other queues, as long as the brokers of the queues stop."""
    result: AwaitableFuture[SendResult] = AwaitableFuture()
    result.set_running_or_notify_cancel()  # a message that is being sent cannot be cancelled

    def finish(call: SendCall, sent: Future[SendResult]) -> None:
        error = sent.exception()
        if error is None:
            result.set_result(sent.result())
            return
        try:
            changed = reselected(call, select, error)
            if changed is None:
                result.set_exception(error)
            else:
                start(changed)
        except MQTemplateError as exc:
            result.set_exception(exc)

    def start(call: SendCall) -> None:
        send(call).add_done_callback(lambda sent: finish(call, sent))

    start(call)
    return result
