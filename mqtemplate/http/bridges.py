"""A handler of requests as a WSGI and as an ASGI application, for any web framework to mount."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from mqtemplate.http.exchange import HttpHandler, HttpRequest, HttpResponse, too_large

WsgiApp = Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
AsgiApp = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


def wsgi_application(handler: HttpHandler, max_body_bytes: int) -> WsgiApp:
    """Return a WSGI application: Flask, Django, gunicorn."""

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH") or "0"
        size = int(length) if str(length).isdecimal() else 0
        if size > max_body_bytes:
            response = too_large(max_body_bytes)
        else:
            response = handler(_wsgi_request(environ, size))
        start_response(f"{response.status} {HTTPStatus(response.status).phrase}", response.all_headers)
        if environ["REQUEST_METHOD"] == "HEAD":
            response.close()
            return [b""]
        return [response.body] if isinstance(response.body, bytes) else response.body

    return app


def _wsgi_request(environ: dict[str, Any], size: int) -> HttpRequest:
    names = {name[5:].replace("_", "-").lower(): name for name in environ if name.startswith("HTTP_")}
    headers = {name: str(environ[key]) for name, key in names.items()}
    if content_type := environ.get("CONTENT_TYPE"):
        headers["content-type"] = str(content_type)
    return HttpRequest(
        method=environ["REQUEST_METHOD"],
        path=_wsgi_text(environ.get("PATH_INFO", "")),
        mount=_wsgi_text(environ.get("SCRIPT_NAME", "")),
        query=parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True),
        headers=headers,
        body=environ["wsgi.input"].read(size) if size else b"",
        remote=environ.get("REMOTE_ADDR", ""),
        is_secure=environ.get("wsgi.url_scheme") == "https",
    )


def _wsgi_text(text: str) -> str:
    """Return a path. PEP 3333: a server decodes it as Latin-1, whatever it is."""
    return text.encode("latin-1").decode("utf-8", "replace")


def asgi_application(handler: HttpHandler, max_body_bytes: int) -> AsgiApp:
    """Return an ASGI application: FastAPI, Starlette, uvicorn. The handler runs in a thread, since it may wait."""

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        body = await _read_body(receive, max_body_bytes)
        if body is None:
            response = too_large(max_body_bytes)
        else:
            response = await asyncio.to_thread(handler, _asgi_request(scope, body))
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in response.all_headers]
        try:
            await send({"type": "http.response.start", "status": response.status, "headers": encoded})
            await _send_body(response, scope["method"] == "HEAD", receive, send)
        finally:
            response.close()

    return app


def _asgi_request(scope: dict[str, Any], body: bytes) -> HttpRequest:
    mount = scope.get("root_path", "")
    return HttpRequest(
        method=scope["method"],
        path=scope["path"].removeprefix(mount),
        mount=mount,
        query=parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True),
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
        body=body,
        remote=str((scope.get("client") or ("",))[0]),
        is_secure=scope.get("scheme") == "https",
    )


async def _send_body(response: HttpResponse, is_head: bool, receive: Receive, send: Send) -> None:
    if is_head or isinstance(response.body, bytes):
        body = response.body if isinstance(response.body, bytes) and not is_head else b""
        await send({"type": "http.response.body", "body": body})
        return
    disconnected = asyncio.ensure_future(_until_disconnect(receive))
    try:
        while not disconnected.done():
            part = await asyncio.to_thread(_next_part, response.body)
            if part is None:
                break
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        disconnected.cancel()


def _next_part(parts: Iterator[bytes]) -> bytes | None:
    return next(parts, None)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the body; None if it is too large."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > max_bytes:
            return None
        if not message.get("more_body"):
            return body
