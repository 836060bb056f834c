"""Plan of a hand-over: what moves from the old broker to the new one, what stays, and what must exist there.

`create_plan` reads both brokers and changes nothing. The command ``mqtemplate hand-over plan``, and `run`, use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from mqtemplate.broker import Broker, BrokerAdmin, TopicKind, TopicSettings
from mqtemplate.broker.hand_over import DelayLimits
from mqtemplate.converters.readable import count_text, span_text, time_text
from mqtemplate.errors import BrokerError, UnknownNameError, UnsupportedError
from mqtemplate.handover.admin import copy_topics
from mqtemplate.message import MessageQueue
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import OnProgress, no_progress
from mqtemplate.operations.delayed import DelayedOperations
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.topics import RETRY_TOPIC_PREFIX, is_reply_topic

_MAX_BODY = 4 << 20
"""RocketMQ's default ``maxMessageSize``; our server has the same."""
_MAX_NAMES = 1_000
_OTHERS = "(others)"


@dataclass(slots=True)
class PendingPart:
    """Pending messages with the same future.

    Attributes:
        count: Number of messages.
        topics: Their number by topic; beyond a thousand topics the others are counted together.
        days: Their number by the local day on which they are due, such as ``2026-01-31``.
        first_ms: The first deliver time (epoch ms); None without messages.
        last_ms: The last deliver time.
    """

    count: int = 0
    topics: dict[str, int] = field(default_factory=dict)
    days: dict[str, int] = field(default_factory=dict)
    first_ms: int | None = None
    last_ms: int | None = None

    def add(self, topic: str, deliver_ms: int) -> None:
        """Count one message."""
        self.count += 1
        name = topic if topic in self.topics or len(self.topics) < _MAX_NAMES else _OTHERS
        self.topics[name] = self.topics.get(name, 0) + 1
        day = day_text(deliver_ms)
        self.days[day] = self.days.get(day, 0) + 1
        self.first_ms = deliver_ms if self.first_ms is None else min(self.first_ms, deliver_ms)
        self.last_ms = deliver_ms if self.last_ms is None else max(self.last_ms, deliver_ms)


def day_text(time_ms: int) -> str:
    """Return the local day of a time."""
    return datetime.fromtimestamp(time_ms / 1_000).astimezone().strftime("%Y-%m-%d")


@dataclass(frozen=True, slots=True)
class UnreadQueue:
    """Messages of one queue that some group has not consumed; of a topic without groups all that exist.

    Attributes:
        start: Queue offset of the first one.
        end: One past the queue offset of the last one.
        groups: Group -> queue offset of the first message that it has not consumed.
    """

    queue: MessageQueue
    start: int
    end: int
    groups: Mapping[str, int]

    @property
    def count(self) -> int:
        """Number of the messages."""
        return max(0, self.end - self.start)


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One topic at both brokers.

    Attributes:
        queue_count: Number of queues that the new broker needs: as many as the old one has.
        existing: Number of queues on a broker of the new cluster; 0 for a topic that is to be created.
        ready: Number of messages that some group has not consumed.
        rights: Rights of the topic: ``read, write``.
    """

    name: str
    queue_count: int
    existing: int
    ready: int
    rights: str

    @property
    def is_missing(self) -> bool:
        """True if the new broker lacks the topic, or some of its queues."""
        return self.existing < self.queue_count


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One consumer group at both brokers.

    Attributes:
        topics: Topics that it reads at the old broker.
        old_lag: Messages that it has not consumed at the old broker.
        new_lag: The same at the new broker; None for a group that is to be created.
        members: Number of members that are connected to the old broker.
    """

    name: str
    topics: tuple[str, ...]
    old_lag: int
    new_lag: int | None
    members: int


