"""Harness: virtual time for an application. It moves the clock and does all work that is due on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mqtemplate.broker import Broker
from mqtemplate.clock import VirtualClock
from mqtemplate.durations import duration_ms, is_duration_text, warn_of_unit
from mqtemplate.errors import ConfigurationError, DependencyError
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.message import MessageExt
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.services import Service
from mqtemplate.template.options import parse_destination
from mqtemplate.testing.recording import (
    HandledMessages,
    HandlerFailedError,
    HandlerFailure,
    line_of,
    messages_in,
    shortened,
)
from mqtemplate.topics import DLQ_TOPIC_PREFIX

if TYPE_CHECKING:
    from mqtemplate.context.application import MQApplication
    from mqtemplate.context.autoconfigure import StarterSource


_MAX_ROUNDS = 100_000
_MAX_PENDING = 10_000
_MAX_LINES = 10
_MAX_LINE = 200


class NotIdleError(AssertionError):
    """The services always have more work at one instant, so time cannot pass."""


class Harness:
    """Stepper of a broker and its listeners on a `VirtualClock`, in one thread and in a fixed order.

    The services of the broker are stepped first, then the containers in their order, until a round leaves no work that
    is due. Then the clock moves to the next due time. ``advance("3h")`` returns when all work of these three hours is
    done, and has the same result each time.

    An error of a service is raised to the test: on a virtual clock no service is retried. A handler that raises fails
    the test, too: `advance` and `run_until_idle` raise `HandlerFailedError` when they have done their work.

    Args:
        app_or_broker: A started broker, or an application that has one.
        containers: More services, stepped after the services of the application. Services that an application starts
            on the clock, such as an outbox or schedules, are stepped without it.
        raise_handler_errors: False: a handler may raise, for tests of retries and dead letters.

    Attributes:
        failures: Calls of handlers that raised, oldest first.

    Raises:
        ConfigurationError: The broker runs on a real clock.
    """

    def __init__(
        self, app_or_broker: Broker | MQApplication, *containers: Service, raise_handler_errors: bool = True
    ) -> None:
        self._apps = [] if isinstance(app_or_broker, Broker) else [app_or_broker]
        self.broker = app_or_broker if isinstance(app_or_broker, Broker) else app_or_broker.broker
        clock = self.broker.clock
        if not isinstance(clock, VirtualClock):
            raise ConfigurationError(
                f"a harness moves a VirtualClock, and this broker runs on a {type(clock).__name__}; "
                "create it with clock=VirtualClock()"
            )
        self.clock = clock
        self._more = list(containers)
        self.raise_handler_errors = raise_handler_errors
        self.failures: list[HandlerFailure] = []
        self._reported = 0  # failures that were raised, or may stay
        self._handled: list[HandledMessages] = []
        self._woken = False
        self._listened: dict[int, Service] = {}
        self._stepping: set[int] = set()
        clock.drive_with(self.advance_until)

    def add(self, added: Service | MQApplication) -> None:
        """Step this service, too, or the listeners of this application while it runs; after the others."""
        from mqtemplate.context.application import MQApplication

        if isinstance(added, MQApplication):
            self._apps.append(added)
        else:
            self._more.append(added)

    def advance(self, span: str | timedelta | int) -> None:
        """Let time pass: ``"3h"``, ``"1h 30m"``, ``"250ms"``, or a timedelta. A number is milliseconds, with a warning.

        Raises:
            NotIdleError: At some instant the services always have more work.
            HandlerFailedError: A handler raised.
        """
        target_ms = self.clock.now_ms() + span_ms(span)
        warn_of_unit("advance({})", span, 1)
        due_ms = self._work()
        while due_ms is not None and due_ms <= target_ms:
            self._move_to(due_ms)
            due_ms = self._work()
        self._move_to(target_ms)
        self._work()
        self.raise_failures()

    def advance_until(self, happened: Callable[[], bool], until_ms: int | None = None) -> None:
        """Let time pass until *happened* returns True, or no more work is due.

        A handler may call it, by a method that waits. Then its own container is not stepped, but the others are.

        Args:
            until_ms: Latest time (epoch ms). Time passes up to it, if *happened* does not return True before.
        """
        due_ms = self._work()
        while not happened() and due_ms is not None and (until_ms is None or due_ms <= until_ms):
            self._move_to(due_ms)
            due_ms = self._work()
        if until_ms is not None and not happened():
            self._move_to(until_ms)
            self._work()

    def _move_to(self, now_ms: int) -> None:
        """Move the clock, but never back: a handler that waited may have moved it beyond *now_ms*."""
        self.clock.set_ms(max(now_ms, self.clock.now_ms()))

    def run_until_idle(self) -> int | None:
        """Do the work that is due now, without time passing. Return the next due time, or None.

        Raises:
            NotIdleError: The services always have more work.
            HandlerFailedError: A handler raised.
        """
        due_ms = self._work()
        self.raise_failures()
        return due_ms

    # --- what happened -------------------------------------------------------------------------

    def assert_received(self, listener: object, times: int | None = None) -> list[MessageExt]:
        """Check that a listener has handled messages without an exception; return them, oldest first.

        Args:
            listener: The class, the function, the object, or the name of the listener.
            times: Number of messages; None for one or more.

        Raises:
            AssertionError: There are fewer or more, or the harness does not have the listener.
        """
        self._services()
        records = self._records(listener)
        found = [message for record in records for message in record.received]
        waiting = partial(self._pending_for, records)
        _check_count(f"{_title(listener)} has received", found, times, self.failures, waiting)
        return found

    def assert_sent(self, destination: str, times: int | None = None) -> list[MessageExt | PendingMessage]:
        """Check that messages were sent to ``topic`` or ``topic:tag``; return them, the pending ones last.

        Raises:
            AssertionError: There are fewer or more.
        """
        target = parse_destination(destination)
        tag = target.tag
        found: list[MessageExt | PendingMessage] = []
        found += [message for message in messages_in(self.broker, target.topic) if tag in (None, message.tags)]
        found += self.broker.delayed.pending(PendingQuery(topic=target.topic, tag=tag), _MAX_PENDING).messages
        _check_count(f"{destination!r} has been sent", found, times, ())
        return found

    def assert_dead_lettered(self, listener: object, times: int | None = None) -> list[MessageExt]:
        """Check that messages of a listener, or of a consumer group, are in its dead letter topic; return them.

        Raises:
            AssertionError: There are fewer or more.
        """
        self._services()
        known = [record for record in self._handled if record.is_of(listener)]
        group = known[0].container.endpoint.settings.group if known else str(listener)
        found = messages_in(self.broker, f"{DLQ_TOPIC_PREFIX}{group}")
        _check_count(f"dead letters of {_title(listener)}", found, times, self.failures)
        return found

    def _pending_for(self, records: Iterable[HandledMessages]) -> list[PendingMessage]:
        """Return the pending messages of the listener's topics, the next one first."""
        topics = {topic for record in records for topic in record.container.endpoint.settings.topics}
        queries = (PendingQuery(topic=topic) for topic in sorted(topics))
        pending = (each for query in queries for each in self.broker.delayed.pending(query, _MAX_PENDING).messages)
        return sorted(pending, key=lambda message: message.deliver_ms)

    def _records(self, listener: object) -> list[HandledMessages]:
        records = [record for record in self._handled if record.is_of(listener)]
        if not records:
            names = ", ".join(record.container.endpoint.id for record in self._handled) or "none"
            raise AssertionError(f"{_title(listener)} is not a listener of this harness; it has: {names}")
        return records

    def raise_failures(self) -> None:
        """Raise the failures since the last time. `advance` and `run_until_idle` call it, and the fixture at the end.

        While a handler is running it does nothing: the call of the test that started the handler raises them.

        Raises:
            HandlerFailedError: A handler raised, and *raise_handler_errors* is True.
        """
        new, self._reported = self.failures[self._reported :], len(self.failures)
        if new and self.raise_handler_errors and not self._stepping:
            lines = "".join(f"\n  {failure}" for failure in new)
            raise HandlerFailedError(
                f"{len(new)} calls of handlers raised:{lines}\n"
                "Harness(..., raise_handler_errors=False) lets them: for tests of retries and dead letters"
            ) from new[0].error

    # --- steps ---------------------------------------------------------------------------------

    def _work(self) -> int | None:
        for _ in range(_MAX_ROUNDS):
            self._woken = False
            due_ms = min((due for each in self._services() if (due := self._step(each)) is not None), default=None)
            if not self._woken and (due_ms is None or due_ms > self.clock.now_ms()):
                return due_ms
        raise NotIdleError(self._busy_services())

    def _step(self, service: Service) -> int | None:
        key = id(service)
        if key in self._stepping:
            return None
        self._stepping.add(key)
        try:
            return service.step()
        finally:
            self._stepping.discard(key)

    def _services(self) -> list[Service]:
        """Return all services; a broker or an application may have new ones in each round."""
        of_apps = [each for app in self._apps for each in _services_of(app, self.broker)]
        found = (*self.broker.services(), *of_apps, *self._more, *self.clock.services)
        services = list({id(each): each for each in found}.values())  # a test may add one that an application started
        for service in services:
            if id(service) not in self._listened:
                self._listened[id(service)] = service
                service.on_wake(self._note_wake)
                if isinstance(service, ListenerContainer):
                    record = HandledMessages(service, self.failures)
                    self._handled.append(record)
                    service.observers.append(record.note)
        return services

    def _note_wake(self) -> None:
        self._woken = True

    def _busy_services(self) -> str:
        now_ms = self.clock.now_ms()
        due = [(service.name, service.step()) for service in self._services()]
        busy = [name for name, due_ms in due if due_ms is not None and due_ms <= now_ms]
        return (
            f"after {_MAX_ROUNDS} rounds at one instant there is still work for "
            f"{', '.join(busy) or 'a service that is always woken'}; "
            "does a handler send to its own topic, or does the step of a service always return the current time?"
        )


