"""Messages sent back for redelivery: to the broker that stores them or, if it refuses, to the retry topic.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl.sendMessageBack``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.brokers.retry import dead_letter, is_exhausted, retry
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, Property
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader

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
    spec: ConsumerSpec
    producer: Producer

    def send_back(self, message: MessageExt, delay_level: int) -> None:
        """Send a message back; see `Consumer.send_back`.

        Raises:
            SendError: The broker refused the message, and so did the brokers of the retry topic.
        """
        problem = self._send_back_at_broker(message, delay_level)
        if problem is not None:
            _log.warning("remote.send_back_refused", group=self.spec.group, msg_id=message.msg_id, reason=problem)
            self._send_copy(message, delay_level)

    def _send_back_at_broker(self, message: MessageExt, delay_level: int) -> str | None:
        """Have the broker move the message to the retry topic; return the reason if it does not."""
        context, spec = self.context, self.spec
        header = ConsumerSendMsgBackRequestHeader(
            offset=message.physical_offset,
            group=context.namespace.wrap(spec.group),
            delay_level=delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=context.namespace.wrap(message.topic),
            unit_mode=False,
            max_reconsume_times=spec.max_reconsume_times,
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

    def _send_copy(self, message: MessageExt, delay_level: int) -> None:
        """Send a copy to the retry or dead-letter topic; its broker reads ``reconsume_times`` from the header."""
        spec, wrap = self.spec, self.context.namespace.wrap
        is_dead = is_exhausted(message, delay_level, spec.max_reconsume_times)
        copy = dead_letter(message, spec.group) if is_dead else retry(message, spec.group, delay_level)
        copy.properties[Property.RETRY_TOPIC] = wrap(copy.properties[Property.RETRY_TOPIC])
        request = self.producer.factory.single(copy)
        request.reconsume_times = message.reconsume_times + 1
        request.max_reconsume_times = spec.max_reconsume_times
        self.producer.deliver(request, None, _TIMEOUT_MS)
