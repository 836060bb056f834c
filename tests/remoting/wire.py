"""A small server with known responses, and a peer that can break every rule of the protocol."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import Connection, RemotingClient, RemotingServer, RemotingServerSettings
from mqtemplate.remoting.protocol import FrameDecoder, RemotingCommand, ResponseCode, encode_command
from mqtemplate.remoting.server import ErrorResponse, Guard
from tests.waiting import PATIENCE_S

ECHO = 9_001
"""The response has the body and the fields of the request."""
RAISE = 9_002
"""The processor raises ``ValueError("no such thing")``."""
HOLD = 9_003
"""The processor does not respond: the request is in `EchoServer.held`."""
SLOW = 9_004
"""The response has the name of the worker thread. A request with a body waits for `EchoServer.gate`."""
BIG = 9_005
"""The response has as many bytes as the number in the request's body."""
PARTS = 9_006
"""The response has a body of three parts."""
PARSE = 9_007
"""A body of up to 100,000 bytes is parsed: the response has the name of the thread that did it."""
UNKNOWN = 9_999
"""No processor has this code."""

LOOPBACK = HostAddress("127.0.0.1", 0)
LONG_MS = PATIENCE_S * 1_000
"""Timeout of a request that must get its response."""

Results = queue.Queue[RemotingCommand | BrokerError]
"""Results of asynchronous requests; its `put` is their callback."""


class EchoServer(RemotingServer):
    """Server with a processor for each code above.

    Attributes:
        check: Guard, if a test sets one.
        convert_error: Conversion of exceptions to responses, if a test sets one.
        held: Connection and request of each `HOLD`.
        seen: All `ECHO` requests, in order.
        closed: Connections that have ended.
        gate: Each `SLOW` request with a body takes one item from it.
    """

    def __init__(
        self,
        settings: RemotingServerSettings | None = None,
        clock: Clock | None = None,
        listen: HostAddress = LOOPBACK,
    ) -> None:
        super().__init__(
            listen,
            settings or RemotingServerSettings(),
            clock or SystemClock(),
            guard=lambda connection, request: None if self.check is None else self.check(connection, request),
            error_response=lambda request, exc: (
                None if self.convert_error is None else self.convert_error(request, exc)
            ),
        )
        self.check: Guard | None = None
        self.convert_error: ErrorResponse | None = None
        self.held: queue.Queue[tuple[Connection, RemotingCommand]] = queue.Queue()
        self.seen: queue.Queue[RemotingCommand] = queue.Queue()
        self.closed: queue.Queue[Connection] = queue.Queue()
        self.gate: queue.Queue[None] = queue.Queue()
        self.on_close(self.closed.put)
        self.register(ECHO, self._echo)
        self.register(RAISE, self._raise)
        self.register(HOLD, self._hold)
        self.register(SLOW, self._slow, slow=True)
        self.register(BIG, self._big)
        self.register(PARTS, self._parts)
        self.register(PARSE, self._parse, max_body_bytes=100_000)

    def _echo(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        self.seen.put(request)
        response = request.response(body=request.body)
        response.ext_fields.update(request.ext_fields)
        return response

    def _raise(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        raise ValueError("no such thing")

    def _hold(self, connection: Connection, request: RemotingCommand) -> None:
        self.held.put((connection, request))

    def _slow(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        if request.body:
            self.gate.get(timeout=PATIENCE_S)
        return request.response(body=threading.current_thread().name.encode())

    def _parse(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return request.response(body=threading.current_thread().name.encode())

    def _big(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return request.response(body=bytes(int(request.body)))

    def _parts(self, connection: Connection, request: RemotingCommand) -> None:
        connection.reply(request.response(), body=[b"one", b"", b"two" * 10_000])


def echo(body: bytes = b"", **fields: str) -> RemotingCommand:
    return RemotingCommand(ECHO, body=body, ext_fields=dict(fields))


class RawPeer:
    """A socket, with a decoder for the received commands."""

    def __init__(self, address: HostAddress, *, wrap: Callable[[socket.socket], socket.socket] | None = None) -> None:
        sock = socket.create_connection((address.ip, address.port), PATIENCE_S)
        self.socket = sock if wrap is None else wrap(sock)
        self._decoder = FrameDecoder()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def invoke(self, command: RemotingCommand) -> RemotingCommand | None:
        """Send a command, and return the next received one."""
        return self.invoke_frame(encode_command(command))

    def invoke_frame(self, frame: bytes) -> RemotingCommand | None:
        """Do the same with an encoded command."""
        self.send(frame)
        return self.next_command()

    def next_command(self) -> RemotingCommand | None:
        """Return the next command; None at the end of the connection."""
        while (command := self._decoder.next_command()) is None:
            try:
                data = self.socket.recv(65_536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._decoder.feed(data)
        return command

    def is_closed_by_peer(self) -> bool:
        """Wait for the end of the connection; return False if a command arrives instead."""
        return self.next_command() is None

    def reset(self) -> None:
        """Abort the connection: the other side gets ECONNRESET."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def hold(server: EchoServer, peer: RawPeer, *, opaque: int = 1) -> tuple[Connection, RemotingCommand]:
    """Send a request that the server holds; return its connection and the request there."""
    peer.send(encode_command(RemotingCommand(HOLD, opaque=opaque)))
    return server.held.get(timeout=PATIENCE_S)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call *work* with its number in several threads at once, and raise the error of one."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the address of a listener whose backlog is full, so the system completes no connection to it."""
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            sock = sockets.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


def address_of(server: RemotingServer) -> str:
    return str(server.address)


def echoed(client: RemotingClient, server: EchoServer, body: bytes) -> None:
    """Send a body, and check that it returns unchanged."""
    assert client.invoke(address_of(server), echo(body), LONG_MS).body == body


def response_of(results: Results) -> RemotingCommand:
    """Wait for the next result, which must be a response."""
    response = results.get(timeout=PATIENCE_S)
    assert isinstance(response, RemotingCommand)
    return response


def error_of(results: Results) -> BrokerError:
    """Wait for the next result, which must be an error."""
    error = results.get(timeout=PATIENCE_S)
    assert isinstance(error, BrokerError)
    return error


def refuse_with_go_away(server: EchoServer, times: int) -> None:
    """Make *server* refuse this many requests, as a server does while it stops."""
    left = iter(range(times))
    server.check = lambda connection, request: (
        request.response(ResponseCode.GO_AWAY) if next(left, None) is not None else None
    )
