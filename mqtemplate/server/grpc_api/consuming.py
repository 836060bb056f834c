"""Methods of consumers: assignments, receives, acknowledgements, changes of the invisible time, dead letters.

Source: RocketMQ ``proxy: RouteActivity``, ``ReceiveMessageActivity``, ``AckMessageActivity``,
``ChangeInvisibleDurationActivity``, ``ForwardMessageToDLQActivity``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any

from mqtemplate.engine.clients import Owner
from mqtemplate.engine.pop.pop import HeldPop, PopRequest, PopResult, PopService
from mqtemplate.engine.pop.receipt_handle import ReceiptHandle
from mqtemplate.errors import BrokerClosedError, MessageError, StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code, Permission
from mqtemplate.http2.grpc_server import GrpcCall
from mqtemplate.message import HostAddress
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.bodies.route import TopicConfig
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.server.core.server_core import ServerCore
from mqtemplate.server.grpc_api.answers import GrpcAnswers, broker_of, ok
from mqtemplate.server.grpc_api.checks import (
    MAX_INVISIBLE_MS,
    MIN_INVISIBLE_MS,
    check_group_name,
    check_topic_name,
)
from mqtemplate.server.grpc_api.client_settings import RECEIVE_BATCH_SIZE, max_attempts, poll_ms
from mqtemplate.server.grpc_api.clients import GrpcClients, filter_of
from mqtemplate.server.grpc_api.context import GrpcContext
from mqtemplate.server.grpc_api.encoded import ok_ack_answer
from mqtemplate.server.grpc_api.messages import RecordEncoder, milliseconds
from mqtemplate.server.grpc_api.status import GrpcRefusedError, error_status, overall, status
from mqtemplate.server.pulls.pull_checks import LONG_EXPRESSION
from mqtemplate.server.state.groups import mixed_group_error

_log = get_logger("mqtemplate.server")

_RENEWED_MS = 60_000
_BUSY_MS = 1_000
"""Time after which a message is visible again that was not sent because the server has too much work. At once, the next
receive would have the same end."""
_TURN_S = 0.001
_MAX_UNREAD_BYTES = 16 << 20
"""With more bytes of responses than this, which a connection does not read, its receives get no messages."""
_MAX_ACKS = 4_096
"""Most messages of one acknowledgement. RocketMQ's clients send one, or those of one receive."""
_RECEIPT_MS = 1_000
"""Time after which the server finds out if a push consumer has read its messages. Most are acknowledged by then."""
_INLINE_BYTES = 256 << 10
"""Longest sum of bodies that is answered in the thread that popped the messages: about a millisecond."""


