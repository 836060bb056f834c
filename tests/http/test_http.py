"""The HTTP server and the bridges to WSGI and ASGI, beside what the tests of the actuator show."""

from __future__ import annotations

import asyncio
import http.client
import io
import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.http.bridges import asgi_application, wsgi_application
from mqtemplate.http.exchange import HttpRequest, HttpResponse
from mqtemplate.http.server import HttpServer
from tests.waiting import eventually


class Echo:
    """A handler that returns its request, and streams below /stream."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.is_closed = False

    def __call__(self, request: HttpRequest) -> HttpResponse:
        self.requests.append(request)
        if request.path == "/stream":
            return HttpResponse(200, self._parts(), "text/event-stream")
        if request.path == "/fail":
            raise RuntimeError("broken handler")
        text = f"{request.method} {request.mount} {request.path} {list(request.query)} {request.body.decode()}"
        return HttpResponse(200, text.encode(), headers=(("X-Extra", "yes"),))

    def _parts(self) -> Iterator[bytes]:
        try:
            for number in range(1_000_000):
                yield f"data: {number}\n\n".encode()
        finally:
            self.is_closed = True


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[HttpServer]:
    log = get_logger("mqtemplate.tests")
    server = HttpServer(
        echo, "127.0.0.1", 0, thread_name="test", events=log, event="test", max_connections=4, max_body_bytes=100
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def connection(server: HttpServer) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection(server.address.ip, server.address.port, timeout=30)) as connection:
        yield connection


def test_a_request_arrives_with_path_query_and_body(connection: http.client.HTTPConnection, echo: Echo) -> None:
    connection.request("POST", "/a%20b?name=x&empty=", b"body", {"X-Own": "1"})
    answer = connection.getresponse()

    assert answer.read() == b"POST  /a b [('name', 'x'), ('empty', '')] body"
    assert answer.headers["X-Extra"] == "yes"
    assert answer.headers["Server"] == "mqtemplate"
    assert (echo.requests[0].headers["x-own"], echo.requests[0].remote) == ("1", "127.0.0.1")


def test_a_stream_ends_with_its_connection(connection: http.client.HTTPConnection, echo: Echo) -> None:
    connection.request("GET", "/stream")
    answer = connection.getresponse()
    first = answer.read(9)
    answer.close()
    connection.close()

    assert first == b"data: 0\n\n"
    eventually(lambda: echo.is_closed, "the stream is closed")


def test_a_body_that_is_too_large_is_refused(connection: http.client.HTTPConnection, echo: Echo) -> None:
    connection.request("POST", "/", b"x" * 101)

    assert connection.getresponse().status == 413
    assert echo.requests == []


def test_a_handler_that_fails_is_logged(
    connection: http.client.HTTPConnection, caplog: pytest.LogCaptureFixture
) -> None:
    connection.request("GET", "/fail")
    with pytest.raises(http.client.RemoteDisconnected):
        connection.getresponse()

    eventually(lambda: "test.request_failed" in caplog.text, "the event is written")


def test_the_query_is_not_logged(connection: http.client.HTTPConnection, caplog: pytest.LogCaptureFixture) -> None:
    """It may contain a token."""
    caplog.set_level(logging.DEBUG, "mqtemplate.tests")
    connection.request("GET", "/sign-in?token=secret")
    connection.getresponse().read()

    assert "/sign-in" in caplog.text
    assert "secret" not in caplog.text


def test_an_address_in_use_is_an_error(server: HttpServer) -> None:
    log = get_logger("mqtemplate.tests")
    address = server.address
    second = HttpServer(
        Echo(), address.ip, address.port, thread_name="t", events=log, event="t", max_connections=1, max_body_bytes=1
    )

    with pytest.raises(ConfigurationError, match=r"127.0.0.1:\d+ cannot be used: .*; stop the process that uses it"):
        second.start()


# --- bridges ------------------------------------------------------------------------------------


def test_wsgi_has_the_mount_and_decodes_the_path(echo: Echo) -> None:
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ |= {"SCRIPT_NAME": "/dash", "PATH_INFO": "/ä".encode().decode("latin-1"), "QUERY_STRING": "a=1"}
    environ |= {"wsgi.url_scheme": "https", "wsgi.input": io.BytesIO(b""), "HTTP_X_OWN": "1"}
    started: list[Any] = []

    body = b"".join(wsgi_application(echo, 100)(environ, lambda *args: started.append(args)))

    assert body.decode() == "GET /dash /ä [('a', '1')] "
    assert started[0][0] == "200 OK"
    assert echo.requests[0].is_secure
    assert echo.requests[0].headers["x-own"] == "1"


def test_asgi_streams_until_the_client_is_away(echo: Echo) -> None:
    sent: list[Any] = []
    is_enough = asyncio.Event()
    requests = iter([{"type": "http.request", "body": b""}])

    async def receive() -> Any:
        for message in requests:
            return message
        await is_enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            is_enough.set()

    scope = {"type": "http", "method": "GET", "path": "/dash/stream", "root_path": "/dash", "headers": []}
    asyncio.run(asgi_application(echo, 100)(scope, receive, send))

    assert sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream") in sent[0]["headers"]
    assert sent[1]["body"] == b"data: 0\n\n"
    assert echo.is_closed
    assert echo.requests[0].mount == "/dash"
