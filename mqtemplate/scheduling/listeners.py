"""Listeners of schedules, and their decision about each run message: run, skip or forward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any

from mqtemplate.broker import ConsumeFromWhere, QueueLock
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerBusyError, MessageError, MQTemplateError, RemoteConnectError, SendError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.declaration.attributes import Resolve
from mqtemplate.listener.declaration.decorator import message_listener
from mqtemplate.listener.declaration.resolution import default_resolve
from mqtemplate.listener.handler.providers import is_async
from mqtemplate.listener.handler.results import check_result
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.message import MessageExt
from mqtemplate.scheduling.discovery import make_schedules
from mqtemplate.scheduling.schedule import CatchUp, Schedule, ScheduledRun
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.scheduling.topic import RunMessage, ScheduleTopic, find_run_key
from mqtemplate.scheduling.trigger import epoch_ms
from mqtemplate.services import ClockWatch, Service, ServiceRunner

_log = get_logger("mqtemplate.scheduling")
_TRIES = 3
_AFTER_FAILURE_MS = 60_000
_FIRST_WAIT_MS, _LONGEST_WAIT_MS = 500, 8_000  # while another process runs the schedule
_SKEW_MS = 60_000
"""By how much the clocks of processes may differ before a time counts as one of a wrong clock."""


class DropReason(Enum):
    """Reason for which a message of a schedule is not its next run."""

    OLD_TRIGGER = "old trigger"
    DUPLICATE = "duplicate"
    DONE = "done"


class ScheduleRunner:
    """Reader of the run messages of one schedule in one process.

    A schedule is a chain: the process that gets the message of a run sends the message of the next one, and then runs
    the function. The steps may be repeated at any point:

    - A crash before the send: the message is redelivered, so the chain never ends.
    - A crash after the send: the next message is sent again. Of all messages for one run only the first in the queue
      counts, so a second one neither runs nor continues the chain. The same holds for several processes that start.
    - A crash while the function runs: it runs again, as a message that was not acknowledged is redelivered. Runs that
      are done are noted at once, so a crash repeats only the run that was not done.
    - A process that joins while the function runs: it may get the queue, and with it the message of this run, which is
      not acknowledged yet. So a process handles a message only while it has the lock of the schedule, and then knows
      whether the run is done.

    Args:
        since_ms: Start of this process. A message of another trigger is older, and dropped; or newer: a later version
            of the program sent it, and it is continued with the trigger that it contains.
    """

    def __init__(self, schedule: Schedule, topic: ScheduleTopic, since_ms: int) -> None:
        self.schedule = schedule
        self._topic = topic
        self._since_ms = since_ms
        self._clock = topic.broker.clock
        self._failed_ms = -_AFTER_FAILURE_MS
        self._refusals = 0

    def start(self) -> None:
        """Send the message of the next run, unless it is pending or delivered; cancel messages of another trigger.

        A delivered message that is not handled yet continues the schedule, and may be of an earlier run: during a long
        one the next runs are late. A message of a later run would be before theirs, and they would count as done.

        A pending message is cancelled as well if its run is further away than the next two: a process sent it while the
        clock was ahead, and without it the schedule would be silent until then.
        """
        self._start_after(None)

    def _start_after(self, handled: MessageExt | None) -> None:
        """See `start`; a message is handled, and so are those before it."""
        now_ms, is_pending = self._clock.now_ms(), False
        next_ms = self.schedule.next_after(now_ms)
        after_next_ms = None if next_ms is None else self.schedule.next_after(next_ms)
        for message in self._topic.pending(self.schedule.name):
            key = find_run_key(message.keys)
            if key is None or key.fingerprint != self.schedule.trigger.fingerprint:
                self._topic.cancel(message)
                _log.info("schedule.replaced", schedule=self.schedule.name, trigger=str(self.schedule.trigger))
            elif after_next_ms is not None and key.run_ms > after_next_ms + _SKEW_MS:
                self._topic.cancel(message)
                _log.warning("schedule.clock_was_ahead", schedule=self.schedule.name, run_ms=key.run_ms)
            else:
                is_pending = True
        if next_ms is None or is_pending:
            return
        fingerprint = self.schedule.trigger.fingerprint
        # Later than the look at the pending ones: a message is delivered after it was pending.
        if not self._topic.has_unhandled(self.schedule.name, fingerprint, now_ms + _SKEW_MS, handled):
            request = RunMessage.of_run(self.schedule.name, next_ms, self.schedule.trigger, self._since_ms)
            self._send(request, now_ms)

    @contextmanager
    def admitted(self, message: MessageExt) -> Iterator[ScheduledRun | None]:
        """Yield the run that a message requests, after the next one was sent; None if nothing is to be run.

        The process has the lock of the schedule in the block. The run is noted as done when the block ends.

        Raises:
            PauseListener: Another process has the lock: it still runs the function, or stops now.
            MessageError: The message is not a run of this schedule.
            SendError: The next message could not be sent. The message must be redelivered.
        """
        lock = self._topic.lock(self.schedule.name, message.broker_name)
        if lock is None:
            self._refusals += 1
            pause_ms = min(_FIRST_WAIT_MS * 2 ** (self._refusals - 1), _LONGEST_WAIT_MS)
            raise PauseListener(f"{pause_ms}ms", f"another process runs the schedule {self.schedule.name!r}")
        self._refusals = 0
        try:
            run = self._admit(message)
            if run is None:
                yield None
                return
            if not lock.is_held:  # this process stood still: another one may have done this run meanwhile
                raise PauseListener(f"{_FIRST_WAIT_MS}ms", f"the lock of the schedule {self.schedule.name!r} is lost")
            with self._noted(run):
                yield run
        finally:
            self._release(lock)

    def _release(self, lock: QueueLock) -> None:
        try:
            lock.release()
        except MQTemplateError as error:  # the application was stopped during the run; the lock ends with it
            _log.debug("schedule.lock_not_released", schedule=self.schedule.name, reason=str(error))

    def _admit(self, message: MessageExt) -> ScheduledRun | None:
        request = RunMessage.read(message)
        if request.schedule != self.schedule.name:
            raise MessageError(
                f"message {message.msg_id} of topic {message.topic} has the tag {message.tags!r} and is a run of "
                f"{request.schedule!r}; the topic of mqtemplate.schedules.topic is for schedules only"
            )
        if request.is_manual:
            return self._run(request, message)
        if (reason := self._reason_to_drop(request, message)) is not None:
            _log.debug(
                "schedule.message_dropped", schedule=request.schedule, run_ms=request.run_ms, reason=reason.value
            )
            if reason is not DropReason.OLD_TRIGGER and self._topic.can_list:
                # The message that ran may have been one of a clock that was ahead, so that nothing follows it.
                self._start_after(message)
            return None
        self._continue(request)
        if request.deliver_ms < request.run_ms:
            return None
        if (skipped := self._reason_to_skip(request, message)) is not None:
            _log.info("schedule.run_skipped", schedule=request.schedule, run_ms=request.run_ms, reason=skipped)
            return None
        return self._run(request, message)

    def _reason_to_drop(self, request: RunMessage, message: MessageExt) -> DropReason | None:
        if request.trigger != self.schedule.trigger and request.since_ms < self._since_ms:
            return DropReason.OLD_TRIGGER
        first = self._topic.first_with(request.key)
        if first is not None and first.msg_id != message.msg_id:
            return DropReason.DUPLICATE
        # A retry of a run that failed comes after later runs, and counts.
        done_ms = self._topic.last_done_ms(request.schedule)
        if done_ms > self._clock.now_ms() + _SKEW_MS:
            return None  # it was noted while the clock was ahead, and says nothing about the runs until then
        return DropReason.DONE if message.reconsume_times == 0 and request.run_ms <= done_ms else None

    @contextmanager
    def _noted(self, run: ScheduledRun) -> Iterator[None]:
        """Note that a run is done when the block ends; a retry is not, since later runs may be done already.

        For a while after a failure nothing is noted: the message of the run that failed may not be sent back yet, and a
        crash would lose the run if a later one were done.
        """
        try:
            yield
        except BaseException:
            self._failed_ms = self._clock.steady_ms()
            raise
        is_first = not run.is_manual and run.attempt == 1
        if is_first and self._clock.steady_ms() - self._failed_ms > _AFTER_FAILURE_MS:
            try:
                self._topic.note_done(run.schedule, epoch_ms(run.scheduled_at))
            except MQTemplateError as error:  # the run is done all the same; a crash within seconds would repeat it
                _log.warning("schedule.done_not_noted", schedule=run.schedule, reason=str(error))

    def _continue(self, request: RunMessage) -> None:
        """Send the message of the next run; for a delivery on the way to a run, the next delivery."""
        now_ms = max(self._clock.now_ms(), request.deliver_ms)  # this machine's clock may be behind the broker's
        if request.deliver_ms < request.run_ms:
            run_ms: int | None = request.run_ms
        else:
            after_ms = request.run_ms if self.schedule.catch_up is CatchUp.ALL else max(request.run_ms, now_ms)
            run_ms = request.trigger.next_after(after_ms, self.schedule.holidays)
        if run_ms is not None:
            self._send(RunMessage.of_run(request.schedule, run_ms, request.trigger, request.since_ms), now_ms)

    def _reason_to_skip(self, request: RunMessage, message: MessageExt) -> str | None:
        late_ms = self._clock.now_ms() - request.run_ms
        is_late = late_ms > self.schedule.grace_ms and message.reconsume_times == 0
        if self.schedule.catch_up is CatchUp.NONE and is_late:
            return "missed"
        return "paused" if request.run_ms < self._topic.paused_until_ms(request.schedule) else None

    def _run(self, request: RunMessage, message: MessageExt) -> ScheduledRun:
        late_ms = max(self._clock.now_ms() - request.run_ms, 0)
        return ScheduledRun(
            schedule=request.schedule,
            scheduled_at=request.trigger.local(request.run_ms),
            late=timedelta(milliseconds=late_ms),
            attempt=message.reconsume_times + 1,
            is_manual=request.is_manual,
        )

    def _send(self, request: RunMessage, now_ms: int) -> None:
        """Send a message; repeat it, since a policy without retries would end the schedule with a send that fails."""
        for remaining in reversed(range(_TRIES)):
            try:
                self._topic.send_towards(request, now_ms)
                return
            except SendError:
                if not remaining:
                    raise


_LONGEST_RUN = "7d"
_WATCH_MS = 10_000
_RETRY_MS = 5_000


def register_schedules(
    target: object, schedules: Schedules, registry: ListenerRegistry, resolve: Resolve = default_resolve
) -> list[ScheduleRunner]:
    """Register a listener for each schedule of a function or object. Return the schedules to start after the listeners.

    Raises:
        ScheduleError: A schedule is declared wrongly, or two have the same name.
    """
    own = make_schedules(target, resolve, registry.objects)
    schedules.add(own)
    since_ms = schedules.topic.broker.clock.now_ms()
    runners = [ScheduleRunner(schedule, schedules.topic, since_ms) for schedule in own]
    # A schedule that is disabled has no listener, and this process does not start it.
    # Enhancers do not see their listeners, which do not belong to the application; middlewares are around the runs.
    return [
        runner
        for runner in runners
        if registry.register(listener_of(runner, schedules.topic, registry), is_internal=True)
    ]


def start_schedules(runners: Iterable[ScheduleRunner]) -> None:
    """Send the message of each schedule's next run, where it is missing. Doing it again is harmless."""
    for runner in runners:
        runner.start()