@dataclass(frozen=True, slots=True)
class HandOverPlan:
    """Effect of a hand-over, before it happens.

    Attributes:
        limits: Limits of the new broker for delayed messages; None if it does not tell them.
        moves: Pending messages that the new broker can take now.
        later: Pending messages that move when they come into its range.
        stays: Pending messages that the old broker releases: the new one has no timers.
        retries: Pending retries. They are released and consumed at the old broker; `run` moves them.
        impossible: Sentences about what cannot be moved.
        notes: Sentences about what else a reader must know.
        rate: Messages per second.
    """

    source: str
    target: str
    time_ms: int
    limits: DelayLimits | None
    moves: PendingPart
    later: PendingPart
    stays: PendingPart
    retries: PendingPart
    topics: tuple[TopicPlan, ...]
    groups: tuple[GroupPlan, ...]
    impossible: tuple[str, ...]
    notes: tuple[str, ...]
    rate: float

    @property
    def pending(self) -> int:
        """Number of all pending messages."""
        return self.moves.count + self.later.count + self.stays.count + self.retries.count

    @property
    def ready(self) -> int:
        """Number of messages in topics that some group has not consumed."""
        return sum(each.ready for each in self.topics)

    @property
    def move_ms(self) -> int:
        """Estimated time until all is moved that can move now."""
        return round(self.moves.count * 1_000 / self.rate)

    @property
    def in_range_ms(self) -> int | None:
        """Time (epoch ms) at which the last message of `later` comes into the range of the new broker."""
        if self.later.last_ms is None or self.limits is None:
            return None
        return self.later.last_ms - self.limits.max_delay_ms

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        parts = {name: asdict(getattr(self, name)) for name in ("moves", "later", "stays", "retries")}
        return {
            "source": self.source,
            "target": self.target,
            "time_ms": self.time_ms,
            "limits": None if self.limits is None else asdict(self.limits),
            "pending": self.pending,
            "ready": self.ready,
            **parts,
            "in_range_ms": self.in_range_ms,
            "topics": [asdict(each) | {"is_missing": each.is_missing} for each in self.topics],
            "groups": [asdict(each) for each in self.groups],
            "impossible": list(self.impossible),
            "notes": list(self.notes),
            "rate": self.rate,
            "move_ms": self.move_ms,
        }

    def lines(self) -> list[str]:
        """Return the plan for a reader, without its tables of topics and groups."""
        lines = [f"from {self.source} to {self.target}", self._limits_text()]
        lines.append(f"{count_text(self.pending, 'pending message')}:")
        for part, text in (
            (self.moves, f"move now, in about {span_text(self.move_ms)} at {self.rate:g} a second"),
            (self.later, self._later_text()),
            (self.stays, "stay: the new broker has no timers. The old one releases them, if max-early-ms is 0"),
            (self.retries, "are retries: the old broker releases them, and listeners consume them there"),
        ):
            if part.count:
                lines.append(f"  {part.count:,} {text}")
                lines += [f"    {line}" for line in _part_lines(part)]
        lines.append(f"{count_text(self.ready, 'message')} in topics not consumed by every group")
        lines += [f"IMPOSSIBLE: {text}" for text in self.impossible]
        return [*lines, *(f"note: {text}" for text in self.notes)]

    def _limits_text(self) -> str:
        if self.limits is None:
            return "the new broker does not tell its limits for delayed messages"
        if not self.limits.max_delay_ms:
            return f"the new broker has no timers, and {count_text(len(self.limits.levels_ms), 'delay level')}"
        return (
            f"the new broker takes delays up to {span_text(self.limits.max_delay_ms)}, with a precision of "
            f"{span_text(self.limits.precision_ms)}"
        )

    def _later_text(self) -> str:
        at_ms = self.in_range_ms
        until = "" if at_ms is None else f", the last one on {time_text(at_ms)}"
        return f"stay until they come into the range of the new broker{until}"


def _part_lines(part: PendingPart, most: int = 10) -> list[str]:
    """Return the numbers of a part by topic and by day."""
    topics = Counter(part.topics).most_common(most + 1)
    days = sorted(part.days.items())[: most + 1]
    return [
        f"{title}: {', '.join(f'{name} {count:,}' for name, count in found[:most])}{', …' if len(found) > most else ''}"
        for title, found in (("by topic", topics), ("due", days))
    ]


