"""Headers of a received message: its fields under ``rocketmq_`` names, and the producer's own properties."""

from __future__ import annotations

from mqtemplate.message import MessageExt, Property

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