def _services_of(app: MQApplication, stepped: Broker) -> Sequence[Service]:
    """Return the services of the other brokers of an application, and its listeners; none if it is not started yet."""
    try:
        others = [broker for broker in app.brokers.values() if broker is not stepped]
        return [*(service for broker in others for service in broker.services()), *app.containers]
    except DependencyError:
        return ()


def _title(listener: object) -> str:
    return str(getattr(listener, "__qualname__", listener)).rpartition("<locals>.")[2]


def _check_count(
    what: str,
    found: Sequence[MessageExt | PendingMessage],
    times: int | None,
    failures: Sequence[HandlerFailure],
    waiting: Callable[[], Sequence[PendingMessage]] = list,
) -> None:
    """Check a number of messages.

    Raises:
        AssertionError: It is another one. A line for each message says what was found, the newest first; then the
            failures of handlers, and if messages are missing, those that are pending.
    """
    if (times is None and found) or len(found) == times:
        return
    wanted = "one or more" if times is None else str(times)
    is_missing = len(found) < (1 if times is None else times)
    lines = [
        *_listed("", [line_of(each) for each in reversed(found)]),
        *_listed("failed: ", [str(each) for each in reversed(failures)]),
        *_listed("pending: ", [line_of(each) for each in waiting()] if is_missing else []),
    ]
    raise AssertionError("\n  ".join([f"{what}: {len(found)} messages, expected {wanted}", *lines]))


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the first lines, each of them short, and the number of the others."""
    for line in lines[:_MAX_LINES]:
        yield title + shortened(" ".join(line.split()), _MAX_LINE)
    if len(lines) > _MAX_LINES:
        yield f"{title}... and {len(lines) - _MAX_LINES} more"


def span_ms(span: str | timedelta | int) -> int:
    """Return a span of time in milliseconds.

    Raises:
        ValueError: The span is negative, or a text of another form.
    """
    try:
        if isinstance(span, str) and not is_duration_text(span):
            raise ValueError(f"a duration with units, such as '3h', '1h 30m', '250ms', got {span!r}")
        return duration_ms(span)
    except ValueError as exc:
        raise ValueError(f"a span of time must be {exc}; VirtualClock.move_ms sets a clock back") from None


class StartApp(Protocol):
    """Function that starts an application over the broker, the clock and the template of the test."""

    def __call__(
        self,
        *components: object,
        config_folder: Path | str | None = None,
        profiles: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        overrides: Mapping[type, object] | None = None,
        settings: Mapping[str, object] | None = None,
        starters: Iterable[StarterSource] | None = None,
    ) -> MQApplication:
        """Start an application; arguments as `MQApplication`. The end of the test stops it."""
