"""The messages of a Celery application: delayed tasks, started and stopped with the worker."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from celery import Celery, signals

from mqtemplate import ScheduleChange
from mqtemplate.context import MQApplication
from mqtemplate.durations import Duration, duration_ms, is_bare_number
from mqtemplate.running.hosting import ProcessApplication
from mqtemplate.template import RocketMQTemplate
from mqtemplate_starter_celery.sending import DEFAULT_TOPIC, delay_tasks, task_forwarder
from mqtemplate_starter_celery.tasks import SigningKey


class CeleryMQTemplate(ProcessApplication):
    """Delayed tasks of a Celery application: ``eta`` and ``countdown`` wait in mqtemplate.

    ::

        celery = Celery("shop", broker="redis://localhost")
        messages = MQTemplate(app=celery)

    A process that sends a task with an eta connects with its first one. The main process of each worker publishes those
    that are due; it starts when the worker is ready and stops with it.

    Args:
        components: Further components of the application that runs in workers, such as listeners.
        app: Celery application, if there is one already.
        topic: Topic of the delayed tasks. Celery applications that share a broker need one each.
        signing_key: Key that signs the tasks, so that only processes with the key can add some; at least 16
            characters. Of several the first one signs. Needed for tasks that are pickled.
        options: Options of `MQApplication`.
    """

    def __init__(
        self,
        *components: object,
        app: Celery | None = None,
        topic: str = DEFAULT_TOPIC,
        signing_key: SigningKey = None,
        **options: Any,
    ) -> None:
        super().__init__(*components, **options)
        self._topic, self._signing_key = topic, signing_key
        self._sender = ProcessApplication(**options)
        self._celery: Celery | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Celery) -> None:
        """Connect a Celery application. Nothing is started."""
        self._celery = app
        delay_tasks(app, lambda: self.sending_template, self._topic, self._signing_key)
        signals.worker_ready.connect(self._worker_ready, weak=False)
        signals.worker_shutdown.connect(self._worker_shutdown, weak=False)

    def new_application(self) -> MQApplication:
        """Return a new application that forwards tasks: for workers, and for ``mqtemplate run shop.tasks:messages``."""
        own = () if self._celery is None else (task_forwarder(self._celery, self._topic, self._signing_key),)
        return MQApplication(*self._components, *own, **self._options)

    @property
    def sending_template(self) -> RocketMQTemplate:
        """The template of this process for tasks. Only the main process of a worker has listeners beside it."""
        return self.template if self.is_started else self._sender.template

    def cancel(self, task_id: str) -> ScheduleChange:
        """Cancel a task that waits. The result is final: a cancelled task never runs, also after restarts."""
        return self.sending_template.cancel(key=task_id, topic=self._topic)

    def reschedule(
        self, task_id: str, countdown: Duration | None = None, eta: datetime | int | None = None
    ) -> ScheduleChange:
        """Give a task that waits another time; without one it is published now.

        Args:
            countdown: Seconds, as in ``apply_async``, or a duration such as ``"3h"``.
        """
        # Celery's own API defines the unit.
        delay = timedelta(milliseconds=duration_ms(countdown, 1_000)) if is_bare_number(countdown) else countdown
        return self.sending_template.reschedule(key=task_id, topic=self._topic, delay=delay, deliver_at=eta)

    def stop(self) -> None:
        """Stop what this process has started."""
        super().stop()
        self._sender.stop()

    def _worker_ready(self, sender: Any = None, **_: Any) -> None:
        if getattr(sender, "app", self._celery) is self._celery:
            self.start()

    def _worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if getattr(sender, "app", self._celery) is self._celery:
            self.stop()
