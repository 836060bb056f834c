"""One send as a request: messages checked, compressed, and encoded for the wire; its tries and their error.

Source: RocketMQ ``client: DefaultMQProducerImpl``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.failures import refusal_text, send_error
from mqtemplate.brokers.remote.cluster.routes import MissingTopicError
from mqtemplate.brokers.remote.cluster.settings import Namespace, RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.durations import format_ms
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerError,
    MessageError,
    MQTemplateError,
    RemoteConnectError,
    SendConnectError,
    SendError,
    SendTimeoutError,
)
from mqtemplate.message import (
    BROKER_PROPERTIES,
    DELAY_PROPERTIES,
    Message,
    MessageQueue,
    Property,
    create_unique_id,
    delay_number,
)
from mqtemplate.numbers import parse_number
from mqtemplate.record.compression import compress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties_template import PropertiesTemplate
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2, SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import encode_batch, encode_properties_text, join_in_batch
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.topics import AUTO_CREATE_TOPIC, RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, check_send_topic

_TIMER_PROPERTIES = frozenset(DELAY_PROPERTIES) - {Property.DELAY}
_MAX_PROPERTIES_BYTES = 32_767  # RocketMQ stores the length in two bytes, with a sign
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
        return SendResult(
            status,
            self.msg_id,
            header.msg_id,
            MessageQueue(self.topic, broker_name, header.queue_id),
            header.queue_offset,
            (header.transaction_id or self.msg_id) if self.is_half else None,
            header.recall_handle,
            header.msg_region,
            header.trace_on != "false",
        )

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


def _has_level(properties: Mapping[str, str]) -> bool:
    return properties.get(Property.DELAY, "0") != "0"


# --- tries of one send ----------------------------------------------------------------------------


_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_SHORTEST_TRY_S = 0.05  # in less time, a broker could store the message and answer too late
_NOT_STORED = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY})
"""Responses of a broker that is overloaded, starts or stops. It has not stored the message."""


@dataclass(slots=True)
class _Failure:
    """One reason, and the tries in a row that failed for it; times in milliseconds since the start of the send."""

    reason: str
    first: int
    last: int
    first_ms: int
    last_ms: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"({self.first}) after {format_ms(self.first_ms)}: {self.reason}"
        return (
            f"({self.first}-{self.last}) after {format_ms(self.first_ms)} to {format_ms(self.last_ms)}: {self.reason}"
        )


@dataclass(slots=True, eq=False)
class Tries:
    """The failed tries of one send.

    - A try that certainly stored nothing is repeated until the timeout: the topic has no route yet, the broker could
      not be reached, or it answered that it is busy, starts or stops. The pauses grow, so that a broker that starts is
      not flooded.
    - All other tries count. There are as many of them as RocketMQ's own client makes; a message for one queue has one.

    Args:
        request: What is sent; its text begins the error.
        retries: Number of tries that count, after the first one.
        may_repeat: False for a setting of no retries: then the first failure is the last one.
    """

    request: object
    retries: int
    may_repeat: bool
    timeout_ms: int
    deadline: float
    _number: int = 0
    _counted: int = 0
    _failures: list[_Failure] = field(default_factory=list)
    _has_timed_out: bool = False

    def pause_s(self, address: str, failure: BrokerError | RemotingCommand) -> float | None:
        """Add a failed try; return the pause before the next one, or None if it was the last one."""
        self._add(address, failure)
        if not _stored_nothing(failure):
            self._counted += 1
        left_s = self.deadline - time.monotonic() - min(_SHORTEST_TRY_S, self.timeout_ms / 10_000)
        if not self.may_repeat or self._counted > self.retries or left_s <= 0:
            return None
        pause_s = min(_FIRST_PAUSE_S * (1 << min(self._number - 1, 10)), _LONGEST_PAUSE_S)
        return min(pause_s * random.uniform(0.5, 1), left_s)  # at random times, since many producers lose one broker

    def _add(self, address: str, failure: BrokerError | RemotingCommand) -> None:
        self._number += 1
        self._has_timed_out |= isinstance(failure, TimeoutError)
        reason = str(failure) if isinstance(failure, BrokerError) else refusal_text(failure, address)
        now_ms = self.timeout_ms - round((self.deadline - time.monotonic()) * 1_000)
        if self._failures and self._failures[-1].reason == reason:
            self._failures[-1].last, self._failures[-1].last_ms = self._number, now_ms
        else:
            self._failures.append(_Failure(reason, self._number, self._number, now_ms, now_ms))

    def queue_is_away(self, queue: MessageQueue | None) -> SendError:
        """Return the error for a queue that left the route while the send was tried; these tries stored nothing."""
        self._add(
            "",
            RemoteConnectError(
                f"{queue} is not in the route of its topic any more, since its broker has stopped; send again to "
                "another queue, or when the broker is back"
            ),
        )
        error = SendError.during(str(self.request), self._text())
        error.tries, error.queue_is_away = tuple(map(str, self._failures)), True
        return error

    def _text(self) -> str:
        times = "once" if self._number == 1 else f"{self._number} times"
        return f"tried {times} within {format_ms(self.timeout_ms)}: {'; '.join(map(str, self._failures))}"

    def error(self, address: str, failure: BrokerError | RemotingCommand) -> MQTemplateError:
        """Return the error of the send after its last try, *failure*."""
        if isinstance(failure, RemotingCommand):
            has_timer = isinstance(self.request, SendRequest) and self.request.has_timer
            refused = send_error(failure, str(self.request), address, has_timer=has_timer)
            if self._number == 1:
                return refused
            kind = type(refused)
        else:
            kind = SendTimeoutError if self._has_timed_out else kind_of_send_error(failure)
        error = kind.during(str(self.request), self._text())
        if isinstance(error, SendConnectError):
            error.was_sent = self._counted > 0
        if isinstance(error, SendError):
            error.tries = tuple(map(str, self._failures))
        return error


def kind_of_send_error(failure: BrokerError) -> type[SendError]:
    """Return the class of the error of a send that ended with a failed connection or a timeout."""
    return SendConnectError if isinstance(failure, RemoteConnectError) else SendError


def _stored_nothing(failure: BrokerError | RemotingCommand) -> bool:
    """Return True if the broker has certainly not stored the message."""
    if isinstance(failure, RemotingCommand):
        return failure.code in _NOT_STORED
    if isinstance(failure, MissingTopicError | BrokerBusyError):
        return True
    return isinstance(failure, RemoteConnectError) and not failure.was_sent
