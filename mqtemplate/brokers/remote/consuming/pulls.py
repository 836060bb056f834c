"""Pulls of a group member: a pull for each queue that is not full, the requests, and a buffer of the pulled messages.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl.pullMessage``, ``ProcessQueue``,
``PullAPIWrapper``, ``PullCallback``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import log_failure, response_error
from mqtemplate.brokers.remote.cluster.queries import PULL_RESPONSES, MemberSubscription, matching_messages
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from mqtemplate.user_code import error_text

# --- prefetching ----------------------------------------------------------------------------------


_log = get_logger("mqtemplate.remote")

_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class Pulled:
    """Messages of a queue, possibly none.

    Attributes:
        next_offset: Offset of the next pull, after all messages that the selector excluded.
        broker_id: Broker id for the next pull; 0 is the master.
        lags: The queue is read to its end, and does not have all messages yet that this client has sent to it.
    """

    messages: list[MessageExt]
    next_offset: int
    broker_id: int = 0
    lags: bool = False


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A failed pull, to be repeated after *retry_ms*.

    Attributes:
        needs_heartbeat: The broker does not know the member, as after a restart; the next heartbeat registers it.
    """

    error: BrokerError
    retry_ms: int
    needs_heartbeat: bool = False


PullOutcome: TypeAlias = Pulled | PullFailed


Pull = Callable[[MessageQueue, int, int, bool, Callable[[PullOutcome], None]], None]
"""Sends a pull without blocking: ``(queue, queue_offset, broker_id, may_wait, done)``.

With *may_wait*, the broker may hold the pull until a message arrives. *done* is called once, in any thread.
"""


@dataclass(slots=True, eq=False)
class _PrefetchedQueue:
    """One queue: its prefetched messages and its pull.

    Attributes:
        body_bytes: Size of the prefetched bodies.
        epoch: Incremented by a seek; outcomes of pulls from an earlier epoch are ignored.
        is_first: The next outcome is the first one of this epoch. The first pull does not wait at the broker.
        is_settled: A pull of this epoch has read the messages that this client had sent to the queue.
        needs_heartbeat: The last pull failed because the broker did not know the member.
        retry_ms: Time of the next pull after a failure.
        failure: Why the last pull failed, as it was logged; None after a pull that did not.
    """

    queue: MessageQueue
    next_offset: int
    messages: deque[MessageExt] = field(default_factory=deque)
    body_bytes: int = 0
    epoch: int = 0
    is_first: bool = True
    is_settled: bool = False
    is_pulling: bool = False
    needs_heartbeat: bool = False
    retry_ms: int | None = None
    failure: str | None = None
    broker_id: int = 0

    @property
    def position(self) -> int:
        return self.messages[0].queue_offset if self.messages else self.next_offset


