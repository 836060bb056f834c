"""Collaborators that all parts of a remote broker share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.errors import check_response
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.results import SendResult

_REMEMBERED_MS = 5_000
_OFFSET_DIGITS = 16  # an offset message id ends with the physical offset in hexadecimal digits


class SentOffsets:
    """The highest offsets this client has seen, by queue and by broker; remembered for some seconds.

    A broker acknowledges a send when the message is in its commit log. The message enters its consume queue and the
    index a moment later, one after the other. With these offsets, later reads include the messages that this client has
    sent or received.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue_ends: dict[MessageQueue, tuple[int, int]] = {}  # (offset, time of the entry in ms)
        self._physical: dict[str, tuple[int, int]] = {}

    def add_sent(self, result: SendResult, count: int, queue: MessageQueue | None) -> None:
        """Remember a send.

        Args:
            count: Number of messages: one, or those of a batch.
            queue: The queue that has the messages: of a delayed message, that of its system topic. None if unknown.
        """
        if queue is not None:
            self._queue_ends[queue] = (result.queue_offset + count, self._clock.steady_ms())
        digits = result.offset_msg_id[-_OFFSET_DIGITS:]
        if len(digits) == _OFFSET_DIGITS:
            self.add_seen(result.message_queue.broker_name, int(digits, 16))

    def add_seen(self, broker_name: str, physical_offset: int) -> None:
        """Remember that a broker's commit log has a message at this offset."""
        latest = self._physical.get(broker_name)
        if latest is None or latest[0] < physical_offset:
            self._physical[broker_name] = (physical_offset, self._clock.steady_ms())

    def queue_end(self, queue: MessageQueue) -> int:
        """Return the queue offset after the last message sent to *queue*; 0 if there was none recently."""
        return self._recent(self._queue_ends.get(queue))

    def physical_offset(self, broker_name: str) -> int:
        """Return the highest physical offset seen of a broker; 0 if there was none recently."""
        return self._recent(self._physical.get(broker_name))

    def age_ms(self, broker_name: str) -> int:
        """Return the time since the highest physical offset of a broker was seen; some seconds if there is none."""
        latest = self._physical.get(broker_name)
        return _REMEMBERED_MS if latest is None else self._clock.steady_ms() - latest[1]

    def _recent(self, entry: tuple[int, int] | None) -> int:
        return entry[0] if entry is not None and self._clock.steady_ms() - entry[1] < _REMEMBERED_MS else 0


@dataclass(frozen=True, slots=True)
class ClientContext:
    """One client of a cluster.

    Attributes:
        instance: The instance that sends requests: the client's first one, or that of a group member.
        sent: Offsets of the messages that this client has sent.
    """

    settings: RemoteSettings
    clock: Clock
    namespace: Namespace
    instance: ClientInstance
    routes: RouteTable
    sent: SentOffsets

    def call(
        self,
        address: str,
        request: RemotingCommand,
        operation: str,
        *,
        accept: Collection[int] = (ResponseCode.SUCCESS,),
        timeout_ms: int | None = None,
    ) -> RemotingCommand:
        """Send a request to a broker and return the response.

        Args:
            operation: What the request is for, such as "read queue 1 of orders", for the error.
            accept: Codes of the responses that are not errors.
            timeout_ms: None for ``settings.request_timeout_ms``.

        Raises:
            BrokerError: The broker cannot be reached, did not answer in time, or refused.
        """
        response = self.instance.invoke(address, request, timeout_ms or self.settings.request_timeout_ms)
        return check_response(response, operation, address, accept)
