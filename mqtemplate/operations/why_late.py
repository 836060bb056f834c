"""Why a message is late: pending, released late, a paused listener, a backlog, a retry, a slow handler.

And how late the newest delayed messages of a topic were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mqtemplate.converters.readable import span_text, time_text
from mqtemplate.errors import MQTemplateError, UnknownNameError
from mqtemplate.message import MessageExt, Property
from mqtemplate.numbers import parse_number
from mqtemplate.operations.access import BrokerAccess, StoreAccess
from mqtemplate.operations.audit import AuditLog
from mqtemplate.operations.bulk import parse_time
from mqtemplate.operations.message_path import MessagePath, PathStep, StepKind
from mqtemplate.pending import ON_TIME_MS
from mqtemplate.record import dead_letter

RateOf: TypeAlias = Callable[[str], float | None]
"""Function that returns how many messages a group handles per second; None if that is unknown."""

_LATE_MS = 1_000
"""A release or a call of a handler that is not later is on time for a reader."""
_SAMPLE_S = 2.0
_RECENT_CHANGES = 200
_SAME_CHANGE_MS = 30_000
_PAUSE = "listener.pause"
_PARTS = {
    # cause of a part of the lateness, as the application names it
    "broker_stopped": "the broker did not run for {}",
    "backlog": "the broker released other messages first for {}",
    "rate_limit": "the rate, jitter or spread of the topic is {} of it",
    "release": "the broker released it {} late",
    "consumer_lag": "the listener fetched it {} late: it was stopped, paused, or far behind",
    "slow_handler": "its handlers were busy for {} with the messages before",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the lateness of a message.

    Attributes:
        is_cause: True if it delays the message, or has delayed it.
        group: The group that the fact is about.
        listener: The listener that the fact is about.
        change: Id of the change in the log of changes that caused it.
        lacks_rate: True for a backlog whose time is not estimated, since the rate of the group is unknown.
    """

    text: str
    is_cause: bool = False
    group: str | None = None
    listener: str | None = None
    change: str | None = None
    lacks_rate: bool = False


@dataclass(frozen=True, slots=True)
class LoggedPause:
    """The last pause of a listener."""

    time_ms: int
    author: str
    change: str


@dataclass(frozen=True, slots=True)
class ListenerReport:
    """The listeners of an application, as the documents of its actuator have them.

    Attributes:
        listeners: Of ``/actuator/listeners``.
        deliveries: Recent late deliveries, of ``/actuator/lateness``.
        pauses: Listener -> its last pause.
    """

    listeners: Sequence[Mapping[str, Any]] = ()
    deliveries: Sequence[Mapping[str, Any]] = ()
    pauses: Mapping[str, LoggedPause] | None = None

    @classmethod
    def read(cls, get: Callable[[str], Any] | None, audit: AuditLog | None = None) -> ListenerReport:
        """Return the state of an application.

        Args:
            get: Returns a document of the actuator; None without an application.
            audit: Log of changes of the reader; a pause in it is older than its copy in the log of the application.
        """
        own = [] if audit is None else audit.recent(_RECENT_CHANGES)
        pauses = dict(_pauses((each.action, each.facts, each.time, each.author, each.id) for each in own))
        if get is None:
            return cls(pauses=pauses)
        changes = _list_of(get, "changes", "changes")
        for listener, pause in _pauses(
            (each["action"], each["facts"], each["time"], each["author"], each["id"]) for each in changes
        ):
            if listener not in pauses or pause.time_ms > pauses[listener].time_ms + _SAME_CHANGE_MS:
                pauses[listener] = pause
        return cls(_list_of(get, "listeners", "listeners"), _list_of(get, "lateness", "deliveries"), pauses)

    def of_group(self, group: str) -> Sequence[Mapping[str, Any]]:
        """Return the listeners of a group."""
        return [each for each in self.listeners if each["group"] == group]

    def pause_of(self, listener: str) -> LoggedPause | None:
        """Return the last pause of a listener."""
        return (self.pauses or {}).get(listener)


def _list_of(get: Callable[[str], Any], path: str, name: str) -> Sequence[Mapping[str, Any]]:
    try:
        document = get(path)
    except UnknownNameError:  # the application has no such document
        return []
    return [] if document is None else document[name]


