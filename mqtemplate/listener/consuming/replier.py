"""Brings what a handler returned to who asked."""

from __future__ import annotations

import structlog

from mqtemplate.broker import Broker
from mqtemplate.converter import CONTENT_TYPE, MessageConverter
from mqtemplate.errors import MQTemplateError
from mqtemplate.listener.current import log_fields
from mqtemplate.message import MessageExt, Property

_log = structlog.stdlib.get_logger("mqtemplate.listener")


class Replier:
    """Replies for one listener.

    A reply that cannot be made or brought is logged and no more, as in rocketmq-spring: the message was handled, and
    whoever asked sees the time-out.

    Args:
        timeout_ms: For bringing one reply.
    """

    def __init__(self, broker: Broker, converter: MessageConverter, timeout_ms: int, listener: str) -> None:
        self._broker = broker
        self._converter = converter
        self._timeout_ms = timeout_ms
        self._log = _log.bind(listener=listener)

    def reply(self, request: MessageExt, answer: object) -> bool:
        """Reply to *request*; False if it is none."""
        if not request.properties.get(Property.REPLY_TO_CLIENT):
            return False
        try:
            body, content_type = self._converter.to_body(answer)
            properties = {} if content_type is None else {CONTENT_TYPE: content_type}
            self._broker.reply(request, body, properties, self._timeout_ms)
        except MQTemplateError as exc:
            self._log.error("listener.reply_failed", reason=str(exc), **log_fields(request))
        return True
