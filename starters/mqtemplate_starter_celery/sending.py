"""Tasks with an eta become delayed messages, and a task that is due goes to Celery's broker."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any

from celery import Celery
from celery.utils.time import maybe_make_aware
from kombu.exceptions import OperationalError
from kombu.utils.imports import symbol_by_name

from mqtemplate import MessageExt, PauseListener, message_listener
from mqtemplate.errors import MessageError
from mqtemplate.template import RocketMQTemplate
from mqtemplate_starter_celery.tasks import SIGNATURE_HEADER, SigningKey, StoredTask, TaskTrust

DEFAULT_TOPIC = "celery-eta"

_NATIVE_DELAY = "celery_delayed_"  # exchanges of RabbitMQ's quorum queues, which delay by themselves


def delay_tasks(
    app: Celery,
    template: Callable[[], RocketMQTemplate],
    topic: str = DEFAULT_TOPIC,
    signing_key: SigningKey = None,
) -> None:
    """Let the tasks of a Celery application that have an eta wait in mqtemplate, from now on.

    It acts on everything that publishes a task: ``apply_async``, ``send_task``, ``retry``, canvases and beat. Routing,
    serialization and signals are Celery's own. Tasks without an eta, or whose eta has passed, are published as before.

    Args:
        template: Returns the template; it is called for each task with an eta.
        topic: Topic of the messages; `task_forwarder` with the same topic publishes the tasks when they are due.
        signing_key: Key that signs the tasks; needed for tasks that are pickled.

    Raises:
        ConfigurationError: The key is too short.
    """
    trust = TaskTrust(topic, signing_key)
    base: Any = symbol_by_name(app.amqp_cls)

    class DelayingAMQP(base):  # type: ignore[misc]  # the class that the application names
        """AMQP of a Celery application whose tasks with an eta go to mqtemplate."""

        @cached_property
        def send_task_message(self) -> Callable[..., Any]:
            """Function that publishes a task."""
            publish = self._create_task_sender()

            def send(producer: Any, name: str, message: Any, *arguments: Any, **options: Any) -> Any:
                eta_ms = _eta_ms(app, message, options)
                if eta_ms is not None and eta_ms > template().broker.clock.now_ms():
                    producer = _StoringProducer(producer, template(), f"{topic}:{name}", eta_ms, trust)
                return publish(producer, name, message, *arguments, **options)

            return send

    app.amqp_cls = DelayingAMQP
    app.__dict__.pop("amqp", None)  # one that was used before has the function of Celery


def _eta_ms(app: Celery, message: Any, options: dict[str, Any]) -> int | None:
    """Return the eta of a task in epoch milliseconds, rounded up; None if it has no eta, or RabbitMQ delays it."""
    eta = message.headers.get("eta")
    exchange = options.get("exchange")
    if eta is None or str(getattr(exchange, "name", exchange)).startswith(_NATIVE_DELAY):
        return None
    at: datetime = maybe_make_aware(datetime.fromisoformat(eta), app.timezone)
    return math.ceil(at.timestamp() * 1_000)


class _StoringProducer:
    """Producer of kombu that stores a task as a delayed message. Events about it go to the producer that it wraps."""

    def __init__(
        self, producer: Any, template: RocketMQTemplate, destination: str, eta_ms: int, trust: TaskTrust
    ) -> None:
        self._producer = producer
        self._template = template
        self._destination = destination
        self._eta_ms = eta_ms
        self._trust = trust

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, headers: dict[str, Any] | None = None, **options: Any) -> Any:
        """Store a task, or publish an event."""
        if headers is None or "task" not in headers:
            return self._producer.publish(body, headers=headers, **options)
        task = StoredTask.of_publish(body, headers, options)
        stored = task.to_body()
        signed = self._trust.headers(task, stored)
        return self._template.sync_send(
            self._destination, stored, deliver_at=self._eta_ms, keys=[str(headers["id"])], headers=signed
        )


_PAUSE = "5s"
_THREADS = 4  # publishing to Redis or RabbitMQ takes well under a millisecond


def task_forwarder(
    app: Celery, topic: str = DEFAULT_TOPIC, signing_key: SigningKey = None
) -> Callable[[MessageExt], None]:
    """Return a listener that publishes the tasks of `delay_tasks` when they are due: a component of an application.

    Several processes may have it: each task is published by one of them, at least once. While the broker of Celery is
    down the listener is paused, and no task is lost. A message that is not a task, or one that the application does not
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