def _pauses(
    changes: Iterable[tuple[str, Mapping[str, Any], str, str, str]],
) -> Iterator[tuple[str, LoggedPause]]:
    """Yield the last pause of each listener, from changes with the newest first."""
    seen: set[str] = set()
    for action, facts, time, author, change in changes:
        listener = facts.get("listener")
        if action == _PAUSE and isinstance(listener, str) and listener not in seen:
            seen.add(listener)
            yield listener, LoggedPause(parse_time(time) or 0, author, change)


def measured_rate(access: BrokerAccess) -> RateOf:
    """Return a function that reads the offsets of a group twice: its rate is of the two seconds between.

    Of a store directory there is no rate: it is read as a snapshot.
    """

    def rate_of(group: str) -> float | None:
        if isinstance(access, StoreAccess):
            return None
        before = _committed(access, group)
        access.broker.clock.sleep(_SAMPLE_S)
        after = _committed(access, group)
        grown = sum(max(0, offset - before.get(queue, offset)) for queue, offset in after.items())
        return grown / _SAMPLE_S

    return rate_of


def _committed(access: BrokerAccess, group: str) -> dict[object, int]:
    return {each.queue: each.committed for each in access.admin.progress(group) if each.committed is not None}


def unknown_rate(group: str) -> float | None:
    """Return None: the rate of no group is known."""
    return None


def why_late(
    access: BrokerAccess,
    path: MessagePath,
    application: ListenerReport = ListenerReport(),
    rate_of: RateOf = unknown_rate,
) -> Sequence[Finding]:
    """Return why a message is late, or was: first of its release, then of each group that reads its topic.

    A message that is on time has findings too: that it is pending, or that it was handled.
    """
    return [*_release(access, path), *_Groups(access, path, application, rate_of).findings()]


# --- release ------------------------------------------------------------------------------------


def _release(access: BrokerAccess, path: MessagePath) -> Iterator[Finding]:
    now_ms = access.broker.clock.now_ms()
    own = [step for step in path.steps if step.group is None]
    pending = [step for step in own if step.kind is StepKind.PENDING]
    delivered = [step for step in own if step.kind in (StepKind.DELIVERED, StepKind.STORED, StepKind.SENT_AGAIN)]
    for step in pending:
        yield _pending(access, step, now_ms)
    if delivered:
        yield _delivered(delivered[-1])
    elif not pending and any(step.kind is StepKind.CANCELLED for step in own):
        cancelled = [step for step in own if step.kind is StepKind.CANCELLED][-1]
        yield Finding(f"it was cancelled at {time_text(cancelled.time_ms)}, so it is not delivered", is_cause=True)


def _pending(access: BrokerAccess, step: PathStep, now_ms: int) -> Finding:
    at = time_text(step.time_ms)
    if step.time_ms > now_ms:
        return Finding(f"still pending, due in {span_text(step.time_ms - now_ms)}, at {at}", is_cause=True)
    late = span_text(now_ms - step.time_ms)
    why = "no broker has its directory open, or it is behind" if isinstance(access, StoreAccess) else "it is behind"
    return Finding(f"it was due at {at}, {late} ago, and the broker has not released it: {why}", is_cause=True)


def _delivered(step: PathStep) -> Finding:
    at = time_text(step.time_ms)
    if step.kind is not StepKind.DELIVERED:
        again = " again" if step.kind is StepKind.SENT_AGAIN else ""
        return Finding(f"it was sent{again} without a delay, and stored in topic {step.topic} at {at}")
    if step.late_ms is None:
        return Finding(f"delivered to the topic at {at}; its deliver time is unknown")
    if step.late_ms > _LATE_MS:
        return Finding(f"delivered to the topic {span_text(step.late_ms)} late, at {at}", is_cause=True)
    return Finding(f"delivered to the topic on time, at {at}")


