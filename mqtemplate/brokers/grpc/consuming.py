"""Consumption by POP over gRPC: members of groups, receives, and the fate of each received message.

Source: RocketMQ ``client-java: SimpleConsumerImpl``, ``ConsumerImpl``; ``proxy: ReceiveMessageActivity``.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel, PopConsumers, ReceivedMessage
from mqtemplate.brokers.grpc.channels import RpcError, check_status, is_cancelled, rpc_error
from mqtemplate.brokers.grpc.messages import decode_received, is_intact
from mqtemplate.brokers.grpc.sessions import ClientSession, ProxyContext, RouteQueue, Routes, endpoints_message
from mqtemplate.brokers.grpc.settings import Endpoints
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    InvalidReceiptHandleError,
    ListenerError,
    MQTemplateError,
    UnsupportedError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code, FilterType, Permission
from mqtemplate.selectors.tags import Selector, TagSelector

_log = get_logger("mqtemplate.remote")

_SHORTEST_POLL_MS = 5_000  # a proxy waits so long in any case; RocketMQ: grpcClientConsumerMinLongPollingTimeoutMillis
_LONGEST_POLL_MS = 20_000
_MOST_AT_ONCE = 32
_MOST_ACKS = 32
_MOST_RECEIPTS = 100_000
_CORRUPT_MS = 10_000


class _Origin(NamedTuple):
    """Origin of a receipt handle: the proxy that gave it renews it, under the id of its message."""

    msg_id: str
    endpoints: Endpoints


@dataclass(eq=False)
class _ReceiveCall:
    """One running request for messages."""

    call: Any
    has_answer: bool = False

    def stop(self) -> None:
        """End the wait. Once messages arrive it is left alone: the proxy has made them invisible."""
        if not self.has_answer:
            self.call.cancel()


@dataclass(eq=False)
class _ReceivingGroup:
    """The member of one group that this client is."""

    spec: ConsumerSpec
    session: ClientSession
    registrations: int = 0
    receives: set[_ReceiveCall] = field(default_factory=set)
    is_closed: bool = False


class _Registration:
    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()


class GrpcPop(PopConsumers):
    """Consumption by POP.

    All registrations of one group in this client are one member for the proxy.
    """

    def __init__(self, context: ProxyContext, routes: Routes) -> None:
        self._context = context
        self._routes = routes
        self._lock = threading.Lock()
        self._groups: dict[str, _ReceivingGroup] = {}
        self._origins: OrderedDict[str, _Origin] = OrderedDict()

    def sessions(self) -> list[ClientSession]:
        """Return the sessions of all groups."""
        return [each.session for each in list(self._groups.values())]

    def session_of(self, group: str) -> ClientSession:
        """Return the session of a group that has a member here."""
        return self._group(group).session

    # --- members -------------------------------------------------------------------------------

    def join(self, spec: ConsumerSpec) -> _Registration:
        """See `PopConsumers.join`."""
        _check_spec(spec)
        endpoints = {each: None for topic in spec.subscriptions for each in self._routes.get(topic).endpoints}
        with self._lock:
            group = self._groups.get(spec.group)
            if group is None:
                group = self._groups[spec.group] = _ReceivingGroup(spec, self._new_session(spec))
            elif group.spec.subscriptions != spec.subscriptions:
                raise ListenerError(
                    f"group {spec.group!r} has a member in this process with other subscriptions "
                    f"({_described(group.spec)}, and now {_described(spec)}); give all members the same ones, or "
                    "another group"
                )
            group.registrations += 1
        try:
            group.session.join(list(endpoints))
        except BaseException:
            self._leave(group)
            raise
        if spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
            # The protocol always says "last"; a broker starts a new group of a young topic at the first message anyway.
            _log.debug("group.start_chosen", group=spec.group, by="the broker")
        return _Registration(lambda: self._leave(group))

    def _new_session(self, spec: ConsumerSpec) -> ClientSession:
        def fill(settings: Any) -> None:
            settings.subscription.group.CopyFrom(self._context.resource(spec.group))
            for topic, selector in spec.subscriptions.items():
                entry = settings.subscription.subscriptions.add()
                entry.topic.CopyFrom(self._context.resource(topic))
                entry.expression.CopyFrom(_filter(selector))

        title = f"a member of group {spec.group!r}"
        return ClientSession(self._context, ClientType.PUSH_CONSUMER, title, fill, group=spec.group)

    def _leave(self, group: _ReceivingGroup) -> None:
        with self._lock:
            group.registrations -= 1
            if group.registrations or self._groups.get(group.spec.group) is not group:
                return
            del self._groups[group.spec.group]
        self._end(group)

    @staticmethod
    def _end(group: _ReceivingGroup) -> None:
        group.is_closed = True
        for receive in list(group.receives):
            receive.stop()
        group.session.leave()

    def _group(self, name: str) -> _ReceivingGroup:
        found = self._groups.get(name)
        if found is None:
            raise BrokerClosedError(f"group {name!r} has no member here; call join first")
        return found

    def close(self) -> None:
        """Leave all groups; receives that wait end."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            self._end(group)

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

        Without messages it takes five seconds at least: a proxy waits so long in any case, and RocketMQ's goes on after
        the client has ended the request; messages that arrive then would be invisible to everyone for seconds.

        Of several brokers all are asked at once; the requests that still wait when the first messages are there are
        ended. Whether messages are in order is a setting of the group at the broker.
        """
        member = self._group(group)
        if is_ordered:
            self.check_ordered(group)
        queues = self._routes.get(topic).of_brokers()
        if not queues:
            self._routes.forget(topic)
            raise BrokerError(
                f"topic {topic!r} has no readable queue: its permission forbids reading (mqadmin topicRoute)"
            )
        request = protos.ReceiveMessageRequest(
            group=self._context.resource(group),
            filter_expression=_filter(selector),
            batch_size=min(max(max_count, 1), _MOST_AT_ONCE),
            auto_renew=auto_renew,
        )
        if not auto_renew:
            request.invisible_duration.FromMilliseconds(invisible_ms)
        if attempt_id:
            request.attempt_id = attempt_id
        deadline = time.monotonic() + wait_ms / 1_000
        receiving = _Receiving(self, member, request, selector, deadline)
        if len(queues) == 1:
            return receiving.from_one(queues[0])
        return receiving.from_all(queues)

    def check_ordered(self, group: str) -> None:
        """Raise `UnsupportedError` if the broker does not keep the messages of a group in order."""
        merged = self._group(group).session.merged
        if merged is not None and not merged.subscription.fifo:
            raise UnsupportedError(
                f"group {group!r} is not one for messages in order, and over gRPC the group decides; let an "
                f"administrator change it: mqadmin updateSubGroup -c DefaultCluster -g {group} -o true"
            )

    def wake(self, group: str) -> None:
        """See `PopConsumers.wake`."""
        found = self._groups.get(group)
        for receive in [] if found is None else list(found.receives):
            receive.stop()

    def remember(self, received: ReceivedMessage, endpoints: Endpoints) -> None:
        """Note which proxy gave a receipt handle."""
        with self._lock:
            self._origins[received.receipt] = _Origin(received.message.msg_id, endpoints)
            if len(self._origins) > _MOST_RECEIPTS:
                self._origins.popitem(last=False)

    # --- fate of a message ---------------------------------------------------------------------

    def ack_all(self, group: str, topic: str, receipts: Sequence[str]) -> list[MQTemplateError | None]:
        """See `PopConsumers.ack_all`. Each proxy gets the messages that it gave, in few requests."""
        results: dict[str, MQTemplateError | None] = {}
        of_proxy: dict[Endpoints, list[tuple[str, str]]] = {}
        for receipt in receipts:
            try:
                origin = self._origin(topic, receipt)
            except MQTemplateError as exc:  # this client has not received it, and gets no route
                results[receipt] = exc
            else:
                of_proxy.setdefault(origin.endpoints, []).append((origin.msg_id, receipt))
        for endpoints, entries in of_proxy.items():
            for start in range(0, len(entries), _MOST_ACKS):
                some = entries[start : start + _MOST_ACKS]
                try:
                    results |= self._ack_some(group, topic, endpoints, some)
                except MQTemplateError as exc:
                    results |= dict.fromkeys((receipt for _, receipt in some), exc)
        return [results[receipt] for receipt in receipts]

    def _ack_some(
        self, group: str, topic: str, endpoints: Endpoints, entries: Sequence[tuple[str, str]]
    ) -> dict[str, MQTemplateError | None]:
        """Send one request. Return the result for each receipt handle."""
        request = protos.AckMessageRequest(
            group=self._context.resource(group),
            topic=self._context.resource(topic),
            entries=[protos.AckMessageEntry(message_id=msg_id, receipt_handle=receipt) for msg_id, receipt in entries],
        )
        of_one = f"message {entries[0][0]}" if len(entries) == 1 else f"{len(entries)} messages"
        operation = f"acknowledge {of_one} of {topic!r}"
        answer = self._request(group, endpoints, "AckMessage", request, operation)
        if not answer.entries:
            check_status(answer.status, operation, endpoints)
        results: dict[str, MQTemplateError | None] = {receipt: None for _, receipt in entries}
        for entry, (msg_id, receipt) in zip(answer.entries, entries, strict=False):
            try:
                check_status(entry.status, f"acknowledge message {entry.message_id or msg_id} of {topic!r}", endpoints)
            except MQTemplateError as exc:
                results[entry.receipt_handle or receipt] = exc
        for receipt, error in results.items():
            if error is None or isinstance(error, InvalidReceiptHandleError):
                self._forget(receipt)
        return results

    def change_all(
        self, group: str, topic: str, receipts: Sequence[str], invisible_ms: int, *, counts: bool = True
    ) -> list[str | MQTemplateError]:
        """See `PopConsumers.change_all`. The protocol has one request for each message: some are sent at a time."""
        results: list[str | MQTemplateError] = []
        for start in range(0, len(receipts), _MOST_AT_ONCE):
            some = receipts[start : start + _MOST_AT_ONCE]
            answers = [self._start_change(group, topic, receipt, invisible_ms, counts) for receipt in some]
            results += [answer() for answer in answers]
        return results

    def _start_change(
        self, group: str, topic: str, receipt: str, invisible_ms: int, counts: bool
    ) -> Callable[[], str | MQTemplateError]:
        """Send a request. Return a function that waits for its result."""
        try:
            origin, session = self._origin(topic, receipt), self._group(group).session
            request = protos.ChangeInvisibleDurationRequest(
                group=self._context.resource(group),
                topic=self._context.resource(topic),
                receipt_handle=receipt,
                message_id=origin.msg_id,
                suspend=not counts,
            )
            request.invisible_duration.FromMilliseconds(invisible_ms)
            operation = f"change the invisible time of message {origin.msg_id} of {topic!r}"
            answers: SimpleQueue[Any] = SimpleQueue()
            session.start_request(origin.endpoints, "ChangeInvisibleDuration", request, operation, answers.put)
        except MQTemplateError as exc:
            failure = exc
            return lambda: failure

        def result() -> str | MQTemplateError:
            answer = answers.get()
            if isinstance(answer, MQTemplateError):
                return answer
            try:
                check_status(answer.status, operation, origin.endpoints)
            except MQTemplateError as exc:
                return exc
            new = str(answer.receipt_handle) or receipt
            with self._lock:
                self._origins.pop(receipt, None)
                self._origins[new] = origin
            return new

        return result

    def dead_letter(
        self, group: str, topic: str, received: ReceivedMessage, properties: Mapping[str, str] | None = None
    ) -> None:
        """See `PopConsumers.dead_letter`. The protocol does not carry *properties*."""
        origin = self._origin(topic, received.receipt)
        member = self._groups.get(group)
        most = 17 if member is None else member.spec.max_reconsume_times + 1
        request = protos.ForwardMessageToDeadLetterQueueRequest(
            group=self._context.resource(group),
            topic=self._context.resource(topic),
            receipt_handle=received.receipt,
            message_id=received.message.msg_id,
            delivery_attempt=received.attempt,
            max_delivery_attempts=most,
        )
        operation = f"store message {received.message.msg_id} of {topic!r} as a dead letter"
        answer = self._request(group, origin.endpoints, "ForwardMessageToDeadLetterQueue", request, operation)
        check_status(answer.status, operation, origin.endpoints)
        self._forget(received.receipt)

    def _request(self, group: str, endpoints: Endpoints, method: str, request: Any, operation: str) -> Any:
        return self._group(group).session.request(endpoints, method, request, operation)

    def _origin(self, topic: str, receipt: str) -> _Origin:
        found = self._origins.get(receipt)
        return _Origin("", self._routes.get(topic).endpoints[0]) if found is None else found

    def _forget(self, receipt: str) -> None:
        with self._lock:
            self._origins.pop(receipt, None)


@dataclass(frozen=True, slots=True)
class _Receiving:
    """One call of `GrpcPop.receive`."""

    pop: GrpcPop
    member: _ReceivingGroup
    request: Any
    selector: Selector | None
    deadline: float

    def from_all(self, queues: Sequence[RouteQueue]) -> list[ReceivedMessage]:
        """Receive from several brokers at once."""
        found: list[ReceivedMessage] = []
        failures: list[BrokerError] = []
        lock = threading.Lock()

        def receive(queue: RouteQueue) -> None:
            messages: list[ReceivedMessage] = []
            try:
                messages = self.from_one(queue)
            except BrokerError as exc:
                failures.append(exc)
            with lock:
                is_first = bool(messages) and not found
                found.extend(messages)
            if is_first:
                for other in list(self.member.receives):
                    other.stop()

        threads = [threading.Thread(target=receive, args=(queue,), daemon=True) for queue in queues[1:]]
        for thread in threads:
            thread.start()
        receive(queues[0])
        for thread in threads:
            thread.join()
        if not found and failures:
            raise failures[0]
        return found

    def from_one(self, queue: RouteQueue) -> list[ReceivedMessage]:
        """Receive from one broker, for as long as the deadline allows."""
        while True:
            left_ms = max(0, int((self.deadline - time.monotonic()) * 1_000))
            messages, is_over = self._poll(queue, left_ms)
            if messages or is_over or time.monotonic() >= self.deadline:
                return messages

    def _poll(self, queue: RouteQueue, left_ms: int) -> tuple[list[ReceivedMessage], bool]:
        """Send one request. Return the messages, and True if the wait was ended from here."""
        member, context = self.member, self.member.session.context
        poll_ms = min(max(left_ms, _SHORTEST_POLL_MS), _LONGEST_POLL_MS)
        timeout_ms = poll_ms + context.settings.request_timeout_ms
        request = protos.ReceiveMessageRequest()
        request.CopyFrom(self.request)
        request.long_polling_timeout.FromMilliseconds(poll_ms)
        request.message_queue.CopyFrom(_queue_message(context, queue))
        call = context.channels.stream(queue.endpoints, member.session.id, "ReceiveMessage", request, timeout_ms)
        receive = _ReceiveCall(call)
        member.receives.add(receive)
        operation = f"receive messages of {queue.queue.topic!r}"
        try:
            if member.is_closed:
                receive.stop()
            return self._read(receive, queue, operation), False
        except RpcError as exc:
            if not is_cancelled(exc):
                raise rpc_error(exc, operation, queue.endpoints, timeout_ms) from exc
            if member.is_closed:
                raise BrokerClosedError.during(
                    operation, "the member has left its group, or the client closes"
                ) from exc
            return [], True
        finally:
            member.receives.discard(receive)

    def _read(self, receive: _ReceiveCall, queue: RouteQueue, operation: str) -> list[ReceivedMessage]:
        messages: list[ReceivedMessage] = []
        for answer in receive.call:
            kind = answer.WhichOneof("content")
            if kind == "status" and answer.status.code != Code.MESSAGE_NOT_FOUND:
                receive.has_answer = answer.status.code == Code.OK
                check_status(answer.status, operation, queue.endpoints)
            elif kind == "message":
                receive.has_answer = True
                if (message := self._accepted(answer.message, queue)) is not None:
                    messages.append(message)
        return messages

    def _accepted(self, given: Any, queue: RouteQueue) -> ReceivedMessage | None:
        """Return a message for the caller; None for one that was damaged on the way, or that was not requested."""
        settings = self.member.session.context.settings
        received = decode_received(given, queue.queue.broker_name, settings.max_body_bytes)
        self.pop.remember(received, queue.endpoints)
        message, group = received.message, self.member.spec.group
        try:
            if not is_intact(given):
                _log.error("message.corrupt", topic=message.topic, msg_id=message.msg_id, group=group)
                self.pop.change_invisible(group, message.topic, received.receipt, _CORRUPT_MS)
                return None
            # A broker compares the hashes of tags only.
            if isinstance(self.selector, TagSelector) and not self.selector.matches(message.properties):
                self.pop.ack(group, message.topic, received.receipt)
                return None
        except BrokerError as exc:
            _log.warning("message.release_failed", topic=message.topic, msg_id=message.msg_id, reason=str(exc))
            return None
        return received


def _queue_message(context: ProxyContext, queue: RouteQueue) -> Any:
    broker = protos.Broker(name=queue.queue.broker_name, endpoints=endpoints_message(queue.endpoints))
    return protos.MessageQueue(
        topic=context.resource(queue.queue.topic),
        id=queue.queue.queue_id,
        broker=broker,
        permission=int(Permission.READ_WRITE if queue.is_writable else Permission.READ),
    )


def _filter(selector: Selector | None) -> Any:
    if selector is None or selector.selects_all:
        return protos.FilterExpression(type=int(FilterType.TAG), expression="*")
    if isinstance(selector, TagSelector):
        return protos.FilterExpression(type=int(FilterType.TAG), expression=" || ".join(sorted(selector.tags)))
    return protos.FilterExpression(type=int(FilterType.SQL), expression=selector.expression)


def _check_spec(spec: ConsumerSpec) -> None:
    """Raise `UnsupportedError` for what a proxy does not have."""
    if spec.message_model is not MessageModel.CLUSTERING:
        raise UnsupportedError(
            f"group {spec.group!r}: RocketMQ's gRPC protocol has no broadcasting groups; give each process a group of "
            "its own, or use rocketmq.name-server"
        )
    if spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
        raise UnsupportedError(
            f"group {spec.group!r}: over gRPC the broker chooses where a new group starts; leave consume_from_where "
            "out, and let an administrator set the offsets (mqadmin resetOffsetByTime)"
        )


def _described(spec: ConsumerSpec) -> str:
    return ", ".join(f"{topic}: {selector.expression}" for topic, selector in spec.subscriptions.items())
