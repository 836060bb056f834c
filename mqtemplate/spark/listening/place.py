"""Interface of the place that a Spark listener reads from, and the commit of its offsets there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mqtemplate.broker import Broker
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Metrics
from mqtemplate.spark.broker_access.location import BrokerLocation
from mqtemplate.spark.listening.redelivery import SendBacks
from mqtemplate.spark.offsets import OffsetTable


class Place(Protocol):
    """Broker of a listener, as Spark's processes reach it.

    Attributes:
        metrics: Metrics of the broker, or of the listener alone if the broker is a cluster.
        send_backs: Sender of rows that come back.
    """

    metrics: Metrics
    send_backs: SendBacks

    @property
    def broker(self) -> Broker: ...

    def start(self, retry_topic: str) -> None:
        """Let Spark's processes reach the broker. A second call has no effect."""

    def stop(self) -> None:
        """End what `start` started. A second call has no effect."""

    def location(self) -> BrokerLocation:
        """Return the location for Spark's processes."""

    def options(self) -> dict[str, str]:
        """Return the options of the source for it."""

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the queues of a topic; none if it is missing."""

    def queue(self, read: MessageQueue) -> MessageQueue:
        """Return the queue of the broker for one in a checkpoint."""


def commit_offsets(
    broker: Broker, queue_of: Callable[[MessageQueue], MessageQueue], group: str, end: OffsetTable
) -> None:
    """Commit the end of a batch for a group, but no lower offset than before, as a repeated batch would.

    Args:
        queue_of: Returns the queue of the broker for one in a checkpoint.
    """
    for read, offset in sorted(end.items()):
        queue = queue_of(read)
        if offset > (broker.committed_offset(group, queue) or 0):
            broker.commit_offset(group, queue, offset)
