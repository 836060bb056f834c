"""`Schedules`: list, pause and resume schedules, and run one now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from mqtemplate.broker import Broker
from mqtemplate.errors import ScheduleError
from mqtemplate.pending import PendingMessage
from mqtemplate.scheduling.schedule import Schedule, check_name
from mqtemplate.scheduling.topic import FOREVER_MS, RunMessage, ScheduleTopic, find_run_key
from mqtemplate.scheduling.trigger import LAST_MS, Trigger, epoch_ms
from mqtemplate.topics import SCHEDULES_TOPIC
from mqtemplate.user_code import did_you_mean

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleState:
    """State of one schedule.

    Attributes:
        trigger: Description such as ``every 10m``; None for a schedule that only other processes have.
        next_run: Time of the next run; None without a further run.
        paused_until: End of the pause, `datetime.max` for one without an end; None if the schedule is not paused.
    """

    name: str
    trigger: str | None
    next_run: datetime | None
    paused_until: datetime | None


class Schedules:
    """The schedules of a topic: of this application, and of other processes that started some.

    An application has one object of this class, and any service can take it.

    Args:
        topic: Topic of the run messages: ``mqtemplate.schedules.topic``.
    """

    def __init__(self, broker: Broker, topic: str = SCHEDULES_TOPIC) -> None:
        self.topic = ScheduleTopic(broker, topic)
        self._clock = broker.clock
        self._own: dict[str, Schedule] = {}

    @property
    def own(self) -> Sequence[Schedule]:
        """Schedules of this process."""
        return tuple(self._own.values())

    def add(self, schedules: Iterable[Schedule]) -> None:
        """Add schedules of this process.

        Raises:
            ScheduleError: Two have the same name.
        """
        for schedule in schedules:
            if schedule.name in self._own:
                raise ScheduleError(f"two schedules are called {schedule.name!r}; give one of them another name=")
            self._own[schedule.name] = schedule

    def list(self) -> tuple[ScheduleState, ...]:
        """Return all schedules, by name.

        Schedules of other processes are known while they have a pending run; on a RocketMQ cluster they are not known.
        """
        return tuple(self._state(name, pending) for name, pending in self._pending())

    def _pending(self) -> Iterator[tuple[str, Sequence[PendingMessage]]]:
        """Yield each schedule with its pending messages, by name."""
        for name in sorted(self._own.keys() | self.topic.known()):
            pending = self.topic.pending(name)
            if pending or name in self._own:
                yield name, pending

    def pause(self, name: str, until: datetime | None = None) -> None:
        """Skip the runs of a schedule, in all processes, until a time or until `resume`.

        Skipped runs are not caught up. A pause survives restarts. It is stored as consumers' progress is: a broker that
        is killed within seconds after the call may lose it.

        Args:
            until: An aware datetime; runs at or after it are not skipped.

        Raises:
            ScheduleError: No schedule has this name, or *until* has no offset.
        """
        self._check(name)
        if until is not None and until.tzinfo is None:
            raise ScheduleError(f"until must be an aware datetime, such as datetime.now(UTC), got {until!r}")
        self.topic.pause(name, FOREVER_MS if until is None else epoch_ms(until))

    def resume(self, name: str) -> None:
        """End a pause: the next run takes place.

        Raises:
            ScheduleError: No schedule has this name.
        """
        self._check(name)
        self.topic.pause(name, self._clock.now_ms())

    def trigger(self, name: str) -> None:
        """Run a schedule now, in one of the processes that have it, also while it is paused. Its next run is unchanged.

        Raises:
            ScheduleError: No schedule has this name.
        """
        self._check(name)
        now_ms = self._clock.now_ms()
        trigger = self._own[name].trigger if name in self._own else Trigger(at_ms=now_ms)
        self.topic.send(
            RunMessage(
                schedule=name, run_ms=now_ms, deliver_ms=now_ms, trigger=trigger, since_ms=now_ms, is_manual=True
            )
        )

    def _state(self, name: str, pending: Sequence[PendingMessage]) -> ScheduleState:
        own, now_ms = self._own.get(name), self._clock.now_ms()
        keys = (find_run_key(message.keys) for message in pending)
        next_ms = min((key.run_ms for key in keys if key is not None), default=None)
        if own is not None and not self.topic.can_list:
            next_ms = own.next_after(now_ms)
        until_ms = self.topic.paused_until_ms(name)
        local = own.trigger.local if own is not None else _utc
        return ScheduleState(
            name=name,
            trigger=None if own is None else str(own.trigger),
            next_run=None if next_ms is None else local(next_ms),
            paused_until=None
            if until_ms <= now_ms
            else datetime.max.replace(tzinfo=UTC)
            if until_ms >= LAST_MS  # FOREVER_MS, or a value of another program
            else local(until_ms),
        )

    def _check(self, name: str) -> None:
        if name in self._own:
            return
        if not self.topic.can_list:  # another process may have it
            check_name(name)
            return
        names = [each for each, _ in self._pending()]
        if name in names:
            return
        hint = did_you_mean(name, names, f"there is: {', '.join(names) or 'none'}")
        raise ScheduleError(f"there is no schedule {name!r}; {hint}")


def _utc(at_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=at_ms)
