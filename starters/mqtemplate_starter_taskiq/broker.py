"""The broker of taskiq: tasks are messages of one topic, and a message is committed when its task acknowledges it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from mqtemplate import ConsumeFromWhere, MessageExt, MQApplication, PauseListener, ScheduleChange, message_listener
from mqtemplate.durations import Duration, duration_ms, is_bare_number
from mqtemplate.errors import ConfigurationError
from mqtemplate.template import RocketMQTemplate

DEFAULT_TOPIC = "taskiq"
DELAY_LABEL, DELIVER_AT_LABEL = "delay", "deliver_at"
SCHEDULE_LABEL = "schedule_id"
_LONGEST_TASK = "7d"
_WAKE_S = 1.0


class MQTemplateBroker(AsyncBroker):  # type: ignore[misc]  # mypy does not follow the imports of taskiq
    """Broker of taskiq. A task with the label ``delay`` waits on the disk of the broker, and can be cancelled.

    ::

        broker = MQTemplateBroker(settings={"rocketmq.name-server": "127.0.0.1:9876"})


        @broker.task
        async def remind(order: str) -> None: ...


        await remind.kicker().with_labels(delay="3h").kiq("4466")

    A task that a killed worker has taken runs again: a message is committed when its task is acknowledged.

    Args:
        components: Further components of the application, such as listeners.
        topic: Topic of the tasks. Programs that share a broker need one each.
        consumer_group: Group of the workers; by default the name of the topic.
        concurrency: Maximum number of tasks that one worker has taken and not acknowledged.
        options: Options of `MQApplication`.
    """

    def __init__(
        self,
        *components: object,
        topic: str = DEFAULT_TOPIC,
        consumer_group: str | None = None,
        concurrency: int = 100,
        **options: Any,
    ) -> None:
        super().__init__()
        self.topic = topic
        self._consumer_group = consumer_group or topic
        self._concurrency = concurrency
        self._components = components
        self._options = options
        self._application: MQApplication | None = None
        self._taken = _TakenTasks()

    @property
    def application(self) -> MQApplication:
        """The application of this process.

        Raises:
            ConfigurationError: The broker is not started.
        """
        if self._application is None:
            raise ConfigurationError("the broker of taskiq is not started; call 'await broker.startup()' first")
        return self._application

    @property
    def template(self) -> RocketMQTemplate:
        """The template of this process; errors as of `application`."""
        return self.application.template

    async def startup(self) -> None:
        """Start the application, and what taskiq starts."""
        self._taken = taken = _TakenTasks()
        application = MQApplication(*self._components, self._listener(taken), **self._options)
        await application.start_async()
        self._application = application
        await super().startup()

    async def shutdown(self) -> None:
        """Stop both. Tasks that were not acknowledged run again, in another worker."""
        await super().shutdown()
        application, self._application = self._application, None
        if application is not None:
            self._taken.close()
            await application.stop_async()

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task. The label ``delay`` is a duration such as ``"3h"``, or seconds.

        Raises:
            MessageError: A label is not allowed.
            SendError: The broker did not store the message.
        """
        labels = message.labels
        deliver_at = labels.get(DELIVER_AT_LABEL)
        await self.template.async_send(
            self.topic,
            message.message,
            keys=[message.task_id, *([labels[SCHEDULE_LABEL]] if SCHEDULE_LABEL in labels else [])],
            headers={"task_name": message.task_name},
            delay=_delay(labels.get(DELAY_LABEL)) if deliver_at is None else None,
            deliver_at=None if deliver_at is None else int(deliver_at),
        )

    async def cancel(self, task_id: str) -> ScheduleChange:
        """Cancel a task that waits, by its id or the id of its schedule. The result is final."""
        return await self.template.async_cancel(key=task_id, topic=self.topic)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield the tasks that are due. taskiq calls this in workers."""
        for container in self.application.containers:
            if container.endpoint.id == self._listener_id and not container.is_running:
                container.start()
        while True:
            yield await self._taken.get()

    @property
    def _listener_id(self) -> str:
        return f"taskiq-{self.topic}"

    def _listener(self, taken: _TakenTasks) -> Callable[..., Any]:
        @message_listener(
            self.topic,
            consumer_group=self._consumer_group,
            id=self._listener_id,
            auto_startup=False,  # a process that only sends does not listen
            consume_thread_number=self._concurrency,
            consume_timeout=_LONGEST_TASK,
            consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        )
        async def run_task(message: MessageExt) -> None:
            await taken.run(message.body)

        return run_task


class _TakenTasks:
    """Tasks that this process has taken from the broker, and that are not acknowledged yet."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[AckableMessage] = asyncio.Queue()
        self._open: set[asyncio.Future[None]] = set()

    async def get(self) -> AckableMessage:
        """Wait for the next task.

        The loop wakes from time to time: taskiq sets an event in its handler of signals, which does not wake a loop, so
        an idle worker would not stop.
        """
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._ready.get(), _WAKE_S)

    async def run(self, body: bytes) -> None:
        """Hand a task to taskiq, and wait until it is acknowledged.

        Raises:
            PauseListener: The worker stops before that.
        """
        acknowledged = asyncio.get_running_loop().create_future()
        self._open.add(acknowledged)
        try:
            self._ready.put_nowait(AckableMessage(data=body, ack=lambda: _acknowledge(acknowledged)))
            await acknowledged
        finally:
            self._open.discard(acknowledged)

    def close(self) -> None:
        """End the wait for the tasks that are not acknowledged: their messages are not committed."""
        for acknowledged in self._open:
            if not acknowledged.done():
                acknowledged.set_exception(PauseListener("1h", "the worker of taskiq stops"))


def _acknowledge(acknowledged: asyncio.Future[None]) -> None:
    if not acknowledged.done():
        acknowledged.set_result(None)


def _delay(label: Any) -> Duration | None:
    """Return a delay. A number is seconds, as in taskiq's other brokers, which turn labels into text."""
    if not is_bare_number(label):
        return label  # type: ignore[no-any-return]  # the send checks it
    return timedelta(milliseconds=duration_ms(label, 1_000))
