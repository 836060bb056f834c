"""Requests of POP consumers, codes 200050 to 200055 and 200151: clients pop messages, acknowledge them, and change the
times for which they are invisible.

Source: RocketMQ ``broker: PopMessageProcessor``, ``AckMessageProcessor``, ``ChangeInvisibleTimeProcessor``,
``PeekMessageProcessor``, ``NotificationProcessor``, ``PollingInfoProcessor``.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from mqtemplate.engine.engine import Engine
from mqtemplate.engine.pop.receipt_handle import (
    NORMAL_TOPIC,
    ORDERED_REVIVE_QUEUE,
    RETRY_V1,
    RETRY_V2,
    ReceiptHandle,
    retry_topic_v1,
    retry_topic_v2,
)
from mqtemplate.engine.pop.requests import PoppedMessage, PopRequest, PopResult
from mqtemplate.errors import MessageError
from mqtemplate.key_limits import MAX_IN_FLIGHT_PER_KEY, KeyLimits, parse_rate
from mqtemplate.message import MessageQueue, Property
from mqtemplate.record.codec import RecordDraft, StoredRecord, without_check
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import pop as headers
from mqtemplate.remoting.protocol.headers.pop import PopMessageRequestHeader, PopMessageResponseHeader, PoppedQueue
from mqtemplate.server.acl.callers import Callers
from mqtemplate.server.pulls.client_pops import ClientPops, WaitingNotification
from mqtemplate.server.pulls.pull_checks import LONG_EXPRESSION, PullChecks, Subscriptions
from mqtemplate.server.pulls.raw_reader import RawQuery, RawReader
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.state.groups import ClientCreations
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs

_MAX_COUNT = 32
"""Most messages of one pop. Source: ``PopMessageProcessor``."""
_LATE_MS = 500
"""A pop that arrives later than this after its deadline has no effect: its client does not wait any more."""
_MAX_INVISIBLE_MS = 365 * 86_400_000
_MAX_ATTEMPT_ID = 256
_MAX_BATCH = 4_096
"""Most messages that one request acknowledges."""
_MAX_BITS_BYTES = 1 << 17
"""Most bytes of a bit set. A message that is visible again may be a million before the others of its pop."""


@dataclass(frozen=True, slots=True)
class PopProcessor:
    """Pops messages for remote clients. A pop without messages is held without a thread: see `ClientPops`."""

    engine: Engine
    callers: Callers
    settings: BrokerServerSettings
    creations: ClientCreations
    checks: PullChecks
    subscriptions: Subscriptions
    raw: RawReader
    pops: ClientPops
    deferred_work: DeferredWork

    # --- pop -----------------------------------------------------------------------------------

    @handles(RequestCode.POP_MESSAGE)
    def _process(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(PopMessageRequestHeader)
        if self.creations.groups.find(header.consumer_group) is not None:
            return self._pop(connection, request, header, may_compile=False)
        return self.deferred_work.run(connection, request, partial(self._pop, connection, request, header))

    def _pop(
        self,
        connection: Connection,
        request: RemotingCommand,
        header: PopMessageRequestHeader,
        *,
        may_compile: bool = True,
    ) -> RemotingCommand | None:
        wait_ms = self._wait_ms(header.born_time, header.poll_time)
        if wait_ms < -_LATE_MS:
            remark = (
                f"the request arrived {-wait_ms} ms after its time to wait ended, if the clocks of client and broker "
                "agree; its client does not wait any more"
            )
            return request.response(ResponseCode.POLLING_TIMEOUT, self._response_header(header), remark=remark)
        caller = self.callers.of(connection, request)
        _check_pop(header)
        group = self._checked(caller, header.consumer_group, header.topic, header.queue_id)
        expression = (header.exp_type, header.exp or "*")
        compiled = self.subscriptions.find(expression)
        if compiled is None:
            if not may_compile and len(expression[1]) > LONG_EXPRESSION:
                again = partial(self._pop, connection, request, header)
                return self.deferred_work.run(connection, request, again)
            compiled = self.subscriptions.compile(*expression)
        wanted = PopRequest(
            group=header.consumer_group,
            topic=header.topic,
            queue_id=max(header.queue_id, -1),
            max_count=header.max_msg_nums,
            invisible_ms=header.invisible_time,
            selector=compiled.selector,
            is_ordered=header.order,
            attempt_id=header.attempt_id or "",
            from_last=header.init_mode != headers.INIT_MIN,
            max_attempts=group.retry_max_times + 1,
            priority_factor=group.priority_factor,
            max_bytes=self.settings.max_pull_bytes,
            client=str(connection.remote),
            key_limits=_key_limits(header),
        )
        return self._pop_or_hold(caller, connection, request, header, wanted, max(wait_ms, 0))

    def _pop_or_hold(
        self,
        caller: Caller,
        connection: Connection,
        request: RemotingCommand,
        header: PopMessageRequestHeader,
        wanted: PopRequest,
        wait_ms: int,
    ) -> RemotingCommand | None:
        def answer(result: PopResult | None) -> None:
            if result is not None and result.messages and not connection.is_open:
                self.pops.release(wanted.group, wanted.topic, result)
                return
            connection.reply(self._response(request, header, result or PopResult([])))

        try:
            self.pops.pop(caller, wanted, wait_ms, answer)
        except RefusedError as exc:
            if exc.code is not ResponseCode.SYSTEM_BUSY:
                raise
            # The client has too many held requests. It may take what is there, but not wait.
            result = self.engine.pop.pop(wanted)
            if not result.messages:
                return request.response(ResponseCode.POLLING_FULL, self._response_header(header), remark=str(exc))
            return self._response(request, header, result)
        return None

    def _wait_ms(self, born_ms: int, poll_ms: int) -> int:
        """Return how long a request may be held; negative if its client has stopped waiting.

        Source: ``PopMessageRequestHeader.isTimeoutTooMuch``, ``PollingHeader``.
        """
        now_ms = self.engine.clock.now_ms()
        poll_ms = min(max(poll_ms, 0), self.settings.max_suspend_ms)
        return poll_ms if born_ms <= 0 else min(poll_ms, born_ms + poll_ms - now_ms)

    def _checked(self, caller: Caller, group: str, topic: str, queue_id: int) -> bodies.SubscriptionGroupConfig:
        """Return the settings of a group that may read a topic. A negative queue ID stands for all queues.

        Raises:
            RefusedError: It may not, or the topic or the queue does not exist.
        """
        self.checks.topics.check_readable(topic, max(queue_id, 0))
        config = self.creations.group(caller, group)
        self.checks.check(topic, max(queue_id, 0), config)
        return config

    # --- responses -----------------------------------------------------------------------------

    def _response_header(
        self, header: PopMessageRequestHeader, rest: int = 0, queues: Sequence[PoppedQueue] = ()
    ) -> PopMessageResponseHeader:
        """Return the header of a response without messages; clients read the number of the other messages."""
        return PopMessageResponseHeader(
            pop_time=self.engine.clock.now_ms(),
            invisible_time=header.invisible_time,
            revive_qid=ORDERED_REVIVE_QUEUE if header.order else 0,
            rest_num=rest,
            start_offset_info=headers.start_offset_info(queues),
            msg_offset_info=headers.msg_offset_info(queues),
        )

    def _response(
        self, request: RemotingCommand, header: PopMessageRequestHeader, result: PopResult
    ) -> RemotingCommand:
        """Return the response to a pop. The client makes the receipt handles from the header."""
        if not result.messages:
            code = ResponseCode.POLLING_FULL if result.is_full else ResponseCode.POLLING_TIMEOUT
            remark = "NO_MESSAGE_IN_QUEUE"
            return request.response(code, self._response_header(header, result.rest), remark=remark)
        queues = _popped_queues(result.messages, has_counts=header.order)
        first = result.messages[0].handle
        answered = PopMessageResponseHeader(
            pop_time=first.pop_ms,
            invisible_time=first.invisible_ms,
            revive_qid=first.revive_queue_id,
            rest_num=result.rest,
            start_offset_info=headers.start_offset_info(queues),
            msg_offset_info=headers.msg_offset_info(queues),
            order_count_info=headers.order_count_info(queues) if header.order else None,
        )
        records = []
        for popped in result.messages:
            record, handle = popped.record, popped.handle
            # The client can make the handle if the delivery is the one of the header.
            is_plain = first[1:4] == handle[1:4] and record.topic == header.topic
            records.append(self._stored(record) if is_plain else self._with_handle(popped, header.topic))
        return request.response(ResponseCode.SUCCESS, answered, b"".join(records), remark="FOUND")

    def _stored(self, record: StoredRecord) -> bytes:
        """Return the bytes of a record, without the check of this library."""
        data = self.raw.store.read_bytes(record.physical_offset, record.total_size)
        return without_check(data, record) if data else _encoded(record, record.topic, record.properties_bytes)

    def _with_handle(self, popped: PoppedMessage, topic: str) -> bytes:
        """Return a record with its receipt handle, under the topic of the pop. Clients do not know the retry topic.

        Source: ``PopMessageProcessor.popMsgFromQueue``.
        """
        record = popped.record
        properties = decode_properties(record.properties_bytes) | {Property.POP_CK: popped.handle.extra_info}
        try:
            return _encoded(record, topic, encode_properties(properties))
        except MessageError:  # The properties are too long by the handle. Clients find it by the stored topic, too.
            return self._stored(record)

    # --- without popping -----------------------------------------------------------------------

    @handles(RequestCode.PEEK_MESSAGE, slow=True)
    def _peek(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the messages that a group would pop, from all queues or from one, and from its retry topic."""
        header = request.header(headers.PeekMessageRequestHeader)
        _check_count(header.max_msg_nums)
        self._checked(self.callers.of(connection, request), header.consumer_group, header.topic, header.queue_id)
        parts: list[bytes] = []
        count, size, rest = 0, 0, 0
        for queue, at in self._positions(header.consumer_group, header.topic, header.queue_id):
            rest += max(self.engine.queues.max_offset(queue) - at, 0)
            left = self.settings.max_pull_bytes - size
            if count < header.max_msg_nums and left > 0:
                found = self.raw.pull(RawQuery(queue, header.max_msg_nums - count, left, None), at)
                parts.append(found.body)
                count, size = count + found.count, size + len(parts[-1])
        answered = PopMessageResponseHeader(pop_time=0, invisible_time=0, revive_qid=0, rest_num=rest)
        if not count:
            return request.response(ResponseCode.PULL_NOT_FOUND, answered, remark="NO_MESSAGE_IN_QUEUE")
        return request.response(ResponseCode.SUCCESS, answered, b"".join(parts), remark="FOUND")

    @handles(RequestCode.NOTIFICATION)
    def _notification(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        """Answer when a group could pop a message. As in RocketMQ, messages that no expression selects count too."""
        header = request.header(headers.NotificationRequestHeader)
        if self.creations.groups.find(header.consumer_group) is not None:
            return self._notify(connection, request, header)
        return self.deferred_work.run(connection, request, partial(self._notify, connection, request, header))

    def _notify(
        self, connection: Connection, request: RemotingCommand, header: headers.NotificationRequestHeader
    ) -> RemotingCommand | None:
        caller, group, topic = self.callers.of(connection, request), header.consumer_group, header.topic
        self._checked(caller, group, topic, header.queue_id)
        wait_ms = self._wait_ms(header.born_time, header.poll_time)
        has_message = partial(self._has_message, group, topic, header.queue_id, is_ordered=header.order)
        if (found := has_message()) or wait_ms <= 0:
            return request.response(header=headers.NotificationResponseHeader(has_msg=found))

        def answer(found: bool) -> None:
            connection.reply(request.response(header=headers.NotificationResponseHeader(has_msg=found)))

        deadline_ms = self.engine.clock.steady_ms() + wait_ms
        topics = (topic, retry_topic_v1(topic, group), retry_topic_v2(topic, group))
        try:
            self.pops.notify(WaitingNotification(caller, topics, has_message, answer, deadline_ms, header.order))
        except RefusedError as exc:
            if exc.code is not ResponseCode.SYSTEM_BUSY:
                raise
            return request.response(header=headers.NotificationResponseHeader(polling_full=True), remark=str(exc))
        return None

    def _has_message(self, group: str, topic: str, queue_id: int, *, is_ordered: bool) -> bool:
        blocked = set()
        if is_ordered:
            blocked = {each.queue for each in self.engine.pop.in_flight(group, topic) if each.in_flight}
        return any(
            queue not in blocked and self.engine.queues.max_offset(queue) > at
            for queue, at in self._positions(group, topic, queue_id)
        )

    def _positions(self, group: str, topic: str, queue_id: int) -> Iterator[tuple[MessageQueue, int]]:
        """Yield the queues of a topic, then those of its retry topics, with the next offset that a pop reads."""
        popped = {each.queue: each.next for each in self.engine.pop.in_flight(group, topic)}
        for name in (topic, retry_topic_v1(topic, group), retry_topic_v2(topic, group)):
            config = self.checks.topics.table.config(name)
            count = 0 if config is None else int(config.get("readQueueNums", 0))
            for number in [queue_id] if queue_id >= 0 and name == topic else range(count):
                queue = MessageQueue(name, self.engine.name, number)
                at = popped.get(queue, self.engine.offsets.offset(group, name, number) or 0)
                yield queue, max(at, self.engine.queues.min_offset(queue))

    @answers(RequestCode.POLLING_INFO)
    def _polling_info(
        self, header: headers.PollingInfoRequestHeader, connection: Connection, request: RemotingCommand
    ) -> headers.PollingInfoResponseHeader:
        self._checked(self.callers.of(connection, request), header.consumer_group, header.topic, header.queue_id)
        count = self.engine.pop.count_held(header.consumer_group, header.topic, max(header.queue_id, -1))
        return headers.PollingInfoResponseHeader(polling_num=count)


def _check_count(count: int) -> None:
    if not 1 <= count <= _MAX_COUNT:
        raise RefusedError(ResponseCode.INVALID_PARAMETER, f"maxMsgNums must be 1..{_MAX_COUNT}, got {count}")


def _check_pop(header: PopMessageRequestHeader) -> None:
    """Raise `RefusedError` if a number or a text of a pop is out of range."""
    _check_count(header.max_msg_nums)
    _check_invisible(header.invisible_time, 1)
    if len(header.attempt_id or "") > _MAX_ATTEMPT_ID:
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"attemptId has {len(header.attempt_id or '')} characters, allowed are {_MAX_ATTEMPT_ID}",
        )


