"""The Spark listeners of an application: one session, a query for each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import structlog

from mqtemplate import Broker, EmbeddedBroker
from mqtemplate.context import ApplicationContext
from mqtemplate.errors import SparkError
from mqtemplate.listener import ListenerRegistry, ListenerSpec
from mqtemplate.spark import (
    SparkListenerContainer,
    refuse_shared_groups,
    session,
    spark_listener_specs,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SparkListeners"]

_log = structlog.stdlib.get_logger("mqtemplate.starter.spark")


class SparkListeners:
    """Starts after the message listeners and stops before them.

    The session is made at the start, from ``mqtemplate.spark.*``, and ended at the stop. A ``SparkSession`` among the
    application's objects is used instead, and not ended.

    Args:
        marked: The decorated functions and classes.
    """

    name = "spark listeners"

    def __init__(self, context: ApplicationContext, marked: Sequence[object]) -> None:
        self._context = context
        self._marked = marked
        self._session: SparkSession | None = None
        self.containers: list[SparkListenerContainer] = []

    def start(self) -> None:
        """Make the session and start a query for each listener.

        Raises:
            SparkError: Spark or its Java cannot be used, or the broker has no folder.
            ListenerError: A group has another listener too.
        """
        self.containers = [
            self._container(component, spec) for component in self._marked for spec in spark_listener_specs(component)
        ]
        native = self._context.get(ListenerRegistry)
        refuse_shared_groups(
            [container.settings.consumer_group for container in self.containers],
            [container.endpoint.settings.group for container in native],
        )
        for container in self.containers:
            container.start()

    def stop(self) -> None:
        """Stop the queries, the last first, then the session.

        Raises:
            ExceptionGroup: What could not be stopped cleanly; everything else was.
        """
        stops: list[Any] = [container.stop for container in reversed(self.containers)]
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
        broker: Broker = self._context.get(Broker)  # type: ignore[type-abstract]  # by its base, whichever it is
        if not isinstance(broker, EmbeddedBroker):
            raise SparkError(
                f"Spark listeners read the folder of an EmbeddedBroker of this process, and the broker is a "
                f"{type(broker).__name__}; use rocketmq.name-server: embedded:<folder>"
            )
        settings = self._context.settings
        return SparkListenerContainer(
            self._endpoint(component),
            self._spark,
            broker,
            settings.mqtemplate.spark.checkpoint_path.expanduser(),
            resolve=settings.resolve_text,
            spec=spec,
        )

    def _endpoint(self, component: object) -> object:
        """The function, or the object that the context built of the class."""
        definition = None if inspect.isroutine(component) else self._context.definition_of(component)
        return component if definition is None else self._context.build(definition)

    def _spark(self) -> SparkSession:
        """The session, made when the first listener starts."""
        from pyspark.sql import SparkSession

        if self._context.has(SparkSession):
            return self._context.get(SparkSession)
        if self._session is None:
            own = self._context.settings.mqtemplate.spark
            conf: dict[str, Any] = dict(own.conf)
            self._session = session(master=own.master, java_home=own.java_home, **conf)
            _log.info("spark.session", master=own.master, version=self._session.version)
        return self._session
