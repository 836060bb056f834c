"""The senders of trace records of one application: one for each broker and trace topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mqtemplate.broker import Broker
from mqtemplate.message_trace.dispatcher import TraceDispatcher


class TraceOf(Protocol):
    """Function that returns the sender of the trace records of a broker."""

    def __call__(self, broker: Broker, topic: str = "", *, is_cloud: bool = False) -> TraceDispatcher: ...


class Traces:
    """Senders of trace records, created when a template or a listener needs one.

    Args:
        on_created: Gets name and ``close`` of each new one. It has to be closed before its broker.
    """

    def __init__(self, on_created: Callable[[str, Callable[[], object]], object]) -> None:
        self._on_created = on_created
        self._dispatchers: dict[tuple[int, str, bool], TraceDispatcher] = {}

    def dispatcher(self, broker: Broker, topic: str = "", *, is_cloud: bool = False) -> TraceDispatcher:
        """Return the sender for a broker and a trace topic."""
        key = (id(broker), topic, is_cloud)
        if key not in self._dispatchers:
            self._dispatchers[key] = dispatcher = TraceDispatcher(broker, topic, is_cloud=is_cloud)
            self._on_created(f"message trace {dispatcher.topic}", dispatcher.close)
        return self._dispatchers[key]
