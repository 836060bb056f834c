"""ASGI and WSGI applications together with their `MQApplication`, which starts and stops with the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_ENDS = ("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed")


class HostedMessages(Protocol):
    """A `mqtemplate.running.hosting.ProcessApplication`."""

    def start(self) -> object:
        """Start, unless it is started, and return the application."""

    async def start_async(self) -> object:
        """Start, unless it is started, and return the application."""

    async def stop_async(self) -> None:
        """Stop."""


class MQTemplateASGI:
    """ASGI application around another one; ``async def`` handlers run on the loop of the server.

    The messages start before the lifespan of the inner application and stop after it. An inner application without a
    lifespan, such as Django's, works too.

    ``scope["mqtemplate"]`` of each request is the started `MQApplication`.
    """

    def __init__(self, app: ASGIApp, messages: HostedMessages) -> None:
        self._app = app
        self._messages = self.__mqtemplate__ = messages  # `mqtemplate.running.hosting.process_of`

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

    def __init__(self, app: WSGIApp, messages: HostedMessages) -> None:
        self._app = app
        self._messages = self.__mqtemplate__ = messages  # `mqtemplate.running.hosting.process_of`

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["mqtemplate"] = self._messages.start()
        return self._app(environ, start_response)