def _key_limits(header: PopMessageRequestHeader) -> KeyLimits | None:
    """Return the limits for each key of a pop of our client.

    Raises:
        RefusedError: One of them is out of range.
    """
    fair_by, in_flight, text = header.mqt_fair_by, header.mqt_max_in_flight_per_key, header.mqt_max_rate_per_key
    if fair_by is None:
        return None
    rate = parse_rate(text)
    is_valid = 0 < len(fair_by) <= _MAX_ATTEMPT_ID and (in_flight is None or 1 <= in_flight <= MAX_IN_FLIGHT_PER_KEY)
    if not is_valid or (text is not None and rate is None):
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"mqtFairBy must have 1..{_MAX_ATTEMPT_ID} characters, mqtMaxInFlightPerKey be 1..{MAX_IN_FLIGHT_PER_KEY}, "
            f"and mqtMaxRatePerKey a number a second above 0; got {len(fair_by)} characters, {in_flight} and "
            f"{text and text[:40]!r}",
        )
    return KeyLimits(fair_by, in_flight, rate)


def _check_invisible(invisible_ms: int, least: int) -> None:
    if not least <= invisible_ms <= _MAX_INVISIBLE_MS:
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"invisibleTime must be {least}..{_MAX_INVISIBLE_MS} ms, got {invisible_ms}",
        )


