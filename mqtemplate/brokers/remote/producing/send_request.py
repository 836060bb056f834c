"""One send as a request: messages checked, compressed, and encoded for the wire. Numbered sends.

Source: RocketMQ ``client: DefaultMQProducerImpl``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import UNANSWERED, send_error
from mqtemplate.brokers.remote.cluster.settings import Namespace, RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.errors import (
    MessageError,
    PendingKeyError,
    RemoteConnectError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.message import (
    BROKER_PROPERTIES,
    DELAY_PROPERTIES,
    Message,
    MessageQueue,
    Property,
    SendSequence,
    create_unique_id,
    delay_number,
)
from mqtemplate.numbers import parse_number
from mqtemplate.pending import PendingDecision, PendingOutcome
from mqtemplate.record.compression import compress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties_template import PropertiesTemplate
from mqtemplate.remoting.protocol.bodies.own_requests import (
    SendSequencedRequestHeader,
    SendSequencedResponseHeader,
    decode_outcome,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2, SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import EncodedBatch, encode_batch, encode_properties_text, join_in_batch
from mqtemplate.remoting.protocol.sequenced import (
    NumberedMessages,
    encode_queue_batch,
    encode_queue_batches,
    parts_of_batch,
    parts_of_messages,
)
from mqtemplate.results import SendResult, SendStatus, SequencedResult
from mqtemplate.topics import AUTO_CREATE_TOPIC, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, check_send_topic

_DELAYS = frozenset(DELAY_PROPERTIES)
_TIMER_PROPERTIES = _DELAYS - {Property.DELAY}
_MAX_PROPERTIES_BYTES = 32_767  # RocketMQ stores the length in two bytes, with a sign
_OF_ANOTHER = (PendingDecision.KEPT, PendingDecision.POSTPONED)
_CHECKED_PROPERTIES = BROKER_PROPERTIES.union(DELAY_PROPERTIES)
_BATCH_PROPERTIES = encode_properties_text({Property.WAIT: "true"})
_NOT_JOINED = _CHECKED_PROPERTIES | {
    Property.TRANSACTION_PREPARED,
    Property.PRODUCER_GROUP,
    Property.CORRELATION_ID,  # Java's consumers reply only to requests with the property CLUSTER, which batches lack
}
_LONGEST_JOINED = 16 << 10
"""Bodies from this size on are sent alone: joining them saves little."""


class JoinableMessage(NamedTuple):
    """One message that may be sent with others.

    Attributes:
        properties: Properties of the message, possibly without its id. They are not changed any more.
        data: The message as it stands in the body of the batch, with its id.
    """

    topic: str
    body: bytes
    properties: Mapping[str, str]
    flag: int
    msg_id: str
    data: bytes


@dataclass(slots=True, kw_only=True)
class SendRequest:
    """A message, or a batch, encoded for any queue of its topic.

    Attributes:
        topic: The application's name; *wire_topic* is the name on the wire.
        msg_ids: The ids created by this client, one for each message.
        has_timer: The message has a delay that is not a level.
        has_level: The message, or one of a batch, has a delay level.
        level: The delay level of a single message; 0 for none.
        needs: Capability that a broker must have announced; None for a message that every broker stores correctly.
        pending_keys: Pending keys of delayed messages. One broker decides about all messages under a key.
    """

    topic: str
    wire_topic: str
    group: str
    body: bytes
    properties: str
    msg_ids: tuple[str, ...]
    code: int = RequestCode.SEND_MESSAGE_V2
    sys_flag: int = 0
    flag: int = 0
    default_queue_count: int = 4
    born_timestamp: int = 0
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    has_timer: bool = False
    has_level: bool = False
    level: int = 0
    needs: Capability | None = None
    pending_keys: frozenset[str] = frozenset()

    @property
    def is_immediate(self) -> bool:
        """True if the message is in its queue when the broker has acknowledged it."""
        return not (self.has_timer or self.has_level or self.is_half or self.code == RequestCode.SEND_REPLY_MESSAGE_V2)

    @property
    def is_half(self) -> bool:
        """True for the half message of a transaction."""
        return self.sys_flag & SysFlag.TRANSACTION_PREPARED != 0

    @property
    def msg_id(self) -> str:
        """The message id; of a batch all ids, joined by commas."""
        return ",".join(self.msg_ids)

    def __str__(self) -> str:
        what = f"a batch of {len(self.msg_ids)} messages" if len(self.msg_ids) > 1 else f"message {self.msg_ids[0]}"
        return f"send {what} to {self.topic!r}"

    def result(self, status: SendStatus, broker_name: str, header: SendMessageResponseHeader) -> SendResult:
        """Return the result after a broker has accepted the message."""
        pending, msg_id = None, self.msg_id
        if header.pending is not None:
            pending, msg_id = decode_outcome(header.pending)
            if msg_id == self.msg_id and pending.decision in _OF_ANOTHER:  # of an earlier try, whose response was lost
                pending = replace(pending, decision=PendingDecision.STORED)
        return SendResult(
            status,
            msg_id,
            header.msg_id,
            MessageQueue(self.topic, broker_name, header.queue_id),
            header.queue_offset,
            (header.transaction_id or self.msg_id) if self.is_half else None,
            header.recall_handle,
            header.msg_region,
            header.trace_on != "false",
            pending,
        )

    def result_of_earlier_try(self, error: PendingKeyError, broker_name: str) -> SendResult | None:
        """Return the result if an earlier try, whose response was lost, has stored the message that is pending."""
        if error.msg_id != self.msg_id:
            return None
        queue = MessageQueue(self.topic, broker_name, -1)
        outcome = PendingOutcome(PendingDecision.STORED)
        return SendResult(SendStatus.SEND_OK, self.msg_id, "", queue, -1, None, error.handle, pending=outcome)

    def queue_of(self, result: SendResult) -> MessageQueue | None:
        """Return the queue that has the stored message; of a delayed message a queue of a system topic.

        None if it is unknown, as for half messages.
        """
        if self.is_immediate:
            return result.message_queue
        broker_name = result.message_queue.broker_name
        if result.handle is not None:
            return MessageQueue(TIMER_TOPIC, broker_name, 0)
        return MessageQueue(SCHEDULE_TOPIC, broker_name, self.level - 1) if self.level > 0 else None

    def command(self, queue: MessageQueue, *, one_way: bool = False) -> RemotingCommand:
        """Return the command that sends the message to *queue*."""
        header = SendMessageRequestHeaderV2(
            producer_group=self.group,
            topic=self.wire_topic,
            default_topic=AUTO_CREATE_TOPIC,
            default_topic_queue_nums=self.default_queue_count,
            queue_id=queue.queue_id,
            sys_flag=self.sys_flag,
            born_timestamp=self.born_timestamp,
            flag=self.flag,
            properties=self.properties,
            reconsume_times=self.reconsume_times,
            unit_mode=False,
            max_reconsume_times=self.max_reconsume_times,
            batch=self.code == RequestCode.SEND_BATCH_MESSAGE,
            broker_name=queue.broker_name,
        )
        return RemotingCommand.request(self.code, header, self.body, one_way=one_way)


class SendRequestFactory:
    """Encoder of messages. It checks each message and does not change it."""

    def __init__(self, settings: RemoteSettings, namespace: Namespace, clock: Clock) -> None:
        self._settings = settings
        self._namespace = namespace
        self._clock = clock
        self._group = namespace.wrap(settings.producer_group)
        self.levels = DelayLevels.parse(settings.message_delay_level, is_clamping=settings.clamp_delay_level)
        self._joined_limit = min(settings.compress_threshold, _LONGEST_JOINED)
        # The last properties without an id, and their encoded form: one tuple, since any thread may replace it.
        self._last: tuple[dict[str, str], PropertiesTemplate] = {"": ""}, PropertiesTemplate.appending(b"")

    def single(self, message: Message, *, transaction_group: str | None = None) -> SendRequest:
        """Return the request for one message.

        Args:
            transaction_group: Set for the half message of a transaction of this producer group.

        Raises:
            MessageError: The message is too large, or its topic is not one to send to.
            DelayError: Its delay is not a number.
        """
        check_send_topic(message.topic)
        self._check_size(message)
        properties, msg_id = self._properties(message)
        sys_flag, group = 0, self._group
        has_level, has_timer = _has_level(properties), not _TIMER_PROPERTIES.isdisjoint(properties)
        needs, retries = None, _take_retries(properties) if message.topic.startswith(RETRY_TOPIC_PREFIX) else (0, None)
        if transaction_group is not None:
            needs = Capability.TRANSACTION_DELAY if has_level or has_timer else None
            group = self._namespace.wrap(transaction_group)
            properties |= {Property.TRANSACTION_PREPARED: "true", Property.PRODUCER_GROUP: group}
            sys_flag |= SysFlag.TRANSACTION_PREPARED
        body, compressed = self._compress(message.body)
        request = self._request(message.topic, body, _encode(properties), (msg_id,), sys_flag=sys_flag | compressed)
        request.group, request.flag = group, message.flag
        request.reconsume_times, request.max_reconsume_times = retries
        request.has_level, request.has_timer, request.needs = has_level, has_timer, needs
        # A message that a hand-over moves decides nothing, so any broker may store it.
        if (has_level or has_timer) and Property.PENDING_KEY in properties and Property.HAND_OVER not in properties:
            request.needs, request.pending_keys = _pending_keys(properties)
        if transaction_group is not None and Property.CANCELS in properties:
            request.needs = Capability.PENDING_KEYS
        request.level = self.levels.clamp(int(properties[Property.DELAY])) if has_level else 0
        return request

    def batch(self, messages: Sequence[Message]) -> SendRequest:
        """Return one request for several messages of one topic.

        Raises:
            MessageError: The batch is empty, has messages of two topics, or is too large.
            DelayError: A delay is not a number.
        """
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        topic = check_send_topic(messages[0].topic)
        encoded: list[Message] = []
        ids: list[str] = []
        for message in messages:
            if message.topic != topic:
                raise MessageError(
                    f"a batch goes to one topic, this one names {topic!r} and {message.topic!r}; send two batches"
                )
            self._check_size(message)
            properties, msg_id = self._properties(message)
            encoded.append(Message(topic, message.body, properties, message.flag))
            ids.append(msg_id)
        has_level = any(_has_level(each.properties) for each in encoded)
        has_timer = any(not _TIMER_PROPERTIES.isdisjoint(each.properties) for each in encoded)
        body = encode_batch(encoded)
        if len(body) > self._settings.max_message_size:
            raise MessageError(
                f"the batch for {topic!r} has {len(body)} bytes, allowed are {self._settings.max_message_size}; "
                "send it in smaller parts"
            )
        request = self._batch_request(topic, body, ids)
        request.has_level, request.has_timer = has_level, has_timer
        request.needs = Capability.BATCH_DELAY if has_level or has_timer else None
        delayed = [each.properties for each in encoded if not _DELAYS.isdisjoint(each.properties)]
        if any(Property.PENDING_KEY in each and Property.HAND_OVER not in each for each in delayed):
            request.needs, request.pending_keys = _pending_keys(*delayed)
        return request

    def _batch_request(self, topic: str, body: bytes, msg_ids: Sequence[str]) -> SendRequest:
        return self._request(topic, body, _BATCH_PROPERTIES, tuple(msg_ids), RequestCode.SEND_BATCH_MESSAGE)

    def _request(
        self,
        topic: str,
        body: bytes,
        properties: str,
        msg_ids: tuple[str, ...],
        code: int = RequestCode.SEND_MESSAGE_V2,
        *,
        sys_flag: int = 0,
    ) -> SendRequest:
        return SendRequest(
            topic=topic,
            wire_topic=self._namespace.wrap(topic),
            group=self._group,
            body=body,
            properties=properties,
            msg_ids=msg_ids,
            code=code,
            sys_flag=sys_flag,
            default_queue_count=self._settings.default_topic_queue_nums,
            born_timestamp=self._clock.now_ms(),
        )

    def complete(self, message: Message) -> Message:
        """Return a checked message with the properties that it has on the wire; its body is not compressed.

        Raises:
            MessageError: It is too large, or its topic is not one to send to.
            DelayError: Its delay is not a number.
        """
        topic = check_send_topic(message.topic)
        self._check_size(message)
        properties, _ = self._properties(message)
        return Message(topic, message.body, properties, message.flag)

    def can_be_joined(self, message: Message) -> bool:
        """Return True if the message may be sent with others in one request: no consumer treats it in another way.

        Brokers add properties to messages that are sent alone: region, cluster, and whether to trace them.
        """
        properties = message.properties
        return (
            len(message.body) < self._joined_limit
            and _NOT_JOINED.isdisjoint(properties)
            and properties.get(Property.WAIT, "true") == "true"
        )

    def joinable(self, message: Message) -> JoinableMessage:
        """Return a message for `joined`.

        Raises:
            MessageError: It is too large, or its topic is not one to send to.
        """
        check_send_topic(message.topic)
        self._check_size(message)
        # Most producers send the same properties again and again, so the last ones stay encoded.
        properties, template = self._last
        if message.properties == properties:
            msg_id = create_unique_id()
            encoded = template.fill(msg_id.encode())
        else:
            properties, encoded, msg_id = self._encode_new(message)
        body, flag = message.body, message.flag
        return JoinableMessage(message.topic, body, properties, flag, msg_id, join_in_batch(body, encoded, flag))

    def _encode_new(self, message: Message) -> tuple[dict[str, str], bytes, str]:
        """Return the properties of a message, the encoded ones with the message id, and that id."""
        given = message.properties.copy()
        properties, msg_id = self._properties(message)
        encoded = encode_properties_text(properties).encode()
        template = None if Property.UNIQ_KEY in given else PropertiesTemplate.around(encoded, msg_id.encode())
        if template is not None:
            self._last = given, template
        return given, encoded, msg_id

    def alone(self, message: JoinableMessage) -> SendRequest:
        """Return the request for a message that is not sent with others after all."""
        properties = {**message.properties, Property.UNIQ_KEY: message.msg_id}
        return self.single(Message(message.topic, message.body, properties, message.flag))

    def joined(self, messages: Sequence[JoinableMessage]) -> SendRequest:
        """Return one request for messages of one topic."""
        data = b"".join([message.data for message in messages])
        return self._batch_request(messages[0].topic, data, [message.msg_id for message in messages])

    def for_messages(self, messages: Sequence[Message]) -> SendRequest:
        """Return the request for one message, or the batch of several."""
        return self.single(messages[0]) if len(messages) == 1 else self.batch(messages)

    def reply(self, topic: str, body: bytes, properties: dict[str, str]) -> SendRequest:
        """Return the request for a reply; *topic* belongs to the cluster, so it has no namespace."""
        msg_id = properties.setdefault(Property.UNIQ_KEY, create_unique_id())
        packed, compressed = self._compress(body)
        text = _encode(properties | {Property.WAIT: "true"})
        request = self._request(topic, packed, text, (msg_id,), RequestCode.SEND_REPLY_MESSAGE_V2, sys_flag=compressed)
        request.wire_topic = topic
        return request

    def _check_size(self, message: Message) -> None:
        if len(message.body) > self._settings.max_message_size:
            raise MessageError(
                f"the body for {message.topic!r} has {len(message.body)} bytes, allowed are "
                f"{self._settings.max_message_size}; store large data elsewhere and send its address, or raise "
                "max-message-size here and maxMessageSize on the broker"
            )

    def _compress(self, body: bytes) -> tuple[bytes, int]:
        settings = self._settings
        if len(body) < settings.compress_threshold:
            return body, 0
        packed, bits = compress_body(body, settings.compression_type, settings.compression_level)
        return (packed, bits) if len(packed) < len(body) else (body, 0)

    def _properties(self, message: Message) -> tuple[dict[str, str], str]:
        """Return the properties on the wire, and the message id."""
        properties = dict(message.properties)
        if not _CHECKED_PROPERTIES.isdisjoint(properties):
            properties = _checked_properties(properties, message.topic, self.levels)
        msg_id = properties.get(Property.UNIQ_KEY)
        if not msg_id:
            msg_id = properties[Property.UNIQ_KEY] = create_unique_id()
        properties[Property.WAIT] = properties.get(Property.WAIT, "true")
        if self._settings.namespace:
            properties[Property.INSTANCE_ID] = self._settings.namespace
        return properties, msg_id


def _encode(properties: Mapping[str, str]) -> str:
    text = encode_properties_text(properties)
    size = len(text) if text.isascii() else len(text.encode())
    if size > _MAX_PROPERTIES_BYTES:
        raise MessageError(
            f"keys, tags and properties have {size} bytes, allowed are {_MAX_PROPERTIES_BYTES}; move data into the body"
        )
    return text


def _checked_properties(properties: dict[str, str], topic: str, levels: DelayLevels) -> dict[str, str]:
    """Return the properties without those that only brokers write, with a checked delay."""
    kept = {name: value for name, value in properties.items() if name not in BROKER_PROPERTIES}
    if (level := kept.get(Property.DELAY)) is not None:
        levels.read(level, topic)  # RocketMQ's broker limits it, so it is sent as it is
    for name in _TIMER_PROPERTIES & kept.keys():
        delay_number(name, kept[name])
    start = kept.pop(Property.START_DELIVER_TIME, None)
    if start is not None:  # Alibaba Cloud's name for TIMER_DELIVER_MS; Apache RocketMQ's brokers ignore it
        kept.setdefault(Property.TIMER_DELIVER_MS, start)
    return kept


def _take_retries(properties: dict[str, str]) -> tuple[int, int | None]:
    """Remove the number of retries of a message, and their limit, from its properties, and return them.

    They are in the header of the request. Source: RocketMQ ``client: DefaultMQProducerImpl.sendKernelImpl``.
    """
    count = parse_number(properties.pop(Property.RECONSUME_TIME, None)) or 0
    return count, parse_number(properties.pop(Property.MAX_RECONSUME_TIMES, None))


def _pending_keys(*delayed: Mapping[str, str]) -> tuple[Capability, frozenset[str]]:
    keys = frozenset(key for each in delayed if (key := each.get(Property.PENDING_KEY)) is not None)
    return Capability.PENDING_KEYS, keys


def _has_level(properties: Mapping[str, str]) -> bool:
    return properties.get(Property.DELAY, "0") != "0"


# --- sequenced sends: to servers of this library ---------------------------------------------------


_REPEAT_S = 0.1
_MAY_PASS = (ResponseCode.SYSTEM_BUSY, ResponseCode.FLUSH_DISK_TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Part:
    """Body of one request, for one broker."""

    broker_name: str
    topics: Iterable[str]
    body: bytes
    count: int


@dataclass(frozen=True, slots=True)
class SequencedSends:
    """Sends numbered messages in parts. A part without a response is sent again: the server drops repeats."""

    context: ClientContext

    def send(self, messages: NumberedMessages, sequence: SendSequence, timeout_ms: int = 10_000) -> SequencedResult:
        """See `MessageSends.send_sequenced`.

        Raises:
            SendTimeoutError: The server did not respond in time, also after repeats.
        """
        return self._send_parts(map(self._encode, parts_of_messages(messages)), sequence, timeout_ms)

    def send_encoded(
        self, batch: EncodedBatch, queue: MessageQueue, sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """Send encoded messages to one queue; otherwise as `send`.

        Their properties are set by an application, and nothing checks them here. They may contain a delay.
        """
        (topic,) = names = self._find_topics({batch.topic})
        parts = (
            _Part(queue.broker_name, names.keys(), encode_queue_batch(names[topic], queue.queue_id, data), count)
            for data, count in parts_of_batch(batch)
        )
        return self._send_parts(parts, sequence, timeout_ms)

    def _find_topics(self, topics: set[str]) -> dict[str, str]:
        """Return the names on the wire of checked topics; the client then has the addresses of their brokers."""
        for topic in topics:
            check_send_topic(topic)
            self.context.routes.publish_route(topic)
        return {topic: self.context.namespace.wrap(topic) for topic in topics}

    def _encode(self, messages: NumberedMessages) -> _Part:
        names = {queue.broker_name for _, queue in messages}
        if len(names) > 1:
            raise MessageError(f"a sequenced send goes to one broker, this one names {', '.join(sorted(names))}")
        topics = self._find_topics({message.topic for message, _ in messages})
        body = encode_queue_batches(((message, queue.queue_id) for message, queue in messages), topics)
        return _Part(names.pop(), topics.keys(), body, len(messages))

    def _send_parts(self, parts: Iterable[_Part], sequence: SendSequence, timeout_ms: int) -> SequencedResult:
        deadline = time.monotonic() + timeout_ms / 1_000
        stored = repeated = 0
        for part in parts:
            result = self._send_part(part, sequence.after(stored + repeated), deadline, timeout_ms)
            stored, repeated = stored + result.stored, repeated + result.repeated
        return SequencedResult(stored, repeated)

    def _send_part(self, part: _Part, sequence: SendSequence, deadline: float, timeout_ms: int) -> SequencedResult:
        context, broker_name = self.context, part.broker_name
        header = SendSequencedRequestHeader(
            producer_group=context.namespace.wrap(context.settings.producer_group),
            app_id=sequence.app_id,
            version=sequence.version,
            partition=sequence.partition,
            first=sequence.first,
            born_timestamp=context.clock.now_ms(),
        )
        failure: object = ""
        while True:
            left_ms = int((deadline - time.monotonic()) * 1_000)
            if left_ms <= 0:
                raise SendTimeoutError(
                    f"{part.count} messages of partition {sequence.partition} were not acknowledged in {timeout_ms} ms "
                    f"by broker {broker_name!r} ({failure}); send them again with the same numbers"
                )
            try:
                request = RemotingCommand.request(RequestCode.SEND_SEQUENCED_MESSAGES, header, part.body)
                response = self._invoke(broker_name, request, min(left_ms, context.settings.request_timeout_ms))
            except UNANSWERED as exc:
                failure = exc
            else:
                if response.code == ResponseCode.SUCCESS:
                    for topic in part.topics:  # the server may have just created it
                        context.routes.forget_default(topic)
                    answer = response.header(SendSequencedResponseHeader)
                    return SequencedResult(answer.stored, answer.repeated)
                failure = response.remark
                if response.code not in _MAY_PASS:
                    address = context.routes.address(broker_name)
                    raise send_error(response, f"send {part.count} numbered messages", address, has_timer=False)
            threading.Event().wait(min(_REPEAT_S, max(0.0, deadline - time.monotonic())))

    def _invoke(self, broker_name: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        context = self.context
        address = context.routes.address(broker_name)
        context.instance.register_at([address])
        announced = context.instance.announced.get(address)
        if announced is None:
            raise RemoteConnectError(f"{address} has not answered a heartbeat")
        if Capability.SEQUENCED_SEND not in announced:
            raise UnsupportedError(
                f"broker {broker_name!r} at {address} does not drop repeated sends (RocketMQ's brokers do not); "
                "use send_batch"
            )
        return context.instance.invoke(address, request, timeout_ms)
