"""The topic of the schedules of an application: run messages, their keys, and the pauses."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from mqtemplate.broker import Broker, Capability, QueueLock
from mqtemplate.errors import DelayError, MessageError, ScheduleError, UnsupportedError
from mqtemplate.hashes import queue_number
from mqtemplate.message import Message, MessageExt, MessageQueue, Property, create_unique_id, split_keys
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.scheduling.schedule import check_name, is_name
from mqtemplate.scheduling.trigger import LAST_MS, Trigger
from mqtemplate.topics import SCHEDULES_TOPIC

SHORT_STEP_MS = 2 * 86_400_000
"""Longest delay that every broker takes: RocketMQ's timers take three days."""

LONG_STEP_MS = 30 * 86_400_000
"""Longest delay where the broker takes more: the embedded broker and our server take forty days, by default."""


class RunKey(NamedTuple):
    """Key of a run message: equal messages of several processes have equal keys.

    The fingerprint keeps the messages of a trigger apart from the messages of the trigger that replaces it.
    """

    schedule: str
    run_ms: int
    deliver_ms: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.schedule}@{self.run_ms}@{self.deliver_ms}@{self.fingerprint}"


_RUN_KEY = re.compile(r"([a-zA-Z0-9_-]{1,64})@(\d{1,15})@(\d{1,15})@([0-9a-f]{8})", re.ASCII)