class GrpcConsuming:
    """The methods of consumers. Each takes a context and a request, and returns the answer or None.

    Args:
        address: Returns the address of the endpoints in assignments.

    Attributes:
        pop: The service of POP.
    """

    def __init__(
        self,
        core: ServerCore,
        pop: PopService,
        answers: GrpcAnswers,
        clients: GrpcClients,
        address: Callable[[], HostAddress],
    ) -> None:
        self._core = core
        self.pop = pop
        self._answers = answers
        self._clients = clients
        self._address = address
        self._engine = core.registration.engine
        self._clock = self._engine.clock
        self._encoder = RecordEncoder(self._engine.settings.max_body_bytes)
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[_Receive, None]] = {}  # client ID -> its receives that wait
        self._soon: deque[Callable[[], None]] = deque()
        self._is_due = self._is_closed = False
        clients.on_leaving(self._end_of_client)

    # --- assignments ---------------------------------------------------------------------------

    def query_assignment(self, context: GrpcContext, request: Any) -> Any:
        """Assign a topic: each member gets all of it, since POP needs no assignment of queues."""
        topic, group = check_topic_name(request.topic.name), check_group_name(request.group.name)
        config = self._readable(topic)
        self._clients.queried_assignment(context)
        is_ordered = self._group(group).consume_message_orderly
        permission = Permission.READ_WRITE if config.perm & Perm.WRITE else Permission.READ
        broker = broker_of(self._engine.name, self._address())
        answer = protos.QueryAssignmentResponse(status=ok())
        for queue_id in range(config.read_queue_nums) if is_ordered else (-1,):
            answer.assignments.add().message_queue.CopyFrom(
                protos.MessageQueue(topic=request.topic, id=queue_id, permission=permission, broker=broker)
            )
        return answer

    def _readable(self, topic: str) -> TopicConfig:
        config = self._core.topics.get(topic)
        if not config.perm & Perm.READ or config.read_queue_nums <= 0:
            raise GrpcRefusedError(Code.FORBIDDEN, f"topic {topic!r} has no readable queue")
        return config

    def _group(self, group: str) -> SubscriptionGroupConfig:
        return self._core.groups.find(group) or SubscriptionGroupConfig(group_name=group)

    # --- receives ------------------------------------------------------------------------------

    def receive(self, context: GrpcContext, request: Any) -> None:
        """Check a receive, and hold it until there are messages. The queue that it names has no effect."""
        topic = check_topic_name(request.message_queue.topic.name)
        group = check_group_name(request.group.name)
        self._readable(topic)
        _check_unread(context.call)
        kind, expression = filter_of(request.filter_expression)
        is_known = self._core.subscriptions.find((kind, expression)) is not None
        if self._core.groups.find(group) is None or (len(expression) > LONG_EXPRESSION and not is_known):
            self._answers.later(context.call, lambda: self._receive(context, request, topic, group))
        else:
            self._receive(context, request, topic, group)

    def _receive(self, context: GrpcContext, request: Any, topic: str, group: str) -> None:
        client = self._clients.of(context)
        requested = request.long_polling_timeout
        wait_ms = poll_ms(
            milliseconds(requested) if request.HasField("long_polling_timeout") else None,
            context.left_ms(self._clock),
            client.request_timeout_ms,
            context.version,
        )
        invisible_ms = _RENEWED_MS if request.auto_renew else milliseconds(request.invisible_duration)
        if not MIN_INVISIBLE_MS <= invisible_ms <= MAX_INVISIBLE_MS:
            raise GrpcRefusedError(
                Code.ILLEGAL_INVISIBLE_TIME,
                f"the invisible duration must be {MIN_INVISIBLE_MS} ms to {MAX_INVISIBLE_MS} ms, got {invisible_ms} ms",
            )
        config = self._core.creations.group(context.caller, group)
        if not config.consume_enable:
            raise GrpcRefusedError(Code.FORBIDDEN, f"group {group!r} may not consume (consumeEnable)")
        if self._engine.groups.local.has_members(group):
            raise mixed_group_error(group)
        pop = PopRequest(
            group=group,
            topic=topic,
            max_count=min(max(request.batch_size, 1), RECEIVE_BATCH_SIZE),
            invisible_ms=invisible_ms,
            selector=self._core.subscriptions.compile(*filter_of(request.filter_expression)).selector,
            is_ordered=config.consume_message_orderly,
            attempt_id=request.attempt_id,
            max_attempts=max_attempts(config),
            priority_factor=config.priority_factor,
            client=client.client_id,
            session=client.client_id if request.auto_renew else "",
            awaits_receipt=request.auto_renew,
        )
        _Receive(self, context, pop).hold(wait_ms)

    # --- acknowledgements ----------------------------------------------------------------------

    def ack(self, context: GrpcContext, request: Any) -> None:
        group, topic = check_group_name(request.group.name), check_topic_name(request.topic.name)
        if not request.entries:
            raise GrpcRefusedError(Code.INTERNAL_SERVER_ERROR, "no message to acknowledge")
        if len(request.entries) > _MAX_ACKS:
            raise GrpcRefusedError(
                Code.BAD_REQUEST,
                f"the request acknowledges {len(request.entries)} messages, allowed are {_MAX_ACKS}; send several",
            )
        ack = _Ack(context, list(request.entries))
        for number, entry in enumerate(request.entries):
            try:
                handle = self.handle(context, entry.receipt_handle)
                if not self.pop.ack(group, topic, handle, partial(ack.done, number)):
                    raise superseded(entry.receipt_handle)
            except (MessageError, StoreError, GrpcRefusedError) as exc:
                ack.done(number, exc)

    def handle(self, context: GrpcContext, text: str) -> ReceiptHandle:
        """Return the handle of a request.

        Raises:
            GrpcRefusedError: It is not a handle of this broker, or has expired.
        """
        try:
            handle = ReceiptHandle.parse(text)
        except MessageError as exc:
            raise GrpcRefusedError(Code.INVALID_RECEIPT_HANDLE, str(exc)) from exc
        if handle.broker_name != self._engine.name:
            raise GrpcRefusedError(
                Code.BAD_REQUEST,
                f"the receipt handle is of broker {handle.broker_name!r}, this one is {self._engine.name!r}",
            )
        # A push consumer keeps the first handle while the server renews the delivery.
        client = self._clients.find(context)
        is_fixed = client is not None and client.kind == ClientType.SIMPLE_CONSUMER
        if is_fixed and handle.expires_ms <= self._clock.now_ms():
            raise superseded(text)
        return handle

    def change_invisible(self, context: GrpcContext, request: Any) -> None:
        group, topic = check_group_name(request.group.name), check_topic_name(request.topic.name)
        invisible_ms = milliseconds(request.invisible_duration)
        if not 0 <= invisible_ms <= MAX_INVISIBLE_MS:
            raise GrpcRefusedError(
                Code.ILLEGAL_INVISIBLE_TIME,
                f"the invisible duration must be 0 ms to {MAX_INVISIBLE_MS} ms, got {invisible_ms} ms",
            )
        handle = self.handle(context, request.receipt_handle)
        answer = _WhenBoth(context)
        changed = self.pop.change_invisible(
            group, topic, handle, invisible_ms, answer.durable, counts=not request.suspend
        )
        if changed is None:
            raise superseded(request.receipt_handle)
        answer.complete(protos.ChangeInvisibleDurationResponse(status=ok(), receipt_handle=changed.text))

    def forward(self, context: GrpcContext, request: Any) -> None:
        """Store a message in the dead letter topic of its group. The topic may have to be created."""
        group, topic = check_group_name(request.group.name), check_topic_name(request.topic.name)
        handle = self.handle(context, request.receipt_handle)
        self._answers.later(context.call, lambda: self._forward(context, group, topic, handle))

    def _forward(self, context: GrpcContext, group: str, topic: str, handle: ReceiptHandle) -> None:
        answer = _WhenBoth(context)
        if not self.pop.dead_letter(group, topic, handle, answer.durable):
            raise superseded(handle.text)
        answer.complete(protos.ForwardMessageToDeadLetterQueueResponse(status=ok()))

    # --- deliveries ----------------------------------------------------------------------------

    def began(self, receive: _Receive, client_id: str, owner: Owner) -> None:
        """Note a receive that waits. It counts as a held pull."""
        self._core.limits.pulls.take(owner)
        with self._lock:
            self._waiting.setdefault(client_id, {})[receive] = None

    @property
    def is_closed(self) -> bool:
        """True when the server stops: no receive waits."""
        return self._is_closed

    def ended(self, receive: _Receive, client_id: str, owner: Owner) -> None:
        """Note that a receive waits no longer."""
        with self._lock:
            of_client = self._waiting[client_id]
            del of_client[receive]
            if not of_client:
                del self._waiting[client_id]
        self._core.limits.pulls.give(owner)

    def _end_of_client(self, client_id: str) -> None:
        """Answer the receives of a client that wait: it leaves."""
        with self._lock:
            found = list(self._waiting.get(client_id, ()))
        self.do_soon([receive.stop for receive in found])

    def do_soon(self, work: Iterable[Callable[[], None]]) -> None:
        """Do short work in the I/O thread, for a millisecond at a time.

        A client that leaves may have thousands of receives and messages. The other clients are served meanwhile.
        """
        with self._lock:
            self._soon.extend(work)
            is_closed, is_due = self._is_closed, self._is_due or not self._soon
            self._is_due = bool(self._soon)
        if is_closed:
            self._do_some(float("inf"))  # the I/O thread calls no timers any more
        elif not is_due:
            self._clients.call_later(0, self._do_some)

    def _do_some(self, seconds: float = _TURN_S) -> None:
        end_s = time.monotonic() + seconds
        while True:
            with self._lock:
                work = self._soon.popleft() if self._soon else None
                self._is_due = work is not None
            if work is None:
                return
            try:
                work()
            except Exception:  # the rest of the work is of other clients
                _log.exception("server.receive_not_ended")
            if time.monotonic() >= end_s:
                break
        self._clients.call_later(0, self._do_some)

    def answer_for(self, accounts: Set[str]) -> None:
        """Answer the receives that wait of accounts whose rights have changed: their next ones are checked again."""
        with self._lock:
            found = [receive for of_client in self._waiting.values() for receive in of_client]
        self.do_soon([receive.stop for receive in found if receive.account in accounts])

    def close(self) -> None:
        """Answer the receives that wait: the server stops."""
        with self._lock:
            self._is_closed = True
            found = [receive for of_client in self._waiting.values() for receive in of_client]
        for receive in found:
            receive.stop()

    def deliver(self, context: GrpcContext, receive: _Receive, result: PopResult) -> None:
        """Answer a receive with the messages that were popped for it."""
        if result.is_full:
            self._answers.fail(context.call, _too_many())
        elif not result.messages:
            self.answer_empty(context)
        elif context.call.connection.unread_bytes > _MAX_UNREAD_BYTES:  # many receives waited
            receive.put_back(result, _BUSY_MS)
            self._answers.fail(context.call, _unread(context.call))
        elif _is_long(result):
            held_bytes = sum(len(each.record.body) for each in result.messages)
            self._answers.later(context.call, lambda: receive.send(result), held_bytes)
            if not context.call.is_open:  # it was refused, since too much work waits, or its client is gone
                receive.put_back(result, _BUSY_MS)
        else:
            receive.send(result)

    def fail(self, context: GrpcContext, error: Exception) -> None:
        """Answer a receive whose messages could not be sent."""
        self._answers.fail(context.call, error)

    def answer_empty(self, context: GrpcContext) -> None:
        """Answer a receive for which there was no message."""
        self._answers.end_receive(context.call, status(Code.MESSAGE_NOT_FOUND, "no new message"))

    def send(self, context: GrpcContext, topic: str, result: PopResult) -> None:
        """Send messages, and end the receive."""
        encode = self._encoder.encode
        messages = (encode(each.record, topic, each.handle.text, each.attempt) for each in result.messages)
        self._answers.end_receive(context.call, ok(), messages)

    def find_receipt(self, context: GrpcContext, request: PopRequest, handles: Sequence[ReceiptHandle]) -> None:
        """Let the messages of a receive be renewed once their client has read the response.

        Else they come again after a minute: no client may have them, even if the socket has accepted the response. In
        the meantime a client resets a call whose deadline has passed before it has read all of it.
        """
        self._clients.call_later(_RECEIPT_MS, partial(self._find_receipt, context, request, handles))

    def _find_receipt(self, context: GrpcContext, request: PopRequest, handles: Sequence[ReceiptHandle]) -> None:
        received = partial(self._received, request, handles)
        if (
            self._clients.has(request.session)
            and self.pop.is_awaiting_receipt(request.group, request.topic, handles)
            and not context.call.when_read(received)
        ):
            self.find_receipt(context, request, handles)

    def _received(self, request: PopRequest, handles: Sequence[ReceiptHandle]) -> None:
        # A client that ended while the messages were popped for it: no one would end their renewal.
        if self._clients.has(request.session):
            self.pop.received(request.group, request.topic, handles)

    def release_soon(self, request: PopRequest, handles: Sequence[ReceiptHandle]) -> None:
        """Make messages visible again that their client did not get, a few at a time."""
        self.do_soon([partial(self.release, request, [handle]) for handle in handles])

    def release(self, request: PopRequest, handles: Sequence[ReceiptHandle], invisible_ms: int = 0) -> None:
        """Make messages visible again that their client did not get; this was no attempt."""
        for handle in handles:
            try:
                self.pop.change_invisible(request.group, request.topic, handle, invisible_ms, _ignore, counts=False)
            except (BrokerClosedError, StoreError) as exc:  # it becomes visible when its time is over
                _log.debug("server.receive_not_released", topic=request.topic, reason=str(exc))