# --- reading of both brokers ----------------------------------------------------------------------


def create_plan(
    old: Broker,
    new: Broker,
    *,
    source: str,
    target: str,
    rate: float,
    open_transactions: int = 0,
    on_progress: OnProgress = no_progress,
) -> HandOverPlan:
    """Read both brokers, and return what a hand-over will do. Nothing changes.

    Args:
        source: The old broker for a reader, such as ``embedded:./data``.
        target: The new broker for a reader.
        rate: Messages per second that may move.
        open_transactions: Number of transactions at the old broker that have not ended.
        on_progress: Called with the number of pending messages read since the last call.

    Raises:
        UnsupportedError: Messages cannot move from this kind of broker, or a broker does not list its topics.
    """
    old.hand_over.state()  # refuses a broker of RocketMQ
    counts = _PendingCounts(limits_of(new), old.clock.now_ms())
    for message in DelayedOperations(BrokerAccess(old)).all(PendingQuery()):
        counts.add(message)
        on_progress(1)
    unread = unread_queues(old.admin())
    return HandOverPlan(
        source=source,
        target=target,
        time_ms=counts.now_ms,
        limits=counts.limits,
        moves=counts.moves,
        later=counts.later,
        stays=counts.stays,
        retries=counts.retries,
        topics=topic_plans(old.admin(), new, unread),
        groups=_group_plans(old.admin(), new.admin()),
        impossible=(*counts.impossible(), *_transactions(open_transactions)),
        notes=(*counts.notes(), *_notes_about_groups(old.admin())),
        rate=rate,
    )


def limits_of(new: Broker) -> DelayLimits | None:
    """Return the limits of a broker for delayed messages; None if it does not tell them."""
    try:
        return new.delay_limits()
    except UnsupportedError:
        return None


class _PendingCounts:
    """Counts pending messages by their future."""

    def __init__(self, limits: DelayLimits | None, now_ms: int) -> None:
        self.limits, self.now_ms = limits, now_ms
        self.moves, self.later, self.stays, self.retries = (PendingPart() for _ in range(4))
        self._corrupt = self._large = self._rounded = self._levels = 0

    def add(self, message: PendingMessage) -> None:
        """Count one message."""
        if not message.msg_id:
            self._corrupt += 1
            return
        part = self._part(message)
        if message.body_size > _MAX_BODY:
            self._large += 1
        if part is self.moves and self.limits is not None:
            self._rounded += message.deliver_ms % self.limits.precision_ms != 0
            self._levels += message.delay_level > 0
        part.add(message.topic, message.deliver_ms)

    def _part(self, message: PendingMessage) -> PendingPart:
        limits = self.limits
        if message.topic.startswith(RETRY_TOPIC_PREFIX):
            return self.retries
        if limits is None:
            return self.moves
        if not limits.max_delay_ms:
            return self.stays
        return self.moves if message.deliver_ms - self.now_ms <= limits.max_delay_ms else self.later

    def impossible(self) -> list[str]:
        """Return what cannot be moved."""
        found = []
        if self._corrupt:
            found.append(
                f"{count_text(self._corrupt, 'pending message')} cannot be read, so they cannot be moved; "
                "mqtemplate doctor FOLDER names them"
            )
        if self._large:
            found.append(
                f"{count_text(self._large, 'pending message has', 'pending messages have')} more than 4 MiB, which "
                "RocketMQ refuses by default: raise maxMessageSize there"
            )
        return found

    def notes(self) -> list[str]:
        """Return what else a reader must know."""
        found = []
        if self._rounded and self.limits is not None:
            found.append(
                f"{count_text(self._rounded, 'message')} may be delivered up to {span_text(self.limits.precision_ms)} "
                "late: the new broker has this precision"
            )
        if self._levels:
            messages = count_text(self._levels, "message")
            found.append(f"{messages} with a delay level: each moves as a timer with the same deliver time")
        return found


