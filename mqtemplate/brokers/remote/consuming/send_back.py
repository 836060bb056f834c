"""Messages sent back for redelivery: to the broker that stores them or, if it refuses, to the retry topic.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl.sendMessageBack``.
"""

from __future__ import annotations

import structlog

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.producing.send_request import Deliver, SendRequestFactory
from mqtemplate.brokers.retry import dead_letter, is_exhausted, retry
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_TIMEOUT_MS = 5_000


class RetrySender:
    """Sender of messages for redelivery, for the members of any group."""

    def __init__(self, context: ClientContext, factory: SendRequestFactory, deliver: Deliver) -> None:
        self._routes = context.routes
        self._namespace = context.namespace
        self._factory = factory
        self._deliver = deliver

    def send_back(self, instance: ClientInstance, spec: ConsumerSpec, message: MessageExt, delay_level: int) -> None:
        """Send a message back; see `Consumer.send_back`.

        Args:
            instance: The member's instance.

        Raises:
            SendError: The broker refused the message, and so did the brokers of the retry topic.
        """
        problem = self._send_back_at_broker(instance, spec, message, delay_level)
        if problem is not None:
            _log.warning("remote.send_back_refused", group=spec.group, msg_id=message.msg_id, reason=problem)
            self._send_copy(spec, message, delay_level)

    def _send_back_at_broker(
        self, instance: ClientInstance, spec: ConsumerSpec, message: MessageExt, delay_level: int
    ) -> str | None:
        """Have the broker move the message to the retry topic; return the reason if it does not."""
        header = ConsumerSendMsgBackRequestHeader(
            offset=message.physical_offset,
            group=self._namespace.wrap(spec.group),
            delay_level=delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=self._namespace.wrap(message.topic),
            unit_mode=False,
            max_reconsume_times=spec.max_reconsume_times,
            broker_name=message.broker_name,
        )
        request = RemotingCommand.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        try:
            response = instance.invoke(self._routes.address(message.broker_name), request, _TIMEOUT_MS)
        except (BrokerClosedError, ForkedError):
            raise
        except BrokerError as exc:
            return str(exc)
        return None if response.code == ResponseCode.SUCCESS else str(response)

    def _send_copy(self, spec: ConsumerSpec, message: MessageExt, delay_level: int) -> None:
        """Send a copy to the retry or dead-letter topic; its broker reads ``reconsume_times`` from the header."""
        is_dead = is_exhausted(message, delay_level, spec.max_reconsume_times)
        copy = dead_letter(message, spec.group) if is_dead else retry(message, spec.group, delay_level)
        copy.properties[Property.RETRY_TOPIC] = self._namespace.wrap(copy.properties[Property.RETRY_TOPIC])
        request = self._factory.single(Message(copy.topic, copy.body, copy.properties, copy.flag))
        request.reconsume_times = message.reconsume_times + 1
        request.max_reconsume_times = spec.max_reconsume_times
        self._deliver(request, None, _TIMEOUT_MS)