class _Receive:
    """One receive that may wait for messages. Thread-safe.

    It waits until it has a result, its client leaves or is gone, or the server stops. Messages of a result are sent or
    put back, one of both. Those that were sent, but that the socket had not accepted when the call ended, are put back.
    """

    def __init__(self, consuming: GrpcConsuming, context: GrpcContext, request: PopRequest) -> None:
        self._consuming = consuming
        self._context = context
        self._request = request
        self._lock = threading.Lock()
        self._is_waiting = True
        self._is_settled = False
        self._result: PopResult | None = None
        self._held: HeldPop | None = None

    @property
    def account(self) -> str | None:
        """Access key of the client."""
        return self._context.caller.account

    def hold(self, wait_ms: int) -> None:
        """Wait for messages."""
        call = self._context.call
        self._consuming.began(self, self._context.client_id, self._context.caller.owner)
        call.on_closed, call.on_leaving = self._on_closed, self._on_leaving
        try:
            self._held = self._consuming.pop.hold(self._request, wait_ms, self._on_result)
        except Exception:
            self._end_wait()
            raise
        if not call.is_open:  # it was closed before `on_closed` was set
            self._on_closed()
        if self._consuming.is_closed:  # `close` has not found it
            self.stop()
        if not self._is_waiting:  # another thread has ended it before the pop was held
            self._held.cancel()

    def _end_wait(self) -> bool:
        """Return True the first time."""
        with self._lock:
            was_waiting, self._is_waiting = self._is_waiting, False
        if was_waiting:
            self._consuming.ended(self, self._context.client_id, self._context.caller.owner)
        return was_waiting

    def _settle(self) -> bool:
        """Return True the first time."""
        with self._lock:
            was_settled, self._is_settled = self._is_settled, True
        return not was_settled

    def _on_result(self, result: PopResult) -> None:
        if not self._end_wait():  # it was cancelled meanwhile
            self._consuming.release(self._request, _handles(result))
            return
        self._result = result
        try:
            self._consuming.deliver(self._context, self, result)
        except Exception as exc:  # the thread of POP serves the other receives next
            self._consuming.fail(self._context, exc)
        if not self._context.call.is_open:
            self.put_back(result)

    def send(self, result: PopResult) -> None:
        """Send the messages of the result."""
        call = self._context.call
        if call.is_open and self._settle():
            self._result = None  # not the bodies, too, while the client does not permit to send them
            handles = _handles(result)
            call.on_unsent = partial(self._on_unsent, handles)
            self._consuming.send(self._context, self._request.topic, result)
            if self._request.awaits_receipt:
                self._consuming.find_receipt(self._context, self._request, handles)

    def _on_unsent(self, handles: list[ReceiptHandle], sent: int) -> None:
        """The client is gone before the socket has accepted all messages. The first of those *sent* is the status."""
        self._consuming.release_soon(self._request, handles[max(sent - 1, 0) :])

    def put_back(self, result: PopResult, invisible_ms: int = 0) -> None:
        """Make the messages of the result visible again, unless they were sent."""
        if self._settle():
            self._consuming.release(self._request, _handles(result), invisible_ms)

    def _on_closed(self) -> None:
        """The client is gone, or its deadline has passed."""
        if self._end_wait():
            if self._held is not None:
                self._held.cancel()
        elif (result := self._result) is not None:
            self.put_back(result)

    def _on_leaving(self) -> None:
        self._consuming.do_soon([self.stop])

    def stop(self) -> None:
        """Answer that there are no messages."""
        if self._end_wait():
            if self._held is not None:
                self._held.cancel()
            self._consuming.answer_empty(self._context)


