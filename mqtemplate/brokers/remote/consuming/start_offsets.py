"""Offsets at which a group member starts to read its queues.

Source: RocketMQ ``client: RebalancePushImpl.computePullFromWhereWithException``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.consuming.offset_store import OffsetStore
from mqtemplate.brokers.remote.queries import Queries
from mqtemplate.brokers.remote.routes import MASTER_ID
from mqtemplate.errors import RemoteConnectError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.remote")

_HALF_AN_HOUR_MS = 1_800_000


@dataclass(slots=True, eq=False)
class StartOffsets:
    """The start offsets of one member: the committed one, or without one what its spec defines.

    A queue that the member gave up because its broker stopped continues after the member's last commit. The broker may
    have stored an older one only: RocketMQ's stores them each five seconds.

    A replica copies the committed offsets every ten seconds. So while a master is away, its answer "no offset" does not
    mean that the group has read nothing: the member then starts at the last offset that it knows itself. If it knows
    none, and the group has offsets in other queues of the topic, the queue is not read until the master is back.
    Otherwise the group would read the whole queue again.
    """

    spec: ConsumerSpec
    offsets: OffsetStore
    context: ClientContext
    queries: Queries
    _known: dict[MessageQueue, int] = field(default_factory=dict, init=False)
    _stopped: set[MessageQueue] = field(default_factory=set, init=False)
    _waiting: set[MessageQueue] = field(default_factory=set, init=False)

    def remember(self, queue: MessageQueue) -> None:
        """Keep the last commit of a queue that is given up: brokers may not have it after a failure."""
        own = self.offsets.own(queue)
        if own is not None:
            self._known[queue] = own
            if not self._has_connection(queue.broker_name):
                self._stopped.add(queue)

    def _has_connection(self, broker_name: str) -> bool:
        master = self.context.routes.brokers().get(broker_name, {}).get(MASTER_ID)
        return master is not None and self.context.instance.is_registered(master)

    def of(self, queue: MessageQueue) -> int:
        """Return the start offset of a queue.

        Raises:
            BrokerError: The broker does not answer, or only a replica that may lack the group's offset.
        """
        if self.spec.message_model is MessageModel.CLUSTERING:
            routes = self.context.routes
            if routes.is_replica(queue.broker_name, routes.address(queue.broker_name)):
                return self._at_replica(queue)
        known = self._known.get(queue)  # the broker may have been killed before it had stored the commit
        committed = self.offsets.read(queue, young_is_zero=self._starts_at_end and known is None)
        if known is not None and (committed is None or (queue in self._stopped and known > committed)):
            self.offsets.commit(queue, known)
            committed = known
        self._stopped.discard(queue)
        return self._without_commit(queue) if committed is None else committed

    @property
    def _starts_at_end(self) -> bool:
        return self.spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET

    def _at_replica(self, queue: MessageQueue) -> int:
        committed, known = self.offsets.read(queue), self._known.get(queue)
        if committed is not None or known is not None:
            return max(committed or 0, known or 0)
        if not self._has_progress(queue.topic):
            committed = self.offsets.read(queue, young_is_zero=self._starts_at_end)
            return self._without_commit(queue) if committed is None else committed
        if queue not in self._waiting:
            self._waiting.add(queue)
            _log.warning(
                "remote.offset_unknown",
                group=self.spec.group,
                topic=queue.topic,
                queue=queue.queue_id,
                broker=queue.broker_name,
                reason="the master is away, and its replica has no offset of this group yet; the queue is read when "
                "the master is back",
            )
        raise RemoteConnectError(f"the replica of {queue.broker_name!r} has no offset of group {self.spec.group!r}")

    def _has_progress(self, topic: str) -> bool:
        """Return True if the group has a committed offset in any queue of a topic."""
        route = self.context.routes.existing(topic)
        stored = {} if route is None else self.offsets.read_stored(route.read_queues)
        return any(isinstance(offset, int) and offset > 0 for offset in stored.values())

    def _without_commit(self, queue: MessageQueue) -> int:
        where = self.spec.consume_from_where
        is_retry = queue.topic == RETRY_TOPIC_PREFIX + self.spec.group
        if is_retry or where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
            return self.queries.min_offset(queue)
        if where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET:
            return self.queries.max_offset(queue)
        since = self.spec.consume_timestamp
        return self.queries.search_offset(
            queue, self.context.clock.now_ms() - _HALF_AN_HOUR_MS if since is None else since
        )
