"""A member of a group on a cluster.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl``, ``RebalanceImpl``; sections 11 to 13 of the specification.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from mqtemplate.broker import ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel
from mqtemplate.brokers.rebalance import allocate_averagely, sort_client_ids
from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.consuming.offsets import BrokerOffsets, MemberOffsets
from mqtemplate.brokers.remote.consuming.pull import MemberPulls, subscription_data
from mqtemplate.brokers.remote.consuming.pull_loop import PullLoop
from mqtemplate.brokers.remote.consuming.queue_locks import QueueLocks
from mqtemplate.brokers.remote.consuming.send_back import SendBack
from mqtemplate.brokers.remote.errors import answer_problem, check_answer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.queries import RemoteQueries
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.brokers.remote.sent_offsets import SentOffsets
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.brokers.retry import check_can_send_back
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerClosedError, BrokerError, ListenerError, UnsupportedError
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    ConsumerData,
    GetConsumerListByGroupResponseBody,
)
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.services import WakeEvent
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_HALF_AN_HOUR_MS = 1_800_000
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberParts:
    """What members share with their broker.

    Attributes:
        need_heartbeat: Has one sent soon.
        need_rebalance: Has the queues shared out anew soon.
        left: Takes note of a member that has left.
    """

    settings: RemoteSettings
    clock: Clock
    namespace: Namespace
    routes: RouteTable
    queries: RemoteQueries
    brokers_offsets: BrokerOffsets
    send_back: SendBack
    marks: SentOffsets
    need_heartbeat: Callable[[], None]
    need_rebalance: Callable[[], None]
    left: Callable[[RemoteConsumer], None]


class RemoteConsumer(Consumer):
    """Shares the queues out with the other members, wherever they run, by RocketMQ's own rules.

    - Messages are fetched ahead; the position is that of the first one that was not polled yet.
    - A commit is told to the broker within some seconds, and before a queue goes or the member ends.
    - A queue that was locked and whose lock may have been lost is not read on until the lock is back.

    Attributes:
        has_joined: The brokers have been told of it, so that it may ask for its part.
    """

    def __init__(
        self, spec: ConsumerSpec, instance: ClientInstance, offsets: MemberOffsets, parts: MemberParts
    ) -> None:
        self.spec = spec
        self.instance = instance
        self.offsets = offsets
        self._parts = parts
        self._wake_event = WakeEvent()
        self.has_joined = False
        self._is_closed = False
        self._is_woken = False
        self._changing = threading.RLock()  # one change of the assignment at a time; may wait for brokers
        self._assignment: frozenset[MessageQueue] = frozenset()
        self._missing: frozenset[str] = frozenset()
        self._is_whole = False
        self._retry_topic = RETRY_TOPIC_PREFIX + spec.group
        self._wire_group = parts.namespace.wrap(spec.group)
        self._subscriptions = self._subscribe(parts.clock.now_ms())
        self.locks = QueueLocks(
            instance, parts.routes, parts.namespace, spec.group, parts.clock, parts.settings.lock_live_ms
        )
        settings = parts.settings
        pulls = MemberPulls(
            instance,
            parts.routes,
            parts.namespace,
            settings,
            spec.group,
            self._subscriptions,
            self._retry_topic,
            parts.marks,
            parts.need_heartbeat,
        )
        self.pulls = PullLoop(
            f"remote.pull {spec.group}",
            pulls.fetch,
            parts.clock,
            settings.pull_threshold_messages,
            settings.pull_threshold_bytes,
            self._wake_event.set,
        )

    def _subscribe(self, version: int) -> dict[str, tuple[Selector, SubscriptionData]]:
        wanted: dict[str, Selector] = dict(self.spec.subscriptions)
        if self.is_clustering:
            wanted[self._retry_topic] = TagSelector()
        wrap = self._parts.namespace.wrap
        return {
            topic: (selector, subscription_data(wrap(topic), selector, version)) for topic, selector in wanted.items()
        }

    @property
    def is_clustering(self) -> bool:
        return self.spec.message_model is MessageModel.CLUSTERING

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # --- membership ----------------------------------------------------------------------------

    def consumer_data(self) -> ConsumerData:
        """What heartbeats tell of this member."""
        return ConsumerData(
            group_name=self._wire_group,
            message_model=self.spec.message_model.value,
            consume_from_where=self.spec.consume_from_where.value,
            subscription_data_set=[data for _, data in self._subscriptions.values()],
        )

    @property
    def name_servers(self) -> tuple[str, ...]:
        return self._parts.settings.name_servers

    def subscriptions(self) -> list[SubscriptionData]:
        return [data for _, data in self._subscriptions.values()]

    def check_selectors(self) -> None:
        """Have a broker look at SQL92 expressions.

        Raises:
            UnsupportedError: It evaluates none.
            ListenerError: It cannot read this one.
        """
        for topic, (_, data) in self._subscriptions.items():
            if data.expression_type != "TAG":
                self._check_selector(topic, data)

    def _check_selector(self, topic: str, data: SubscriptionData) -> None:
        masters = self._masters_of(topic)
        if not masters:
            return
        body = CheckClientRequestBody(
            client_id=self.instance.id,
            group=self._wire_group,
            subscription_data=data,
            namespace=self._parts.settings.namespace or None,
        ).encode()
        request = RemotingCommand.request(RequestCode.CHECK_CLIENT_CONFIG, body=body)
        answer = self.instance.invoke(masters[0], request, self._parts.settings.request_timeout_ms)
        if answer.code == ResponseCode.SUCCESS:
            return
        asked = f"group {self.spec.group!r} subscribes to {topic!r} by {data.sub_string!r}"
        problem = answer_problem(answer, asked, masters[0])
        if answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            raise ListenerError(str(problem))
        raise UnsupportedError(f"{problem}; set enablePropertyFilter=true on the broker, or select by tags")

    def assignment(self) -> frozenset[MessageQueue]:
        return self._assignment

    @property
    def is_incomplete(self) -> bool:
        """Whether a topic is not there yet, or nobody could say which queues are this member's."""
        return not self._is_closed and (not self._is_whole or bool(self._missing))

    def lacks(self) -> bool:
        """Whether a rebalance now would find more than the last one: a topic is there that was not."""
        try:
            return not self._is_whole or any(self._parts.routes.existing(topic) for topic in self._missing)
        except BrokerError:
            return False

    def rebalance(self) -> None:
        """Take and give up queues so that each member has its part."""
        with self._changing:
            if self._is_closed:
                return
            wanted: set[MessageQueue] = set()
            self._missing = frozenset()
            is_whole = True
            for topic in self._subscriptions:
                mine = self._share_of(topic)
                if mine is None:
                    is_whole = False
                    mine = {queue for queue in self._assignment if queue.topic == topic}
                wanted |= mine
            self._is_whole = self._assign(wanted) and is_whole

    def _share_of(self, topic: str) -> set[MessageQueue] | None:
        """The queues of a topic that are this member's; None if nobody can say now."""
        try:
            route = self._parts.routes.existing(topic)
            if route is None:
                self._missing |= {topic}
                return set()
            if not self.is_clustering:
                return set(route.subscribe)
            ids = self._member_ids(self._masters_of(topic))
        except BrokerError as exc:
            _log.warning("remote.rebalance_failed", group=self.spec.group, topic=topic, reason=str(exc))
            return None
        if self.instance.id not in ids:  # the broker has not heard of this member yet
            return None
        return set(allocate_averagely(self.instance.id, sort_client_ids(ids), sorted(route.subscribe)))

    def _masters_of(self, topic: str) -> list[str]:
        route = self._parts.routes.existing(topic)
        return route.masters() if route is not None else self._parts.routes.masters()

    def _member_ids(self, masters: list[str]) -> list[str]:
        if not masters:
            return []
        address = random.choice(masters)
        header = ConsumerGroupRequestHeader(consumer_group=self._wire_group)
        request = RemotingCommand.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
        answer = self.instance.invoke(address, request, self._parts.settings.request_timeout_ms)
        asked = f"ask for the members of group {self.spec.group!r}"
        return GetConsumerListByGroupResponseBody.decode(check_answer(answer, asked, address).body).consumer_id_list

    def _assign(self, wanted: set[MessageQueue]) -> bool:
        is_whole = True
        lost = self._assignment - wanted
        if lost:
            self._assignment -= lost
            self._give_up(lost)
        for queue in sorted(wanted - self._assignment):
            try:
                queue_offset = self._first_position(queue)
            except BrokerError as exc:
                _log.warning("remote.queue_not_started", group=self.spec.group, queue=str(queue), reason=str(exc))
                is_whole = False
                continue
            self.pulls.add(queue, queue_offset)
            self._assignment |= {queue}
        return is_whole

    def _give_up(self, queues: frozenset[MessageQueue]) -> None:
        for queue in queues:
            self.pulls.drop(queue)
        self.offsets.flush(queues)
        for queue in queues:
            self.offsets.forget(queue)

    def _first_position(self, queue: MessageQueue) -> int:
        """Where to begin: where the group stands, else where the spec says. Source: ``RebalancePushImpl``."""
        where = self.spec.consume_from_where
        at_end = where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
        committed = self.offsets.read(queue, young_is_zero=at_end)
        if committed is not None:
            return committed
        queries = self._parts.queries
        if queue.topic == self._retry_topic or where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
            return queries.min_offset(queue)
        if at_end:
            return queries.max_offset(queue)
        since = self.spec.consume_timestamp
        return queries.search_offset(queue, self._parts.clock.now_ms() - _HALF_AN_HOUR_MS if since is None else since)

    # --- reading -------------------------------------------------------------------------------

    def wake(self) -> None:
        self._is_woken = True
        self._wake_event.set()

    def poll(
        self, max_count: int, wait_ms: int = 0, *, without: frozenset[MessageQueue] = frozenset()
    ) -> list[MessageExt]:
        self._settle(without)
        deadline = time.monotonic() + wait_ms / 1_000
        while True:
            if self._is_closed:
                raise BrokerClosedError(f"this member of group {self.spec.group!r} was closed")
            messages = self.pulls.take(max_count, without | self.locks.lost())
            left = deadline - time.monotonic()
            if messages or left <= 0 or self._is_woken or self._parts.clock.is_virtual:
                self._is_woken = False
                return messages
            self._wake_event.wait(left)

    def _settle(self, without: frozenset[MessageQueue]) -> None:
        """Wait, not long, until it is known of queues that came lately what is there to read."""
        deadline = time.monotonic() + _SETTLE_S
        while self.pulls.is_settling(without) and not (self._is_closed or self._is_woken):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._wake_event.wait(left)

    def position(self, queue: MessageQueue) -> int:
        at = self.pulls.position(queue)
        return self._first_position(queue) if at is None else at

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        self.pulls.seek(queue, queue_offset)

    # --- progress ------------------------------------------------------------------------------

    def committed(self, queue: MessageQueue) -> int | None:
        return self.offsets.read(queue)

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        if queue in self._assignment:
            self.offsets.commit(queue, queue_offset)
        elif self.is_clustering and self.locks.holds(queue):  # taken away, but nobody else is at it yet
            self._parts.brokers_offsets.write(self.spec.group, queue, queue_offset)

    def send_back(self, message: MessageExt, delay_level: int = 0) -> None:
        check_can_send_back(self.spec)
        limit = self.spec.max_reconsume_times
        self._parts.send_back.send_back(self.instance, message, self.spec.group, delay_level, limit)

    def reset(self, offsets: dict[MessageQueue, int]) -> None:
        """Go on elsewhere, since an administrator wants it."""
        with self._changing:
            for queue, queue_offset in offsets.items():
                if queue in self._assignment:
                    self.pulls.seek(queue, queue_offset)
                    self.offsets.commit(queue, queue_offset)
            self.offsets.flush()

    # --- locks ---------------------------------------------------------------------------------

    def lock(self, queue: MessageQueue) -> bool:
        return self.locks.lock(queue)

    def unlock(self, queue: MessageQueue) -> None:
        self.offsets.flush([queue])
        self.locks.unlock(queue)

    def renew_locks(self) -> None:
        """Keep what is locked. A queue whose lock was lost meanwhile is read on from where the group stands now."""
        for queue in self.locks.renew(self._assignment):
            self.offsets.forget(queue)
            committed = self.offsets.read(queue)
            if committed is not None:
                self.pulls.seek(queue, committed)
            self._wake_event.set()

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wake_event.set()
        with self._changing:
            queues, self._assignment = self._assignment, frozenset()
            for queue in queues:
                self.pulls.drop(queue)
            self.offsets.flush()
            self.locks.close()
            self._parts.left(self)