@dataclass(slots=True, eq=False)
class PullLoop:
    """The queues of one member. Thread-safe.

    - Each queue has at most one pull; its outcome starts the next one, unless the queue is full.
    - A queue is full when *max_messages*, or *max_bytes* of bodies, are prefetched.

    Args:
        on_arrival: Called in any thread when there are messages to take, or a queue has settled.
        on_retry: Called in any thread when `retry` has work at a new time.
    """

    send_pull: Pull
    clock: Clock
    max_messages: int
    max_bytes: int
    on_arrival: Callable[[], None]
    on_retry: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _states: dict[MessageQueue, _PrefetchedQueue] = field(default_factory=dict, init=False)
    _turn: list[_PrefetchedQueue] = field(default_factory=list, init=False)

    # --- queues --------------------------------------------------------------------------------

    def add(self, queue: MessageQueue, queue_offset: int) -> None:
        """Start to pull from a queue."""
        state = _PrefetchedQueue(queue, queue_offset)
        with self._lock:
            self._states[queue] = state
            self._turn = sorted(self._states.values(), key=lambda each: each.queue)
        self._pull(state)

    def remove(self, queue: MessageQueue) -> None:
        """Stop to pull from a queue, and discard its prefetched messages."""
        with self._lock:
            state = self._states.pop(queue, None)
            if state is not None:
                state.epoch += 1
                self._turn = [each for each in self._turn if each is not state]

    def position(self, queue: MessageQueue) -> int | None:
        """Return the offset of the next message to take; None if the queue is not pulled."""
        with self._lock:
            state = self._states.get(queue)
            return None if state is None else state.position

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Continue at another offset. The prefetched messages are kept if they start with it."""
        with self._lock:
            state = self._states.get(queue)
            if state is None or state.position == queue_offset:
                return
            state.epoch += 1
            state.is_first, state.is_settled = True, False
            state.next_offset = queue_offset
            state.messages.clear()
            state.body_bytes = 0
            state.is_pulling = False
            state.retry_ms = None
        self._pull(state)

    def prefetched(self, queue: MessageQueue) -> int:
        """Return the number of prefetched messages of a queue."""
        state = self._states.get(queue)
        return 0 if state is None else len(state.messages)

    def is_settling(self, without: frozenset[MessageQueue]) -> bool:
        """Return True if a new queue may have messages that are not prefetched yet; ignore the queues in *without*."""
        with self._lock:
            return any(not state.is_settled and state.queue not in without for state in self._states.values())

    def take(self, max_count: int, without: frozenset[MessageQueue]) -> list[MessageExt]:
        """Return prefetched messages, each queue in order; the queues take turns at being the first."""
        taken: list[MessageExt] = []
        with self._lock:
            turn = self._turn
            self._turn = turn[1:] + turn[:1]
            for state in turn:
                if state.messages and state.queue not in without:
                    _take_from(state, max_count - len(taken), taken)
                if len(taken) >= max_count:
                    break
        for state in turn:
            if not state.is_pulling:
                self._pull(state)
        return taken

    # --- pulls ---------------------------------------------------------------------------------

    def _pull(self, state: _PrefetchedQueue) -> None:
        """Send a pull, unless there is one, the queue is full, or its next attempt is not due."""
        with self._lock:
            is_removed = self._states.get(state.queue) is not state
            if is_removed or state.is_pulling or state.retry_ms is not None or self._is_full(state):
                return
            state.is_pulling = True
            epoch, may_wait = state.epoch, not state.is_first
            queue_offset, broker_id = state.next_offset, state.broker_id
        try:
            self.send_pull(
                state.queue, queue_offset, broker_id, may_wait, lambda outcome: self._done(state, epoch, outcome)
            )
        except BrokerError as exc:
            self._done(state, epoch, PullFailed(exc, _RETRY_MS))

    def _is_full(self, state: _PrefetchedQueue) -> bool:
        return len(state.messages) >= self.max_messages or state.body_bytes >= self.max_bytes

    def _done(self, state: _PrefetchedQueue, epoch: int, outcome: PullOutcome) -> None:
        """Store the outcome of a pull and send the next one."""
        with self._lock:
            if state.epoch != epoch:
                return
            state.is_pulling = state.is_first = False
            did_need_heartbeat, state.needs_heartbeat = state.needs_heartbeat, False
            was_settled = state.is_settled
            if isinstance(outcome, PullFailed):
                state.is_settled = True  # poll() must not wait for a broker that fails
                state.retry_ms = self.clock.steady_ms() + outcome.retry_ms
                state.needs_heartbeat = outcome.needs_heartbeat
                state.broker_id = 0  # a replica that the broker suggested may be away now
            else:
                state.failure = None
                state.is_settled = was_settled or not outcome.lags
                state.next_offset = outcome.next_offset
                state.broker_id = outcome.broker_id
                state.messages.extend(outcome.messages)
                state.body_bytes += sum([len(message.body) for message in outcome.messages])
            has_arrival = state.is_settled != was_settled or (isinstance(outcome, Pulled) and outcome.messages)
        if isinstance(outcome, PullFailed):
            _log_failed_pull(state, outcome, is_expected=outcome.needs_heartbeat and not did_need_heartbeat)
            self.on_retry()
        if has_arrival:
            self.on_arrival()
        self._pull(state)

    def retry(self) -> int | None:
        """Repeat the failed pulls that are due; return the time of the next one."""
        now_ms = self.clock.steady_ms()
        with self._lock:
            due = [each for each in self._states.values() if each.retry_ms is not None and each.retry_ms <= now_ms]
            for state in due:
                state.retry_ms = None
        for state in due:
            self._pull(state)
        with self._lock:
            return min((state.retry_ms for state in self._states.values() if state.retry_ms is not None), default=None)


def _take_from(state: _PrefetchedQueue, max_count: int, taken: list[MessageExt]) -> None:
    for _ in range(min(max_count, len(state.messages))):
        message = state.messages.popleft()
        state.body_bytes -= len(message.body)
        taken.append(message)


def _log_failed_pull(state: _PrefetchedQueue, outcome: PullFailed, *, is_expected: bool) -> None:
    """Log a failed pull; one that is repeated, and fails for the same reason, at level DEBUG."""
    queue, reason = state.queue, str(outcome.error)
    fields: dict[str, Any] = {"topic": queue.topic, "queue": queue.queue_id, "broker": queue.broker_name}
    if is_expected:
        _log.debug("remote.member_unknown", reason=reason, **fields)
        return
    is_known, state.failure = state.failure == reason, reason
    if is_known:
        _log.debug("remote.pull_failed", reason=reason, retry_in_ms=outcome.retry_ms, **fields)
    else:
        log_failure(_log, "remote.pull_failed", outcome.error, retry_in_ms=outcome.retry_ms, **fields)


# --- requests -------------------------------------------------------------------------------------


_MAX_BYTES = 256 << 10
_FLOW_CONTROL_MS = 20
_UNKNOWN_MEMBER = frozenset({ResponseCode.SUBSCRIPTION_NOT_EXIST, ResponseCode.SUBSCRIPTION_NOT_LATEST})


@dataclass(eq=False)
class PullClient:
    """Sender of the pulls of one group member.

    Args:
        subscriptions: By topic, as in the heartbeats of the context's instance.
        carried: Returns the offset that a pull of a queue commits on its way; 0 for none.
        on_unknown_member: Called when a broker does not have the member's subscription: it needs a heartbeat.
    """

    context: ClientContext
    group: str
    subscriptions: Mapping[str, MemberSubscription]
    carried: Callable[[MessageQueue], int]
    on_unknown_member: Callable[[], None]

    def __post_init__(self) -> None:
        self._settings = self.context.settings
        self._wire_group = self.context.namespace.wrap(self.group)
        self._retry_topic = RETRY_TOPIC_PREFIX + self.group

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        broker_id: int,
        may_wait: bool,
        done: Callable[[PullOutcome], None],
        /,
    ) -> None:
        """Send one pull; see `pull_loop.Pull`."""
        address = self.context.routes.address(queue.broker_name, broker_id)
        subscription = self.subscriptions[queue.topic].data
        carried = self.carried(queue)
        suspend = PullSysFlag.SUSPEND if may_wait and self._settings.suspend_ms else 0
        header = PullMessageRequestHeader(
            **self.context.namespace.queue_fields(queue),
            consumer_group=self._wire_group,
            queue_offset=queue_offset,
            max_msg_nums=self._settings.pull_batch_size,
            sys_flag=suspend | PullSysFlag.COMMIT_OFFSET if carried else suspend,
            commit_offset=carried,
            suspend_timeout_millis=self._settings.suspend_ms if may_wait else 0,
            sub_version=subscription.sub_version,  # the broker has the subscription from a heartbeat
            expression_type=subscription.expression_type,
            max_msg_bytes=_MAX_BYTES,
        )
        request = RemotingCommand.request(RequestCode.PULL_MESSAGE, header)
        instance = self.context.instance
        seen = instance.outages.changes

        def on_answer(answer: RemotingCommand | BrokerError) -> None:
            instance.report(address, answer, seen)
            done(self._outcome(queue, address, answer))

        instance.invoke_async(address, request, self._settings.pull_timeout_ms, on_answer)

    def _outcome(self, queue: MessageQueue, address: str, response: RemotingCommand | BrokerError) -> PullOutcome:
        retry_ms = self._settings.retry_after_error_ms
        if isinstance(response, BrokerError):
            return PullFailed(response, retry_ms)
        try:
            return self._read(queue, address, response)
        except Exception as exc:  # whatever a response holds: without an outcome the queue would not be pulled again
            return PullFailed(RemoteProtocolError(f"{address} sent an invalid response: {error_text(exc)}"), retry_ms)

    def _read(self, queue: MessageQueue, address: str, response: RemotingCommand) -> PullOutcome:
        if response.code not in PULL_RESPONSES:
            return self._refused(queue, address, response)
        header = response.header(PullMessageResponseHeader)
        messages, lags = [], False
        if response.code == ResponseCode.SUCCESS:
            found = decode_messages(response.body, queue.broker_name, self._settings.max_body_bytes)
            if found:
                self.context.sent.add_seen(queue.broker_name, found[-1].physical_offset)
            messages = matching_messages(found, self.subscriptions[queue.topic].selector)
            self._set_topics(queue, messages)
        elif response.code == ResponseCode.PULL_OFFSET_MOVED:
            _log.warning(
                "remote.offset_moved", topic=queue.topic, queue=queue.queue_id, next_offset=header.next_begin_offset
            )
        else:
            lags = header.max_offset < self.context.sent.queue_end(queue)
        return Pulled(messages, header.next_begin_offset, header.suggest_which_broker_id, lags)

    def _refused(self, queue: MessageQueue, address: str, response: RemotingCommand) -> PullFailed:
        is_unknown = response.code in _UNKNOWN_MEMBER
        if is_unknown:
            self.on_unknown_member()
        problem = response_error(response, f"group {self.group!r} reads {queue}", address)
        is_flow_control = response.code == ResponseCode.FLOW_CONTROL
        retry_ms = _FLOW_CONTROL_MS if is_flow_control else self._settings.retry_after_error_ms
        return PullFailed(problem, retry_ms, is_unknown)

    def _set_topics(self, queue: MessageQueue, messages: list[MessageExt]) -> None:
        """Give the messages the application's topic names."""
        for message in messages:
            message.topic = queue.topic
            if queue.topic == self._retry_topic and (original := message.properties.get(Property.RETRY_TOPIC)):
                message.topic = message.properties[Property.RETRY_TOPIC] = self.context.namespace.unwrap(original)