def find_run_key(keys: str | None) -> RunKey | None:
    """Return the key of a run among the keys of a message; None for another message.

    Other programs may send to the topic, so nothing is assumed about the keys.
    """
    for key in split_keys(keys):
        if (found := _RUN_KEY.fullmatch(key)) is not None:
            schedule, run_ms, deliver_ms, fingerprint = found.groups()
            if int(run_ms) <= LAST_MS:
                return RunKey(schedule, int(run_ms), int(deliver_ms), fingerprint)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """Request for one run of a schedule, with all that another process needs to continue the schedule.

    Attributes:
        run_ms: Time of the run (epoch ms).
        deliver_ms: Time of the delivery; earlier than *run_ms* if the run is far away.
        trigger: Trigger of the process that started the schedule.
        since_ms: Time at which a process started the schedule with this trigger.
        is_manual: True for a run on request, which is outside of the schedule.
    """

    schedule: str
    run_ms: int
    deliver_ms: int
    trigger: Trigger
    since_ms: int
    is_manual: bool = False

    @classmethod
    def of_run(cls, schedule: str, run_ms: int, trigger: Trigger, since_ms: int) -> RunMessage:
        """Return the message for a run."""
        return cls(schedule=schedule, run_ms=run_ms, deliver_ms=run_ms, trigger=trigger, since_ms=since_ms)

    def in_steps(self, now_ms: int, step_ms: int) -> RunMessage:
        """Return this message; if the run is further away than a step, the one for a delivery on the way to it."""
        if self.run_ms - now_ms <= step_ms:
            return self
        # On a grid, so that all processes send the same.
        return replace(self, deliver_ms=(now_ms // step_ms + 1) * step_ms)

    @property
    def key(self) -> RunKey:
        """Key that all messages for this run and delivery have."""
        return RunKey(self.schedule, self.run_ms, self.deliver_ms, self.trigger.fingerprint)

    def to_message(self, topic: str) -> Message:
        """Return the message to send."""
        key = f"manual-{create_unique_id()}" if self.is_manual else str(self.key)
        properties = {Property.TAGS: self.schedule, Property.KEYS: f"{self.schedule} {key}"}
        if not self.is_manual:
            properties[Property.TIMER_DELIVER_MS] = str(self.deliver_ms)
        return Message(topic, json.dumps(self._fields(), separators=(",", ":")).encode(), properties)

    def _fields(self) -> dict[str, object]:
        # By hand: `asdict` copies each value, and takes longer than the JSON.
        return {
            "schedule": self.schedule,
            "run_ms": self.run_ms,
            "deliver_ms": self.deliver_ms,
            "trigger": self.trigger.fields(),
            "since_ms": self.since_ms,
            "is_manual": self.is_manual,
        }

    @classmethod
    def read(cls, message: MessageExt) -> RunMessage:
        """Return the request in a message.

        Raises:
            MessageError: The body is not a request for a run.
        """
        try:
            fields = json.loads(message.body)
            request = cls(**fields | {"trigger": Trigger(**fields["trigger"])})
            request._check()
        except (ValueError, TypeError, KeyError, RecursionError, ScheduleError) as error:
            raise MessageError(
                f"message {message.msg_id} of topic {message.topic} is not a run of a schedule: {error!r}; the topic "
                "of mqtemplate.schedules.topic is for schedules only"
            ) from error
        return request

    def _check(self) -> None:
        """Check the values of a message: any program that may send to the topic can have sent it.

        Raises:
            ValueError: A value has another type, or is out of its range.
            ScheduleError: The name or the trigger is invalid.
        """
        check_name(self.schedule)
        self.trigger.check()
        for name in ("run_ms", "deliver_ms", "since_ms"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= LAST_MS:
                raise ValueError(f"{name} must be milliseconds from 0 to {LAST_MS}, got {value!r:.64}")
        if type(self.is_manual) is not bool:
            raise ValueError(f"is_manual must be true or false, got {self.is_manual!r:.64}")


FOREVER_MS = (1 << 62) - 1
"""End of a pause without an end."""

_PAUSED, _DONE = "paused", "done"
_NEEDED = (Capability.TIMER, Capability.QUERY)
_MAX_DUPLICATES = 64  # RocketMQ returns no more; each process that starts a schedule may send one
_NEWEST = 64
"""Messages of a schedule that are looked at. A chain has one pending message, its newest but for duplicates."""


class ScheduleTopic:
    """Run messages and pauses of schedules in one topic of a broker.

    All messages of a schedule have its name as tag and are in one queue, so they have one order. Two values of each
    schedule are stored as committed offsets, the only values that a RocketMQ broker of any version stores under a name
    without a limit of time: the end of the pause (epoch ms) as the offset of the group ``<topic>-<name>-paused``, and
    the last run that is done as the offset of ``<topic>-<name>-done``.
    """

    def __init__(self, broker: Broker, topic: str = SCHEDULES_TOPIC) -> None:
        self.broker = broker
        self.name = topic
        self._takes_long_steps = True

    def check_supported(self) -> None:
        """Raise an error if the broker lacks something that schedules need.

        Raises:
            UnsupportedError: It has no timers, or does not find messages by key.
        """
        missing = [each.value for each in _NEEDED if each not in self.broker.capabilities]
        if missing:
            raise UnsupportedError(
                f"schedules need {' and '.join(missing)}, and the broker {self.broker.name} does not have it; use the "
                "embedded broker, the server of mqtemplate, or RocketMQ 5 with timers"
            )

    def group_of(self, schedule: str) -> str:
        """Return the consumer group that runs a schedule."""
        return f"{self.name}-{schedule}"

    def send(self, request: RunMessage) -> None:
        """Send a run message."""
        self.broker.sends.send(request.to_message(self.name), self._queue_of(request.schedule))

    def send_towards(self, request: RunMessage, now_ms: int) -> None:
        """Send the message of a run; of one further away than the broker takes, the one for a delivery on the way.

        Processes may take different steps to one run. The last messages are equal again, so the first one counts.
        """
        if self._takes_long_steps and self.can_list:
            try:
                self.send(request.in_steps(now_ms, LONG_STEP_MS))
                return
            except DelayError:  # mqtemplate.broker.timer-max-delay-sec is shorter
                self._takes_long_steps = False
        self.send(request.in_steps(now_ms, SHORT_STEP_MS))

    def first_with(self, key: RunKey) -> MessageExt | None:
        """Return the delivered run message that came first of all that have the key. Other messages do not count."""
        found = self.broker.reader.messages_by_key(self.name, str(key), _MAX_DUPLICATES)
        firsts: dict[str, MessageExt] = {}
        for each in sorted(filter(_is_run, found), key=lambda each: each.queue_offset):
            firsts.setdefault(each.broker_name, each)
        # During a hand-over there may be one in each of two brokers, whose offsets say nothing about each other.
        return min(firsts.values(), key=lambda each: (each.store_timestamp, each.broker_name), default=None)

    def has_unhandled(self, schedule: str, fingerprint: str, latest_ms: int, handled: MessageExt | None) -> bool:
        """Return True if a run message of a trigger is delivered, and no process of the schedule has handled it.

        Args:
            latest_ms: Messages of runs after this time (epoch ms) do not count.
            handled: Message that is handled now: it counts, and those before it in its queue; None for none.
        """
        ends = {} if handled is None else {_queue_of(handled): handled.queue_offset + 1}
        for each in self.broker.reader.messages_by_key(self.name, schedule, _NEWEST):
            key = find_run_key(each.keys)
            if key is None or key.fingerprint != fingerprint or key.run_ms > latest_ms:
                continue
            queue = _queue_of(each)
            if queue not in ends:
                ends[queue] = self.broker.groups.committed_offset(self.group_of(schedule), queue) or 0
            if each.queue_offset >= ends[queue]:
                return True
        return False

    @property
    def can_list(self) -> bool:
        """True if the broker lists and cancels its delayed messages.

        A RocketMQ cluster lists some too, but only by reading its whole backlog, up to a limit.
        """
        return self.broker.capabilities >= {Capability.PENDING, Capability.SCHEDULE_CHANGE}

    def pending(self, schedule: str) -> list[PendingMessage]:
        """Return the run messages of a schedule that are not delivered yet; none if the broker cannot list them.

        They are found by their key, among the newest messages of the schedule: neither the other pending messages of
        the broker nor the past runs are read.
        """
        if not self.can_list:
            return []
        query = PendingQuery(topic=self.name, key=schedule, newest=_NEWEST)
        found = self.broker.delayed.pending(query, _NEWEST).messages
        return [each for each in found if (key := find_run_key(each.keys)) is not None and key.schedule == schedule]

    def known(self) -> set[str]:
        """Return the names that schedules of any process may have: the groups of the topic contain them.

        Some are names of values, such as ``report-done``. Without `can_list` the result is empty.
        """
        if not self.can_list:
            return set()
        prefix = self.group_of("")
        groups = [group for group in self.broker.admin().groups_of(self.name) if group.startswith(prefix)]
        names = {group.removeprefix(prefix) for group in groups}
        names |= {name.removesuffix(f"-{kind}") for name in names for kind in (_DONE, _PAUSED)}
        return {name for name in names if is_name(name)}  # anyone may name a group

    def cancel(self, message: PendingMessage) -> None:
        """Cancel a run message. If it is delivered already, the process that gets it drops it."""
        self.broker.delayed.cancel(message.handle)

    def paused_until_ms(self, schedule: str) -> int:
        """Return the end of the pause of a schedule (epoch ms); 0 if it never was paused."""
        return self._value(schedule, _PAUSED)

    def pause(self, schedule: str, until_ms: int) -> None:
        """Set the end of the pause of a schedule."""
        self._set_value(schedule, _PAUSED, until_ms)

    def last_done_ms(self, schedule: str) -> int:
        """Return the time of the last run that is done (epoch ms); 0 before the first run."""
        return self._value(schedule, _DONE)

    def note_done(self, schedule: str, run_ms: int) -> None:
        """Store that a run is done. Consumers store their progress some seconds later only."""
        self._set_value(schedule, _DONE, run_ms)

    def lock(self, schedule: str, broker_name: str) -> QueueLock | None:
        """Lock a schedule for one run, over all processes; return None while another process or thread has the lock.

        It is a lock of the group that has the last run, as a value of the group: no right on another group is needed,
        and RocketMQ takes a group whose own queues are locked for one that consumes in order.

        Args:
            broker_name: Broker that has the message of the run.
        """
        return self.broker.groups.lock_queue(
            f"{self.group_of(schedule)}-{_DONE}", MessageQueue(self.name, broker_name, 0)
        )

    def _value(self, schedule: str, kind: str) -> int:
        group = f"{self.group_of(schedule)}-{kind}"
        return self.broker.groups.committed_offset(group, self._queue_of(schedule)) or 0

    def _set_value(self, schedule: str, kind: str, value: int) -> None:
        self.broker.groups.commit_offset(f"{self.group_of(schedule)}-{kind}", self._queue_of(schedule), value)

    def _queue_of(self, schedule: str) -> MessageQueue:
        queues = self.broker.queues(self.name)
        return queues[queue_number(schedule, len(queues))]


def _queue_of(message: MessageExt) -> MessageQueue:
    return MessageQueue(message.topic, message.broker_name, message.queue_id)


def _is_run(message: MessageExt) -> bool:
    try:
        RunMessage.read(message)
    except MessageError:
        return False
    return True