class _Ack:
    """Answers an acknowledgement when all its entries have a result. Thread-safe."""

    def __init__(self, context: GrpcContext, entries: list[Any]) -> None:
        self._context = context
        self._entries = entries
        self._results: dict[int, Exception | None] = {}
        self._lock = threading.Lock()

    def done(self, number: int, error: Exception | None) -> None:
        """Note the result of one entry."""
        with self._lock:
            if number in self._results:
                return
            self._results[number] = error
            if len(self._results) < len(self._entries):
                return
        self._context.call.reply(ack_answer(self._entries, [self._results[at] for at in range(len(self._entries))]))


def ack_answer(entries: Sequence[Any], results: Sequence[Exception | None]) -> bytes:
    """Return the answer to an acknowledgement whose entries have these results."""
    if len(entries) == 1 and results[0] is None:
        return ok_ack_answer(entries[0].message_id, entries[0].receipt_handle)
    answer, codes = protos.AckMessageResponse(), []
    for entry, problem in zip(entries, results, strict=True):
        result = answer.entries.add()
        result.message_id, result.receipt_handle = entry.message_id, entry.receipt_handle
        result.status.CopyFrom(ok() if problem is None else error_status(problem))
        codes.append(Code(result.status.code))
    code = overall(codes)
    answer.status.CopyFrom(answer.entries[0].status if code is not Code.MULTIPLE_RESULTS else status(code))
    return bytes(answer.SerializeToString())


