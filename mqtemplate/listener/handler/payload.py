"""Values that a handler takes from a message: its payload by the listener's converter, its headers, its queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.settings import PayloadSettings
from mqtemplate.message import MessageExt, MessageQueue, Property

if TYPE_CHECKING:  # it needs pydantic, which executors of Spark do not have
    from mqtemplate.converter import MessageConverter


ConverterOf = Callable[[type], "MessageConverter"]
"""Function that returns an object of a converter class."""


def converter_of(
    listener: str, settings: PayloadSettings, default: MessageConverter, converter_of_class: ConverterOf
) -> MessageConverter:
    """Return the converter of a listener.

    Raises:
        ListenerError: The converter writes text in one encoding only.
    """
    converter: Any = default if settings.converter is None else settings.converter
    if isinstance(converter, type):
        converter = converter_of_class(converter)
    if settings.charset:
        with_charset = getattr(converter, "with_charset", None)
        if with_charset is None:
            raise ListenerError(
                f"listener {listener}: charset={settings.charset!r} is given, and {converter!r} has no with_charset; "
                "remove charset, or give a converter that has it, such as JsonMessageConverter"
            )
        converter = with_charset(settings.charset)
    return WithContentType(converter, settings.content_type) if settings.content_type else converter


class WithContentType:
    """Converter that takes bodies without a content type for bodies of one, and writes it on replies."""

    def __init__(self, converter: MessageConverter, content_type: str) -> None:
        from mqtemplate.converter import CONTENT_TYPE

        self._header = CONTENT_TYPE
        self._converter = converter
        self._content_type = content_type
        check = getattr(converter, "check_type", None)
        self.check_type: Callable[[Any], object] = check if check is not None else lambda target_type: None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._converter!r}, {self._content_type!r})"

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        return self._converter.to_body(payload)[0], self._content_type

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        if self._header not in properties:
            properties = {**properties, self._header: self._content_type}
        return self._converter.from_body(body, target_type, properties)


_FROM_PROPERTIES = (
    ("rocketmq_KEYS", Property.KEYS),
    ("rocketmq_TAGS", Property.TAGS),
    ("rocketmq_DELAY", Property.DELAY),
    ("rocketmq_WAIT", Property.WAIT),
    ("rocketmq_TRANSACTION_ID", Property.TRANSACTION_ID),
)

_NEVER_COPIED = frozenset({"id", "timestamp"})


def message_headers(message: MessageExt) -> dict[str, str]:
    """Return every header as text, without those that the message does not have.

    Source: the names of ``rocketmq-spring: RocketMQHeaders``.
    """
    properties = message.properties
    headers = {name: text for name, text in message.user_properties.items() if name not in _NEVER_COPIED}
    headers["rocketmq_TOPIC"] = message.topic
    headers["rocketmq_MESSAGE_ID"] = message.msg_id
    headers["rocketmq_BORN_TIMESTAMP"] = str(message.born_timestamp)
    headers["rocketmq_BORN_HOST"] = message.born_host.ip
    headers["rocketmq_FLAG"] = str(message.flag)
    headers["rocketmq_QUEUE_ID"] = str(message.queue_id)
    headers["rocketmq_SYS_FLAG"] = str(message.sys_flag)
    for header, name in _FROM_PROPERTIES:
        if (text := properties.get(name)) is not None:
            headers[header] = text
    return headers


Read = Callable[[MessageExt], object]
"""Function that returns a value of the message, such as the value of a parameter."""


def read_message(message: MessageExt) -> MessageExt:
    """Return the message itself."""
    return message


def read_queue(message: MessageExt) -> MessageQueue:
    """Return the queue of the message."""
    return message.message_queue
