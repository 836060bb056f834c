"""Search for new topics whose names match the pattern of a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.event_log import get_logger
from mqtemplate.listener.endpoint import Endpoint
from mqtemplate.services import Service, ServiceThread, wall_time

_log = get_logger("mqtemplate.listener")

_INTERVAL_MS = 30_000
"""Time between two searches for new topics. Source: ``client: ClientConfig.pollNameServerInterval``."""


class Follower(Protocol):
    """A listener container, as far as the search needs it."""

    endpoint: Endpoint

    @property
    def is_running(self) -> bool: ...

    def follow_topics(self) -> None:
        """Join the group again if there are new topics."""


class TopicWatch:
    """Search for new topics, for the listeners with patterns. A `Service`; on a system clock it has a thread.

    A listener with a new topic leaves its group and joins it again with all of them; its handlers finish before.
    """

    name = "listener topics"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._containers: list[Follower] = []
        self._due_ms = clock.steady_ms() + _INTERVAL_MS
        self._thread: ServiceThread | None = None

    def start(self, containers: Iterable[Follower]) -> None:
        """Watch for the containers that have patterns; do nothing if there are none."""
        self._containers = [each for each in containers if each.endpoint.settings.topic_patterns]
        if not self._containers:
            return
        self._due_ms = self._clock.steady_ms() + _INTERVAL_MS
        if isinstance(self._clock, VirtualClock):
            self._clock.services.append(self)
        elif self._thread is None:
            self._thread = ServiceThread("mqtemplate-topics", [self], self._clock, _report)
            self._thread.start()

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Nothing wakes this service before its time."""

    def step(self) -> int | None:
        """Let the listeners join the topics that are new, if it is time. Return the time of the next search."""
        if self._clock.steady_ms() < self._due_ms:
            return wall_time(self._clock, self._due_ms)
        self._due_ms = self._clock.steady_ms() + _INTERVAL_MS
        for container in self._containers:
            if container.is_running:
                container.follow_topics()
        return wall_time(self._clock, self._due_ms)

    def stop(self) -> None:
        """End the search."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        elif isinstance(self._clock, VirtualClock) and self in self._clock.services:
            self._clock.services.remove(self)


def _report(service: Service, error: Exception) -> None:
    _log.warning("listener.topics_unknown", reason=str(error))
