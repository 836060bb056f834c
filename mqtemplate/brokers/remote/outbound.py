"""From the message a client sends to the request a broker takes: checks, ids, properties, compression.

Source: RocketMQ ``client: DefaultMQProducerImpl``; sections 8, 9 and 14 of the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.errors import DelayError, MessageError, UnsupportedError
from mqtemplate.message import (
    BROKER_PROPERTIES,
    DELAY_PROPERTIES,
    Message,
    MessageQueue,
    Property,
    create_unique_id,
)
from mqtemplate.record.compression import compress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.messages import encode_batch
from mqtemplate.remoting.protocol.properties import encode_properties_text
from mqtemplate.topics import AUTO_CREATE_TOPIC, check_send_topic

TIMER_PROPERTIES = frozenset(DELAY_PROPERTIES) - {Property.DELAY}
_LONGEST_PROPERTIES = 32_767
_LOOK_TWICE = BROKER_PROPERTIES.union(DELAY_PROPERTIES)


@dataclass(slots=True, kw_only=True)
class Outbound:
    """A message, or a batch, ready for any queue of its topic.

    Attributes:
        topic: As the application knows it; `wire_topic` as the cluster does.
        msg_ids: The ids made here, one for each message.
        wants_timer, wants_level: What delay it asks for.
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
    wants_timer: bool = False
    wants_level: bool = False

    @property
    def is_at_once(self) -> bool:
        """Whether it is in its queue when the broker has taken it."""
        return not (
            self.wants_timer or self.wants_level or self.is_half or self.code == RequestCode.SEND_REPLY_MESSAGE_V2
        )

    @property
    def is_half(self) -> bool:
        return self.sys_flag & SysFlag.TRANSACTION_PREPARED != 0

    @property
    def msg_id(self) -> str:
        return ",".join(self.msg_ids)

    def request(self, queue: MessageQueue, *, one_way: bool = False) -> RemotingCommand:
        """What sends it to *queue*."""
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


