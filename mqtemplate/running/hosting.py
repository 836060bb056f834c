"""One application for each process of a web server, created and started there after a fork; and its health."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from mqtemplate.context.application import MQApplication
from mqtemplate.template.rocketmq_template import RocketMQTemplate

__all__ = ["RUN_ATTRIBUTE", "HealthAnswer", "ProcessApplication", "health_of", "process_of"]

T = TypeVar("T")

_OK, _UNAVAILABLE = 200, 503

RUN_ATTRIBUTE = "__mqtemplate__"
"""Attribute of a web application with its `ProcessApplication`: ``mqtemplate run`` and hooks of servers look for it."""


class _Current:
    """The application of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.async_lock = asyncio.Lock()
        self.app: MQApplication | None = None  # set during the start too: `on_start` of a service may use it
        self.is_started = False


class ProcessApplication:
    """One `MQApplication` for each process of a web server, created and started by its first use.

    A web server may import the program in one process and fork others, and an application belongs to the process that
    started it. So this object may be created at import: it opens nothing. After `stop` the next use starts a new
    application.

    Args:
        arguments: Components and options of `MQApplication`.
    """

    def __init__(self, *components: object, **options: Any) -> None:
        self._components = components
        self._options = options
        self._prepare: list[Callable[[MQApplication], object]] = []
        self._current = _Current()

    def prepare(self, function: Callable[[MQApplication], object]) -> None:
        """Call a function with each new application before its start."""
        self._prepare.append(function)

    def new_application(self) -> MQApplication:
        """Return a new application that is not started: for ``mqtemplate run``, which has a process to itself."""
        app = MQApplication(*self._components, **self._options)
        for function in self._prepare:
            function(app)
        return app

    @property
    def is_started(self) -> bool:
        """True if this process has a started application."""
        return self._current.pid == os.getpid() and self._current.is_started

    @property
    def application(self) -> MQApplication:
        """The application of this process; the first use starts it."""
        return self.start()

    @property
    def template(self) -> RocketMQTemplate:
        """The template of this process; the first use starts the application."""
        return self.start().template

    def get(self, wanted: type[T], name: str | None = None) -> T:
        """Return an object of the application by its type; the first use starts the application."""
        return self.start().get(wanted, name)

    def start(self) -> MQApplication:
        """Start the application of this process, once, and return it.

        Raises:
            MQTemplateError: It cannot start; the next use tries again.
        """
        current = self._of_this_process()
        with current.lock:
            if current.app is not None:
                return current.app
            with self._starting(current) as app:
                app.start()
            return app

    async def start_async(self) -> MQApplication:
        """Start the application of this process, once; its ``async def`` handlers run on this event loop."""
        current = self._of_this_process()
        async with current.async_lock:
            if current.app is not None:
                return current.app
            with self._starting(current) as app:
                await app.start_async()
            return app

    @contextmanager
    def _starting(self, current: _Current) -> Iterator[MQApplication]:
        current.app = app = self.new_application()
        try:
            yield app
        except BaseException:
            current.app = None
            raise
        current.is_started = True

    def stop(self) -> None:
        """Stop the application of this process, if there is one: running handlers finish."""
        app = self._taken()
        if app is not None:
            app.stop()

    async def stop_async(self) -> None:
        """Stop the application of this process while the event loop goes on."""
        app = self._taken()
        if app is not None:
            await app.stop_async()

    def _taken(self) -> MQApplication | None:
        current = self._of_this_process()
        app, current.app, current.is_started = current.app, None, False
        return app

    def _of_this_process(self) -> _Current:
        """Return the state of this process: a forked child has no application yet, and a lock of its own."""
        if self._current.pid != os.getpid():
            self._current = _Current()
        return self._current


def process_of(web_application: object) -> ProcessApplication | None:
    """Return the messages of a web application, or the object itself if it is that; None if there are none."""
    process = getattr(web_application, RUN_ATTRIBUTE, web_application)
    return process if isinstance(process, ProcessApplication) else None


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Answer to a probe.

    Attributes:
        status_code: Status of HTTP: 200 or 503.
        body: The answer as JSON.
    """

    status_code: int
    body: dict[str, str]


def health_of(app: MQApplication | None) -> HealthAnswer:
    """Return the readiness of an application; None: this process has started none yet.

    503 during start and stop, and while a part that has failed keeps the application from working.
    """
    if app is None:
        return HealthAnswer(_UNAVAILABLE, {"status": "DOWN", "reason": "the application is not started"})
    if not app.is_ready.is_set():
        return HealthAnswer(_UNAVAILABLE, {"status": "DOWN", "reason": "the application is not ready"})
    return HealthAnswer(_OK, {"status": "UP", "broker": app.broker.name})
