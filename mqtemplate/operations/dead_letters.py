"""Dead letters of a broker: their causes and states; list, compare, send again, purge."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from mqtemplate.broker import QueueSpan, TopicKind, unknown_name
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import (
    HostAddress,
    Message,
    MessageExt,
    Property,
    key_text,
    parse_offset_msg_id,
    split_keys,
)
from mqtemplate.numbers import parse_number
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import DAY_MS, OnProgress, no_progress, only_one, paced, yesterday_of
from mqtemplate.operations.messages import MessageSearch, read_queue, sent_again_properties
from mqtemplate.record import dead_letter as cause
from mqtemplate.results import SendResult
from mqtemplate.topics import DLQ_TOPIC_PREFIX, MARKS_TOPIC, RETRY_TOPIC_PREFIX

RESENT_FROM = "dead_letter_resent_from"
"""Property of a message that was sent again: the offset message id of the dead letter."""


class LetterState(Enum):
    """State of a dead letter: the last action of an administrator."""

    OPEN = "open"
    RESENT = "resent"
    PURGED = "purged"


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    """A message in the dead-letter topic of a group.

    The cause is known for listeners of this library; other clients write none.

    Attributes:
        message: The message as it is stored; its topic is ``%DLQ%group``.
        state_ms: Time (epoch ms) of the last resend or purge; None for an open one.
    """

    group: str
    message: MessageExt
    state: LetterState = LetterState.OPEN
    state_ms: int | None = None

    @property
    def id(self) -> str:
        """Id of the dead letter: its offset message id."""
        return self.message.offset_msg_id

    @property
    def origin_topic(self) -> str | None:
        """Topic that the message was sent to."""
        properties = self.message.properties
        return properties.get(Property.DLQ_ORIGIN_TOPIC) or properties.get(Property.RETRY_TOPIC)

    @property
    def origin_msg_id(self) -> str | None:
        """Offset message id of the message that was sent to it."""
        properties = self.message.properties
        return properties.get(Property.DLQ_ORIGIN_MESSAGE_ID) or properties.get(Property.ORIGIN_MESSAGE_ID)

    @property
    def is_origin_known(self) -> bool:
        """False if a client named the topic in a retry that it sent itself, and may not send to that topic.

        The broker takes the id of the origin from such a retry, and writes one into all others; so do RocketMQ's.
        """
        return self.origin_topic is not None and self.origin_msg_id is not None

    @property
    def exception(self) -> str | None:
        """Class of the exception, with its module."""
        return self.message.properties.get(cause.EXCEPTION)

    @property
    def reason(self) -> str | None:
        """Text of the exception."""
        return self.message.properties.get(cause.MESSAGE)

    @property
    def listener(self) -> str | None:
        """Id of the listener."""
        return self.message.properties.get(cause.LISTENER)

    @property
    def attempts(self) -> int:
        """Number of deliveries."""
        number = parse_number(self.message.properties.get(cause.ATTEMPTS))
        return self.message.reconsume_times + 1 if number is None or number < 0 else number

    @property
    def failed_at(self) -> str | None:
        """Time of the last failure, ISO 8601 in UTC."""
        return self.message.properties.get(cause.FAILED_AT)

    @property
    def stack(self) -> str | None:
        """The last frames of the stack."""
        return self.message.properties.get(cause.STACK)

    @property
    def cause(self) -> str:
        """Exception and text in one line; empty if unknown."""
        return ": ".join(part for part in (self.exception, self.reason) if part)


@dataclass(frozen=True, slots=True)
class LetterEdit:
    """Changes of a message before it is sent again.

    Attributes:
        body: New body; None leaves it.
        properties: Properties to set, such as ``KEYS`` or properties of the application; None removes one.
    """

    body: bytes | None = None
    properties: Mapping[str, str | None] | None = None


def resent_message(letter: DeadLetterMessage, edit: LetterEdit | None = None, *, only_group: bool = False) -> Message:
    """Return the message to send again: id, keys, tags and the properties of the application are kept.

    Args:
        only_group: Send it to the retry topic of the group, so that other groups of the topic do not get it again.
    """
    edit = edit or LetterEdit()
    properties = {
        name: value
        for name, value in sent_again_properties(letter.message).items()
        if name != RESENT_FROM and name not in cause.CAUSES
    }
    for name, value in (edit.properties or {}).items():
        if value is None:
            properties.pop(name, None)
        else:
            properties[name] = value
    properties[RESENT_FROM] = letter.id
    topic = letter.origin_topic or letter.message.topic
    if only_group:
        properties[Property.RETRY_TOPIC] = topic
        topic = RETRY_TOPIC_PREFIX + letter.group
    body = letter.message.body if edit.body is None else edit.body
    return Message(topic, body, properties, letter.message.flag)


_log = LimitedLog(get_logger("mqtemplate.admin"), lambda: int(time.monotonic() * 1_000))

_IDS_IN_MARK = 500


@dataclass(frozen=True, slots=True)
class LetterMark:
    """The last thing that was done with a dead letter, and when (epoch ms)."""

    state: LetterState
    time_ms: int


@dataclass(frozen=True, slots=True)
class LetterMarks:
    """The marks of one broker or cluster."""

    access: BrokerAccess

    def of(self, group: str) -> dict[str, LetterMark]:
        """Return the marks of the dead letters of *group*, by the ids of the dead letters."""
        return self._read(group).get(group, {})

    def by_group(self) -> dict[str, dict[str, LetterMark]]:
        """Return the marks of all groups."""
        return self._read(None)

    def _read(self, only: str | None) -> dict[str, dict[str, LetterMark]]:
        try:
            spans = self.access.admin.queue_spans(MARKS_TOPIC)
        except UnknownNameError:
            return {}
        found: dict[str, dict[str, LetterMark]] = {}
        for span in spans:
            for message in read_queue(self.access.broker, span.queue, span.min_offset, span.max_offset):
                if message.keys and only in (None, message.keys):
                    marks = found.setdefault(message.keys, {})
                    state, ids = _read_mark(message)
                    added = LetterMark(state, message.store_timestamp)
                    for letter_id in ids:
                        if letter_id not in marks or marks[letter_id].time_ms <= added.time_ms:
                            marks[letter_id] = added
        return found

    def add(self, group: str, state: LetterState, ids: Sequence[str]) -> None:
        """Mark dead letters of *group*."""
        if not ids:
            return
        broker = self.access.open_for_changes()
        broker.create_topic(MARKS_TOPIC, 1)
        for some in _batches(ids):
            body = json.dumps({"state": state.value, "ids": some}).encode()
            broker.sends.send(Message(MARKS_TOPIC, body, {Property.KEYS: group, Property.TAGS: state.value}))


def _read_mark(message: MessageExt) -> tuple[LetterState, list[str]]:
    """Return the state and the ids of a mark; no ids for a message of another program, which is logged."""
    try:
        mark = json.loads(message.body)
        state, ids = LetterState(mark["state"]), mark["ids"]
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise TypeError(f"ids must be a list of texts, got {ids!r:.64}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning("dead_letters.mark_ignored", topic=message.topic, msg_id=message.msg_id, reason=repr(error))
        return LetterState.OPEN, []
    return state, ids


def _batches(ids: Sequence[str]) -> Iterator[list[str]]:
    rest = iter(ids)
    while some := list(islice(rest, _IDS_IN_MARK)):
        yield some


_MARK_AFTER = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Filter for dead letters. A dead letter must match all values that are given.

    Attributes:
        state: By default only dead letters that were neither sent again nor purged; None for all.
        after_ms: Stored at this time (epoch ms) or later.
        before_ms: Stored before this time.
        cause: Part of the exception or its text, in any case.
        topic: The topic that the message was sent to.
        with_property: Name and value of a property of the message.
    """

    state: LetterState | None = LetterState.OPEN
    after_ms: int | None = None
    before_ms: int | None = None
    cause: str | None = None
    topic: str | None = None
    key: str | None = None
    tag: str | None = None
    with_property: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            object.__setattr__(self, "key", key_text(self.key))

    def matches(self, letter: DeadLetterMessage) -> bool:
        """Return True if the dead letter matches."""
        message = letter.message
        return (
            self.state in (None, letter.state)
            and (self.after_ms is None or message.store_timestamp >= self.after_ms)
            and (self.before_ms is None or message.store_timestamp < self.before_ms)
            and (self.cause is None or self.cause.lower() in letter.cause.lower())
            and self.topic in (None, letter.origin_topic)
            and (self.key is None or self.key in split_keys(message.keys))
            and self.tag in (None, message.tags)
            and (self.with_property is None or self.with_property in message.properties.items())
        )


