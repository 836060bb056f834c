"""The HTTP server and the bridges to WSGI and ASGI, beside what the tests of the actuator show."""

from __future__ import annotations

import asyncio
import http.client
import io
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.http.bridges import asgi_application, wsgi_application
from mqtemplate.http.exchange import HttpRequest, HttpResponse
from mqtemplate.http.server import HttpServer
from tests.waiting import PATIENCE_S, eventually


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


# --- requests that are not valid, or cut off -----------------------------------------------------


def exchange(server: HttpServer, *parts: bytes) -> bytes:
    """Send bytes, close the sending side, and return all that comes back."""
    with socket.create_connection((server.address.ip, server.address.port), timeout=30) as client:
        for part in parts:
            client.sendall(part)
        client.shutdown(socket.SHUT_WR)
        found = b""
        while more := client.recv(65_536):
            found += more
        return found


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2, 2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: ", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5_000, 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 101", 413),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked", 411),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\n Content-Length: 2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\nContent-Length: 2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nX: a\rContent-Length: 2", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nX: a\x00b", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: something", 417),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b", 400),
        (b"GET / HTTP/1.1", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b", 400),
        (b"GET / HTTP/2.0\r\nHost: a", 505),
        (b"GET / HTTP/1.1 \r\nHost: a", 400),
        (b"GET  / HTTP/1.1\r\nHost: a", 400),
        (b"GET /", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: a", 400),
        (b"GET other HTTP/1.1\r\nHost: a", 400),
        (b"GET /#a HTTP/1.1\r\nHost: a", 400),
        (b"GET http://b/ HTTP/1.1\r\nHost: a", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000, 431),
        (b"GET / HTTP/1.1\r\nHost: a" + b"\r\nX: a" * 101, 431),
    ],
)
def test_what_two_programs_could_read_differently_is_refused(
    server: HttpServer, echo: Echo, head: bytes, status: int
) -> None:
    """A proxy before this server may have read it the other way (request smuggling)."""
    answer = exchange(server, head + b"\r\n\r\nab")

    assert answer.split(b" ")[1] == str(status).encode(), answer
    assert b"Connection: close" in answer
    assert answer.count(b"Server: mqtemplate") == 1
    assert echo.requests == []


