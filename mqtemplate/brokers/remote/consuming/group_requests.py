"""Requests of a group member to brokers: its group's members, queue locks, messages for redelivery.

Source: RocketMQ ``client: MQClientAPIImpl``, ``RebalanceImpl.lock``, ``DefaultMQPushConsumerImpl.sendMessageBack``,
``broker: RebalanceLockManager``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mqtemplate.broker import Capability, QueueLock
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import log_failure, response_error
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.clock import Clock, lease_time_ms
from mqtemplate.engine.group_rules import SentBack, retry_level
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    ForkedError,
    ListenerError,
    RemoteConnectError,
    UnsupportedError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.message import DELAY_PROPERTIES, Message, MessageQueue, Property, copy_properties
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    GetConsumerListByGroupResponseBody,
    LockBatchRequestBody,
    LockBatchResponseBody,
)
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.remoting.protocol.messages import encode_properties_text
from mqtemplate.topics import RETRY_TOPIC_PREFIX

# --- requests -------------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remote")

_LOCK_TIMEOUT_MS = 1_000
_LIST_TIMEOUT_MS = 1_000
_SETTLE_MS = 3_000  # members repeat the heartbeat to a lost broker each second


class MemberList(NamedTuple):
    """Client ids of the members of a group.

    Attributes:
        is_settled: False if each broker that answered had forgotten this client until a moment ago, as after a restart.
            Then other members may be missing, too.
    """

    ids: frozenset[str]
    is_settled: bool


@dataclass(eq=False)
class GroupRequests:
    """Requests of one member. They raise `BrokerError` if the broker refuses or does not answer."""

    context: ClientContext
    group: str

    def __post_init__(self) -> None:
        self.wire_group = self.context.namespace.wrap(self.group)
        self._on_replicas: set[str] = set()

    def list_members(self, topic: str) -> MemberList:
        """Return the client ids of the group's members at all masters of a topic; without a master, at the replicas.

        A restarted master has only the members whose heartbeats have arrived since, so one list alone would let a
        member take the queues of others.
        """
        masters, replicas = self._brokers_of(topic)
        found = self._member_lists(masters) if masters else {}
        if not found:
            found = self._member_lists(replicas) if replicas else {}
            self._log_replicas(topic, has_answer=bool(found))
        else:
            self._on_replicas.discard(topic)
        if not found:
            raise RemoteConnectError(
                f"get the members of group {self.group!r}: no broker of topic {topic!r} answers; see that one runs"
            )
        settled = any(self.context.instance.is_registered(address, _SETTLE_MS) for address in found)
        return MemberList(frozenset().union(*found.values()), settled)

    def _member_lists(self, addresses: list[str]) -> dict[str, list[str]]:
        """Return address -> client ids, of the brokers that answer."""
        header = ConsumerGroupRequestHeader(consumer_group=self.wire_group)
        requests = [
            (address, RemotingCommand.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)) for address in addresses
        ]
        found: dict[str, list[str]] = {}
        refusal: BrokerError | None = None
        for address, response in self.context.instance.invoke_all(requests, _LIST_TIMEOUT_MS):
            if isinstance(response, BrokerError):
                continue
            # SYSTEM_ERROR: the broker lacks the group, as after a restart. The next heartbeat registers its members.
            if response.code == ResponseCode.SYSTEM_ERROR:
                _log.debug("remote.group_unknown", group=self.group, reason=response.remark)
                found[address] = []
            elif response.code == ResponseCode.SUCCESS:
                found[address] = GetConsumerListByGroupResponseBody.decode(response.body).consumer_id_list
            else:
                refusal = response_error(response, f"get the members of group {self.group!r}", address)
        if refusal is not None and not found:
            raise refusal
        return found

    def _log_replicas(self, topic: str, *, has_answer: bool) -> None:
        if topic not in self._on_replicas and has_answer:
            self._on_replicas.add(topic)
            _log.warning(
                "remote.masters_missing",
                group=self.group,
                topic=topic,
                reason="no master of the topic answers; its replicas are read until one does",
            )

    def check_subscription(self, topic: str, subscription: SubscriptionData) -> None:
        """Have one of the topic's masters check an SQL92 expression; tags need no check.

        Raises:
            UnsupportedError: The broker does not evaluate SQL92 expressions.
            ListenerError: It cannot parse this one.
        """
        if subscription.expression_type == "TAG" or not (masters := self._brokers_of(topic)[0]):
            return
        body = CheckClientRequestBody(
            client_id=self.context.instance.id,
            group=self.wire_group,
            subscription_data=subscription,
            namespace=self.context.settings.namespace or None,
        ).encode()
        request = RemotingCommand.request(RequestCode.CHECK_CLIENT_CONFIG, body=body)
        response = self.context.instance.invoke(masters[0], request)
        if response.code == ResponseCode.SUCCESS:
            return
        operation = f"group {self.group!r} subscribes to {topic!r} by {subscription.sub_string!r}"
        problem = response_error(response, operation, masters[0])
        if response.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            raise ListenerError(str(problem))
        raise UnsupportedError(f"{problem}; set enablePropertyFilter=true on the broker, or select by tags")

    def _brokers_of(self, topic: str) -> tuple[list[str], list[str]]:
        """Return the addresses of the topic's masters and of its replicas; of all brokers if the topic is missing."""
        routes = self.context.routes
        route = routes.existing(topic)
        names = routes.brokers() if route is None else route.addresses
        by_ids = [routes.brokers().get(name, {}) for name in names]
        masters = [by_id[MASTER_ID] for by_id in by_ids if MASTER_ID in by_id]
        return masters, [address for by_id in by_ids for address in by_id.values() if address not in masters]

    # --- queue locks ---------------------------------------------------------------------------

    def lock(self, queues: Mapping[str, list[MessageQueue]]) -> dict[str, set[MessageQueue] | BrokerError]:
        """Lock queues at all brokers at once.

        Args:
            queues: Broker name -> its queues.

        Returns:
            Broker name -> the queues that this member has locked now, or the error.
        """
        results: dict[str, set[MessageQueue] | BrokerError] = {}
        for broker_name, response in self._call_masters(RequestCode.LOCK_BATCH_MQ, queues, "lock").items():
            if isinstance(response, BrokerError):
                results[broker_name] = response
            else:
                locked = LockBatchResponseBody.decode(response.body).lock_ok_mq_set
                results[broker_name] = set(map(self.context.namespace.unwrap_queue, locked))
        return results

    def unlock(self, queues: Mapping[str, list[MessageQueue]]) -> None:
        """Unlock queues at all brokers at once; a failure is logged."""
        for broker_name, response in self._call_masters(RequestCode.UNLOCK_BATCH_MQ, queues, "unlock").items():
            if isinstance(response, BrokerError):
                _log.info("remote.unlock_failed", group=self.group, broker=broker_name, reason=str(response))

    def _call_masters(
        self, code: int, queues: Mapping[str, list[MessageQueue]], verb: str
    ) -> dict[str, RemotingCommand | BrokerError]:
        """Send a request to the master of each broker; a replica's locks would be unknown to the master."""
        context = self.context

        def create(broker_name: str) -> tuple[str, RemotingCommand]:
            body = LockBatchRequestBody(
                consumer_group=self.wire_group,
                client_id=context.instance.id,
                mq_set=list(map(context.namespace.wrap_queue, queues[broker_name])),
            )
            return context.routes.master(broker_name), RemotingCommand.request(code, body=body.encode())

        results: dict[str, RemotingCommand | BrokerError] = {}
        for broker_name, (address, response) in context.invoke_each(queues, create, _LOCK_TIMEOUT_MS).items():
            operation = f"{verb} {len(queues[broker_name])} queues of group {self.group!r}"
            if isinstance(response, RemotingCommand) and response.code != ResponseCode.SUCCESS:
                response = response_error(response, operation, address)
            results[broker_name] = response
        return results


