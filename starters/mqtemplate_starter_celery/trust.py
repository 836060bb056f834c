"""Trust in stored tasks: their signature, and what the application accepts.

Who may send to the topic of the tasks could otherwise run any task of the application, with pickle any code. The topic
of an embedded broker belongs to one user. On a server each client may send to it, unless access control forbids that.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from celery import Celery
from kombu.exceptions import SerializerNotInstalled
from kombu.serialization import prepare_accept_content

from mqtemplate.errors import ConfigurationError, MessageError
from mqtemplate_starter_celery.stored_task import StoredTask

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
            signature: Header of its message; empty if it has none.

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
            f"the exchange of the task is {task.exchange!r:.64}, and those of the application are "
            f"{', '.join(sorted(filter(None, exchanges)))}; add a queue with it to task_queues"
        )