def _popped_queues(messages: Sequence[PoppedMessage], *, has_counts: bool) -> list[PoppedQueue]:
    """Return the queues of popped messages, each with the offsets of its messages in ascending order."""
    queues: dict[tuple[int, int], list[PoppedMessage]] = {}
    for popped in messages:
        queues.setdefault((popped.handle.topic_type, popped.handle.queue_id), []).append(popped)
    return [
        PoppedQueue(
            topic_type,
            queue_id,
            # A redelivered message is before the start of the pop. Bits of acknowledgements count from this offset.
            min(min(popped.handle.start_offset, popped.handle.queue_offset) for popped in found),
            sorted(popped.handle.queue_offset for popped in found),
            {popped.handle.queue_offset: popped.attempt - 1 for popped in found} if has_counts else {},
        )
        for (topic_type, queue_id), found in queues.items()
    ]


def _encoded(record: StoredRecord, topic: str, properties: bytes) -> bytes:
    """Return a record with another topic and other properties, without the check of this library.

    Raises:
        MessageError: The properties are too long.
    """
    draft = RecordDraft(
        topic,
        record.queue_id,
        record.body,
        properties,
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
        body_crc=record.body_crc,
    )
    data = draft.encode(record.queue_offset, record.physical_offset, record.store_timestamp, record.store_host)
    return without_check(data, record._replace(total_size=len(data), properties_bytes=properties))


