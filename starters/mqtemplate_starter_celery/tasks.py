"""A task as Celery would publish it, as the body of a message, and the trust in such tasks.

Who may send to the topic of the tasks could otherwise run any task of the application, with pickle any code. The topic
of an embedded broker belongs to one user. On a server each client may send to it, unless access control forbids that.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

from celery import Celery
from kombu.compression import get_encoder
from kombu.exceptions import SerializerNotInstalled
from kombu.messaging import Producer
from kombu.serialization import dumps as serialize
from kombu.serialization import prepare_accept_content
from kombu.utils.json import dumps, loads

from mqtemplate.errors import ConfigurationError, MessageError

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
"""Arguments of ``Producer.publish`` that are not properties of a message."""
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
            MessageError: The message is not a task.
        """
        try:
            task = cls(**loads(body))
            task._check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f"{error!s:.200}" or type(error).__name__
            raise MessageError(
                f"the message is not a task of Celery: {reason}; only mqtemplate_starter_celery may send to its topic"
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
            raise ValueError(f"{wrong[0]} is not a property of a task")
        if self.is_binary:
            base64.b64decode(self.body, validate=True)

    @property
    def payload(self) -> str | bytes:
        """The serialized arguments."""
        return base64.b64decode(self.body) if self.is_binary else self.body


SIGNATURE_HEADER = "celery_signature"
"""Property of a message with the signature of its body."""

_MIN_KEY_LENGTH = 16
_RUNS_CODE = "application/x-python-serialize"
"""Content type of pickle: to read such a body runs what it says."""

SigningKey = str | Sequence[str] | None
"""Key that signs stored tasks; of several the first one signs, and each is accepted."""


class TaskTrust:
    """Signs stored tasks, and says which ones may be published.

    Args:
        topic: Topic of the tasks: a signature is valid in this one only.
        key: Key that only the processes of the application have; None: tasks are not signed.

    Raises:
        ConfigurationError: A key is shorter than 16 characters.
    """

    def __init__(self, topic: str, key: SigningKey = None) -> None:
        keys = [key] if isinstance(key, str) else list(key or ())
        for each in keys:
            if len(each) < _MIN_KEY_LENGTH:
                raise ConfigurationError(
                    f"a signing_key must have {_MIN_KEY_LENGTH} characters or more, one has {len(each)}; create one "
                    "with secrets.token_hex(), and read it from the environment"
                )
        self._topic = topic
        self._keys = [each.encode() for each in keys]

    def headers(self, task: StoredTask, body: bytes) -> dict[str, str]:
        """Return the headers of the message of a task.

        Raises:
            MessageError: The task is pickled, and there is no key to sign it.
        """
        if not self._keys:
            _refuse_code(task)
            return {}
        return {SIGNATURE_HEADER: self._signature(self._keys[0], body).decode()}

    def check(self, app: Celery, task: StoredTask, body: bytes, signature: str) -> None:
        """Check a task that is due.

        Args:
            body: Body of its message.
            signature: Header of its message; empty without one.

        Raises:
            MessageError: It is not signed with one of the keys, or the application does not accept it.
        """
        if not self._keys:
            _refuse_code(task)
        elif not any(hmac.compare_digest(self._signature(key, body), signature.encode()) for key in self._keys):
            raise MessageError(
                f"task {task.headers.get('id')!r:.64} has no signature of a signing_key: another program sent it, or a "
                "process with another key; give all processes the same key, and in a change of keys the former one "
                "behind it"
            )
        _check_accepted(app, task, is_signed=bool(self._keys))

    def _signature(self, key: bytes, body: bytes) -> bytes:
        return hmac.digest(key, self._topic.encode() + b"\0" + body, "sha256").hex().encode()


def _refuse_code(task: StoredTask) -> None:
    if task.content_type == _RUNS_CODE:
        raise MessageError(
            f"task {task.headers.get('task')!r:.64} is pickled, and a pickled body runs code of who wrote it; give "
            "MQTemplate a signing_key=, or choose another serializer"
        )


def _check_accepted(app: Celery, task: StoredTask, *, is_signed: bool) -> None:
    """Check that workers of the application would take a task, and that the application would send it there."""
    try:
        accepted = prepare_accept_content(app.conf.accept_content)
    except SerializerNotInstalled as error:
        raise MessageError(f"accept_content of the application is not usable: {error}") from error
    if task.content_type not in accepted:
        raise MessageError(
            f"the content type of the task is {task.content_type!r:.64}, and the application accepts "
            f"{', '.join(sorted(accepted))}; add it to accept_content if workers are to take it"
        )
    queues = app.amqp.queues
    if task.queue is not None and task.queue not in queues and not app.conf.task_create_missing_queues:
        raise MessageError(
            f"the queue of the task is {task.queue!r:.64}, and the application has {', '.join(sorted(queues))}; add it "
            "to task_queues, or set task_create_missing_queues"
        )
    if is_signed:
        return  # a call of the application may name any exchange
    if task.queue is not None:
        queues[task.queue]  # one that is missing is created here, as for a call of the application
    exchanges = {"", app.conf.task_default_exchange, *(each.exchange.name for each in queues.values())}
    if task.exchange not in exchanges:
        raise MessageError(
            f"the exchange of the task is {task.exchange!r:.64}, and the application has "
            f"{', '.join(sorted(filter(None, exchanges)))}; add a queue with it to task_queues"
        )
