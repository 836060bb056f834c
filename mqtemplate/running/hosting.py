"""One application for each process of a web server, created and started there after a fork; its health; and wrappers
of ASGI and WSGI applications, which start and stop it with the server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from mqtemplate.context.application import MQApplication
from mqtemplate.template.rocketmq_template import RocketMQTemplate

__all__ = [
    "RUN_ATTRIBUTE",
    "HealthAnswer",
    "MQTemplateASGI",
    "MQTemplateWSGI",
    "ProcessApplication",
    "health_of",
    "process_of",
]

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
        """Return a new application that is not started."""
        app = MQApplication(*self._components, **self._options)
        for function in self._prepare:
            function(app)
        return app

    def application_to_run(self) -> MQApplication:
        """Return a new application that the caller starts and stops, as ``mqtemplate run`` does.

        From now on it is the application of this process, so handlers that use this object get the one that runs.
        """
        current = self._of_this_process()
        with current.lock:
            current.app, current.is_started = self.new_application(), False
            return current.app

    @property
    def is_started(self) -> bool:
        """True if this process has a started application."""
        current = self._current
        is_running = current.is_started or (current.app is not None and current.app.is_ready.is_set())
        return current.pid == os.getpid() and is_running

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
    """Return the messages of a web application, or the object if it is a `ProcessApplication`; None without one."""
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


Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_ENDS = ("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed")


class MQTemplateASGI:
    """ASGI application around another one; ``async def`` handlers run on the loop of the server.

    The messages start before the lifespan of the inner application and stop after it. An inner application without a
    lifespan, such as Django's, works too.

    ``scope["mqtemplate"]`` of each request is the started `MQApplication`.
    """

    def __init__(self, app: ASGIApp, messages: ProcessApplication) -> None:
        self._app = app
        self._messages = self.__mqtemplate__ = messages  # for `process_of`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope["mqtemplate"] = await self._messages.start_async()  # a server without lifespan
            await self._app(scope, receive, send)
            return
        has_lifespan = False

        async def receive_started() -> MutableMapping[str, Any]:
            nonlocal has_lifespan
            message = await receive()
            has_lifespan = True
            if message["type"] == "lifespan.startup":
                await self._messages.start_async()
            return message

        async def send_stopped(message: MutableMapping[str, Any]) -> None:
            if message["type"] in _ENDS:
                await self._messages.stop_async()
            await send(message)

        try:
            await self._app(scope, receive_started, send_stopped)
        except Exception:  # of an application without this protocol, which ASGI allows
            if has_lifespan:
                await self._messages.stop_async()
                raise
        if not has_lifespan:
            await self._own_lifespan(receive, send)

    async def _own_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._messages.start_async()
        except Exception as exc:
            await send({"type": "lifespan.startup.failed", "message": f"{type(exc).__name__}: {exc}"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._messages.stop_async()
        await send({"type": "lifespan.shutdown.complete"})


WSGIApp: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MQTemplateWSGI:
    """WSGI application around another one.

    WSGI has no start and no end of a process, so the first request starts the messages, and the end of the process
    stops them. `mqtemplate.running.gunicorn` starts them with each worker of gunicorn.

    ``environ["mqtemplate"]`` of each request is the started `MQApplication`.
    """

    def __init__(self, app: WSGIApp, messages: ProcessApplication) -> None:
        self._app = app
        self._messages = self.__mqtemplate__ = messages  # for `process_of`

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["mqtemplate"] = self._messages.start()
        return self._app(environ, start_response)
