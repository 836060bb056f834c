"""The actuator as a WSGI and as an ASGI application, for any web framework to mount."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from mqtemplate.actuator.response import MAX_BODY_BYTES, Responder, below_actuator, headers_of, too_large

WsgiApp = Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
AsgiApp = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


def wsgi_app(actuator: Responder) -> WsgiApp:
    """Return the actuator as a WSGI application: Flask, Django, gunicorn. Mount it at ``/actuator``."""

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH") or "0"
        size = int(length) if str(length).isdecimal() else 0
        if size > MAX_BODY_BYTES:
            response = too_large(size)
        else:
            response = actuator.respond(
                environ["REQUEST_METHOD"],
                below_actuator(environ.get("PATH_INFO", "")),
                parse_qsl(environ.get("QUERY_STRING", "")),
                environ.get("HTTP_AUTHORIZATION", ""),
                environ["wsgi.input"].read(size) if size else b"",
                environ.get("REMOTE_ADDR", ""),
            )
        start_response(f"{response.status} {HTTPStatus(response.status).phrase}", headers_of(response))
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else response.body]

    return app


def asgi_app(actuator: Responder) -> AsgiApp:
    """Return the actuator as an ASGI application: FastAPI, Starlette, uvicorn. Mount it at ``/actuator``.

    The documents are created in a thread: a health check may wait for a broker.
    """

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        body = await _read_body(receive)
        if body is None:
            response = too_large(MAX_BODY_BYTES + 1)
        else:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            headers = {name.lower(): value for name, value in scope["headers"]}
            response = await asyncio.to_thread(
                actuator.respond,
                scope["method"],
                below_actuator(path),
                parse_qsl(scope.get("query_string", b"").decode("latin-1")),
                headers.get(b"authorization", b"").decode("latin-1"),
                body,
                str((scope.get("client") or ("",))[0]),
            )
        encoded = [(name.encode(), value.encode()) for name, value in headers_of(response)]
        await send({"type": "http.response.start", "status": response.status, "headers": encoded})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else response.body})

    return app


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body; None if it is too large."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return body