class _WhenBoth:
    """Answers when the answer is known and what it reports is durable, in any order. Thread-safe."""

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._answer: Any = None
        self._is_durable = False
        self._error: Exception | None = None

    def durable(self, error: Exception | None) -> None:
        with self._lock:
            self._is_durable, self._error = True, error
            answer = self._answer
        if answer is not None:
            self._reply(answer)

    def complete(self, answer: Any) -> None:
        with self._lock:
            self._answer = answer
            is_durable = self._is_durable
        if is_durable:
            self._reply(answer)

    def _reply(self, answer: Any) -> None:
        if self._error is not None:
            answer.status.CopyFrom(error_status(self._error))
        self._context.call.reply(answer.SerializeToString())


def _handles(result: PopResult) -> list[ReceiptHandle]:
    return [popped.handle for popped in result.messages]


def _is_long(result: PopResult) -> bool:
    """Return True if the answer takes longer than a millisecond: it is large, or bodies must be decompressed."""
    records = [each.record for each in result.messages]
    return sum(len(record.body) for record in records) > _INLINE_BYTES or any(
        record.sys_flag & SysFlag.COMPRESSED for record in records
    )


def superseded(handle: str) -> GrpcRefusedError:
    """Return the error for a handle whose delivery is over."""
    return GrpcRefusedError(
        Code.INVALID_RECEIPT_HANDLE,
        f"the receipt handle {handle[:128]!r} has expired, or a newer delivery of the message replaced it",
    )


def _check_unread(call: GrpcCall) -> None:
    """Refuse a receive of a client that does not read what it received: the messages would fill the memory."""
    if call.connection.unread_bytes > _MAX_UNREAD_BYTES:
        raise _unread(call)


def _unread(call: GrpcCall) -> GrpcRefusedError:
    return GrpcRefusedError(
        Code.TOO_MANY_REQUESTS,
        f"{call.connection.unread_bytes} bytes of responses wait until the client reads them, allowed are "
        f"{_MAX_UNREAD_BYTES}; receive more when it has read them",
    )


def _too_many() -> GrpcRefusedError:
    return GrpcRefusedError(Code.TOO_MANY_REQUESTS, "too many receives wait for messages; try again later")


def _ignore(error: Exception | None) -> None:
    """Take the result of a change that no client waits for."""