def _transactions(count: int) -> list[str]:
    text = (
        f"{count_text(count, 'transaction has', 'transactions have')} not ended at the old broker; start the "
        "application with mqtemplate.hand-over.from: the old broker checks them until they end"
    )
    return [text] if count else []


def unread_queues(admin: BrokerAdmin) -> list[UnreadQueue]:
    """Return the queues of all topics with the messages that some group has not consumed, sorted."""
    positions: dict[MessageQueue, dict[str, int]] = {}
    for group in admin.groups():
        for each in group.progress:
            positions.setdefault(each.queue, {})[group.name] = each.first_unread
    found = []
    for topic in admin.readable_topics():
        if is_reply_topic(topic):
            continue
        for span in admin.queue_spans(topic):
            groups = {
                name: min(max(at, span.min_offset), span.max_offset)
                for name, at in positions.get(span.queue, {}).items()
            }
            start = min(groups.values(), default=span.min_offset)
            found.append(UnreadQueue(span.queue, start, span.max_offset, groups))
    return found


def create_missing(old: BrokerAdmin, new: Broker) -> list[str]:
    """Create the topics, queues and groups that the new broker lacks. Return the topics that were changed."""
    wanted = {each.name for each in topic_plans(old, new, unread_queues(old)) if each.is_missing}
    settings = {name: each for name, each in old.topic_settings().items() if name in wanted}
    changed = copy_topics(settings, new)
    for group in old.group_names():
        new.admin().create_group(group)
    return changed


def topic_plans(old: BrokerAdmin, new: Broker, unread: list[UnreadQueue]) -> tuple[TopicPlan, ...]:
    """Return the topics of the old broker that the new one needs, sorted.

    Raises:
        BrokerError: No broker of the new cluster is registered at its name servers.
    """
    ready: Counter[str] = Counter()
    for each in unread:
        ready[each.queue.topic] += each.count
    existing = new.admin().topic_settings()
    if not existing and not new.is_embedded:  # each broker has system topics
        raise BrokerError(
            "no broker of the new cluster is registered at its name servers, so nothing can be created there; start "
            "it, wait until it is registered, and try again"
        )
    return tuple(
        TopicPlan(
            name,
            settings.queue_count,
            existing[name].queue_count if name in existing else 0,
            ready[name],
            _rights(settings),
        )
        for name, settings in old.topic_settings().items()
        if _is_moved(name, settings, ready[name])
    )


def _is_moved(name: str, settings: TopicSettings, ready: int) -> bool:
    """Return True for a topic of applications, and for retries and dead letters if there are some."""
    if is_reply_topic(name) or settings.kind is TopicKind.SYSTEM:
        return False
    return settings.kind is TopicKind.NORMAL or ready > 0


def _rights(settings: TopicSettings) -> str:
    names = [name for name, is_given in (("read", settings.is_readable), ("write", settings.is_writable)) if is_given]
    return ", ".join(names) or "none"


def _group_plans(old: BrokerAdmin, new: BrokerAdmin) -> tuple[GroupPlan, ...]:
    lag = lag_reader(new)
    return tuple(
        GroupPlan(each.name, each.topics, each.lag, lag(each.name), len(each.members)) for each in old.groups()
    )


def lag_reader(admin: BrokerAdmin) -> Callable[[str], int | None]:
    """Return a function that returns the lag of a group; None for a group that does not exist."""
    names = set(admin.group_names())

    def lag(group: str) -> int | None:
        if group not in names:
            return None
        try:
            return admin.group(group).lag
        except UnknownNameError:  # it was deleted meanwhile
            return None

    return lag


def _notes_about_groups(old: BrokerAdmin) -> list[str]:
    broadcasting = [each.name for each in old.groups() if each.message_model == "BROADCASTING"]
    text = (
        f"each member of {', '.join(broadcasting)} stores its own offsets (broadcasting), so none are moved: it starts "
        "at the new broker as a new member does"
    )
    return [text] if broadcasting else []