class OutboundMaker:
    """Checks messages and makes them ready. It changes no message that it is given."""

    def __init__(self, settings: RemoteSettings, namespace: Namespace, clock: Clock) -> None:
        self._settings = settings
        self._namespace = namespace
        self._clock = clock
        self._group = namespace.wrap(settings.producer_group)

    def single(self, message: Message, *, transaction_group: str | None = None) -> Outbound:
        """One message.

        Args:
            transaction_group: It is a half message of this producer group.

        Raises:
            MessageError: It is too large, or its topic is no topic to send to.
            DelayError: Its delay cannot be read.
        """
        check_send_topic(message.topic)
        self._check_size(message)
        properties, msg_id = self._properties(message)
        sys_flag, group = 0, self._group
        if transaction_group is not None:
            _refuse_delay(message, "a message in a transaction is not delayed by RocketMQ; send it without a delay")
            group = self._namespace.wrap(transaction_group)
            properties |= {Property.TRANSACTION_PREPARED: "true", Property.PRODUCER_GROUP: group}
            sys_flag |= SysFlag.TRANSACTION_PREPARED
        body, compressed = self._compress(message.body)
        return Outbound(
            topic=message.topic,
            wire_topic=self._namespace.wrap(message.topic),
            group=group,
            body=body,
            properties=_encode(properties),
            msg_ids=(msg_id,),
            sys_flag=sys_flag | compressed,
            flag=message.flag,
            default_queue_count=self._settings.default_topic_queue_nums,
            born_timestamp=self._clock.now_ms(),
            wants_level=properties.get(Property.DELAY, "0") != "0",
            wants_timer=not TIMER_PROPERTIES.isdisjoint(properties),
        )

    def batch(self, messages: Sequence[Message]) -> Outbound:
        """Several messages of one topic, as one request.

        Raises:
            MessageError: There is none, they name two topics, or together they are too large.
            UnsupportedError: One asks for a delay.
        """
        if not messages:
            raise MessageError("the batch is empty; give at least one message")
        topic = check_send_topic(messages[0].topic)
        ready, ids = [], []
        for message in messages:
            if message.topic != topic:
                raise MessageError(
                    f"a batch goes to one topic, this one names {topic!r} and {message.topic!r}; send two batches"
                )
            _refuse_delay(message, "RocketMQ delays no batch; send its messages one by one")
            self._check_size(message)
            properties, msg_id = self._properties(message)
            ready.append(Message(topic, message.body, properties, message.flag))
            ids.append(msg_id)
        body = encode_batch(ready)
        if len(body) > self._settings.max_message_size:
            raise MessageError(
                f"the batch for {topic!r} has {len(body)} bytes, allowed are {self._settings.max_message_size}; "
                "send it in smaller parts"
            )
        return Outbound(
            topic=topic,
            wire_topic=self._namespace.wrap(topic),
            group=self._group,
            body=body,
            properties=_encode({Property.WAIT: "true"}),
            msg_ids=tuple(ids),
            code=RequestCode.SEND_BATCH_MESSAGE,
            default_queue_count=self._settings.default_topic_queue_nums,
            born_timestamp=self._clock.now_ms(),
        )

    def any(self, messages: Sequence[Message]) -> Outbound:
        """One message by itself, several as a batch."""
        return self.single(messages[0]) if len(messages) == 1 else self.batch(messages)

    def reply(self, wire_topic: str, body: bytes, properties: dict[str, str]) -> Outbound:
        """A reply: it goes to a topic of the cluster's own, whatever the namespace."""
        msg_id = properties.setdefault(Property.UNIQ_KEY, create_unique_id())
        packed, compressed = self._compress(body)
        return Outbound(
            topic=wire_topic,
            wire_topic=wire_topic,
            group=self._group,
            body=packed,
            properties=_encode(properties | {Property.WAIT: "true"}),
            msg_ids=(msg_id,),
            code=RequestCode.SEND_REPLY_MESSAGE_V2,
            sys_flag=compressed,
            default_queue_count=self._settings.default_topic_queue_nums,
            born_timestamp=self._clock.now_ms(),
        )

    def _check_size(self, message: Message) -> None:
        if len(message.body) > self._settings.max_message_size:
            raise MessageError(
                f"the body for {message.topic!r} has {len(message.body)} bytes, allowed are "
                f"{self._settings.max_message_size}; send less, keep the data elsewhere and send where it is, or raise "
                "max-message-size here and maxMessageSize on the broker"
            )

    def _compress(self, body: bytes) -> tuple[bytes, int]:
        settings = self._settings
        if len(body) < settings.compress_threshold:
            return body, 0
        packed, bits = compress_body(body, settings.compression_type, settings.compression_level)
        return (packed, bits) if len(packed) < len(body) else (body, 0)

    def _properties(self, message: Message) -> tuple[dict[str, str], str]:
        """The properties as they travel, and the message's id."""
        properties = dict(message.properties)
        if not _LOOK_TWICE.isdisjoint(properties):
            properties = _delay_properties(properties)
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
    if size > _LONGEST_PROPERTIES:
        raise MessageError(
            f"keys, tags and properties take {size} bytes, allowed are {_LONGEST_PROPERTIES}; move data into the body"
        )
    return text


def _delay_properties(properties: dict[str, str]) -> dict[str, str]:
    """Leave out what only brokers write, check the delay, and say it in the words that a broker knows."""
    kept = {name: value for name, value in properties.items() if name not in BROKER_PROPERTIES}
    if (level := kept.get(Property.DELAY)) is not None and _number(Property.DELAY, level) < 0:
        raise DelayError(
            f"the delay level must be 0 or more, got {level}; 0 means no delay, for other delays give a time"
        )
    for name in TIMER_PROPERTIES & kept.keys():
        _number(name, kept[name])
    start = kept.pop(Property.START_DELIVER_TIME, None)
    if start is not None:  # a name of providers' clusters; brokers of one's own know the other
        kept.setdefault(Property.TIMER_DELIVER_MS, start)
    return kept


def _number(name: str, text: str) -> int:
    """A whole number as Java's ``Long.parseLong`` takes it."""
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise DelayError(f"property {name} is {text!r}, expected a whole number of at most 18 digits")
    return int(text)


def _refuse_delay(message: Message, reason: str) -> None:
    asked = [name for name in DELAY_PROPERTIES if message.properties.get(name, "0") != "0"]
    if asked:
        raise UnsupportedError(f"the message for {message.topic!r} asks for a delay ({asked[0]}), but {reason}")
