"""Answers to calls: at once, from a worker thread, or when what they report is durable."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from logging import ERROR
from typing import Any

from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import AddressScheme, Code
from mqtemplate.http2.grpc_server import GrpcCall, GrpcServer
from mqtemplate.message import HostAddress
from mqtemplate.server.grpc_api.messages import set_now
from mqtemplate.server.grpc_api.status import error_status, is_expected, status

_log = get_logger("mqtemplate.server")

Work = Callable[[], Any]
"""Function that returns the answer as a message, or None: it answers later."""

_RECEIVE = protos.method_path("ReceiveMessage")
_WRITTEN_BYTES = 64 << 10
"""Size of the messages that are written together."""


def status_answer(found: Any) -> bytes:
    """Return the answer of any unary method that only has a status: it is field 1 in all of them."""
    return bytes(protos.QueryRouteResponse(status=found).SerializeToString())


def broker_of(name: str, address: HostAddress) -> Any:
    """Return a broker as queues of routes name it: clients send all calls to its endpoints.

    C++ refuses endpoints without the scheme.
    """
    try:
        version = ipaddress.ip_address(address.ip).version
        scheme = AddressScheme.IPv4 if version == 4 else AddressScheme.IPv6
    except ValueError:
        scheme = AddressScheme.DOMAIN_NAME
    endpoints = protos.Endpoints(scheme=scheme, addresses=[protos.Address(host=address.ip, port=address.port)])
    return protos.Broker(name=name, id=0, endpoints=endpoints)


class GrpcAnswers:
    """Runs the work of calls and answers them, with a status if it raises an error."""

    def __init__(self, server: GrpcServer, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._peer_log = LimitedLog(_log, clock.steady_ms)

    def now(self, call: GrpcCall, work: Work) -> None:
        """Run *work* in this thread."""
        try:
            answer = work()
        except Exception as exc:
            self.fail(call, exc)
        else:
            if answer is not None:
                call.reply(answer.SerializeToString())

    def later(self, call: GrpcCall, work: Work, held_bytes: int = 0) -> None:
        """Run *work* in a worker thread: it writes a table, reads many messages, or computes for long.

        Args:
            held_bytes: Size of what *work* holds beside the request.
        """
        self._server.run(call, lambda: self.now(call, work), held_bytes)

    def fail(self, call: GrpcCall, error: Exception) -> None:
        """Answer a call whose work raised an error."""
        if not is_expected(error):
            self.log_unexpected(call, error)
        found = error_status(error)
        if call.method == _RECEIVE:
            self.end_receive(call, found)
        else:
            call.reply(status_answer(found))

    def log_unexpected(self, call: GrpcCall, error: Exception) -> None:
        """Log an error that is a defect of the server, or of its disk."""
        self._peer_log.log(ERROR, "server.request_failed", request=call.method, exc_info=error)

    def end_receive(self, call: GrpcCall, found: Any, messages: Iterable[bytes] = ()) -> None:
        """Answer a receive: the status, the messages, and the time. The stream always ends, since clients wait.

        Args:
            messages: Encoded ``ReceiveMessageResponse``. They are taken and written some at a time: all of them may
                need much memory.
        """
        response = protos.ReceiveMessageResponse
        parts: list[bytes] = [response(status=found).SerializeToString()]
        size = 0
        for message in messages:
            parts.append(message)
            size += len(message)
            if size >= _WRITTEN_BYTES:
                call.write_all(parts)
                parts, size = [], 0
        last = response()
        set_now(last.delivery_timestamp, self._clock.now_ms())
        parts.append(last.SerializeToString())
        call.write_all(parts)
        call.finish()


def ok() -> Any:
    """Return the status of success."""
    return status(Code.OK)
