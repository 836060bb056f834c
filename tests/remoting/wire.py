"""A small server whose answers are known, and a peer that may break every rule."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.message import HostAddress
from mqtemplate.remoting import Connection, RemotingServer, RemotingServerSettings
from mqtemplate.remoting.protocol import FrameDecoder, RemotingCommand, encode_command

ECHO = 9_001
"""Answers with the body and the fields that came."""
RAISE = 9_002
"""Raises ``ValueError("no such thing")``."""
HOLD = 9_003
"""Is not answered: the request is in `EchoServer.held`."""
SLOW = 9_004
"""Runs in a worker, and answers with the name of its thread; waits for `EchoServer.gate` where it has a body."""
BIG = 9_005
"""Answers with as many bytes as the body says."""
PARTS = 9_006
"""Answers with a body of three parts."""
NOBODY = 9_999

LOOPBACK = HostAddress("127.0.0.1", 0)
PATIENCE_S = 20.0
"""How long a test waits for what must come; no test needs it."""


class EchoServer(RemotingServer):
    """Has the processors above.

    Attributes:
        held: Connection and request of each `HOLD`.
        seen: Every echo request, in order.
        closed: Connections that ended.
        gate: `SLOW` requests with a body take one item from it each.
    """

    def __init__(
        self,
        settings: RemotingServerSettings | None = None,
        clock: Clock | None = None,
        listen: HostAddress = LOOPBACK,
    ) -> None:
        super().__init__(listen, settings or RemotingServerSettings(), clock or SystemClock())
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

    def _big(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return request.response(body=bytes(int(request.body)))

    def _parts(self, connection: Connection, request: RemotingCommand) -> None:
        connection.reply(request.response(), body=[b"one", b"", b"two" * 10_000])


def echo(body: bytes = b"", **fields: str) -> RemotingCommand:
    return RemotingCommand(ECHO, body=body, ext_fields=dict(fields))


class RawPeer:
    """A socket, and what came through it as commands."""

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

    def ask(self, command: RemotingCommand) -> RemotingCommand | None:
        """Send it, and give the next command that comes."""
        self.send(encode_command(command))
        return self.next_command()

    def next_command(self) -> RemotingCommand | None:
        """The next command; None at the end of the connection."""
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
        """Wait for the end of the connection; False if a command came instead."""
        return self.next_command() is None

    def reset(self) -> None:
        """Break it off: the other side gets ECONNRESET."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
