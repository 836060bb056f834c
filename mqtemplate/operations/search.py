"""One search for everything: topics and groups by name; messages by id, handle, key, or a property with its value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import MessageError, MQTemplateError, UnknownNameError
from mqtemplate.message import KEY_SEPARATOR, MessageExt, Property
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import only_one
from mqtemplate.operations.delayed import DelayedOperations
from mqtemplate.operations.messages import MessageSearch
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

T = TypeVar("T")

_MAX_HITS = 20
_LIMIT_MS = 2_000
"""Time after which no further topic is searched: a cluster answers one request for each."""
_ID_BEGINNING = re.compile(r"[0-9A-Fa-f]{6,32}", re.ASCII)
_NEWEST = 1_000
"""Messages of each queue that a search for a property looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHit:
    """A message that a search has found.

    Attributes:
        topic: The topic that it was sent to.
        stored_ms: Time (epoch ms) at which the record was stored.
        deliver_ms: Deliver time (epoch ms) of a pending message; None for a stored one.
        dead_letter: The group whose dead letter it is, and the id of the dead letter.
    """

    msg_id: str
    topic: str
    keys: str | None
    tags: str | None
    stored_ms: int
    deliver_ms: int | None = None
    dead_letter: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search.

    Attributes:
        messages: By id, handle, key or property, the newest first.
        is_complete: False if there are more, or time was short for some topics.
    """

    topics: Sequence[str]
    groups: Sequence[str]
    messages: Sequence[MessageHit]
    is_complete: bool

    @property
    def is_empty(self) -> bool:
        """True if nothing was found."""
        return not (self.topics or self.groups or self.messages)


def search(access: BrokerAccess, text: str) -> SearchResult:
    """Return topics and groups by a part of the name, and messages by id, handle, key, or property ``name=value``."""
    topics = access.admin.readable_topics()
    stored = _Topics(access, topics)
    if is_property(text):
        name, _, value = text.partition("=")
        found = _newest_first(stored.with_property(name, value))
        return SearchResult((), (), found[:_MAX_HITS], not stored.is_short and len(found) <= _MAX_HITS)
    wanted = text.lower()
    own = [each for each in topics if not each.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))]
    some_topics = [each for each in own if wanted in each.lower()]
    some_groups = [each for each in access.admin.group_names() if wanted in each.lower()]
    messages = _messages_named(stored, text) or _beginning(stored, text)
    most = max(len(some_topics), len(some_groups), len(messages))
    return SearchResult(
        _exact_first(some_topics, text)[:_MAX_HITS],
        _exact_first(some_groups, text)[:_MAX_HITS],
        messages[:_MAX_HITS],
        not stored.is_short and most <= _MAX_HITS,
    )


def is_property(text: str) -> bool:
    """Return True if a text is a property and its value, ``name=value``; the end of a handle may look like it."""
    name, _, value = text.partition("=")
    return bool(name and value) and not _is_handle(text)


def messages_named(access: BrokerAccess, name: str, topic: str | None = None) -> Sequence[MessageHit]:
    """Return the messages with an id, a handle or a key, the newest first; or else the one whose id begins so.

    Args:
        topic: The topic that they were sent to; None for any.

    Raises:
        UnknownNameError: There is none, or several ids begin so.
    """
    topics = access.admin.readable_topics() if topic is None else [topic]
    found = [each for each in _messages_named(_Topics(access, topics), name) if topic in (None, each.topic)]
    found = found or messages_beginning(access, name, topic)
    if not found:
        place = "any topic" if topic is None else f"topic {topic!r}"
        raise UnknownNameError(
            f"no message with the id, handle or key {name!r} is in {place}, or pending; retention deleted it, or the "
            "name is another one"
        )
    return found


def messages_beginning(access: BrokerAccess, text: str, topic: str | None = None) -> list[MessageHit]:
    """Return the message whose id begins with a text: a pending one, or one of the newest 1,000 of each queue.

    Args:
        topic: The topic that it was sent to; None for any.

    Raises:
        UnknownNameError: There are several.
    """
    topics = access.admin.readable_topics() if topic is None else [topic]
    found = _beginning(_Topics(access, topics), text, topic)
    if found:
        only_one(text, (each.msg_id for each in found))
    return found


def _beginning(stored: _Topics, text: str, topic: str | None = None) -> list[MessageHit]:
    """Return the messages whose ids begin with a text, which must look like the beginning of an id."""
    return _newest_first(stored.beginning(text.upper(), topic)) if _ID_BEGINNING.fullmatch(text) else []


def _exact_first(names: Iterable[str], text: str) -> Sequence[str]:
    return sorted(names, key=lambda name: (name != text, name))


def _newest_first(found: Iterable[MessageHit]) -> list[MessageHit]:
    """Return each message once. A pending one counts as the newest record, and then one in the topic it was sent to."""
    by_id: dict[tuple[str, str], MessageHit] = {}
    for each in sorted(found, key=lambda hit: (hit.deliver_ms is None, hit.dead_letter is not None, -hit.stored_ms)):
        by_id.setdefault((each.msg_id, each.topic), each)
    return sorted(by_id.values(), key=lambda hit: -hit.stored_ms)


def _messages_named(stored: _Topics, name: str) -> list[MessageHit]:
    handle = decode_handle(name) if _is_handle(name) else None
    if handle is not None:
        stored = _Topics(stored.access, [handle.topic])
        name = handle.msg_id
    if not name or KEY_SEPARATOR in name:
        return []
    found = [*_pending(stored.access, name), *stored.by_id(name), *([] if handle else stored.by_key(name))]
    return _newest_first(found)


def _is_handle(text: str) -> bool:
    try:
        return bool(decode_handle(text))
    except MessageError:
        return False


def _pending(access: BrokerAccess, name: str) -> Iterator[MessageHit]:
    try:
        found: list[PendingMessage] = list(DelayedOperations(access).all(PendingQuery(key=name), _MAX_HITS + 1))
    except MQTemplateError:  # a broker that cannot list them, or has too many to read
        return
    for each in found:
        if not each.topic.startswith(RETRY_TOPIC_PREFIX):
            yield _pending_hit(each)


def _pending_hit(message: PendingMessage) -> MessageHit:
    return MessageHit(
        msg_id=message.msg_id,
        topic=message.topic,
        keys=message.keys,
        tags=message.tags,
        stored_ms=message.store_timestamp,
        deliver_ms=message.deliver_ms,
    )


class _Topics:
    """Topics of one search, until its time is over.

    Attributes:
        is_short: True if the time was over before the last topic.
    """

    def __init__(self, access: BrokerAccess, names: Sequence[str]) -> None:
        self.access = access
        self.is_short = False
        # Few messages are in retry topics only, so those are last.
        self._names = sorted(names, key=lambda name: name.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)))
        self._end_ms = access.broker.clock.steady_ms() + _LIMIT_MS

    def by_id(self, name: str) -> Iterator[MessageHit]:
        """Yield the messages with an id, of their producer or of the broker."""
        yield from self._found(name, unique=True)
        try:
            record = self.access.broker.reader.message_by_id(name)
        except MQTemplateError:  # an id of a producer, or of another broker
            return
        if record is not None:
            yield hit_of(record)

    def by_key(self, name: str) -> Iterator[MessageHit]:
        """Yield the messages with a key."""
        yield from self._found(name, unique=False)

    def _found(self, name: str, *, unique: bool) -> Iterator[MessageHit]:
        reader = self.access.broker.reader
        # Of a cancelled message only the delayed record exists.
        for topic in self._in_time((*self._names, SCHEDULE_TOPIC, TIMER_TOPIC)):
            yield from map(hit_of, reader.messages_by_key(topic, name, _MAX_HITS + 1, unique=unique))

    def with_property(self, name: str, value: str) -> Iterator[MessageHit]:
        """Yield the newest messages that have a property with a value."""
        find = MessageSearch(self.access)
        for topic in self._in_time(self._names):
            for record in find.newest(topic, _NEWEST):
                if record.properties.get(name) == value:
                    yield hit_of(record)

    def beginning(self, text: str, topic: str | None) -> Iterator[MessageHit]:
        """Yield the messages whose ids begin with a text."""
        find = MessageSearch(self.access)
        for name in self._in_time(self._names):
            for record in find.newest(name, _NEWEST):
                if record.msg_id.startswith(text):
                    yield hit_of(record)
        try:
            for each in self._in_time(DelayedOperations(self.access).all(PendingQuery(topic=topic))):
                if each.msg_id.startswith(text) and not each.topic.startswith(RETRY_TOPIC_PREFIX):
                    yield _pending_hit(each)
        except MQTemplateError:  # a broker that cannot list them, or has too many to read
            self.is_short = True

    def _in_time(self, items: Iterable[T]) -> Iterator[T]:
        for each in items:
            if self.access.broker.clock.steady_ms() > self._end_ms:
                self.is_short = True
                return
            yield each


def hit_of(record: MessageExt) -> MessageHit:
    """Return a stored message as a hit."""
    group = record.topic.removeprefix(DLQ_TOPIC_PREFIX) if record.topic.startswith(DLQ_TOPIC_PREFIX) else None
    return MessageHit(
        msg_id=record.msg_id,
        topic=origin_topic(record),
        keys=record.keys,
        tags=record.tags,
        stored_ms=record.store_timestamp,
        dead_letter=None if group is None else (group, record.offset_msg_id),
    )


def origin_topic(message: MessageExt) -> str:
    """Return the topic that a message was sent to."""
    found = message.properties
    by_retry = found.get(Property.DLQ_ORIGIN_TOPIC) or found.get(Property.RETRY_TOPIC)
    return by_retry or found.get(Property.REAL_TOPIC) or message.topic
