"""A task as Celery would publish it, as the body of a message."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

from kombu.compression import get_encoder
from kombu.messaging import Producer
from kombu.serialization import dumps as serialize
from kombu.utils.json import dumps, loads

from mqtemplate.errors import MessageError

ETA_HEADER = "mqtemplate_eta"
"""Header of a task with its eta. The header ``eta`` is removed, since it would make the worker wait again."""

_NAMES = ("routing_key", "compression", "delivery_mode")
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("body", "content_type", "exchange"), str),
    **dict.fromkeys(("queue", "routing_key", "compression"), str | None),
    **dict.fromkeys(("headers", "properties"), dict),
    "is_binary": bool,
}
_ENCODINGS = ("utf-8", "binary", "us-ascii")
_DELIVERY_MODES = (None, 1, 2, "transient", "persistent")
_ARGUMENTS = frozenset(signature(Producer.publish).parameters) - {"priority", "mandatory", "immediate"}
"""Arguments of ``Producer.publish`` that are no properties of a message."""
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
        """Return the task of a message. Any program that may send to the topic can have written it.

        Raises:
            MessageError: The message is no task.
        """
        try:
            task = cls(**loads(body))
            task._check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f"{error!s:.200}" or type(error).__name__
            raise MessageError(
                f"the message is no task of Celery: {reason}; only mqtemplate_starter_celery may send to its topic"
            ) from error
        return task

    def _check(self) -> None:
        """Check the values, which become arguments of ``Producer.publish``.

        Raises:
            ValueError: A value has another type, or no call of Celery gives it.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name, kind in _TYPES.items():
            if not isinstance(values[name], kind):
                raise ValueError(f"{name} is {values[name]!r:.64}")
        if not isinstance(self.headers.get("task"), str):
            raise ValueError("the header 'task' names no task")
        if self.content_encoding not in _ENCODINGS:
            raise ValueError(f"content_encoding is {self.content_encoding!r:.64}, not one of {', '.join(_ENCODINGS)}")
        if self.compression is not None:
            get_encoder(self.compression)  # a KeyError for an unknown one
        if self.delivery_mode not in _DELIVERY_MODES:
            raise ValueError(f"delivery_mode is {self.delivery_mode!r:.64}")
        if wrong := sorted(self.properties.keys() & _ARGUMENTS):
            raise ValueError(f"{wrong[0]} is no property of a task")
        if self.is_binary:
            base64.b64decode(self.body, validate=True)

    @property
    def payload(self) -> str | bytes:
        """The serialized arguments."""
        return base64.b64decode(self.body) if self.is_binary else self.body
