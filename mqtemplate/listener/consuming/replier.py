"""Replies: the result of a handler, sent to the client whose request the message is."""

from __future__ import annotations

import structlog

from mqtemplate.broker import Broker
from mqtemplate.converter import CONTENT_TYPE, MessageConverter
from mqtemplate.errors import MQTemplateError
from mqtemplate.listener.consuming.failure import log_fields
from mqtemplate.message import MessageExt, Property

_log = structlog.stdlib.get_logger("mqtemplate.listener")


class Replier:
    """Sender of the replies of one listener.

    A reply that fails is logged and nothing else, as in rocketmq-spring: the message was handled, and the client
    that sent the request gets a timeout.

    Args:
        timeout_ms: Time for sending one reply.
    """

    def __init__(self, broker: Broker, converter: MessageConverter, timeout_ms: int, listener: str) -> None:
        self._broker = broker
        self._converter = converter
        self._timeout_ms = timeout_ms
        self._log = _log.bind(listener=listener)

    def reply(self, request: MessageExt, result: object) -> bool:
        """Reply to *request* with a handler's result. Return False if the message is no request."""
        if not request.properties.get(Property.REPLY_TO_CLIENT):
            return False
        try:
            body, content_type = self._converter.to_body(result)
            properties = {} if content_type is None else {CONTENT_TYPE: content_type}
            self._broker.reply(request, body, properties, self._timeout_ms)
        except MQTemplateError as exc:
            self._log.error("listener.reply_failed", reason=str(exc), **log_fields(request))
        return True