# --- queue locks of one member --------------------------------------------------------------------


_NEVER_MS = 0


@dataclass(slots=True, eq=False)
class HeldQueueLocks:
    """The locks of one member. A lock that was not renewed for *live_ms* counts as lost.

    A queue is *ready* when it is locked and its read position was set after that: the previous member may have
    committed until it unlocked the queue. A ready queue is the caller's from `take` to `release`. One that was locked
    and not taken has no one who would release it: `give_up` does.

    A lock that was lost and is renewed stays lost for the caller until it requests the lock again: another member may
    have had it, and may have handled the messages that the caller polled before.

    A request without an answer may be carried out later. So its queues are unlocked like locked ones when they are
    given up; otherwise the next member would wait until the lock expires.

    Args:
        live_ms: 30 s in RocketMQ. A broker gives the lock to another member after 60 s.
    """

    requests: GroupRequests
    clock: Clock
    live_ms: int
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _renewed_ms: dict[MessageQueue, int] = field(default_factory=dict, init=False)
    _ready: set[MessageQueue] = field(default_factory=set, init=False)
    _taken: set[MessageQueue] = field(default_factory=set, init=False)
    _requested: set[MessageQueue] = field(default_factory=set, init=False)
    _released: set[MessageQueue] = field(default_factory=set, init=False)
    _regained: frozenset[MessageQueue] = field(default=frozenset(), init=False)  # lost and renewed, not requested again
    _unanswered: set[MessageQueue] = field(default_factory=set, init=False)  # a broker may lock them yet
    _requesting: threading.Lock = field(default_factory=threading.Lock, init=False)
    _is_closed: bool = field(default=False, init=False)

    # --- state ---------------------------------------------------------------------------------

    def holds(self, queue: MessageQueue) -> bool:
        """Return True if this member has locked the queue and not unlocked it; the lock may be lost."""
        return queue in self._renewed_ms

    def is_ready(self, queue: MessageQueue) -> bool:
        """Return True if the queue may be taken."""
        return queue in self._ready and queue not in self.lost()

    def take(self, queue: MessageQueue) -> bool:
        """Give a ready queue to the caller; return False if it is not ready."""
        if not self.is_ready(queue):
            return False
        with self._lock:
            is_taken = queue in self._ready  # it may have been given up since
            if is_taken:
                self._taken.add(queue)
            return is_taken

    def lost(self) -> frozenset[MessageQueue]:
        """Return the queues whose locks were not renewed in time: they must not be read."""
        if not self._renewed_ms:
            return frozenset()
        oldest_ms = lease_time_ms(self.clock) - self.live_ms
        with self._lock:
            late = [queue for queue, at_ms in self._renewed_ms.items() if at_ms <= oldest_ms]
            return self._regained.union(late) if self._regained else frozenset(late)

    def is_valid(self, queue: MessageQueue) -> bool:
        """Return True if a queue is locked now."""
        renewed_ms = self._renewed_ms.get(queue, _NEVER_MS)
        return renewed_ms > lease_time_ms(self.clock) - self.live_ms and queue not in self._regained

    def valid(self) -> frozenset[MessageQueue]:
        """Return the queues that are locked now."""
        with self._lock:
            held = frozenset(self._renewed_ms)
        return held - self.lost()

    def committable(self) -> frozenset[MessageQueue]:
        """Return the queues that are locked now, and in which no other member can have committed since."""
        with self._lock:
            requested = frozenset(self._requested)
        return self.valid() - requested

    def lose(self, broker_name: str) -> bool:
        """Count the locks at a broker as lost; return True if there are some."""
        with self._lock:
            lost = [queue for queue in self._renewed_ms if queue.broker_name == broker_name]
            self._renewed_ms |= dict.fromkeys(lost, _NEVER_MS)
            return bool(lost)

    # --- requests that are carried out in another thread ---------------------------------------

    def request(self, queue: MessageQueue) -> bool:
        """Have a queue locked by the next `take_requested`; return False if that was requested before."""
        with self._lock:
            is_new = queue not in self._requested
            self._requested.add(queue)
            self._ready.discard(queue)  # another member may have had a lost lock: the read position is set again
            return is_new

    def release(self, queue: MessageQueue) -> None:
        """Have a queue unlocked by the next `take_released`."""
        with self._lock:
            self._release([queue])

    def give_up(self, queues: Iterable[MessageQueue]) -> bool:
        """Release the queues that may be locked and that the caller has not taken; return False if there are none."""
        with self._lock:
            locked = self._renewed_ms.keys() | self._unanswered
            idle = [queue for queue in queues if queue in locked and queue not in self._taken]
            self._release(idle)
            return bool(idle)

    def _release(self, queues: Collection[MessageQueue]) -> None:
        self._ready.difference_update(queues)
        self._taken.difference_update(queues)
        self._released.update(queues)

    def unanswered(self) -> frozenset[MessageQueue]:
        """Return the queues whose lock request was not answered."""
        with self._lock:
            return frozenset(self._unanswered)

    def take_requested(self, assignment: Collection[MessageQueue]) -> list[MessageQueue]:
        """Return the queues that are requested; forget those that are not assigned."""
        with self._lock:
            self._requested.intersection_update(assignment)
            return sorted(self._requested)

    def take_released(self) -> list[MessageQueue]:
        """Return the queues to be unlocked, and forget them."""
        with self._lock:
            released, self._released = sorted(self._released), set()
            return released

    # --- requests ------------------------------------------------------------------------------

    def lock(self, queue: MessageQueue) -> bool:
        """Lock a queue; return False while another member has the lock.

        Raises:
            BrokerError: The broker did not answer, or refused.
        """
        [(_, locked)] = self._lock_all([queue]).items()
        if isinstance(locked, BrokerError):
            raise locked
        with self._lock:
            self._taken |= locked
        self._forget_loss(locked)
        return queue in locked

    def acquire(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues that the caller has requested; return those that are locked now."""
        acquired = self._acquire(queues)
        self._forget_loss(acquired)
        return acquired

    def _forget_loss(self, queues: Collection[MessageQueue]) -> None:
        with self._lock:
            self._regained -= frozenset(queues)

    def _acquire(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues; return those that are locked now. A broker that fails delays no other one, and is logged."""
        acquired: set[MessageQueue] = set()
        for broker_name, locked in self._lock_all(queues).items():
            if isinstance(locked, BrokerError):
                log_failure(_log, "remote.lock_failed", locked, group=self.requests.group, broker=broker_name)
            else:
                acquired |= locked
        return acquired

    def _lock_all(self, queues: Iterable[MessageQueue]) -> dict[str, set[MessageQueue] | BrokerError]:
        """Send lock requests to all brokers at once; return the locked queues, or the error, of each."""
        by_broker = _by_broker(queues)
        results: dict[str, set[MessageQueue] | BrokerError] = {name: set() for name in by_broker}
        with self._requesting:
            requested_ms = lease_time_ms(self.clock)
            if not self._is_closed:
                results = self.requests.lock(by_broker)
            self._note(by_broker, results, requested_ms)
        return results

    def _note(
        self,
        requested: Mapping[str, list[MessageQueue]],
        results: Mapping[str, set[MessageQueue] | BrokerError],
        requested_ms: int,
    ) -> None:
        with self._lock:
            for broker_name, locked in results.items():
                if isinstance(locked, BrokerError):
                    self._unanswered.update(requested[broker_name])
                    continue
                self._unanswered.difference_update(requested[broker_name])
                for queue in requested[broker_name]:
                    if queue in locked:
                        self._renewed_ms[queue] = requested_ms
                    elif queue in self._renewed_ms:
                        self._renewed_ms[queue] = _NEVER_MS

    def set_ready(self, queue: MessageQueue) -> None:
        """Declare that the read position of a locked queue was set."""
        with self._lock:
            self._requested.discard(queue)
            if queue in self._renewed_ms:
                self._ready.add(queue)

    def renew(self, assignment: Collection[MessageQueue]) -> tuple[set[MessageQueue], bool]:
        """Renew the locks, but no lost one of a queue that is not assigned: it is forgotten if no caller has it.

        Returns:
            The queues whose lost locks were regained, and True if each broker has answered.
        """
        lost = self.lost()
        with self._lock:
            given_up = lost.difference(assignment)
            for queue in given_up - self._taken:
                self._renewed_ms.pop(queue, None)
                self._ready.discard(queue)
            held = self._renewed_ms.keys() - given_up
            # Before the request: there is no moment at which they look valid.
            self._regained = lost.intersection(self._renewed_ms)
        locked = self._acquire(held)
        regained = locked & lost
        with self._lock:
            self._ready -= regained
        return regained, held <= locked

    def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock the queues in *queues* that may be locked. At a broker that cannot be reached the locks expire."""
        with self._lock:
            held = [
                queue for queue in queues if self._renewed_ms.pop(queue, None) is not None or queue in self._unanswered
            ]
            self._unanswered.difference_update(held)
            self._ready.difference_update(held)
            self._taken.difference_update(held)
            self._regained -= frozenset(held)
        if held:
            self.requests.unlock(_by_broker(held))

    def close(self) -> None:
        """Unlock all queues, and lock none any more. A request in another thread is awaited: it may lock some."""
        with self._requesting:
            self._is_closed = True
            self.unlock({*self._renewed_ms, *self._unanswered})


class CallerLocks:
    """The locks of one group that callers in this process have, who are no members of it.

    Attributes:
        locks: The locks, as a member would have them.
    """

    def __init__(self, locks: HeldQueueLocks) -> None:
        self.locks = locks
        self._held: dict[MessageQueue, _CallerLock] = {}
        self._requesting = threading.Lock()  # a renewal that is answered after a release would lock the queue again

    def lock(self, queue: MessageQueue) -> QueueLock | None:
        """See `ConsumerGroups.lock_queue`."""
        lock = _CallerLock(self, queue)
        if self._held.setdefault(queue, lock) is not lock:
            return None
        is_locked = False
        try:
            with self._requesting:
                is_locked = self.locks.lock(queue)
        finally:
            if not is_locked:
                del self._held[queue]
        return lock if is_locked else None

    def release(self, queue: MessageQueue) -> None:
        """Release the lock of a queue."""
        with self._requesting:
            self.locks.unlock([queue])
        del self._held[queue]

    def renew(self) -> bool:
        """Renew the locks; return False if a broker did not answer."""
        with self._requesting:
            return self.locks.renew(self._held)[1]


class _CallerLock:
    """A `QueueLock` of `CallerLocks`."""

    def __init__(self, owner: CallerLocks, queue: MessageQueue) -> None:
        self._owner, self._queue = owner, queue

    @property
    def is_held(self) -> bool:
        return self._owner.locks.is_valid(self._queue)

    def release(self) -> None:
        self._owner.release(self._queue)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    by_broker: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in queues:
        by_broker[queue.broker_name].append(queue)
    return by_broker


# --- messages for redelivery ----------------------------------------------------------------------


_TIMEOUT_MS = 5_000


@dataclass(frozen=True, slots=True)
class RetrySender:
    """Sender of one member's messages for redelivery.

    Attributes:
        context: The client, with the member's instance.
        producer: Sender of the copies that the retry topic gets.
    """

    context: ClientContext
    producer: Producer

    def send_back(self, sent_back: SentBack) -> None:
        """Send a message back; see `Consumer.send_back`.

        A broker moves the message that it has stored. One of RocketMQ takes levels only and adds no properties, so it
        gets a copy of a message with an exact delay, and of a dead letter with properties.

        Raises:
            SendError: The broker refused the message, and so did the brokers of the retry topic.
            UnsupportedError: The brokers have no timers, and an exact delay was requested.
        """
        is_ours = self._takes_exact_delays(sent_back.message.broker_name)
        is_dead, is_exact = sent_back.is_dead, sent_back.delay_ms is not None
        if is_exact and not is_dead and not is_ours and not has_timers(self.context.instance.versions.values()):
            raise UnsupportedError(
                "RocketMQ has timers, and so exact retry delays, from version 5.0 on; use a delay level"
            )
        if not is_ours and (sent_back.properties if is_dead else is_exact):
            self._send_copy(sent_back)
            return
        problem = self._send_back_at_broker(sent_back)
        if problem is not None:
            group, msg_id = sent_back.spec.group, sent_back.message.msg_id
            _log.warning("remote.send_back_refused", group=group, msg_id=msg_id, reason=problem)
            self._send_copy(sent_back)

    def _takes_exact_delays(self, broker_name: str) -> bool:
        """Return True if a broker is one of our servers, whose request has an exact delay and properties."""
        try:
            address = self.context.routes.address(broker_name)
        except BrokerError:  # it was removed from the cluster: its message is sent as a copy
            return False
        return Capability.RETRY_DELAY in self.context.instance.announced.get(address, ())

    def _send_back_at_broker(self, sent_back: SentBack) -> str | None:
        """Have the broker move the message to the retry topic; return the reason if it does not."""
        context, message, spec = self.context, sent_back.message, sent_back.spec
        is_dead, delay_ms = sent_back.is_dead, sent_back.delay_ms
        added = sent_back.properties if is_dead or delay_ms is not None else {}
        header = ConsumerSendMsgBackRequestHeader(
            offset=message.physical_offset,
            group=context.namespace.wrap(spec.group),
            delay_level=sent_back.delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=context.namespace.wrap(message.topic),
            unit_mode=False,
            max_reconsume_times=spec.max_reconsume_times,
            delay_ms=None if is_dead else delay_ms,
            properties=encode_properties_text(added) if added else None,
            broker_name=message.broker_name,
        )
        request = RemotingCommand.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        try:
            response = context.instance.invoke(context.routes.address(message.broker_name), request, _TIMEOUT_MS)
        except (BrokerClosedError, ForkedError):
            raise
        except BrokerError as exc:
            return str(exc)
        return None if response.code == ResponseCode.SUCCESS else str(response)

    def _send_copy(self, sent_back: SentBack) -> None:
        """Send a copy to the retry topic; its broker reads ``reconsume_times`` from the header.

        The broker moves a message whose retries are used up to the dead-letter topic, and creates that topic. Source:
        ``AbstractSendMessageProcessor.handleRetryAndDLQ``.
        """
        is_dead = sent_back.is_dead
        copy = sent_back.dead_letter() if is_dead else sent_back.retry()
        if sent_back.delay_ms is None:
            copy.properties[Property.DELAY] = str(retry_level(sent_back.message, sent_back.delay_level))
        else:
            copy.properties[Property.TIMER_DELAY_MS] = str(sent_back.delay_ms)
        if is_dead:
            copy.properties = copy_properties(copy.properties, *DELAY_PROPERTIES)
        copy.properties[Property.RETRY_TOPIC] = self.context.namespace.wrap(copy.properties[Property.RETRY_TOPIC])
        topic = RETRY_TOPIC_PREFIX + sent_back.spec.group
        request = self.producer.factory.single(Message(topic, copy.body, copy.properties, copy.flag))
        request.reconsume_times = sent_back.message.reconsume_times + 1
        request.max_reconsume_times = 0 if is_dead else sent_back.spec.max_reconsume_times
        self.producer.deliver(request, None, _TIMEOUT_MS)


def has_timers(versions: Iterable[int]) -> bool:
    """Return True if all brokers of these versions have timers."""
    return min(versions, default=int(Version.V5_0_0)) >= Version.V5_0_0