class ScheduleWatch:
    """Service that starts the schedules of a process; on a system clock it has a thread.

    - A broker that is busy or away at the start, for a moment, keeps no application from its start: the service tries
      again until the schedules are started.
    - It starts them again when the clock was set back. Their next runs are as the clock that was ahead says: in an
      hour, or in years.

    Attributes:
        stop: Ends the watch.
    """

    name = "schedules.clock"

    def __init__(self, runners: Sequence[ScheduleRunner], clock: Clock) -> None:
        self._runners = runners
        self._clock = clock
        self._watch = ClockWatch(clock)
        self._is_due = True
        self._runner = ServiceRunner(self, clock, "mqtemplate-schedules", _report)
        self.stop = self._runner.stop

    def start(self) -> None:
        """Send the message of each schedule's next run, where it is missing, and watch the clock.

        Raises:
            MQTemplateError: The broker refuses it, and a retry cannot help.
        """
        self.step()
        self._runner.start()

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: nothing tells that the clock was set."""

    def step(self) -> int | None:
        """Start the schedules if that has not succeeded yet, or if the clock was set back since the last step."""
        self._is_due |= self._watch.moved_ms() < 0
        if self._is_due and not self._try_start():
            return self._clock.now_ms() + _RETRY_MS
        return None if self._clock.is_virtual else self._clock.now_ms() + _WATCH_MS

    def _try_start(self) -> bool:
        """Start the schedules. Return False if the broker did not answer in time."""
        try:
            start_schedules(self._runners)
        except (TimeoutError, RemoteConnectError, BrokerBusyError) as error:
            _log.warning("schedules.start_delayed", retry_ms=_RETRY_MS, reason=str(error))
            return False
        self._is_due = False
        return True


def _report(service: Service, error: Exception, repeated: int) -> None:
    _log.error("schedules.not_started_again", service=service.name, repeated=repeated, exc_info=error)


def listener_of(
    runner: ScheduleRunner, topic: ScheduleTopic, registry: ListenerRegistry
) -> Callable[[MessageExt], object]:
    """Return a function, decorated as a listener, that reads the run messages of a schedule and calls its function.

    The middlewares of *registry* are around the function, and not around the message: one that drops a run must not end
    the schedule.

    One thread in one process reads the only queue of a schedule. While the queue moves to another process, and for
    retries, the lock of the schedule keeps the runs apart.
    """
    schedule = runner.schedule
    attributes: dict[str, Any] = {
        "consume_timeout": _LONGEST_RUN,
        **schedule.attributes,
        "id": schedule.name,
        "selector_expression": schedule.name,
        # Runs that were delivered before the first process of the group started must not be lost.
        "consume_from_where": ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        "consume_thread_number": 1,
        "consume_thread_max": 1,
    }
    decorate = message_listener(topic.name, topic.group_of(schedule.name), **attributes)
    if is_async(schedule.handler):
        return decorate(_async_handler(runner, topic, registry))
    return decorate(_handler(runner, registry))


def _with_middlewares(
    runner: ScheduleRunner, run: ScheduledRun, registry: ListenerRegistry
) -> Callable[[MessageExt], Any]:
    """Return the function of a schedule with its middlewares, as a function of the message."""

    def call(message: MessageExt) -> Any:
        return runner.schedule.invoke(message, run)

    middlewares = registry.middlewares
    return registry.container(runner.schedule.name).around(middlewares, call) if middlewares else call


def _handler(runner: ScheduleRunner, registry: ListenerRegistry) -> Callable[[MessageExt], object]:
    def run_schedule(message: MessageExt) -> None:
        with runner.admitted(message) as run:
            if run is not None:
                check_result(_with_middlewares(runner, run, registry)(message))

    return run_schedule


def _async_handler(
    runner: ScheduleRunner, topic: ScheduleTopic, registry: ListenerRegistry
) -> Callable[[MessageExt], Awaitable[None]]:
    is_virtual = topic.broker.clock.is_virtual

    async def run_schedule(message: MessageExt) -> None:
        async with _entered(runner.admitted(message), in_threads=not is_virtual) as run:
            if run is not None:
                check_result(await _with_middlewares(runner, run, registry)(message))

    return run_schedule


@asynccontextmanager
async def _entered(
    context: AbstractContextManager[ScheduledRun | None], *, in_threads: bool
) -> AsyncIterator[ScheduledRun | None]:
    """Enter and leave a context, in other threads: the broker may be remote, and this loop runs other handlers."""
    call = asyncio.to_thread if in_threads else _call_here
    run = await call(context.__enter__)
    try:
        yield run
    except BaseException as error:
        await call(context.__exit__, type(error), error, error.__traceback__)
        raise
    await call(context.__exit__, None, None, None)


async def _call_here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