# --- acknowledgements -------------------------------------------------------------------------------


class _Reply:
    """The reply to a request that ends several deliveries: when all are durable, or at the first error.

    Args:
        count: Number of the deliveries.
        done: Returns the response without an error.
    """

    def __init__(
        self, connection: Connection, request: RemotingCommand, count: int, done: Callable[[], RemotingCommand]
    ) -> None:
        self._connection = connection
        self._request = request
        self._left = count
        self._done = done
        self._lock = threading.Lock()

    def when_durable(self, error: Exception | None = None) -> None:
        """Count one delivery. The flush thread calls this, too."""
        with self._lock:
            if self._left <= 0:
                return
            self._left = 0 if error is not None else self._left - 1
            if self._left:
                return
        if error is None:
            self._connection.reply(self._done())
        else:
            self._connection.reply(self._request.response(ResponseCode.SYSTEM_ERROR, remark=str(error)))

    def refuse(self, error: RefusedError) -> None:
        """Reply with an error, unless the reply was sent before."""
        with self._lock:
            if self._left <= 0:
                return
            self._left = 0
        self._connection.reply(self._request.response(error.code, remark=str(error)))


@dataclass(frozen=True, slots=True)
class AckProcessor:
    """Ends deliveries, or changes their times. The response is sent when that is as durable as the flush mode says."""

    engine: Engine
    topics: TopicConfigs

    @handles(RequestCode.ACK_MESSAGE)
    def _ack(self, connection: Connection, request: RemotingCommand) -> None:
        header = request.header(headers.AckMessageRequestHeader)
        topic, handle = self._delivery(header, is_change=False)
        reply = _Reply(connection, request, 1, request.response)
        if not self.engine.pop.ack(header.consumer_group, topic, handle, reply.when_durable):
            reply.refuse(_superseded(handle))

    @handles(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
    def _change(self, connection: Connection, request: RemotingCommand) -> None:
        header = request.header(headers.ChangeInvisibleTimeRequestHeader)
        _check_invisible(header.invisible_time, 0)
        topic, handle = self._delivery(header, is_change=True)
        changed: list[ReceiptHandle] = []
        reply = _Reply(connection, request, 2, lambda: _changed_response(request, changed[0]))
        found = self.engine.pop.change_invisible(
            header.consumer_group,
            topic,
            handle,
            header.invisible_time,
            reply.when_durable,
            counts=not header.suspend,
        )
        if found is None:
            reply.refuse(_superseded(handle))
        else:  # The change may be durable before or after the new handle is known.
            changed.append(found)
            reply.when_durable()

    def _delivery(self, header: headers.AckMessageRequestHeader, *, is_change: bool) -> tuple[str, ReceiptHandle]:
        """Return the topic of the pop, and the handle of a delivery. The request says where the message is stored.

        Raises:
            RefusedError: The topic, the queue or the message does not exist, or another broker delivered it.
            MessageError: The handle cannot be read.
        """
        handle = ReceiptHandle.parse(header.extra_info)
        if handle.broker_name != self.engine.name:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"the message was popped from broker {handle.broker_name[:64]!r}, this is {self.engine.name!r}; send "
                "the request there",
            )
        config = self.topics.get(header.topic)
        queue = MessageQueue(header.topic, self.engine.name, header.queue_id)
        # A message may be in flight while the number of queues is reduced.
        is_popped = self.engine.pop.has_read(header.consumer_group, queue)
        if not 0 <= header.queue_id < config.read_queue_nums and not is_popped:
            raise RefusedError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the queue ID of topic {header.topic!r} must be 0..{config.read_queue_nums - 1}, "
                f"got {header.queue_id}",
            )
        low, end = self.engine.queues.min_offset(queue), self.engine.queues.max_offset(queue)
        last = end - 1 if is_change else end  # as in RocketMQ
        if not low <= header.offset <= last:
            raise RefusedError(
                ResponseCode.NO_MESSAGE,
                f"offset {header.offset} is not stored, queue {header.queue_id} of {header.topic!r} has {low}..{end}",
            )
        topic, topic_type = headers.popped_topic(header.topic, header.consumer_group)
        return topic, handle._replace(topic_type=topic_type, queue_id=header.queue_id, queue_offset=header.offset)

    # --- several messages ----------------------------------------------------------------------

    @handles(RequestCode.BATCH_ACK_MESSAGE, slow=True)
    def _ack_batch(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        """Acknowledge several messages. As in RocketMQ, those that cannot be acknowledged are left out."""
        acks = bodies.BatchAckMessageRequestBody.decode(request.body).acks
        if not acks:
            raise RefusedError(ResponseCode.NO_MESSAGE, "the request acknowledges no message")
        found = [(ack.consumer_group, ack.topic, handle) for ack in acks for handle in self._deliveries(ack)]
        if len(found) > _MAX_BATCH:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"one request may acknowledge {_MAX_BATCH} messages, this one has {len(found)}; send several",
            )
        reply = _Reply(connection, request, len(found) + 1, request.response)
        for group, topic, handle in found:
            if not self.engine.pop.ack(group, topic, handle, reply.when_durable):
                reply.when_durable()
        reply.when_durable()
        return None

    def _deliveries(self, ack: bodies.BatchAck) -> Iterator[ReceiptHandle]:
        """Yield the handle of each stored message that *ack* acknowledges."""
        try:
            bits = base64.b64decode(ack.bit_set, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise RefusedError(ResponseCode.INVALID_PARAMETER, f"b is not Base64: {exc}") from exc
        if len(bits) > _MAX_BITS_BYTES:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"b has {len(bits)} bytes, allowed are {_MAX_BITS_BYTES}; acknowledge only what one pop returned",
            )
        kind = {"1": RETRY_V1, "2": RETRY_V2}.get(ack.retry, NORMAL_TOPIC)
        parts = (ack.start_offset, ack.pop_time, ack.invisible_time, ack.revive_queue_id, kind, self.engine.name)
        first = ReceiptHandle(*parts, ack.queue_id, ack.start_offset, None)
        stored = first.real_topic(ack.topic, ack.consumer_group)
        config, queue = self.topics.find(stored), MessageQueue(stored, self.engine.name, ack.queue_id)
        is_popped = self.engine.pop.has_read(ack.consumer_group, queue)
        if config is None or (not 0 <= ack.queue_id < config.read_queue_nums and not is_popped):
            return
        low, end = self.engine.queues.min_offset(queue), self.engine.queues.max_offset(queue)
        for at, byte in enumerate(bits):
            for bit in range(8) if byte else ():
                offset = ack.start_offset + 8 * at + bit
                if byte >> bit & 1 and low <= offset < end:
                    yield first._replace(queue_offset=offset)


def _superseded(handle: ReceiptHandle) -> RefusedError:
    return RefusedError(
        ResponseCode.NO_MESSAGE,
        f"the delivery of {handle.pop_ms} has ended: the invisible time is over, and the message was or will be "
        "delivered again; its new handle is needed",
    )


def _changed_response(request: RemotingCommand, handle: ReceiptHandle) -> RemotingCommand:
    header = headers.ChangeInvisibleTimeResponseHeader(
        pop_time=handle.pop_ms, invisible_time=handle.invisible_ms, revive_qid=handle.revive_queue_id
    )
    return request.response(header=header)
