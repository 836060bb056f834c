"""Messages sent back for redelivery: to the broker that stores them or, if it refuses, to the retry topic.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl.sendMessageBack``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.engine.retries import SentBack, retry_level
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.message import DELAY_PROPERTIES, Message, Property, copy_properties
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.remoting.protocol.properties import encode_properties_text
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.remote")

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
