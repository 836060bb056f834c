"""Listeners of schedules: each schedule is a listener for its run messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from mqtemplate.broker import ConsumeFromWhere
from mqtemplate.clock import VirtualClock
from mqtemplate.event_log import get_logger
from mqtemplate.listener.declaration.attributes import Resolve
from mqtemplate.listener.declaration.decorator import message_listener
from mqtemplate.listener.declaration.resolution import default_resolve
from mqtemplate.listener.handler.providers import is_async
from mqtemplate.listener.handler.results import check_result
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.message import MessageExt
from mqtemplate.scheduling.discovery import make_schedules
from mqtemplate.scheduling.run import ScheduledRun
from mqtemplate.scheduling.runner import ScheduleRunner
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.scheduling.topic import ScheduleTopic
from mqtemplate.services import ClockWatch, Service, ServiceThread

_LONGEST_RUN = "7d"
_WATCH_MS = 10_000

_log = get_logger("mqtemplate.scheduling")


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
    # Enhancers do not see their listeners, which are no part of the application; middlewares are around the runs.
    return [
        runner
        for runner in runners
        if registry.register(listener_of(runner, schedules.topic, registry), is_internal=True)
    ]


def start_schedules(runners: Iterable[ScheduleRunner], schedules: Schedules) -> None:
    """Send the message of each schedule's next run, where it is missing."""
    pending = schedules.topic.pending()
    for runner in runners:
        runner.start(pending.get(runner.schedule.name, ()))


class ScheduleWatch:
    """Service that starts schedules again when the clock was set back; on a system clock it has a thread.

    Their next runs are those of the clock that was ahead: in an hour, or in years.
    """

    name = "schedules.clock"

    def __init__(self, runners: Sequence[ScheduleRunner], schedules: Schedules) -> None:
        self._runners = runners
        self._schedules = schedules
        self._clock = schedules.topic.broker.clock
        self._watch = ClockWatch(self._clock)
        self._thread: ServiceThread | None = None

    def start(self) -> None:
        """Send the messages of the next runs, and watch the clock."""
        start_schedules(self._runners, self._schedules)
        if isinstance(self._clock, VirtualClock):
            self._clock.services.append(self)
        else:
            self._thread = ServiceThread("mqtemplate-schedules", [self], self._clock, _report)
            self._thread.start()

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: nothing tells that the clock was set."""

    def step(self) -> int | None:
        """Start the schedules again if the clock was set back since the last step."""
        if self._watch.moved_ms() < 0:
            start_schedules(self._runners, self._schedules)
        return None if self._clock.is_virtual else self._clock.now_ms() + _WATCH_MS

    def stop(self) -> None:
        """Stop watching."""
        if self._thread is not None:
            self._thread.stop()
        elif isinstance(self._clock, VirtualClock) and self in self._clock.services:
            self._clock.services.remove(self)


def _report(service: Service, error: Exception) -> None:
    _log.error("schedules.not_started_again", service=service.name, exc_info=error)


def listener_of(
    runner: ScheduleRunner, topic: ScheduleTopic, registry: ListenerRegistry
) -> Callable[[MessageExt], object]:
    """Return a function, decorated as a listener, that reads the run messages of a schedule and calls its function.

    The middlewares of *registry* are around the function, and not around the message: one that drops a run must not end
    the schedule.

    One thread in one process reads the only queue of a schedule, so its runs do not overlap; only a run that failed
    may be retried during the next one.
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
        run = runner.admit(message)
        if run is not None:
            with runner.running(run):
                check_result(_with_middlewares(runner, run, registry)(message))

    return run_schedule


def _async_handler(
    runner: ScheduleRunner, topic: ScheduleTopic, registry: ListenerRegistry
) -> Callable[[MessageExt], Awaitable[None]]:
    is_virtual = topic.broker.clock.is_virtual

    async def run_schedule(message: MessageExt) -> None:
        # The broker may be remote, and this loop runs other handlers.
        run = runner.admit(message) if is_virtual else await asyncio.to_thread(runner.admit, message)
        if run is not None:
            with runner.running(run):
                check_result(await _with_middlewares(runner, run, registry)(message))

    return run_schedule