# --- groups -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups that read the topic of a message."""

    access: BrokerAccess
    path: MessagePath
    application: ListenerReport
    rate_of: RateOf

    def findings(self) -> Iterator[Finding]:
        """Yield what each group has done with the message, or waits for."""
        for reading in self.path.readings:
            steps = [step for step in self.path.steps if step.group == reading.group]
            last = steps[-1] if steps else None
            if not reading.is_consumed:
                yield from self._waiting(reading.group, self._record())
            elif last is None or last.kind is StepKind.SENT_AGAIN:
                yield from self._handled(reading.group)
            elif last.kind is StepKind.RETRY_DELIVERED:
                yield from self._retried(reading.group, last)
            else:
                yield self._failed(reading.group, last)

    def _record(self) -> MessageExt | None:
        """Return the last record in the topic."""
        kinds = (StepKind.DELIVERED, StepKind.STORED, StepKind.SENT_AGAIN)
        records = [step.record for step in self.path.steps if step.kind in kinds and step.group is None]
        return records[-1] if records else None

    def _waiting(self, group: str, record: MessageExt | None) -> Iterator[Finding]:
        """Yield why a group has not handled a record yet."""
        paused = [each for each in self.application.of_group(group) if "paused" in each["state"]]
        yield from (self._paused(group, each) for each in paused)
        before = 0 if record is None else self._before(group, record)
        if before:
            yield self._backlog(group, before, is_paused=bool(paused))
        elif not paused:
            yield self._next(group)
        if not paused and self._has_no_member(group):
            yield Finding(f"group {group} has no connected member", is_cause=True, group=group)

    def _paused(self, group: str, listener: Mapping[str, Any]) -> Finding:
        name, pause = listener["id"], self.application.pause_of(listener["id"])
        text = f"the listener {name} is {listener['state']}"
        if pause is None:
            return Finding(text, True, group, name)
        text += f" since {time_text(pause.time_ms)} by {pause.author} (change {pause.change})"
        return Finding(text, True, group, name, pause.change)

    def _before(self, group: str, record: MessageExt) -> int:
        """Return how many messages of the topic that were stored before a record the group has not handled."""
        before = 0
        for each in self.access.admin.progress(group, record.topic):
            end = record.queue_offset
            if each.queue != record.message_queue:
                end = self.access.broker.reader.search_offset(each.queue, record.store_timestamp)
            start = each.committed if each.committed is not None else each.min_offset or 0
            before += max(0, min(end, each.max_offset) - start)
        return before

    def _backlog(self, group: str, before: int, *, is_paused: bool) -> Finding:
        text = f"group {group} has {before:,} {'message' if before == 1 else 'messages'} before it"
        if is_paused:
            return Finding(text, True, group)
        rate = self.rate_of(group)
        if rate is None:
            return Finding(text, True, group, lacks_rate=True)
        if not rate:
            return Finding(f"{text}, and handles none at present", True, group)
        number = f"{rate:,.0f}" if rate >= 1 else f"{rate:.2g}"
        left = span_text(round(before / rate * 1_000))
        return Finding(f"{text}, and handles {number} per second: about {left}", True, group)

    def _next(self, group: str) -> Finding:
        """Return the finding of a message that is the next one."""
        listeners = self.application.of_group(group)
        busy = [each for each in listeners if each["inFlight"]]
        if not busy:
            return Finding(f"group {group} has no message before it, and has not handled it yet", group=group)
        name, running, hanging = busy[0]["id"], busy[0]["inFlight"], busy[0]["hanging"]
        text = f"group {group} has no message before it: the handler of {name} runs for it, or for one beside it"
        more = f" ({running} running{f', {hanging} of them hanging' if hanging else ''})"
        return Finding(text + more, bool(hanging), group, name)

    def _has_no_member(self, group: str) -> bool:
        if isinstance(self.access, StoreAccess) or self.application.of_group(group):
            return False  # a snapshot knows no members
        try:
            return not self.access.admin.group(group).members
        except MQTemplateError:
            return False

    def _handled(self, group: str) -> Iterator[Finding]:
        late = [
            each
            for each in self.application.deliveries
            if each["msgId"] == self.path.msg_id and each["group"] == group and each["lateMs"] > _LATE_MS
        ]
        for each in late[:1]:
            parts = sorted(each["causes"].items(), key=lambda part: -part[1])
            why = "; ".join(_PARTS.get(cause, cause).format(span_text(part)) for cause, part in parts)
            own_ms = each["handledMs"] - each["startedMs"]
            own = f"; then it took {span_text(own_ms)} itself" if own_ms > _LATE_MS else ""
            text = f"listener {each['listener']} handled it {span_text(each['lateMs'])} late: {why}{own}"
            yield Finding(text, True, group, each["listener"])
        if not late:
            yield Finding(f"group {group} has handled it", group=group)

    def _retried(self, group: str, step: PathStep) -> Iterator[Finding]:
        """Yield the state of a message that was delivered again after a failure."""
        record = step.record
        assert record is not None, "a delivery has a record"
        committed = self.access.broker.groups.committed_offset(group, record.message_queue)
        if committed is not None and committed > record.queue_offset:
            number = record.reconsume_times
            yield Finding(f"group {group} has handled it at its retry {number}", True, group)
        else:
            yield from self._waiting(group, record)

    def _failed(self, group: str, step: PathStep) -> Finding:
        at = time_text(step.time_ms)
        if step.kind is not StepKind.DEAD_LETTER:  # a retry that is delayed or pending
            due = "" if step.due_ms is None else f"; its next retry is due at {time_text(step.due_ms)}"
            return Finding(f"the handler of group {group} has failed{due}", True, group)
        properties = {} if step.record is None else step.record.properties
        error = properties.get(dead_letter.EXCEPTION)
        reason = properties.get(dead_letter.MESSAGE)
        cause = "" if error is None else f": {error}{f': {reason}' if reason else ''}"
        return Finding(f"the handler of group {group} failed each time; a dead letter since {at}{cause}", True, group)


