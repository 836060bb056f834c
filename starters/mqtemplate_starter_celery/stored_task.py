"""A task as Celery would publish it, as the body of a message."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kombu.serialization import dumps as serialize
from kombu.utils.json import dumps, loads

from mqtemplate.errors import MessageError

ETA_HEADER = "mqtemplate_eta"
"""Header of a task with its eta. The header ``eta`` is removed, since it would make the worker wait again."""

_NAMES = ("routing_key", "compression", "delivery_mode")
_TRANSIENT = ("serializer", "retry", "retry_policy", "timeout", "confirm_timeout", "exchange", "declare", *_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTask:
    """Arguments that Celery passes to ``Producer.publish`` for one task, after its routing and its signals.

    Attributes:
        body: The serialized arguments, as text; in base64 if *is_binary*.
        queue: Name of the queue to declare; None for a task that only names an exchange.
        properties: Other properties of the message, such as the priority.
    """

    body: str
    is_binary: bool
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    queue: str | None
    exchange: str
    routing_key: str | None
    compression: str | None
    delivery_mode: int | str | None
    properties: dict[str, Any]

    @classmethod
    def of_publish(cls, body: object, headers: Mapping[str, Any], options: Mapping[str, Any]) -> StoredTask:
        """Return the task of a call ``publish(body, headers=headers, **options)``."""
        content_type, encoding, data = serialize(body, serializer=options.get("serializer"))
        is_binary = isinstance(data, bytes)
        declared = options.get("declare") or ()
        exchange = options.get("exchange") or ""
        properties = {name: value for name, value in options.items() if name not in _TRANSIENT}
        properties.pop("expiration", None)  # it counts from the publishing; the header `expires` is a time
        return cls(
            body=base64.b64encode(data).decode() if is_binary else data,
            is_binary=is_binary,
            content_type=content_type,
            content_encoding=encoding,
            headers={**headers, "eta": None, ETA_HEADER: headers["eta"]},
            queue=declared[0].name if declared else None,
            exchange=getattr(exchange, "name", exchange),
            properties=properties,
            **{name: options.get(name) for name in _NAMES},
        )

    def to_body(self) -> bytes:
        """Return the body of the message: JSON, with Celery's encoding of times and the like."""
        text: str = dumps(asdict(self))
        return text.encode()

    @classmethod
    def read(cls, body: bytes) -> StoredTask:
        """Return the task of a message.

        Raises:
            MessageError: The message is no task.
        """
        try:
            return cls(**loads(body))
        except (ValueError, TypeError) as error:
            raise MessageError(
                f"the message is no task of Celery: {error}; only mqtemplate_starter_celery may send to its topic"
            ) from error

    @property
    def payload(self) -> str | bytes:
        """The serialized arguments."""
        return base64.b64decode(self.body) if self.is_binary else self.body
