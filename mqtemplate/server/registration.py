"""Registration of methods as processors of requests.

::

    class QueryProcessor:
        @handles(RequestCode.VIEW_MESSAGE_BY_ID, slow=True)
        def _by_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand: ...


    register(server, QueryProcessor(engine))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mqtemplate.remoting.server import Processor, RemotingServer

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])
_MARK = "__handles__"


def handles(*codes: int, slow: bool = False) -> Callable[[_MethodT], _MethodT]:
    """Mark a method as the processor of requests with these codes.

    Args:
        slow: The method reads messages or waits for the disk. It runs in a worker thread instead of the I/O thread.
    """

    def mark(method: _MethodT) -> _MethodT:
        method.__dict__[_MARK] = (codes, slow)
        return method

    return mark


def register(server: RemotingServer, *parts: object) -> dict[int, Processor]:
    """Let the marked methods of *parts* process the requests that arrive at *server*. Return them by request code."""
    processors: dict[int, Processor] = {}
    for part in parts:
        for name, method in vars(type(part)).items():
            codes, slow = getattr(method, _MARK, ((), False))
            for code in codes:
                processors[code] = getattr(part, name)
                server.register(code, processors[code], slow=slow)
    return processors
