"""Consumer group member on a cluster, and the requests of administrators about it.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl``, ``RebalanceImpl``, ``ClientRemotingProcessor``.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from mqtemplate.broker import Consumer, ConsumerSpec, MessageModel
from mqtemplate.brokers.remote.cluster.client import ClientContext, GroupMember, Handler
from mqtemplate.brokers.remote.cluster.failures import log_failure
from mqtemplate.brokers.remote.cluster.queries import MemberSubscription
from mqtemplate.brokers.remote.cluster.settings import Namespace
from mqtemplate.brokers.remote.consuming.group_requests import GroupRequests, HeldQueueLocks, RetrySender
from mqtemplate.brokers.remote.consuming.offsets import OffsetStore, StartOffsets
from mqtemplate.brokers.remote.consuming.pulls import PullLoop
from mqtemplate.engine.group_rules import allocate_averagely, sent_back_message, sort_client_ids
from mqtemplate.errors import BrokerClosedError, BrokerError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerData,
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ProcessQueueInfo,
    ResetOffsetBody,
)
from mqtemplate.remoting.protocol.codes import CURRENT_VERSION, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import (
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    ResetOffsetRequestHeader,
)
from mqtemplate.services import WakeEvent

# --- one member -----------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remote")

_SETTLE_S = 1.0
_NO_RESETS: Mapping[MessageQueue, int] = {}


@dataclass(eq=False, repr=False, kw_only=True)
class RemoteConsumer(Consumer):
    """A member that shares the queues with members in any process, by RocketMQ's rules.

    - Messages are prefetched. The position of a queue is the offset of its first message that was not polled.
    - Commits are collected. They are sent to the brokers every few seconds, before a queue is given up, and before the
      member leaves the group.
    - A locked queue whose lock may be lost is not polled until the lock is renewed.

    Attributes:
        context: The client, with the member's instance.
        subscriptions: By topic; of a clustering member, its retry topic too.
        offsets: The member's committed offsets.
        wake_event: Set when *pulls* has messages.
        starts: Offsets at which the member starts to read queues.
        on_locks_due: Called when `change_locks` has work.
        on_close: Called at the end of `Consumer.close`.
    """

    spec: ConsumerSpec
    context: ClientContext
    subscriptions: Mapping[str, MemberSubscription]
    requests: GroupRequests
    offsets: OffsetStore
    locks: HeldQueueLocks
    pulls: PullLoop
    wake_event: WakeEvent
    retry_sender: RetrySender
    starts: StartOffsets
    on_locks_due: Callable[[], None]
    on_close: Callable[[RemoteConsumer], None]

    def __post_init__(self) -> None:
        self._has_joined = False
        self._is_closed = False
        self._is_woken = False
        self._has_wake = False  # a poll that did not wait was woken: the next one that would wait does not
        self._is_ordered = False  # set by its settings, or with the first lock
        self._takes_resets = False
        self._resets: dict[MessageQueue, int] = {}
        self._moves: dict[MessageQueue, int] = {}  # offsets of `move` for queues that were not locked
        self._failed_starts: dict[MessageQueue, str] = {}
        self._assigning = threading.RLock()  # held while the assignment changes; that may wait for brokers
        self._assignment: frozenset[MessageQueue] = frozenset()
        self._missing_topics: frozenset[str] = frozenset()
        self._known_members: dict[str, frozenset[str]] = {}
        self._is_complete = False
        if self.spec.is_ordered:
            self._set_ordered()

    @property
    def is_clustering(self) -> bool:
        """True if the members of the group share the messages."""
        return self.spec.message_model is MessageModel.CLUSTERING

    # --- assignment ----------------------------------------------------------------------------

    def consumer_data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.requests.wire_group,
            message_model=self.spec.message_model.value,
            consume_from_where=self.spec.consume_from_where.value,
            subscription_data_set=[subscription.data for subscription in self.subscriptions.values()],
        )

    def join(self) -> None:
        """Register at the brokers, and take part in rebalances from now on.

        Raises:
            ListenerError, UnsupportedError: A broker cannot evaluate a selector.
            BrokerError: The cluster does not answer.
        """
        routes = self.context.routes
        for topic in self.spec.subscriptions:
            routes.existing(topic)  # its route has the addresses for the heartbeat
        for topic, subscription in self.subscriptions.items():
            self.requests.check_subscription(topic, subscription.data)
        instance, group = self.context.instance, self.requests.wire_group
        if not instance.heartbeat(routes.addresses()) and group in instance.refusals:
            raise ListenerError(instance.refusals[group])
        self._has_joined = True
        self.rebalance()

    def assignment(self) -> frozenset[MessageQueue]:
        return self._assignment

    @property
    def is_incomplete(self) -> bool:
        """True if a topic is missing, or the last rebalance failed for some queues."""
        return not self._is_closed and (not self._is_complete or bool(self._missing_topics))

    def needs_rebalance(self) -> bool:
        """Return True if the last rebalance failed for some queues, or a topic that was missing exists now."""
        if not self._has_joined:
            return False
        try:
            return not self._is_complete or any(map(self.context.routes.existing, self._missing_topics))
        except BrokerError:
            return False

    def rebalance(self) -> None:
        """Take and give up queues, so that each member has its share."""
        with self._assigning:
            if self._is_closed or not self._has_joined:
                return
            share: set[MessageQueue] = set()
            self._missing_topics = frozenset()
            is_complete = True
            for topic in self.subscriptions:
                queues = self._share_of(topic)
                if queues is None:
                    is_complete = False
                    queues = {queue for queue in self._assignment if queue.topic == topic}
                share |= queues
            self._is_complete = self._assign(share) and is_complete

    def _share_of(self, topic: str) -> set[MessageQueue] | None:
        """Return this member's queues of a topic; None if they cannot be determined now."""
        try:
            route = self.context.routes.existing(topic)
            if route is None:
                self._missing_topics |= {topic}
                return set()
            if not self.is_clustering:
                return set(route.read_queues)
            ids, is_settled = self.requests.list_members(topic)
        except BrokerError as exc:
            log_failure(_log, "remote.rebalance_failed", exc, group=self.spec.group, topic=topic)
            return None
        if self.context.instance.id not in ids:  # the broker has no heartbeat with this member yet
            return None
        if not is_settled and self._known_members.get(topic, ids) - ids:
            return None  # a restarted broker: the other members may be about to register there
        self._known_members[topic] = ids
        return set(allocate_averagely(self.context.instance.id, sort_client_ids(ids), sorted(route.read_queues)))

    def _assign(self, share: set[MessageQueue]) -> bool:
        """Make *share* the assignment; return False if some of its queues could not be started."""
        removed = self._assignment - share
        if removed:
            self._assignment -= removed
            self._give_up(removed)
            self._unlock_idle(removed)
            self.wake()  # the caller of `poll` unlocks them when it has finished their messages
        is_complete = True
        locked = self.locks.valid()
        for queue in sorted(share - self._assignment):
            if queue in locked:  # its messages of the assignment before are not finished yet
                is_complete = False
                continue
            try:
                queue_offset = self.starts.of(queue)
            except BrokerError as exc:
                self._log_failed_start(queue, exc)
                is_complete = False
                continue
            self._failed_starts.pop(queue, None)
            self._assignment |= {queue}  # before its messages can be polled: commits of other queues are ignored
            self.pulls.add(queue, queue_offset)
        if self._is_ordered:
            self.wake()  # the caller of `poll` locks the new queues
        return is_complete

    def _log_failed_start(self, queue: MessageQueue, error: BrokerError) -> None:
        """Log why a queue is not read, once for each reason: the start is tried again every few seconds."""
        if self._failed_starts.get(queue) != str(error):
            self._failed_starts[queue] = str(error)
            log_failure(_log, "remote.queue_start_failed", error, group=self.spec.group, queue=str(queue))

    def _give_up(self, queues: frozenset[MessageQueue]) -> None:
        for queue in queues:
            self.pulls.remove(queue)
        self._flush(queues)
        for queue in queues:
            self.starts.remember(queue)
            self.offsets.forget(queue)
            self._resets.pop(queue, None)
            self._moves.pop(queue, None)

    # --- reading -------------------------------------------------------------------------------

    def wake(self) -> None:
        self._is_woken = True
        self.wake_event.set()

    def poll(
        self, max_count: int, wait_ms: int = 0, *, without: frozenset[MessageQueue] = frozenset()
    ) -> list[MessageExt]:
        self._settle(without)
        deadline = time.monotonic() + wait_ms / 1_000
        while True:
            if self._is_closed:
                raise BrokerClosedError(f"this member of group {self.spec.group!r} was closed")
            messages = self.pulls.take(max_count, without.union(self.locks.lost(), self._resets))
            left_s = deadline - time.monotonic()
            if messages or left_s <= 0 or self._is_woken or self._has_wake or self.context.clock.is_virtual:
                self._end_wake(does_wait=wait_ms > 0)
                return messages
            self.wake_event.wait(left_s)

    def _end_wake(self, *, does_wait: bool) -> None:
        if self._is_woken or does_wait:
            self._is_woken, self._has_wake = False, not does_wait

    def _settle(self, without: frozenset[MessageQueue]) -> None:
        """Wait a moment for the first pulls of new queues, so that a poll after a rebalance has their messages."""
        deadline = time.monotonic() + _SETTLE_S
        while self.pulls.is_settling(without) and not (self._is_closed or self._is_woken):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self.wake_event.wait(left_s)

    def position(self, queue: MessageQueue) -> int:
        position = self.pulls.position(queue)
        return self.starts.of(queue) if position is None else position

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        self.pulls.seek(queue, queue_offset)

    def move(self, queue: MessageQueue, queue_offset: int) -> None:
        if not self.locks.is_ready(queue):
            self._moves[queue] = queue_offset  # the queue continues after its last commit when it is locked
        super().move(queue, queue_offset)

    # --- progress ------------------------------------------------------------------------------

    def committed(self, queue: MessageQueue) -> int | None:
        return self.offsets.read(queue)

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """See `Consumer.commit`. Ignored for queues that another member may have, so that its offset stays.

        A locked queue that was reassigned still counts: its new owner cannot lock it yet.
        """
        self.offsets.commit(queue, queue_offset, lambda: self._may_commit(queue))

    def _may_commit(self, queue: MessageQueue) -> bool:
        is_mine = self.locks.holds(queue) if self._is_ordered else queue in self._assignment
        return is_mine and queue not in self._resets

    def flush_offsets(self) -> None:
        """Send the commits that were collected; the next call repeats those that fail."""
        self.offsets.flush(self.locks.committable() if self._is_ordered else None, is_last=False)

    def _flush(self, queues: Iterable[MessageQueue]) -> None:
        """Send the commits of *queues* for the last time, unless another member may have locked them."""
        self.offsets.flush(self.locks.committable().intersection(queues) if self._is_ordered else queues)

    def send_back(
        self,
        message: MessageExt,
        delay_level: int = 0,
        *,
        delay_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self.retry_sender.send_back(sent_back_message(self.spec, message, delay_level, delay_ms, properties))

    def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Continue at other offsets, by request of an administrator."""
        with self._assigning:
            mine = {queue: offsets[queue] for queue in self._assignment.intersection(offsets)}
            if self._takes_resets:
                self._resets |= mine
                self.wake()
                return
            for queue, queue_offset in mine.items():
                # Before its messages come again: who has them already reads the offset of the reset.
                self.offsets.commit(queue, queue_offset)
                self.pulls.seek(queue, queue_offset)
            self._flush(mine)

    def take_resets(self) -> Mapping[MessageQueue, int]:
        self._takes_resets = True
        if not self._resets:
            return _NO_RESETS
        with self._assigning:
            resets, self._resets = self._resets, {}
        return resets

    # --- locks ---------------------------------------------------------------------------------

    def lock(self, queue: MessageQueue) -> bool:
        self._set_ordered()
        if not self.locks.lock(queue):
            return False
        self._position([queue])
        return True

    def _set_ordered(self) -> None:
        self._is_ordered = True
        self.offsets.may_carry = False

    def unlock(self, queue: MessageQueue) -> None:
        self._unlock([queue])

    def lock_soon(self, queue: MessageQueue) -> bool:
        self._set_ordered()
        if not self.locks.take(queue):
            if self.locks.request(queue):
                self.on_locks_due()
            return False
        if (moved := self._moves.pop(queue, None)) is not None:
            self.commit(queue, moved)
        own = self.offsets.own(queue)
        if own is not None:
            self.pulls.seek(queue, own)  # messages after it were polled and discarded when the lock was lost
        return True

    def unlock_soon(self, queue: MessageQueue) -> None:
        self.locks.release(queue)
        self.on_locks_due()

    def lost_locks(self) -> frozenset[MessageQueue]:
        return self.locks.lost()

    def has_lock(self, queue: MessageQueue) -> bool:
        return not self._is_closed and self.locks.is_valid(queue)

    def change_locks(self) -> bool:
        """Lock and unlock the queues for which that was requested; return False if some are still to be locked."""
        released = self.locks.take_released()
        if released:
            self._unlock(released)
        requested = self.locks.take_requested(self._assignment)
        if not requested:
            return True
        locked = self.locks.acquire(requested)
        self._position(locked)
        if locked:
            self.wake()
        self._unlock_idle((locked | self.locks.unanswered()) - self._assignment)  # given up while the request was sent
        return not self.locks.take_requested(self._assignment)

    def _unlock_idle(self, queues: Collection[MessageQueue]) -> None:
        """Have queues unlocked that the caller of `lock_soon` does not know to be locked."""
        if self.locks.give_up(queues):
            self.on_locks_due()

    def renew_locks(self) -> bool:
        """Renew the locks; return False if a broker did not answer."""
        lost_before = self.locks.lost()
        regained, is_complete = self.locks.renew(self._assignment)
        self._position(regained)
        if regained or self.locks.lost() - lost_before:
            self.wake()  # the caller of `poll` discards the messages of queues whose locks are lost
        return is_complete

    def _position(self, locked: Iterable[MessageQueue]) -> None:
        """Continue queues that were locked just now after the last commit of any member."""
        for queue, committed in self.offsets.read_stored(locked).items():
            if isinstance(committed, BrokerError):
                self._log_failed_start(queue, committed)
                continue
            self._failed_starts.pop(queue, None)
            if self.pulls.position(queue) is None:
                continue  # it is being assigned or given up in another thread; its lock is requested again
            own = self.offsets.own(queue)
            if committed is not None and (own is None or committed > own):
                self.offsets.forget(queue)
                self.pulls.seek(queue, committed)
            self.locks.set_ready(queue)

    def _unlock(self, queues: Collection[MessageQueue]) -> None:
        self._flush(queues)
        for queue in queues:
            if queue not in self._assignment:
                self.offsets.forget(queue)
        self.locks.unlock(queues)

    # --- close ---------------------------------------------------------------------------------

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.wake_event.set()
        with self._assigning:
            queues, self._assignment = self._assignment, frozenset()
            for queue in queues:
                self.pulls.remove(queue)
            # Before the locks and the membership end: then other members read the queues from these offsets on.
            self._flush(queues | self.locks.valid())
            self.locks.close()
            self.on_close(self)


# --- requests of administrators -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdminRequests:
    """Handlers of the requests for the members of one client id.

    Args:
        members: Group as named on the wire -> member.
    """

    members: Mapping[str, GroupMember]
    namespace: Namespace
    name_servers: tuple[str, ...]

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset_offsets,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
        }

    def _reset_offsets(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(ResetOffsetRequestHeader)
        member = self._member(header.group)
        if member is not None:
            table = ResetOffsetBody.decode(request.body).offset_table
            offsets = {self.namespace.unwrap_queue(queue): offset for queue, offset in table.items()}
            _log.info("remote.offsets_reset", group=member.spec.group, topic=header.topic, queues=len(offsets))
            member.reset(offsets)
        return None if request.is_one_way else request.response()

    def _status(self, channel: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetConsumerStatusRequestHeader)
        member = self._member(header.group)
        if member is None:
            return _no_member(request, header.group)
        topic = self.namespace.unwrap(header.topic)
        table = {
            self.namespace.wrap_queue(queue): member.offsets.read(queue) or 0
            for queue in member.assignment()
            if queue.topic == topic
        }
        return request.response(body=GetConsumerStatusBody(message_queue_table=table).encode())

    def _running_info(self, channel: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetConsumerRunningInfoRequestHeader)
        member = self.members.get(header.consumer_group)
        if member is None:
            return _no_member(request, header.consumer_group)
        info = ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "PROP_CLIENT_VERSION": str(int(CURRENT_VERSION)),
                "PROP_CONSUMEORDERLY": "false",
                "PROP_NAMESERVER_ADDR": ";".join(self.name_servers),
            },
            subscription_set=member.consumer_data().subscription_data_set,
            mq_table=self._queues_of(member),
            jstack=_stacks() if header.jstack_enable else None,
        )
        return request.response(body=info.encode())

    def _queues_of(self, member: GroupMember) -> dict[MessageQueue, ProcessQueueInfo]:
        """Return the queues of a member; a member that receives by POP has none of its own."""
        if not isinstance(member, RemoteConsumer):
            return {}
        return {
            self.namespace.wrap_queue(queue): ProcessQueueInfo(
                commit_offset=member.position(queue),
                cached_msg_count=member.pulls.prefetched(queue),
                locked=member.locks.holds(queue),
            )
            for queue in member.assignment()
        }

    def _member(self, wire_group: str) -> RemoteConsumer | None:
        member = self.members.get(wire_group)
        return member if isinstance(member, RemoteConsumer) else None


def _no_member(request: RemotingCommand, group: str) -> RemotingCommand:
    return request.response(ResponseCode.SYSTEM_ERROR, remark=f"group {group} has no member in this client")


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
