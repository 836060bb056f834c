"""The Spark listeners of an application: one session, and one query per listener."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mqtemplate import Broker
from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, is_spark_listener
from mqtemplate.event_log import get_logger
from mqtemplate.listener import ListenerRegistry, ListenerSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqtemplate.spark import SparkListenerContainer


class SparkAutoConfiguration(AutoConfiguration):
    """Starter that adds `SparkListeners` if there is a Spark listener; without one it starts no session."""

    requires = ("pyspark", "pyarrow", "pandas")
    after = ("logging", "embedded")

    def condition(self, settings: AppSettings) -> bool | str:
        return settings.mqtemplate.spark.enabled or "mqtemplate.spark.enabled is false"

    def contribute(self, context: ApplicationContext) -> None:
        marked = [component for component in context.components if is_spark_listener(component)]
        if not marked:
            context.note_nothing_to_do("no component is a @spark_listener")
            return
        context.add_part(SparkListeners(context, marked))


_log = get_logger("mqtemplate.starter.spark")


class SparkListeners:
    """The Spark listeners of an application. They start after the message listeners and stop before them.

    While a query has ended with an error, the application is not ready.

    The start creates a session from ``mqtemplate.spark.*`` and the stop ends it. If the application has a
    ``SparkSession``, that one is used instead and not ended.

    Args:
        marked: The decorated functions and classes.
    """

    name = "spark listeners"

    def __init__(self, context: ApplicationContext, marked: Sequence[object]) -> None:
        self._context = context
        self._marked = marked
        self._session: SparkSession | None = None
        self._is_stopping = False
        self.containers: list[SparkListenerContainer] = []

    def start(self) -> None:
        """Create the session and start a query for each listener.

        Raises:
            SparkError: Spark or Java cannot be used, or Spark cannot read from the broker.
            ListenerError: Another listener has the same group.
        """
        from mqtemplate.spark import refuse_shared_groups, spark_listener_specs

        self.containers = [
            self._container(component, spec) for component in self._marked for spec in spark_listener_specs(component)
        ]
        message_listeners = self._context.get(ListenerRegistry)
        refuse_shared_groups(
            [container.settings.consumer_group for container in self.containers],
            [container.endpoint.settings.group for container in message_listeners],
        )
        for container in self.containers:
            container.start()

    @property
    def is_ready(self) -> bool:
        """False while a query has ended with an error."""
        return all(container.exception is None for container in self.containers)

    def _update_readiness(self) -> None:
        """Show in ``MQApplication.is_ready`` that a query has ended with an error, or runs again."""
        if not self.is_ready:
            self._context.is_ready.clear()
        elif not self._is_stopping:
            self._context.is_ready.set()

    def stop(self) -> None:
        """Stop the queries, the last one first, then the session.

        Raises:
            ExceptionGroup: The errors of the stops that failed; all others succeeded.
        """
        self._is_stopping = True
        stops: list[Callable[[], object]] = [container.stop for container in reversed(self.containers)]
        if self._session is not None:
            stops.append(self._session.stop)
        errors: list[Exception] = []
        for stop in stops:
            try:
                stop()
            except Exception as exc:
                errors.append(exc)
        self._session = None
        if errors:
            raise ExceptionGroup("Spark could not be stopped cleanly", errors)

    def _container(self, component: object, spec: ListenerSpec) -> SparkListenerContainer:
        from mqtemplate.spark import SparkListenerContainer

        broker: Broker = self._context.get(Broker)  # type: ignore[type-abstract]  # selected by its base class
        settings = self._context.settings
        return SparkListenerContainer(
            self._endpoint(component),
            self._spark,
            broker,
            settings.absolute(settings.mqtemplate.spark.checkpoint_path, "mqtemplate.spark.checkpoint-path"),
            resolve=settings.resolve_text,
            spec=spec,
            on_change=self._update_readiness,
        )

    def _endpoint(self, component: object) -> object:
        """Return the function, or the object that the context built from the class."""
        definition = None if inspect.isroutine(component) else self._context.definition_of(component)
        return component if definition is None else self._context.build(definition)

    def _spark(self) -> SparkSession:
        """Return the session; the start of the first listener creates it."""
        from pyspark.sql import SparkSession

        from mqtemplate.spark import session

        if self._context.has(SparkSession):
            return self._context.get(SparkSession)
        if self._session is None:
            own = self._context.settings.mqtemplate.spark
            conf: dict[str, Any] = dict(own.conf)
            self._session = session(master=own.master, java_home=own.java_home, **conf)
            _log.debug("spark.session", master=own.master, version=self._session.version)
        return self._session