@pytest.mark.parametrize("sent", [0, 1, 18, 19])
def test_a_body_that_is_cut_off_is_not_handled(server: HttpServer, echo: Echo, sent: int) -> None:
    """The last fields of a form narrow what it does: without them it would do more than its user saw."""
    body = b"action=cancel&key=a"[:sent]
    answer = exchange(server, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n", body)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert f"the request ended after {sent} of 20 bytes of its body; nothing was changed, send it again" in str(answer)
    assert echo.requests == []


def test_further_requests_of_a_connection_are_served_until_it_asks_for_its_end(server: HttpServer) -> None:
    first = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"
    second = b"\r\nGET http://a/b?c HTTP/1.1\r\nHost: a\r\nConnection: x, Close\r\n\r\n"

    answer = exchange(server, first + second + second)  # at once: the server closes after the second one

    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"POST  /a [] ab" in answer
    assert b"GET  /b [('c', '')] " in answer


def test_a_client_may_wait_for_the_leave_to_send_its_body(server: HttpServer) -> None:
    with socket.create_connection((server.address.ip, server.address.port), timeout=30) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        interim = client.recv(100)
        client.sendall(b"ab")
        answer = client.recv(1_000)

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.startswith(b"HTTP/1.1 200 OK")


# --- clients that are slow -----------------------------------------------------------------------


def test_a_byte_now_and_then_does_not_prolong_the_time_for_a_request(
    monkeypatch: pytest.MonkeyPatch, server: HttpServer, echo: Echo
) -> None:
    monkeypatch.setattr("mqtemplate.http.server._HEAD_S", 0.2)
    with socket.create_connection((server.address.ip, server.address.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        received = b""
        while not received:
            client.settimeout(0.02)
            try:
                received = client.recv(1_000)
            except TimeoutError:
                client.sendall(b"a")

    assert received.startswith(b"HTTP/1.1 408 ")
    assert echo.requests == []


def test_the_connection_that_waits_longest_is_closed_for_a_new_one(server: HttpServer) -> None:
    """Four clients that never finish their requests do not keep out a fifth."""
    address = (server.address.ip, server.address.port)
    with ExitStack() as stack:
        held = [stack.enter_context(closing(socket.create_connection(address, timeout=30))) for _ in range(4)]
        for each in held:
            each.sendall(b"GET / HTTP/1.1\r\n")
        answer = exchange(server, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")

        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert held[0].recv(1) == b""
        held[3].sendall(b"Host: a\r\n\r\n")
        assert held[3].recv(15) == b"HTTP/1.1 200 OK"


def test_an_urgent_request_is_served_while_all_handlers_work() -> None:
    release, working = threading.Event(), threading.Semaphore(0)

    def handler(request: HttpRequest) -> HttpResponse:
        if request.path == "/slow":
            working.release()
            release.wait(PATIENCE_S)
        return HttpResponse(200, b"done")

    log = get_logger("mqtemplate.tests")
    server = HttpServer(
        handler, "127.0.0.1", 0, thread_name="test", events=log, event="test", max_connections=2, max_body_bytes=1,
        urgent_path="/health",
    )  # fmt: skip
    server.start()
    address = (server.address.ip, server.address.port)
    try:
        with ExitStack() as stack:
            for _ in range(2):
                client = stack.enter_context(closing(socket.create_connection(address, timeout=30)))
                client.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
                assert working.acquire(timeout=PATIENCE_S)
            health = exchange(server, b"GET /health/readiness HTTP/1.1\r\nHost: a\r\n\r\n")
            other = exchange(server, b"GET /other HTTP/1.1\r\nHost: a\r\n\r\n")
            release.set()
            assert client.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        release.set()
        server.stop()

    assert health.startswith(b"HTTP/1.1 200 OK")
    assert other.startswith(b"HTTP/1.1 503 ")
    assert b"2 requests are served already; try again" in other


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


# --- requests that a bridge gets incomplete ------------------------------------------------------


def call_wsgi(echo: Echo, body: bytes, length: str | None, **more: Any) -> tuple[str, bytes]:
    environ: dict[str, Any] = {"REQUEST_METHOD": "POST", "wsgi.input": io.BytesIO(body)} | more
    setup_testing_defaults(environ)
    if length is not None:
        environ["CONTENT_LENGTH"] = length
    started: list[Any] = []
    text = b"".join(wsgi_application(echo, 100)(environ, lambda *args: started.append(args)))
    return started[0][0][:3], text


@pytest.mark.parametrize(
    ("length", "more", "status"),
    [
        ("20", {}, "400"),
        ("5, 5", {}, "400"),
        ("+5", {}, "400"),
        ("-5", {}, "400"),
        ("\u0665", {}, "400"),
        ("101", {}, "413"),
        ("5", {"HTTP_TRANSFER_ENCODING": "chunked"}, "400"),
        (None, {"HTTP_TRANSFER_ENCODING": "chunked"}, "411"),
    ],
)
def test_wsgi_does_not_handle_a_body_of_another_length(
    echo: Echo, length: str | None, more: dict[str, str], status: str
) -> None:
    assert call_wsgi(echo, b"a=b&c", length, **more)[0] == status
    assert echo.requests == []


def test_wsgi_reads_a_body_that_comes_in_parts_and_refuses_one_that_ends_with_an_error(echo: Echo) -> None:
    class Parts:
        def __init__(self, *parts: bytes) -> None:
            self._parts = [*parts]

        def read(self, size: int) -> bytes:
            if not self._parts:
                raise OSError("the client disconnected")
            return self._parts.pop(0)[:size]

    whole = call_wsgi(echo, b"", "4", **{"wsgi.input": Parts(b"ab", b"cd")})
    broken = call_wsgi(echo, b"", "5", **{"wsgi.input": Parts(b"ab", b"cd")})

    assert whole == ("200", b"POST  / [] abcd")
    assert broken[0] == "400"
    assert len(echo.requests) == 1


def test_wsgi_closes_a_stream_that_was_never_sent(echo: Echo) -> None:
    environ: dict[str, Any] = {"REQUEST_METHOD": "GET", "PATH_INFO": "/stream"}
    setup_testing_defaults(environ)
    closed: list[bool] = []

    def handler(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, Stream(closed), "text/event-stream")

    def start_response(*_: object) -> None:
        raise RuntimeError("the server is stopping")

    with pytest.raises(RuntimeError):
        wsgi_application(handler, 100)(environ, start_response)

    assert closed == [True]


class Stream(Iterator[bytes]):
    """A stream that notes that it was closed; each part waits for an event, if one is given."""

    def __init__(
        self, closed: list[bool], wait: threading.Event | None = None, entered: threading.Event | None = None
    ) -> None:
        self._closed = closed
        self._wait = wait
        self._entered = entered or threading.Event()
        self._runs = False

    def __next__(self) -> bytes:
        self._runs = True
        self._entered.set()
        if self._wait is not None:
            self._wait.wait(PATIENCE_S)
        self._runs = False
        return b"part"

    def close(self) -> None:
        assert not self._runs, "a generator that runs cannot be closed"
        self._closed.append(True)


def scope_of(method: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": "/", "headers": [(b"host", b"a"), *headers]}


async def call_asgi(app: Any, scope: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("headers", [(), ((b"content-length", b"20"),), ((b"transfer-encoding", b"chunked"),)])
def test_asgi_does_not_handle_a_body_whose_client_went_away(
    echo: Echo, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    part = {"type": "http.request", "body": b"action=cancel", "more_body": True}

    sent = asyncio.run(
        call_asgi(asgi_application(echo, 100), scope_of("POST", *headers), part, {"type": "http.disconnect"})
    )

    assert sent == []
    assert echo.requests == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (((b"content-length", b"20"),), 400),
        (((b"content-length", b"4"),), 400),
        (((b"content-length", b"5"), (b"content-length", b"5")), 400),
        (((b"content-length", b"5"), (b"transfer-encoding", b"chunked")), 400),
        (((b"content-length", b"+5"),), 400),
        (((b"host", b"b"),), 400),
        (((b"content-length", b"101"),), 413),
    ],
)
def test_asgi_does_not_handle_a_body_of_another_length(
    echo: Echo, headers: tuple[tuple[bytes, bytes], ...], status: int
) -> None:
    whole = {"type": "http.request", "body": b"a=b&c"}

    sent = asyncio.run(call_asgi(asgi_application(echo, 100), scope_of("POST", *headers), whole))

    assert sent[0]["status"] == status
    assert echo.requests == []


def test_asgi_takes_a_body_in_chunks_whose_end_the_server_reports(echo: Echo) -> None:
    parts = [{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.request", "body": b"cd"}]

    sent = asyncio.run(
        call_asgi(asgi_application(echo, 100), scope_of("POST", (b"transfer-encoding", b"chunked")), *parts)
    )

    assert sent[0]["status"] == 200
    assert echo.requests[0].body == b"abcd"


@pytest.mark.parametrize("moment", ["handler", "part", "send"])
def test_a_cancelled_asgi_request_closes_its_stream(moment: str) -> None:
    """A server cancels requests at its end, and a timeout of a middleware does: the stream would keep its place."""
    closed: list[bool] = []
    entered, release = threading.Event(), threading.Event()

    def handler(request: HttpRequest) -> HttpResponse:
        if moment == "handler":
            entered.set()
            release.wait(PATIENCE_S)
        return HttpResponse(200, Stream(closed, release if moment == "part" else None, entered), "text/event-stream")

    async def cancelled() -> None:
        reached = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not reached.is_set():
                reached.set()
                return {"type": "http.request", "body": b""}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if moment == "send" and message["type"] == "http.response.body":
                await asyncio.Event().wait()

        task = asyncio.create_task(asgi_application(handler, 100)(scope_of("GET"), receive, send))
        await reached.wait()
        await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()

    asyncio.run(cancelled())

    eventually(lambda: closed == [True], "the stream is closed, once")


def test_a_disconnect_ends_an_asgi_stream_that_has_no_further_part() -> None:
    closed: list[bool] = []
    release = threading.Event()

    def handler(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, Stream(closed, release), "text/event-stream")

    messages = ({"type": "http.request", "body": b""}, {"type": "http.disconnect"})

    async def run() -> None:
        await asyncio.wait_for(call_asgi(asgi_application(handler, 100), scope_of("GET"), *messages), 30)
        release.set()

    asyncio.run(run())

    eventually(lambda: closed == [True], "the stream is closed")
