"""Consumption by POP from the brokers of a cluster: members of groups, and pops that brokers hold.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl.popMessage``, ``broker: PopMessageProcessor``,
``PopLongPollingService``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mqtemplate.broker import (
    Capability,
    ConsumeFromWhere,
    ConsumerSpec,
    MessageModel,
    ReceivedMessage,
)
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.cluster.queries import MemberSubscription, matching_messages
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID
from mqtemplate.brokers.remote.consuming.group_requests import GroupRequests
from mqtemplate.brokers.remote.consuming.members import Members
from mqtemplate.brokers.remote.consuming.popped import Deliveries, WantedMessages, pop_request, read_popped
from mqtemplate.engine.group_rules import check_same_group
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    ListenerError,
    MQTemplateError,
    RemoteConnectError,
    UnsupportedError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.protocol.bodies.group import ConsumerData
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.services import PeriodicService

_log = get_logger("mqtemplate.remote")

# --- pops of one topic ----------------------------------------------------------------------------


_LONGEST_POLL_MS = 15_000
_ROCKETMQ_POLL_MS = 5_000
"""Longest poll at a broker of RocketMQ. It does not wake held pops for a message of a retry topic, and cannot cancel
them."""
_EARLY_MS = 1_000
_MISSING_TOPIC_MS = 1_000
_UNCLAIMED_MS = 1_000
"""Time for which messages wait that arrived while no call of `RemotePop.receive` did."""
_EMPTY = frozenset({ResponseCode.POLLING_TIMEOUT, ResponseCode.POLLING_FULL, ResponseCode.PULL_NOT_FOUND})


class _Master(NamedTuple):
    """The master of a broker."""

    broker_name: str
    address: str


@dataclass(eq=False, slots=True)
class _Pop:
    """One pop that a broker holds, or its messages. Times are steady."""

    target: _Master
    wanted: WantedMessages
    sent_ms: int
    poll_ms: int


@dataclass(eq=False, slots=True)
class _Arrival:
    """Messages that no call of `RemotePop.receive` has taken yet.

    Attributes:
        response: None after the messages were read from it.
    """

    pop: _Pop
    arrived_ms: int
    response: RemotingCommand | None
    messages: list[ReceivedMessage] = field(default_factory=list)


class _TopicPops:
    """The pops of one group and topic. Thread-safe.

    A broker does not end a pop that it holds. So a pop stays when the call that sent it is woken, and its messages are
    for the next call. If there is none within a second, the messages are released.
    """

    def __init__(self, group: _PopGroup, topic: str, on_unclaimed: Callable[[], None]) -> None:
        self.group = group
        self.topic = topic
        self._on_unclaimed = on_unclaimed
        self._context = group.context
        self._clock = group.context.clock
        self._changed = threading.Condition()
        self._receivers = 0
        self._wakes = 0
        self._turn = 0
        self._held: dict[_Pop, None] = {}
        self._arrived: deque[_Arrival] = deque()
        self._failures: dict[_Master, MQTemplateError] = {}
        self._master_count = 0
        self._not_before_ms: dict[_Master, int] = {}

    @property
    def is_idle(self) -> bool:
        """True if no broker holds a pop, and no messages wait."""
        return not (self._held or self._arrived or self._receivers)

    def wake(self) -> None:
        """Let the calls of `receive` return."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    # --- receiving -----------------------------------------------------------------------------

    def receive(self, wanted: WantedMessages, wait_ms: int) -> list[ReceivedMessage]:
        """See `RemotePop.receive`."""
        deadline = time.monotonic() + wait_ms / 1_000
        with self._changed:
            self._receivers += 1
            wakes = self._wakes
        try:
            is_first = True
            while True:
                if messages := self._take(wanted.max_count):
                    return messages
                self._check()
                left_ms = int((deadline - time.monotonic()) * 1_000)
                if self._wakes != wakes or (left_ms <= 0 and not is_first):
                    return []
                self._request(wanted, max(left_ms, 0), is_first=is_first)
                is_first = False
                self._wait(wakes, deadline)
        finally:
            with self._changed:
                self._receivers -= 1
                is_unclaimed = bool(self._arrived) and not self._receivers
            if is_unclaimed:
                self._on_unclaimed()

    def _check(self) -> None:
        """Raise an error if the member has left, or no broker of the topic can be reached, or all refuse."""
        if self.group.is_closed:
            raise BrokerClosedError(f"the member of group {self.group.spec.group!r} has left the group")
        with self._changed:
            if self._has_failed():
                error = next(iter(self._failures.values()))
                self._failures.clear()
                raise error

    def _has_failed(self) -> bool:
        """Return True if each broker of the topic has failed. The caller has the lock."""
        return bool(self._failures) and len(self._failures) == self._master_count and not self._arrived

    def _take(self, max_count: int) -> list[ReceivedMessage]:
        """Return messages that have arrived; the rest is for the next call."""
        while True:
            with self._changed:
                if not self._arrived:
                    return []
                arrival = self._arrived.popleft()
            messages = self._messages(arrival)
            if len(messages) > max_count:
                arrival.messages = messages[max_count:]
                with self._changed:
                    self._arrived.appendleft(arrival)
            if messages:
                return messages[:max_count]

    def _messages(self, arrival: _Arrival) -> list[ReceivedMessage]:
        if arrival.response is not None:
            response, arrival.response = arrival.response, None
            arrival.messages = self.group.read(arrival.pop, response)
        return arrival.messages

    def _wait(self, wakes: int, deadline: float) -> None:
        """Wait for messages, an error, or the next time to send a pop."""
        with self._changed:
            while not (self._arrived or self._wakes != wakes or self.group.is_closed or self._has_failed()):
                left_s = min(deadline - time.monotonic(), self._pause_s())
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def _pause_s(self) -> float:
        """Return the time until a pop may be sent. The caller has the lock."""
        held = {pop.target for pop in self._held}
        due = [ms for target, ms in self._not_before_ms.items() if target not in held]
        now_ms = self._clock.steady_ms()
        if due:
            return max(0, min(due) - now_ms) / 1_000
        return _LONGEST_POLL_MS / 1_000 if held else 0.0

    # --- requests ------------------------------------------------------------------------------

    def _request(self, wanted: WantedMessages, wait_ms: int, *, is_first: bool) -> None:
        """Send pops to the brokers of the topic: to one after the other for what is there, then to all that may wait.

        Raises:
            BrokerError: The topic has no readable queue, or no master.
        """
        targets = self._targets()
        with self._changed:
            self._master_count = len(targets)
            self._not_before_ms = {each: ms for each, ms in self._not_before_ms.items() if each in targets}
            self._failures = {each: error for each, error in self._failures.items() if each in targets}
            if not targets:
                self._not_before_ms[_NOWHERE] = self._clock.steady_ms() + _MISSING_TOPIC_MS
        if is_first and (wait_ms == 0 or len(targets) > 1) and self._sweep(targets, wanted):
            return
        if wait_ms > 0:
            for target in self._due(targets):
                is_ours = Capability.POP in self._context.instance.announced.get(target.address, ())
                self._send(target, wanted, min(wait_ms, _LONGEST_POLL_MS if is_ours else _ROCKETMQ_POLL_MS))

    def _targets(self) -> list[_Master]:
        route = self._context.routes.existing(self.topic)
        if route is None:
            return []
        brokers = self._context.routes.brokers()
        names = dict.fromkeys(queue.broker_name for queue in route.read_queues)
        if not names:
            raise BrokerError(
                f"topic {self.topic!r} has no readable queue: its permission forbids reading (mqadmin topicRoute)"
            )
        found = [_Master(name, brokers[name][MASTER_ID]) for name in names if MASTER_ID in brokers.get(name, {})]
        if not found:
            raise RemoteConnectError(f"no broker of topic {self.topic!r} has a master now; see that one runs")
        self._turn += 1
        at = self._turn % len(found)
        return found[at:] + found[:at]

    def _sweep(self, targets: Sequence[_Master], wanted: WantedMessages) -> bool:
        """Pop what is there now, at one broker after the other. Return True if there was something."""
        for target in targets:
            with self._changed:
                pop = _Pop(target, wanted, self._clock.steady_ms(), 0)
                is_paused = self._not_before_ms.get(target, 0) > pop.sent_ms
                if is_paused or any(each.target == target for each in self._held):
                    continue
            try:
                response: RemotingCommand | MQTemplateError = self._context.instance.invoke(
                    target.address, self.group.request(pop)
                )
            except BrokerError as exc:
                response = exc
            self._note(pop, response)
            if self._arrived:
                return True
        return False

    def _due(self, targets: Sequence[_Master]) -> list[_Master]:
        """Return the brokers that get another pop: each holds one for each call that waits."""
        now_ms = self._clock.steady_ms()
        with self._changed:
            held = [pop.target for pop in self._held]
            return [
                target
                for target in targets
                if held.count(target) < self._receivers and self._not_before_ms.get(target, 0) <= now_ms
            ]

    def _send(self, target: _Master, wanted: WantedMessages, poll_ms: int) -> None:
        pop = _Pop(target, wanted, self._clock.steady_ms(), poll_ms)
        instance = self._context.instance
        with self._changed:
            self._held[pop] = None
        timeout_ms, seen = poll_ms + self._context.settings.request_timeout_ms, instance.outages.changes

        def done(response: RemotingCommand | BrokerError) -> None:
            instance.report(target.address, response, seen)
            self._note(pop, response)

        try:
            instance.invoke_async(target.address, self.group.request(pop), timeout_ms, done)
        except MQTemplateError as exc:
            self._note(pop, exc)

    def _note(self, pop: _Pop, response: RemotingCommand | MQTemplateError) -> None:
        """Store the result of a pop. The I/O thread calls this, too."""
        now_ms, target = self._clock.steady_ms(), pop.target
        with self._changed:
            self._held.pop(pop, None)
            if isinstance(response, RemotingCommand) and response.code not in _EMPTY:
                if response.code == ResponseCode.SUCCESS:
                    self._arrived.append(_Arrival(pop, now_ms, response))
                    self._failures.pop(target, None)
                    self._not_before_ms.pop(target, None)
                else:
                    operation = f"group {self.group.spec.group!r} pops from {self.topic!r}"
                    response = response_error(response, operation, target.address)
            elif isinstance(response, RemotingCommand):
                self._failures.pop(target, None)
                # A broker that may not hold the pop answers at once.
                is_early = now_ms - pop.sent_ms < min(pop.poll_ms // 2, _EARLY_MS)
                self._not_before_ms[target] = now_ms + _EARLY_MS if is_early else now_ms
            if isinstance(response, MQTemplateError):
                self._failures[target] = response
                self._not_before_ms[target] = now_ms + self._context.settings.retry_after_error_ms
            is_unclaimed = bool(self._arrived) and not self._receivers
            self._changed.notify_all()
        if is_unclaimed:
            self._on_unclaimed()

    # --- messages that no call takes -----------------------------------------------------------

    def take_unclaimed(self) -> tuple[list[ReceivedMessage], int | None]:
        """Return the messages that are to be released, and the time until the next ones are."""
        now_ms = self._clock.steady_ms()
        found: list[_Arrival] = []
        with self._changed:
            while self._arrived and (
                self.group.is_closed or (not self._receivers and self._arrived[0].arrived_ms + _UNCLAIMED_MS <= now_ms)
            ):
                found.append(self._arrived.popleft())
            due_ms = self._arrived[0].arrived_ms + _UNCLAIMED_MS - now_ms if self._arrived else None
        messages: list[ReceivedMessage] = []
        for arrival in found:
            try:
                messages += self._messages(arrival)
            except BrokerError as exc:
                _log.warning("message.release_failed", topic=self.topic, reason=str(exc))
        return messages, due_ms


_NOWHERE = _Master("", "")
"""Stands for the brokers of a topic that does not exist."""


# --- members --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _PopGroup:
    """The member of one group that this client is, for all its registrations. A `GroupMember`."""

    spec: ConsumerSpec
    deliveries: Deliveries
    subscriptions: Mapping[str, MemberSubscription]
    context: ClientContext
    registrations: int = 0
    has_joined: bool = False
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.wire_group = self.context.namespace.wrap(self.spec.group)
        self.topics: dict[tuple[str, int, bool], _TopicPops] = {}

    def consumer_data(self) -> ConsumerData:
        """See `GroupMember.consumer_data`. Java's consumers that pop say the same."""
        return ConsumerData(
            group_name=self.wire_group,
            message_model=self.spec.message_model.value,
            consume_from_where=self.spec.consume_from_where.value,
            subscription_data_set=[subscription.data for subscription in self.subscriptions.values()],
        )

    def request(self, pop: _Pop) -> RemotingCommand:
        """Return the request of a pop."""
        from_first = self.spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
        broker_name, limits = pop.target.broker_name, self.spec.key_limits
        return pop_request(self.context, pop.wanted, broker_name, pop.poll_ms, from_first=from_first, key_limits=limits)

    def read(self, pop: _Pop, response: RemotingCommand) -> list[ReceivedMessage]:
        """Return the messages of a response, without those that were not requested or have no retry left.

        Raises:
            RemoteProtocolError: It cannot be read. Its messages are delivered again later.
        """
        received = read_popped(self.context, pop.wanted, pop.target.broker_name, response)
        selector = pop.wanted.selector or TagSelector()
        matching = set(map(id, matching_messages([each.message for each in received], selector)))
        accepted = []
        for each in received:
            is_wanted = id(each.message) in matching
            if is_wanted and each.message.reconsume_times <= self.spec.max_reconsume_times:
                accepted.append(each)
            else:
                self.deliveries.settle(self.spec.group, each, is_dead=is_wanted)
        return accepted


class _MemberRegistration:
    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()


# --- the part of the broker -----------------------------------------------------------------------


_NO_RELEASE_MS = 3_600_000  # without messages to release; their arrival triggers the service


class RemotePop(Deliveries):
    """POP at the brokers of a cluster. All registrations of one group in this client are one member.

    Attributes:
        releases: Service that releases messages which arrived while no call waited for them.
    """

    def __init__(self, context: ClientContext, members: Members) -> None:
        super().__init__(context, members.send_back)
        self._members = members
        self._lock = threading.Lock()
        self._groups: dict[str, _PopGroup] = {}
        self._topics: set[_TopicPops] = set()
        self.releases = PeriodicService("remote.pop", self.release_arrived, context.clock, _NO_RELEASE_MS)

    # --- members -------------------------------------------------------------------------------

    def join(self, spec: ConsumerSpec) -> _MemberRegistration:
        _check_spec(spec)
        self.context.routes.unknown.expect(spec.subscriptions)
        with self._lock:
            group = self._groups.get(spec.group)
            if group is None:
                group = self._groups[spec.group] = self._attach(spec)
            else:
                check_same_group(group.spec, spec)
            group.registrations += 1
        try:
            if not group.has_joined:
                self._register(group)
        except BaseException:
            self._leave(group)
            raise
        return _MemberRegistration(lambda: self._leave(group))

    def _attach(self, spec: ConsumerSpec) -> _PopGroup:
        group = _PopGroup(spec, self, self._members.subscriptions(spec), self.context)
        instance = self._members.attach(spec.group, group)
        group.context = replace(self.context, instance=instance)
        return group

    def _register(self, group: _PopGroup) -> None:
        routes, instance = group.context.routes, group.context.instance
        for topic in group.spec.subscriptions:
            routes.existing(topic)  # its route has the addresses for the heartbeat
        requests = GroupRequests(group.context, group.spec.group)
        for topic, subscription in group.subscriptions.items():
            requests.check_subscription(topic, subscription.data)
        if not instance.heartbeat(routes.addresses()) and group.wire_group in instance.refusals:
            raise ListenerError(instance.refusals[group.wire_group])
        group.has_joined = True

    def _leave(self, group: _PopGroup) -> None:
        with self._lock:
            group.registrations -= 1
            if group.registrations or self._groups.get(group.spec.group) is not group:
                return
            del self._groups[group.spec.group]
        self._end(group)

    def _end(self, group: _PopGroup) -> None:
        group.is_closed = True
        self._wake(group)
        self.release_arrived()
        self._members.detach(group.spec.group, group.context.instance)

    def close(self) -> None:
        """Leave all groups. Brokers end the pops that they hold when the connections are closed."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            self._end(group)

    def _group(self, name: str) -> _PopGroup:
        found = self._groups.get(name)
        if found is None:
            raise BrokerClosedError(f"group {name!r} has no member here that receives by POP; call join first")
        return found

    # --- receiving -----------------------------------------------------------------------------

    def receive(
        self,
        group: str,
        topic: str,
        max_count: int,
        invisible_ms: int,
        wait_ms: int,
        selector: Selector | None,
        *,
        is_ordered: bool = False,
        attempt_id: str = "",
        auto_renew: bool = False,
    ) -> list[ReceivedMessage]:
        """See `PopConsumers.receive`.

        Of several brokers each gives what it has, one after the other; if none has anything, all of them hold a pop.
        """
        if auto_renew:
            raise UnsupportedError(
                "RocketMQ's remoting protocol does not renew invisible times; change each one before it is over"
            )
        member = self._group(group)
        key = (topic, invisible_ms, is_ordered)
        with self._lock:
            pops = member.topics.get(key)
            if pops is None:
                pops = member.topics[key] = _TopicPops(member, topic, self.releases.trigger)
                self._topics.add(pops)
        wanted = WantedMessages(group, topic, max_count, invisible_ms, selector, is_ordered, attempt_id)
        return pops.receive(wanted, 0 if self.context.clock.is_virtual else wait_ms)

    def wake(self, group: str) -> None:
        found = self._groups.get(group)
        if found is not None:
            self._wake(found)

    def _wake(self, group: _PopGroup) -> None:
        for pops in list(group.topics.values()):
            pops.wake()

    def release_arrived(self) -> int | None:
        """Let other members have messages that no call of `receive` has taken. Return the time until the next step."""
        due: list[int] = []
        for pops in list(self._topics):
            messages, due_ms = pops.take_unclaimed()
            if messages:
                self.release(pops.group.spec.group, pops.topic, messages)
            if due_ms is not None:
                due.append(due_ms)
            elif pops.group.is_closed and pops.is_idle:
                self._topics.discard(pops)
        return max(0, min(due)) if due else None


def _check_spec(spec: ConsumerSpec) -> None:
    """Raise `UnsupportedError` for what POP does not have."""
    if spec.message_model is not MessageModel.CLUSTERING:
        raise UnsupportedError(
            f"group {spec.group!r}: members that receive by POP share the messages, so they cannot broadcast; leave "
            "request_mode out, or message_model"
        )
    if spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
        raise UnsupportedError(
            f"group {spec.group!r} cannot start at a time by POP; start it at the first or the last message, then move "
            f"it: mqtemplate offsets reset {spec.group} TOPIC --to TIME"
        )