# --- late deliveries ------------------------------------------------------------------------------

_SAMPLED = 500


def percentiles(lateness: Sequence[int]) -> dict[int, int]:
    """Return the median, the 99th percentile and the maximum, by 50, 99 and 100; empty without values."""
    in_order = sorted(lateness)
    last = len(in_order) - 1
    return {each: in_order[min(last, len(in_order) * each // 100)] for each in (50, 99, 100)} if in_order else {}


@dataclass(frozen=True, slots=True)
class DeliveryLateness:
    """Lateness of the newest deliveries of delayed messages in a topic.

    Attributes:
        count: Messages of the sample that were delayed.
        median_ms: Time from the due time of a message until it was stored in its topic.
        late: Messages more than `ON_TIME_MS` late.
        first_ms: Store time of the first delivery of the sample (epoch ms).
        last_ms: Store time of the last one.
    """

    count: int = 0
    median_ms: int = 0
    p99_ms: int = 0
    max_ms: int = 0
    late: int = 0
    first_ms: int = 0
    last_ms: int = 0


def delivery_lateness(access: BrokerAccess, topic: str) -> DeliveryLateness:
    """Return the lateness of delayed messages among the newest ones of each queue of a topic.

    A delivered timer has its due time: the millisecond if the producer or our broker has set it, else RocketMQ's slot.
    The due time of a level is the time at which the producer created the message plus the delay of the level.
    """
    reader, found = access.broker.reader, list[tuple[int, int]]()
    levels_ms = access.admin.delay_levels_ms() or access.broker.delay_levels_ms
    for span in access.admin.queue_spans(topic):
        offset = max(span.min_offset, span.max_offset - _SAMPLED)
        while offset < span.max_offset:
            result = reader.pull(span.queue, offset)
            found += [
                (each.store_timestamp, max(0, each.store_timestamp - due_ms))
                for each in result.messages
                if (due_ms := delivered_due_ms(each, levels_ms)) is not None
            ]
            if result.next_begin_offset <= offset:
                break
            offset = result.next_begin_offset
    if not found:
        return DeliveryLateness()
    stored, late = [each for each, _ in found], [each for _, each in found]
    at = percentiles(late)
    return DeliveryLateness(
        len(found),
        at[50],
        at[99],
        at[100],
        sum(each > ON_TIME_MS for each in late),
        min(stored),
        max(stored),
    )


def delivered_due_ms(message: MessageExt, levels_ms: Sequence[int]) -> int | None:
    """Return when a delivered message was due; None if it was not delayed.

    Args:
        levels_ms: The delay of each level, the first one first; empty if they are unknown.
    """
    timer_ms = message.deliver_timestamp or parse_number(message.properties.get(Property.TIMER_OUT_MS))
    if timer_ms is not None:
        return timer_ms
    level = parse_number(message.properties.get(Property.DELAY)) or 0
    return message.born_timestamp + levels_ms[min(level, len(levels_ms)) - 1] if level > 0 and levels_ms else None
