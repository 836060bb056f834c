"""A handler of requests as a WSGI and as an ASGI application, for any web framework to mount."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from mqtemplate.http.exchange import (
    HttpHandler,
    HttpRequest,
    HttpResponse,
    RefusedRequestError,
    body_length,
    combined_headers,
    refused,
    short_body,
)

T = TypeVar("T")

WsgiApp = Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
AsgiApp = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


def wsgi_application(handler: HttpHandler, max_body_bytes: int) -> WsgiApp:
    """Return a WSGI application: Flask, Django, gunicorn."""

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        try:
            response = handler(_wsgi_request(environ, max_body_bytes))
        except RefusedRequestError as exc:
            response = refused(exc)
        try:
            start_response(f"{response.status} {HTTPStatus(response.status).phrase}", response.all_headers)
        except BaseException:
            response.close()  # the server never gets the body, which it would close
            raise
        if environ["REQUEST_METHOD"] == "HEAD":
            response.close()
            return [b""]
        return [response.body] if isinstance(response.body, bytes) else response.body

    return app


def _wsgi_request(environ: dict[str, Any], max_body_bytes: int) -> HttpRequest:
    names = {name[5:].replace("_", "-").lower(): name for name in environ if name.startswith("HTTP_")}
    headers = {name: str(environ[key]) for name, key in names.items()}
    if content_type := environ.get("CONTENT_TYPE"):
        headers["content-type"] = str(content_type)
    # An empty text means that the header is missing (PEP 3333).
    size = body_length(environ.get("CONTENT_LENGTH") or None, headers.get("transfer-encoding"), max_body_bytes)
    return HttpRequest(
        method=environ["REQUEST_METHOD"],
        path=_wsgi_text(environ.get("PATH_INFO", "")),
        mount=_wsgi_text(environ.get("SCRIPT_NAME", "")),
        query=parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True),
        headers=headers,
        body=_wsgi_body(environ["wsgi.input"], size) if size else b"",
        remote=environ.get("REMOTE_ADDR", ""),
        is_secure=environ.get("wsgi.url_scheme") == "https",
    )


def _wsgi_body(stream: Any, size: int) -> bytes:
    """Read the body. A server hands out less than *size* bytes if its client went away."""
    body = b""
    while len(body) < size:
        try:
            more = stream.read(size - len(body))
        except OSError:  # so gunicorn and mod_wsgi report the end of the connection
            more = b""
        if not more:
            raise short_body(len(body), size)
        body += more
    return body


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
        try:
            request = await _asgi_request(scope, receive, max_body_bytes)
        except RefusedRequestError as exc:
            response = refused(exc)
        else:
            if request is None:
                return  # the client went away before the end of its body
            response = await _handled(handler, request)
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in response.all_headers]
        try:
            await send({"type": "http.response.start", "status": response.status, "headers": encoded})
        except BaseException:
            response.close()
            raise
        if not isinstance(response.body, bytes) and scope["method"] != "HEAD":
            await _send_stream(response, response.body, receive, send)
            return
        response.close()
        body = response.body if isinstance(response.body, bytes) and scope["method"] != "HEAD" else b""
        await send({"type": "http.response.body", "body": body})

    return app


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run *work* in a thread of the event loop. Callbacks of the future run in that thread.

    A request can be cancelled, and its thread cannot: what it creates must be closed when it ends.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as exc:
            done.set_exception(exc)
        else:
            done.set_result(result)

    asyncio.get_running_loop().run_in_executor(None, copy_context().run, run)
    return done


async def _handled(handler: HttpHandler, request: HttpRequest) -> HttpResponse:
    """Return the response. If the request is cancelled meanwhile, it is closed: a stream would keep its place."""
    handling = _in_thread(lambda: handler(request))
    try:
        return await asyncio.shield(asyncio.wrap_future(handling))
    except asyncio.CancelledError:
        handling.add_done_callback(_close_result)
        raise


def _close_result(handling: Future[HttpResponse]) -> None:
    if handling.exception() is None:
        handling.result().close()


async def _asgi_request(scope: dict[str, Any], receive: Receive, max_body_bytes: int) -> HttpRequest | None:
    """Return the request with its whole body; None if the client went away before."""
    mount = scope.get("root_path", "")
    headers = combined_headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    announced = headers.get("content-length")
    # The server removes the chunks of a body, and reports its end.
    most = body_length(announced, headers.get("transfer-encoding"), max_body_bytes, is_framed=True)
    body = await _read_body(receive, max_body_bytes)
    if body is None:
        return None
    if announced is not None and len(body) != most:
        raise short_body(len(body), most)
    return HttpRequest(
        method=scope["method"],
        path=scope["path"].removeprefix(mount),
        mount=mount,
        query=parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True),
        headers=headers,
        body=body,
        remote=str((scope.get("client") or ("",))[0]),
        is_secure=scope.get("scheme") == "https",
    )


async def _send_stream(response: HttpResponse, parts: Iterator[bytes], receive: Receive, send: Send) -> None:
    """Send the parts of a stream, until it ends, the client goes away, or the request is cancelled."""
    disconnected = asyncio.ensure_future(_until_disconnect(receive))
    following: Future[bytes | None] | None = None
    try:
        while not disconnected.done():
            following = _in_thread(lambda: next(parts, None))
            arrived = asyncio.wrap_future(following)
            either: set[asyncio.Future[Any]] = {arrived, disconnected}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            part = await arrived
            if part is None:
                await send({"type": "http.response.body", "body": b""})
                return
            await send({"type": "http.response.body", "body": part, "more_body": True})
    finally:
        disconnected.cancel()
        if following is None:
            response.close()
        else:
            # A generator that runs cannot be closed; this waits for the part that is being created.
            following.add_done_callback(lambda _: response.close())


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
    """Return the body; None if the client went away before its end.

    Raises:
        RefusedRequestError: It is too large.
    """
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message.get("type") == "http.disconnect":
            return None
        parts.append(bytes(message.get("body", b"")))
        length += len(parts[-1])
        if length > max_bytes:
            raise RefusedRequestError(413, f"the body is too large, allowed are {max_bytes} bytes")
        if not message.get("more_body"):
            return b"".join(parts)
