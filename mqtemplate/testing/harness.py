"""Virtual time for a whole application: move the clock, and all that falls due on the way has happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from mqtemplate.broker import Broker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError
from mqtemplate.services import Service

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SPAN = re.compile(r"(?:\s*\d+(?:\.\d+)?\s*(?:ms|s|m|h|d))+\s*")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")

_MOST_ROUNDS = 100_000


class NotIdleError(AssertionError):
    """The services go on for ever without time passing: each round one of them says there is more at once."""


class Application(Protocol):
    """What a harness needs to know of an application: its broker, and its listener containers in their order."""

    @property
    def broker(self) -> Broker: ...

    @property
    def containers(self) -> Sequence[Service]: ...


class Harness:
    """Steps a broker and its listeners on a `VirtualClock`, in one thread and in a fixed order.

    The broker's services come first, then the containers as given. They are stepped round by round until a round
    leaves nothing due; then the clock jumps to the next time that one of them named. So a test that says
    ``advance("3h")`` goes on when all that was due within three hours has been handled, and always gives the same.

    What a service raises, the harness raises: on a virtual clock nothing is tried again behind a test's back.

    Args:
        app_or_broker: A started broker, or an application that has one.
        containers: Further services, stepped after those of the application.

    Raises:
        ConfigurationError: The broker runs on a real clock.
    """

    def __init__(self, app_or_broker: Broker | Application, *containers: Service) -> None:
        self._app = None if isinstance(app_or_broker, Broker) else app_or_broker
        self.broker = app_or_broker if isinstance(app_or_broker, Broker) else app_or_broker.broker
        clock = self.broker.clock
        if not isinstance(clock, VirtualClock):
            raise ConfigurationError(
                f"a harness moves a VirtualClock, and this broker runs on a {type(clock).__name__}; "
                "make it with clock=VirtualClock()"
            )
        self.clock = clock
        self._containers = list(containers)
        self._woken = False
        self._known: dict[int, Service] = {}
        self._stepping: set[int] = set()
        clock.drive_with(self.advance_until)

    def add(self, container: Service) -> None:
        """Step this one, too, after the others."""
        self._containers.append(container)

    def advance(self, span: str | timedelta | int) -> None:
        """Let time pass: ``"3h"``, ``"1h 30m"``, ``"250ms"``, a timedelta, or milliseconds.

        Raises:
            NotIdleError: At some instant the services never came to rest.
        """
        target_ms = self.clock.now_ms() + span_ms(span)
        due_ms = self.run_until_idle()
        while due_ms is not None and due_ms <= target_ms:
            self._move_to(due_ms)
            due_ms = self.run_until_idle()
        self._move_to(target_ms)
        self.run_until_idle()

    def advance_until(self, happened: Callable[[], bool]) -> None:
        """Let time pass until something happened, or nothing is left that falls due.

        A handler may call it, by what waits for something: it is not stepped again meanwhile, the others are.
        """
        due_ms = self.run_until_idle()
        while not happened() and due_ms is not None:
            self._move_to(due_ms)
            due_ms = self.run_until_idle()

    def _move_to(self, now_ms: int) -> None:
        """Forward only: a handler that waited may have let more time pass than its own advance knows of."""
        self.clock.set_ms(max(now_ms, self.clock.now_ms()))

    def run_until_idle(self) -> int | None:
        """Do what is due now and what follows from it; no time passes. Returns when the next thing falls due."""
        for _ in range(_MOST_ROUNDS):
            self._woken = False
            wishes = [self._step(service) for service in self._services()]
            due_ms = min((wish for wish in wishes if wish is not None), default=None)
            if not self._woken and (due_ms is None or due_ms > self.clock.now_ms()):
                return due_ms
        raise NotIdleError(self._who_is_busy())

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
        """Asked anew each round, since a broker and an application may get more services as they go."""
        containers = self._app.containers if self._app is not None else ()
        services = [*self.broker.services(), *containers, *self._containers]
        self._listen_to(service for service in services if id(service) not in self._known)
        return services

    def _listen_to(self, services: Iterable[Service]) -> None:
        for service in services:
            self._known[id(service)] = service
            service.on_wake(self._note_wake)

    def _note_wake(self) -> None:
        self._woken = True

    def _who_is_busy(self) -> str:
        now_ms = self.clock.now_ms()
        asked = [(service.name, service.step()) for service in self._services()]
        busy = [name for name, wish in asked if wish is not None and wish <= now_ms]
        return (
            f"after {_MOST_ROUNDS} rounds at one instant there is still work for "
            f"{', '.join(busy) or 'somebody who keeps waking'}; "
            "does a handler send to its own topic, or does the step of a service never say that it is done?"
        )


def span_ms(span: str | timedelta | int) -> int:
    """A span of time in milliseconds.

    Raises:
        ValueError: It is negative, or a text that is no span.
    """
    if isinstance(span, timedelta):
        milliseconds = span // timedelta(milliseconds=1)
    elif isinstance(span, int):
        milliseconds = span
    elif _SPAN.fullmatch(span):
        milliseconds = round(sum(float(number) * _UNITS_MS[unit] for number, unit in _SPAN_PART.findall(span)))
    else:
        raise ValueError(f"{span!r} is no span of time; write '3h', '1h 30m', '250ms', with the units ms s m h d")
    if milliseconds < 0:
        raise ValueError(f"time passes forward only, got {span!r}; VirtualClock.move_ms sets a clock back")
    return milliseconds
