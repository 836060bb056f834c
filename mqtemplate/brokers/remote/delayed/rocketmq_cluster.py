"""Pending messages of a RocketMQ cluster."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.broker import DelayedMessages
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.producing.recall import cancel
from mqtemplate.errors import UnsupportedError
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange

_ALTERNATIVES = "use the broker's own tools (mqadmin), or the embedded broker or our server"


@dataclass(frozen=True, slots=True)
class RocketMQCluster(DelayedMessages):
    """Cancels messages with a timer, by their handles."""

    context: ClientContext

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        return cancel(self.context, handle, key)

    def reschedule(
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        raise UnsupportedError(
            "a RocketMQ cluster cannot reschedule a message; cancel it by its handle and send it again, or use the "
            "embedded broker or our server"
        )

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        raise UnsupportedError(f"a RocketMQ cluster does not list pending messages; {_ALTERNATIVES}")

    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        raise UnsupportedError(f"a RocketMQ cluster does not count pending messages; {_ALTERNATIVES}")
