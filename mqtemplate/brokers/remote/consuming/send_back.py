"""Giving messages back to a cluster: to the broker that has them, or, where it refuses, as messages of our own.

Source: RocketMQ ``client: DefaultMQPushConsumerImpl.sendMessageBack``; section 13 of the specification.
"""

from __future__ import annotations

import structlog

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.outbound import OutboundMaker
from mqtemplate.brokers.remote.producer import RemoteSender
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.brokers.retry import dead_letter, is_exhausted, retry
from mqtemplate.errors import BrokerClosedError, BrokerError, ForkedError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_TIMEOUT_MS = 5_000


class SendBack:
    """Gives messages back for the members of any group."""

    def __init__(self, routes: RouteTable, namespace: Namespace, maker: OutboundMaker, sender: RemoteSender) -> None:
        self._routes = routes
        self._namespace = namespace
        self._maker = maker
        self._sender = sender

    def send_back(
        self, instance: ClientInstance, message: MessageExt, group: str, delay_level: int, max_reconsume_times: int
    ) -> None:
        """See `Consumer.send_back`.

        Raises:
            SendError: Neither way went.
        """
        reason = self._ask(instance, message, group, delay_level, max_reconsume_times)
        if reason is not None:
            _log.warning("remote.send_back_refused", group=group, msg_id=message.msg_id, reason=reason)
            self._send_again(message, group, delay_level, max_reconsume_times)

    def _ask(
        self, instance: ClientInstance, message: MessageExt, group: str, delay_level: int, max_reconsume_times: int
    ) -> str | None:
        """Have the broker put it into the retry topic; None, or why it did not."""
        header = ConsumerSendMsgBackRequestHeader(
            offset=message.physical_offset,
            group=self._namespace.wrap(group),
            delay_level=delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=self._namespace.wrap(message.topic),
            unit_mode=False,
            max_reconsume_times=max_reconsume_times,
            broker_name=message.broker_name,
        )
        request = RemotingCommand.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        try:
            answer = instance.invoke(self._routes.address(message.broker_name), request, _TIMEOUT_MS)
        except (BrokerClosedError, ForkedError):
            raise
        except BrokerError as exc:
            return str(exc)
        return None if answer.code == ResponseCode.SUCCESS else str(answer)

    def _send_again(self, message: MessageExt, group: str, delay_level: int, max_reconsume_times: int) -> None:
        """The retry, or the dead letter, as a message of ours; its broker counts ``reconsume_times`` by the header."""
        is_dead = is_exhausted(message, delay_level, max_reconsume_times)
        again = dead_letter(message, group) if is_dead else retry(message, group, delay_level)
        again.properties[Property.RETRY_TOPIC] = self._namespace.wrap(again.properties[Property.RETRY_TOPIC])
        out = self._maker.single(Message(again.topic, again.body, again.properties, again.flag))
        out.reconsume_times = message.reconsume_times + 1
        out.max_reconsume_times = max_reconsume_times
        self._sender.deliver(out, None, _TIMEOUT_MS)
