"""Forwarding: a task that is due goes to Celery's broker."""

from __future__ import annotations

from collections.abc import Callable

from celery import Celery
from kombu.exceptions import OperationalError

from mqtemplate import MessageExt, PauseListener, message_listener
from mqtemplate.errors import MessageError
from mqtemplate_starter_celery.sending import DEFAULT_TOPIC
from mqtemplate_starter_celery.stored_task import StoredTask
from mqtemplate_starter_celery.trust import SIGNATURE_HEADER, SigningKey, TaskTrust

_PAUSE = "5s"
_THREADS = 4  # publishing to Redis or RabbitMQ takes well under a millisecond


def task_forwarder(
    app: Celery, topic: str = DEFAULT_TOPIC, signing_key: SigningKey = None
) -> Callable[[MessageExt], None]:
    """Return a listener that publishes the tasks of `delay_tasks` when they are due: a component of an application.

    Several processes may have it: each task is published by one of them, at least once. While the broker of Celery is
    down the listener is paused, and no task is lost. A message that is no task, or one that the application does not
    accept, is a dead letter.

    Args:
        signing_key: Key of `delay_tasks`; only tasks that are signed with it are published.

    Raises:
        ConfigurationError: The key is too short.
    """
    trust = TaskTrust(topic, signing_key)

    @message_listener(
        topic, consumer_group=topic, id=topic, consume_thread_number=_THREADS, not_retry_for=(MessageError,)
    )
    def forward(message: MessageExt) -> None:
        task = StoredTask.read(message.body)
        trust.check(app, task, message.body, message.properties.get(SIGNATURE_HEADER, ""))
        try:
            with app.producer_or_acquire() as producer:
                producer.publish(
                    task.payload,
                    headers=task.headers,
                    content_type=task.content_type,
                    content_encoding=task.content_encoding,
                    exchange=task.exchange,
                    routing_key=task.routing_key,
                    compression=task.compression,
                    delivery_mode=task.delivery_mode,
                    declare=[] if task.queue is None else [app.amqp.queues[task.queue]],
                    **task.properties,
                )
        except OperationalError as error:
            raise PauseListener(_PAUSE, f"the broker of Celery is down: {error}") from error

    return forward
