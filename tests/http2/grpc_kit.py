"""A gRPC server with known methods."""

from __future__ import annotations

import queue
import threading

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.http2.grpc_call import GatheredCalls
from mqtemplate.http2.grpc_server import GrpcCall, GrpcLimits, GrpcServer, GrpcStatus
from mqtemplate.message import HostAddress
from mqtemplate.metrics import Metrics
from tests.waiting import PATIENCE_S

ECHO = "/test.Service/Echo"
"""Unary: the response is the request."""
PARTS = "/test.Service/Parts"
"""Server streaming: the request is a number; the response has so many messages, with their numbers."""
CHAT = "/test.Service/Chat"
"""Bidirectional: each message is sent back. The message ``end`` ends the call with ABORTED."""
HOLD = "/test.Service/Hold"
"""Unary: it is not answered: the call is in `EchoServer.held`."""
RAISE = "/test.Service/Raise"
"""Unary: the handler raises ``ValueError("no such thing")``."""
FAIL = "/test.Service/Fail"
"""Unary: NOT_FOUND with the request as details."""
SLOW = "/test.Service/Slow"
"""Unary, in a worker thread: the response is the name of the thread. It waits for `EchoServer.gate`."""
METADATA = "/test.Service/Metadata"
"""Unary: the response is the value of the metadata that the request names."""
BIG = "/test.Service/Big"
"""Unary: the response has as many bytes as the request says."""
NOTED = "/test.Service/Noted"
"""Unary: the request is a number; the response has so many messages of 1,000 bytes. What the socket has not accepted at
the end of the call is in `GrpcEcho.unsent`."""
GATHERED = "/test.Service/Gathered"
"""Unary, gathered: the response has the number of calls that are processed together. For the request ``raise`` the
handler raises ``ValueError("no such thing")``."""

LOOPBACK = HostAddress("127.0.0.1", 0)


class GrpcEcho(GrpcServer):
    """Server with the methods above.

    Attributes:
        held: Calls of `HOLD`.
        closed_calls: Calls of `HOLD` and `CHAT` that ended before the server finished them.
        closed: Connections that have ended.
        chats: Handlers of `CHAT`.
        unsent: Numbers of messages of `NOTED` that the socket had accepted.
        order: Requests of `GATHERED` and of `HOLD`, in the order in which they are processed.
    """

    def __init__(self, limits: GrpcLimits | None = None, clock: Clock | None = None) -> None:
        self.metrics = Metrics()
        super().__init__(LOOPBACK, clock or SystemClock(), limits or GrpcLimits(), self.metrics)
        self.held: queue.Queue[GrpcCall] = queue.Queue()
        self.closed_calls: queue.Queue[GrpcCall] = queue.Queue()
        self.closed: queue.Queue[object] = queue.Queue()
        self.gate = threading.Semaphore(0)
        self.chats: queue.Queue[Chat] = queue.Queue()
        self.unsent: queue.Queue[int] = queue.Queue()
        self.order: list[bytes] = []
        self.register(ECHO, lambda call, message: call.reply(message))
        self.register(PARTS, _parts)
        self.register_stream(CHAT, lambda call: Chat(call, self))
        self.register(HOLD, self._hold)
        self.register(RAISE, _raise)
        self.register(FAIL, lambda call, message: call.finish(GrpcStatus.NOT_FOUND, message.decode()))
        self.register(SLOW, lambda call, message: self.run(call, lambda: self._slow(call)))
        self.register(METADATA, lambda call, message: call.reply(call.metadata.get(message.decode(), "-").encode()))
        self.register(BIG, lambda call, message: call.reply(b"x" * int(message)))
        self.register(NOTED, self._noted)
        self.register(GATHERED, _raise, self._gathered)
        self.on_close(self.closed.put)

    @property
    def target(self) -> str:
        return str(self.address)

    def _hold(self, call: GrpcCall, message: bytes) -> None:
        call.on_closed = lambda: self.closed_calls.put(call)
        self.order.append(message)
        self.held.put(call)

    def _gathered(self, calls: GatheredCalls) -> None:
        self.order += [message for _, message in calls]
        for call, message in calls:
            if message == b"raise":
                raise ValueError("no such thing")
            call.reply(str(len(calls)).encode())

    def _noted(self, call: GrpcCall, message: bytes) -> None:
        call.on_unsent = self.unsent.put
        for _ in range(int(message)):
            call.write(bytes(1_000))
        call.finish()

    def _slow(self, call: GrpcCall) -> None:
        self.gate.acquire(timeout=PATIENCE_S)
        call.reply(threading.current_thread().name.encode())


class Chat:
    def __init__(self, call: GrpcCall, server: GrpcEcho) -> None:
        self.call = call
        self._server = server
        server.chats.put(self)

    def on_message(self, message: bytes) -> None:
        if message == b"raise":
            raise ValueError("no such thing")
        self.call.write(message)
        if message == b"end":
            self.call.finish(GrpcStatus.ABORTED, "the client said so: 100 % ä\n")

    def on_half_closed(self) -> None:
        self.call.finish()

    def on_closed(self) -> None:
        self._server.closed_calls.put(self.call)


def _parts(call: GrpcCall, message: bytes) -> None:
    for number in range(int(message)):
        call.write(str(number).encode())
    call.finish()


def _raise(call: GrpcCall, message: bytes) -> None:
    raise ValueError("no such thing")
