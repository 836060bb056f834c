"""The topic of the schedules of an application: run messages, and the pauses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from mqtemplate.broker import Broker, Capability
from mqtemplate.errors import DelayError, MessageError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.scheduling.run_message import LONG_STEP_MS, SHORT_STEP_MS, RunKey, RunMessage, find_run_key

_log = get_logger("mqtemplate.scheduling")

DEFAULT_TOPIC = "mqtemplate-schedules"
FOREVER_MS = (1 << 62) - 1
"""End of a pause without an end."""

_PAUSED, _DONE = "paused", "done"
_NEEDED = (Capability.TIMER, Capability.QUERY)
_MAX_DUPLICATES = 64  # RocketMQ returns no more; each process that starts a schedule may send one
_PAGE = 1_000


class ScheduleTopic:
    """Run messages and pauses of schedules in one topic of a broker.

    All messages of a schedule have its name as tag and are in one queue, so they have one order. Two values of each
    schedule are stored as committed offsets, the only values that a RocketMQ broker of any version stores under a name
    without a limit of time: the end of the pause (epoch ms) as that of the group ``<topic>-<name>-paused``, and the
    last run that is done as that of ``<topic>-<name>-done``.
    """

    def __init__(self, broker: Broker, topic: str = DEFAULT_TOPIC) -> None:
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
        self.broker.send(request.to_message(self.name), self._queue_of(request.schedule))

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
        found = self.broker.messages_by_key(self.name, str(key), _MAX_DUPLICATES)
        return min(filter(_is_run, found), key=lambda each: each.queue_offset, default=None)

    @property
    def can_list(self) -> bool:
        """True if the broker lists and cancels its delayed messages.

        A RocketMQ cluster lists some too, but only by reading its whole backlog, up to a limit.
        """
        return self.broker.capabilities >= {Capability.PENDING, Capability.SCHEDULE_CHANGE}

    def pending(self) -> dict[str, list[PendingMessage]]:
        """Return the run messages that are not delivered yet, by schedule; none if the broker cannot list them."""
        found: dict[str, list[PendingMessage]] = defaultdict(list)
        ignored = 0
        if self.can_list:
            for message in self._pending():
                if (key := find_run_key(message.keys)) is not None:
                    found[key.schedule].append(message)
                else:
                    ignored += 1
        if ignored:
            _log.warning("schedule.messages_ignored", topic=self.name, count=ignored, reason="no keys of a run")
        return found

    def _pending(self) -> Iterator[PendingMessage]:
        cursor = None
        while True:
            page = self.broker.pending(PendingQuery(topic=self.name), _PAGE, cursor)
            yield from page.messages
            if (cursor := page.cursor) is None:
                return

    def cancel(self, message: PendingMessage) -> None:
        """Cancel a run message. If it is delivered already, the process that gets it drops it."""
        self.broker.cancel(message.handle)

    def paused_until_ms(self, schedule: str) -> int:
        """Return the end of the pause of a schedule (epoch ms); 0 if it never was paused."""
        return self._value(schedule, _PAUSED)

    def pause(self, schedule: str, until_ms: int) -> None:
        """Set the end of the pause of a schedule."""
        self._set_value(schedule, _PAUSED, until_ms)

    def last_done_ms(self, schedule: str) -> int:
        """Return the time of the last run that is done (epoch ms); 0 if there is none."""
        return self._value(schedule, _DONE)

    def note_done(self, schedule: str, run_ms: int) -> None:
        """Store that a run is done. Consumers store their progress some seconds later only."""
        self._set_value(schedule, _DONE, run_ms)

    def _value(self, schedule: str, kind: str) -> int:
        group = f"{self.group_of(schedule)}-{kind}"
        return self.broker.committed_offset(group, self._queue_of(schedule)) or 0

    def _set_value(self, schedule: str, kind: str, value: int) -> None:
        self.broker.commit_offset(f"{self.group_of(schedule)}-{kind}", self._queue_of(schedule), value)

    def _queue_of(self, schedule: str) -> MessageQueue:
        queues = self.broker.queues(self.name)
        return queues[abs(java_string_hash(schedule)) % len(queues)]


def _is_run(message: MessageExt) -> bool:
    try:
        RunMessage.read(message)
    except MessageError:
        return False
    return True
