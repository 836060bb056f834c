"""Changes of many messages, or of the progress of a group: preview, confirmation, the change itself, its audit line.

The command line, the dashboard and the actuator make each such change in this way. `mqtemplate.operations.undo` makes
the change that undoes another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from mqtemplate.broker import Broker, OffsetChange
from mqtemplate.errors import CorruptRecordError, MQTemplateError, OffsetOutOfRangeError
from mqtemplate.message import MessageQueue
from mqtemplate.operations.audit import AuditLog, OldValue
from mqtemplate.operations.bulk import OnProgress, at_most, no_progress

_MAX_NAMES = 1_000
_OTHERS = "(others)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePreview:
    """Effect of a change, before it happens.

    Attributes:
        count: Number of messages that it reaches; for a reset those that are skipped or delivered again.
        noun: Name of one of them, such as ``pending message``.
        topics: Their number by topic.
        tags: Their number by tag; those without one have the empty tag. Empty for a reset of offsets.
        first_ms: The first of their times (epoch ms); None without messages.
        last_ms: The last one; None if it is unknown.
        time_name: Kind of these times: ``due`` or ``stored``.
        offsets: For a reset: old and new offset of each queue that it moves.
        has_effect: True for a change that has one whatever it reaches.
        notes: Sentences about what else a reader must know.
        undo: Sentence about how far the change can be undone.
    """

    count: int
    noun: str
    topics: Mapping[str, int] = field(default_factory=dict)
    tags: Mapping[str, int] = field(default_factory=dict)
    first_ms: int | None = None
    last_ms: int | None = None
    time_name: str = "stored"
    offsets: tuple[OffsetChange, ...] = ()
    has_effect: bool = False
    notes: tuple[str, ...] = ()
    undo: str = ""

    @property
    def skipped(self) -> int:
        """Number of messages that a reset skips."""
        return sum(each.skipped for each in self.offsets)

    @property
    def again(self) -> int:
        """Number of messages that a reset delivers again."""
        return sum(each.again for each in self.offsets)

    @property
    def is_empty(self) -> bool:
        """True if the change has no effect."""
        return not self.count and not self.offsets and not self.has_effect

    @property
    def amount(self) -> str:
        """The number of messages for a question, such as ``2,675 pending messages of 3 topics``."""
        noun = self.noun if self.count == 1 else f"{self.noun}s"
        place = f" of {len(self.topics)} topics" if len(self.topics) > 1 else ""
        return f"{self.count:,} {noun}{place}"

    def document(self) -> dict[str, Any]:
        """Return the preview as JSON has it."""
        return {
            "count": self.count,
            "noun": self.noun,
            "topics": dict(self.topics),
            "tags": dict(self.tags),
            "first_ms": self.first_ms,
            "last_ms": self.last_ms,
            "skipped": self.skipped,
            "again": self.again,
            "offsets": [
                {**offset_value(each), "first": each.first, "skipped": each.skipped, "again": each.again}
                for each in self.offsets
            ],
            "notes": list(self.notes),
            "undo": self.undo,
        }

    def merged(self, other: ChangePreview) -> ChangePreview:
        """Return the preview of this reset and another one, of other queues, as one."""
        first = [each for each in (self.first_ms, other.first_ms) if each is not None]
        last = [each for each in (self.last_ms, other.last_ms) if each is not None]
        return replace(
            self,
            count=self.count + other.count,
            topics=dict(Counter(self.topics) + Counter(other.topics)),
            first_ms=min(first, default=None),
            last_ms=max(last, default=None),
            offsets=(*self.offsets, *other.offsets),
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
        )

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> ChangePreview:
        """Return the preview of a `document`, which an application has sent."""
        names = ("count", "noun", "topics", "tags", "first_ms", "last_ms", "undo")
        offsets = tuple(
            OffsetChange(
                MessageQueue(each["topic"], each["broker"], each["queue"]), each["before"], each["after"], each["first"]
            )
            for each in document["offsets"]
        )
        given: dict[str, Any] = {name: document[name] for name in names}
        return cls(**given, offsets=offsets, notes=tuple(document["notes"]))


def offset_value(change: OffsetChange) -> dict[str, Any]:
    """Return old and new offset of a queue, as the audit log has them."""
    queue = change.queue
    names = {"topic": queue.topic, "broker": queue.broker_name, "queue": queue.queue_id}
    return {**names, "before": change.before, "after": change.after}


class PreviewCounter:
    """Counts the messages of a change by topic and tag. Beyond a thousand names the others are counted together."""

    def __init__(self) -> None:
        self.count = 0
        self.topics: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self._first_ms: int | None = None
        self._last_ms: int | None = None

    def add(self, topic: str, tag: str | None, time_ms: int) -> None:
        """Count one message."""
        self.count += 1
        for counts, name in ((self.topics, topic), (self.tags, tag or "")):
            counts[name if name in counts or len(counts) < _MAX_NAMES else _OTHERS] += 1
        self._first_ms = time_ms if self._first_ms is None else min(self._first_ms, time_ms)
        self._last_ms = time_ms if self._last_ms is None else max(self._last_ms, time_ms)

    def preview(self, noun: str, time_name: str, *, notes: tuple[str, ...] = (), undo: str = "") -> ChangePreview:
        """Return the preview of the messages that were counted."""
        return ChangePreview(
            count=self.count,
            noun=noun,
            topics=dict(self.topics.most_common()),
            tags=dict(self.tags.most_common()),
            first_ms=self._first_ms,
            last_ms=self._last_ms,
            time_name=time_name,
            notes=notes,
            undo=undo,
        )


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """Result of a change.

    Attributes:
        text: The result for a reader.
        facts: The result for the audit log.
        details: The value that the operation itself returns, for programs.
        id: Id of the change in the audit log.
    """

    text: str
    facts: Mapping[str, Any]
    details: Any = None
    id: str = ""


class Change(ABC):
    """A change that can be shown before it happens, and undone from its audit line.

    Args:
        action: Name in the audit log, such as ``delayed.cancel``.
        target: Fields of the audit log that say of what: a group, a filter.
        is_named: The user has named a message by its handle, key or id. If it is one, no confirmation is needed.

    Attributes:
        can_be_undone: `mqtemplate.operations.undo` can undo it from its audit line.
        is_by_queue: It moves offsets, and messages arrive meanwhile: it may reach a tenth more than its preview showed.
    """

    is_by_queue: ClassVar[bool] = False

    def __init__(
        self, action: str, target: Mapping[str, object], *, is_named: bool = False, can_be_undone: bool = True
    ) -> None:
        self.action = action
        self.target = target
        self.is_named = is_named
        self.can_be_undone = can_be_undone

    @property
    @abstractmethod
    def title(self) -> str:
        """The change for a reader as a request, such as ``Cancel 2,675 messages``."""

    @property
    @abstractmethod
    def preview(self) -> ChangePreview:
        """The effect. It is found out once."""

    @abstractmethod
    def old_values(self) -> Iterator[OldValue]:
        """Yield the values of each message or queue before the change."""

    @abstractmethod
    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        """Make the change.

        Args:
            old: Yields the old values that were written.
        """

    @property
    def needs_confirmation(self) -> bool:
        """True unless it is a change of one message that the user has named."""
        return not self.is_named or self.preview.count > 1


class UnconfirmedChangeError(MQTemplateError):
    """A change of many messages was not confirmed, or reaches more of them than its preview showed.

    Attributes:
        preview: The effect now.
    """

    def __init__(self, text: str, preview: ChangePreview) -> None:
        super().__init__(text)
        self.preview = preview


def most_of_reset(expected: int) -> int:
    """Return the most messages that a reset may reach if its preview showed *expected*: some arrive meanwhile."""
    return expected + max(10, expected // 10)


def check_confirmed(change: Change, expected: int | None) -> None:
    """Check that a change was confirmed with the number of its preview.

    Args:
        expected: The number; None if there is none.

    Raises:
        UnconfirmedChangeError: There is none, or the change reaches more by now.
    """
    preview = change.preview
    if preview.is_empty or (expected is None and not change.needs_confirmation):
        return
    check_preview(preview, change.title, expected, is_by_queue=change.is_by_queue)


def check_preview(preview: ChangePreview, title: str, expected: int | None, *, is_by_queue: bool) -> None:
    """Check that a change with this preview was confirmed; see `check_confirmed`."""
    if expected is None:
        raise UnconfirmedChangeError(
            f"{title}: look at the preview with dryRun, and confirm it with its number: confirm={preview.count}",
            preview,
        )
    if preview.count > (most_of_reset(expected) if is_by_queue else expected):
        raise UnconfirmedChangeError(
            f"the preview showed {expected:,}, and the change would reach {preview.count:,}; nothing was changed, make "
            "a new preview",
            preview,
        )


def carry_out(
    change: Change,
    audit: AuditLog,
    remote: str | None = None,
    *,
    place: str | None = None,
    expected: int | None = None,
    on_progress: OnProgress = no_progress,
) -> ChangeResult:
    """Make a change, with its lines in the audit log.

    Args:
        remote: Address of the client; None if the log has one user.
        place: The broker, for a reader of the log.
        expected: Number of the preview; None to trust the preview of the change itself.

    Raises:
        MessageError: It reaches more messages than the preview showed. Nothing was changed.
    """
    shown = change.preview.count if expected is None else expected
    old = change.old_values()
    old = old if change.is_by_queue else at_most(shown, old)
    with audit.change(change.action, remote, old, broker=place, **change.target, shown=shown) as entry:
        result = change.make(entry.old, on_progress)
        entry.result.update(result.facts)
    return ChangeResult(result.text, result.facts, result.details, entry.id)


# --- offsets ------------------------------------------------------------------------------------

LISTENER_SEEK = "listener.seek"
"""Action of a reset by a listener, in the audit log."""

SetOffsets: TypeAlias = Callable[[Mapping[MessageQueue, int]], object]
"""Function that sets committed offsets of a group."""


class OffsetsReset(Change):
    """Reset of the offsets of a group: by its administrator, or by one of its listeners.

    Args:
        broker: Broker with the messages.
        changes: The queues that move.
        set_offsets: Sets the new offsets.
        target: Fields of the audit log: the group, and the position.
        action: Name in the audit log.
        notes: Sentences for the preview.
    """

    is_by_queue: ClassVar[bool] = True

    def __init__(
        self,
        broker: Broker,
        changes: Sequence[OffsetChange],
        set_offsets: SetOffsets,
        target: Mapping[str, object],
        *,
        action: str = "offsets.reset",
        notes: Sequence[str] = (),
        is_named: bool = False,
    ) -> None:
        super().__init__(action, target, is_named=is_named)
        self.changes = tuple(changes)
        self._broker = broker
        self._set_offsets = set_offsets
        self._notes = tuple(notes)

    @property
    def title(self) -> str:
        queues = f"{len(self.changes)} offset{'s' * (len(self.changes) != 1)}"
        parts = [
            f"{verb} {count:,} message{'s' * (count != 1)}{more}"
            for verb, count, more in (("skip", self.preview.skipped, ""), ("deliver", self.preview.again, " again"))
            if count
        ]
        effect = f": {' and '.join(parts)}" if parts else ""
        return f"Set {queues} of group {self.target['group']!r}{effect}"

    @cached_property
    def preview(self) -> ChangePreview:
        moved = Counter[str]()
        times: list[int] = []
        for each in self.changes:
            moved[each.queue.topic] += each.skipped + each.again
            times += self._times(each)
        return ChangePreview(
            count=moved.total(),
            noun="message",
            topics={topic: count for topic, count in moved.most_common() if count},
            first_ms=min(times, default=None),
            last_ms=max(times, default=None),
            offsets=self.changes,
            notes=self._notes,
            undo="It can be undone: the group goes back to the old offsets, and gets what it has handled since again.",
        )

    def _times(self, change: OffsetChange) -> Iterator[int]:
        """Yield the store times of the first and the last message that the change skips or delivers again."""
        if not change.skipped + change.again:
            return
        for at in (change.after - change.skipped, change.after + change.again - 1):
            try:
                page = self._broker.reader.pull(change.queue, max(at, change.first), 1, 0)
            except (OffsetOutOfRangeError, CorruptRecordError):
                continue  # a preview without a time is better than none
            yield from (message.store_timestamp for message in page.messages[:1])

    def old_values(self) -> Iterator[OldValue]:
        yield from map(offset_value, self.changes)

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        self._set_offsets({change.queue: change.after for change in self.changes})
        on_progress(self.preview.count)
        facts = {"skipped": self.preview.skipped, "again": self.preview.again}
        return ChangeResult(f"set {len(self.changes)} offsets of group {self.target['group']!r}", facts)


def old_offsets(values: Iterable[OldValue]) -> dict[MessageQueue, int | None]:
    """Return the offsets before a reset, from its audit line."""
    return {MessageQueue(each["topic"], each["broker"], each["queue"]): each["before"] for each in values}


def plan_restore(
    old: Mapping[MessageQueue, int | None],
    committed: Mapping[MessageQueue, int | None],
    spans: Mapping[MessageQueue, tuple[int, int]],
) -> tuple[list[OffsetChange], list[str]]:
    """Return the changes that set old offsets again, and sentences about queues where that is not possible.

    Args:
        committed: The offsets now.
        spans: First offset and end of each queue that exists.
    """
    changes, notes = [], []
    for queue, before in old.items():
        name = f"queue {queue.topic}/{queue.broker_name}/{queue.queue_id}"
        if queue not in spans:
            notes.append(f"{name} is left alone: it is gone, or belongs to another member.")
            continue
        low, high = spans[queue]
        wanted = min(max(low if before is None else before, low), high)
        if before is None:
            notes.append(f"{name} had no offset; it gets that of its first message.")
        elif before < low:
            notes.append(f"{name}: retention has deleted messages up to offset {low:,}.")
        change = OffsetChange(queue, committed.get(queue), wanted, low)
        if change.before != change.after:
            changes.append(change)
    return changes, notes