@dataclass(frozen=True, slots=True)
class LetterCounts:
    """Numbers of the dead letters of one group.

    Attributes:
        stored: All of them, whatever was done with them.
        resent: Those that were sent again.
        purged: Those that were marked as purged.
    """

    stored: int
    resent: int = 0
    purged: int = 0

    @property
    def open(self) -> int:
        """Those that wait for an operator."""
        return max(0, self.stored - self.resent - self.purged)


@dataclass(frozen=True, slots=True)
class LetterSummary:
    """The dead letters of one group in one row.

    Attributes:
        newest: The newest one; None if it cannot be read.
        last_day: Number of those stored in the last 24 hours, in any state.
        yesterday: Number of those stored between the last two local midnights, in any state.
    """

    counts: LetterCounts
    newest: DeadLetterMessage | None
    last_day: int
    yesterday: int


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of one broker or cluster."""

    access: BrokerAccess

    # --- reading -------------------------------------------------------------------------------

    def groups(self) -> dict[str, int]:
        """Return the number of dead letters by group, whatever was done with them."""
        topics = [name for name, kind in self.access.admin.topic_kinds().items() if kind is TopicKind.DEAD_LETTER]
        counts = {name: sum(span.message_count for span in self.access.admin.queue_spans(name)) for name in topics}
        return {name.removeprefix(DLQ_TOPIC_PREFIX): count for name, count in counts.items()}

    def counts(self) -> dict[str, LetterCounts]:
        """Return the numbers of the dead letters by group and state.

        They are stored until retention deletes them, so their number alone does not fall when they are sent again.
        """
        marks = LetterMarks(self.access).by_group()
        return {
            group: self._counts(group, stored, marks[group]) if group in marks else LetterCounts(stored)
            for group, stored in self.groups().items()
        }

    def _counts(self, group: str, stored: int, marks: Mapping[str, LetterMark]) -> LetterCounts:
        """Count the marks of the dead letters that still exist: their ids have the address and the physical offset."""
        firsts: dict[HostAddress, int] = {}
        for span in self.access.admin.queue_spans(DLQ_TOPIC_PREFIX + group):
            for first in read_queue(self.access.broker, span.queue, span.min_offset, span.min_offset + 1):
                known = firsts.get(first.store_host, first.physical_offset)
                firsts[first.store_host] = min(known, first.physical_offset)
        states: Counter[LetterState] = Counter()
        for letter_id, mark in marks.items():
            try:
                host, physical_offset = parse_offset_msg_id(letter_id)
            except MessageError:  # a mark of another program
                continue
            if host in firsts and physical_offset >= firsts[host]:
                states[mark.state] += 1
        return LetterCounts(stored, states[LetterState.RESENT], states[LetterState.PURGED])

    def summaries(self) -> dict[str, LetterSummary]:
        """Return numbers, the newest one, and the numbers of the last day and of yesterday, by group."""
        now_ms = self.access.broker.clock.now_ms()
        since_ms = (now_ms - DAY_MS, *yesterday_of(now_ms))
        found = {}
        for group, counts in self.counts().items():
            spans = self.access.admin.queue_spans(DLQ_TOPIC_PREFIX + group)
            last_day, start, end = (sum(self._number_since(span, time_ms) for span in spans) for time_ms in since_ms)
            found[group] = LetterSummary(counts, self._newest(group, spans), last_day, start - end)
        return found

    def _number_since(self, span: QueueSpan, time_ms: int) -> int:
        first = self.access.broker.reader.search_offset(span.queue, time_ms)
        return max(0, span.max_offset - max(span.min_offset, first))

    def _newest(self, group: str, spans: Iterable[QueueSpan]) -> DeadLetterMessage | None:
        filled = [each for each in spans if each.last_stored_ms is not None and each.message_count]
        last = max(filled, key=lambda each: each.last_stored_ms or 0, default=None)
        if last is None:
            return None
        found = list(read_queue(self.access.broker, last.queue, last.max_offset - 1, last.max_offset))
        return DeadLetterMessage(group, found[0]) if found else None

    def causes(self, group: str, letter_filter: LetterFilter | None = None) -> Counter[str]:
        """Return the number of dead letters of *group* that match, by the class of the exception."""
        return Counter(letter.exception or "unknown" for letter in self.find(group, letter_filter))

    def find(self, group: str, letter_filter: LetterFilter | None = None) -> Iterator[DeadLetterMessage]:
        """Yield the dead letters of *group* that match, the oldest first.

        Raises:
            UnknownNameError: The group has no dead-letter topic.
        """
        wanted = letter_filter or LetterFilter()
        self._check(group)
        marks = LetterMarks(self.access).of(group)
        search = MessageSearch(self.access)
        for message in search.by_time(DLQ_TOPIC_PREFIX + group, wanted.after_ms or 0, wanted.before_ms):
            mark = marks.get(message.offset_msg_id)
            letter = (
                DeadLetterMessage(group, message)
                if mark is None
                else DeadLetterMessage(group, message, mark.state, mark.time_ms)
            )
            if wanted.matches(letter):
                yield letter

    def get(self, group: str, letter_id: str) -> DeadLetterMessage:
        """Return one dead letter.

        Args:
            letter_id: Its id, or the id of its message; of several dead letters of one message the last one is meant.

        Raises:
            UnknownNameError: There is no such dead letter.
        """
        found = self.get_all(group, [letter_id])
        return found[0]

    def get_all(self, group: str, ids: Sequence[str]) -> list[DeadLetterMessage]:
        """Return dead letters by their ids, or by the ids of their messages. The beginning of an id is enough.

        Raises:
            UnknownNameError: One of them does not exist, or several begin with a text.
        """
        by_id: dict[str, DeadLetterMessage] = {}
        for letter in self.find(group, LetterFilter(state=None)):
            by_id[letter.message.msg_id] = by_id[letter.id] = letter
        return [by_id[_whole_id(group, each, by_id)] for each in ids]

    def original(self, letter: DeadLetterMessage) -> MessageExt | None:
        """Return the message that failed, as it was sent; None if it was deleted."""
        topic, msg_id = letter.origin_topic, letter.origin_msg_id
        if topic is None or msg_id is None:
            return None
        try:
            return MessageSearch(self.access).by_id(msg_id)
        except UnknownNameError:
            return None

    def _check(self, group: str) -> None:
        groups = self.groups()
        if group not in groups:
            raise unknown_name("dead-letter topic of group", group, groups)

    # --- changes -------------------------------------------------------------------------------

    def resend(
        self,
        letters: Iterable[DeadLetterMessage],
        edit: LetterEdit | None = None,
        *,
        only_group: bool = False,
        rate: float | None = None,
        on_progress: OnProgress = no_progress,
    ) -> list[SendResult]:
        """Send the messages of dead letters to their original topics again, and mark the dead letters.

        If a send fails, or the program is interrupted, the dead letters that were sent are marked.

        Args:
            only_group: Send to the retry topic of the group: other groups of the topic do not get the message again.
            rate: Most messages per second; None for no limit.

        Raises:
            MessageError: The original topic of a dead letter is unknown, or only claimed by a client.
        """
        broker, results = self.access.open_for_changes(), []
        with _Marking(LetterMarks(self.access), LetterState.RESENT) as marking:
            for letter in paced(letters, rate, broker.clock):
                _check_origin(letter, only_group=only_group)
                results.append(broker.sends.send(resent_message(letter, edit, only_group=only_group)))
                marking.add(letter)
                on_progress(1)
        return results

    def purge(self, letters: Iterable[DeadLetterMessage], on_progress: OnProgress = no_progress) -> int:
        """Mark dead letters as purged: lists leave them out. Retention deletes the messages. Return their number."""
        count = 0
        with _Marking(LetterMarks(self.access), LetterState.PURGED) as marking:
            for letter in letters:
                marking.add(letter)
                count += 1
                on_progress(1)
        return count


def _whole_id(group: str, text: str, known: Mapping[str, DeadLetterMessage]) -> str:
    if text in known:
        return text
    found = {each.id: name for name, each in known.items() if text and name.startswith(text)}
    if not found:
        raise UnknownNameError(f"group {group!r} has no dead letter {text!r}; list them with: dlq ls {group}")
    return only_one(text, found.values())


def _check_origin(letter: DeadLetterMessage, *, only_group: bool) -> None:
    if letter.origin_topic is None:
        raise MessageError(
            f"dead letter {letter.id} does not name the topic that it was sent to; its client wrote "
            "neither DLQ_ORIGIN_TOPIC nor RETRY_TOPIC, so send its body with: send"
        )
    if not only_group and not letter.is_origin_known:
        raise MessageError(
            f"dead letter {letter.id} names topic {letter.origin_topic!r}, but without the id of a message there "
            "(ORIGIN_MESSAGE_ID): the client that wrote it may not send to that topic; check its body, then send it to "
            "the group only (--only-group), or with: send"
        )


class _Marking:
    """Marks dead letters in batches, the last one at the end of the ``with`` block."""

    def __init__(self, marks: LetterMarks, state: LetterState) -> None:
        self._marks = marks
        self._state = state
        self._ids: dict[str, list[str]] = {}

    def add(self, letter: DeadLetterMessage) -> None:
        """Mark a dead letter with the next batch."""
        ids = self._ids.setdefault(letter.group, [])
        ids.append(letter.id)
        if len(ids) == _MARK_AFTER:
            self._marks.add(letter.group, self._state, self._ids.pop(letter.group))

    def __enter__(self) -> _Marking:
        return self

    def __exit__(self, *error: object) -> None:
        for group, ids in self._ids.items():
            self._marks.add(group, self._state, ids)
