"""Registration of methods as processors of requests.

::

    class TopicAdmin:
        @answers(RequestCode.GET_TOPIC_CONFIG)
        def _config(self, query: TopicNameRequestHeader) -> TopicConfig: ...


    register(server, TopicAdmin(parts))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_type_hints

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.server import Processor, RemotingServer

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])
_MARK = "__handles__"

MAX_BODY_BYTES = 1 << 20
"""Largest body of a request that is not a message: a heartbeat of some thousand groups."""


def handles(
    *codes: int, slow: bool = False, max_body_bytes: int | None = MAX_BODY_BYTES
) -> Callable[[_MethodT], _MethodT]:
    """Mark a method as the processor of requests with these codes. It takes the connection and the request.

    Args:
        slow: The method reads messages or waits for the disk. It runs in a worker thread instead of the I/O thread.
        max_body_bytes: Largest body of a request. None: the body is a message, which is not parsed.
    """
    return _mark(codes, (slow, max_body_bytes), lambda method: method)


def answers(*codes: int, slow: bool = False, max_body_bytes: int = MAX_BODY_BYTES) -> Callable[[_MethodT], _MethodT]:
    """Mark a method that takes parts of a request and returns the contents of the response.

    The types of its parameters select the parts: a header class, a body class, `Connection`, or `RemotingCommand`. It
    returns a header, a body, both in this order, or None for a response that has neither.
    """
    return _mark(codes, (slow, max_body_bytes), _processor)


def _mark(
    codes: tuple[int, ...], options: tuple[bool, int | None], as_processor: Callable[..., Processor]
) -> Callable[[_MethodT], _MethodT]:
    def mark(method: _MethodT) -> _MethodT:
        method.__dict__[_MARK] = (codes, options, as_processor)
        return method

    return mark


def register(server: RemotingServer, *parts: object) -> dict[int, Processor]:
    """Let the marked methods of *parts* process the requests that arrive at *server*. Return them by request code."""
    processors: dict[int, Processor] = {}
    for part in parts:
        for name, method in vars(type(part)).items():
            if _MARK not in getattr(method, "__dict__", ()):
                continue
            codes, (slow, max_body_bytes), as_processor = method.__dict__[_MARK]
            for code in codes:
                processors[code] = as_processor(getattr(part, name))
                server.register(code, processors[code], slow=slow, max_body_bytes=max_body_bytes)
    return processors


def _processor(method: Callable[..., Any]) -> Processor:
    types = _types_of_parts(getattr(method, "__func__", method))

    def process(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        answer = method(*[_part(kind, connection, request) for kind in types])
        header, body = answer if isinstance(answer, tuple) else (None, answer)
        if isinstance(body, CommandHeader):
            header, body = body, None
        return request.response(header=header, body=body.encode() if isinstance(body, JsonBody) else body or b"")

    return process


@cache  # to resolve all annotations takes a tenth of the time to create a server, and a program may have several
def _types_of_parts(function: Callable[..., Any]) -> tuple[Any, ...]:
    return tuple(kind for name, kind in get_type_hints(function).items() if name not in ("return", "self"))


def _part(kind: Any, connection: Connection, request: RemotingCommand) -> Any:
    """Return the part of a request that has the type *kind*."""
    if issubclass(kind, CommandHeader):
        return request.header(kind)
    if issubclass(kind, JsonBody):
        return kind.decode(request.body)
    return connection if kind is Connection else request
