"""The objects of every application as a dependency-injector container. The context adds the application's own."""

from __future__ import annotations

from typing import Any

from dependency_injector import containers, providers
from pydantic_settings import BaseSettings

from mqtemplate.clock import SystemClock
from mqtemplate.context.injection.new_template import new_template
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener.registration.clusters import no_other_cluster
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.message_trace.dispatcher import TraceDispatcher
from mqtemplate.observation.interface import Observation
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.template.rocketmq_template import RocketMQTemplate


class MQContainer(containers.DeclarativeContainer):
    """Container of settings, clock, broker, converter, template and listeners; each is built on first use.

    - `providers.ThreadSafeSingleton` throughout: several threads may build a plain singleton several times.
    - A starter or the application sets ``broker``, and may replace any other object by ``override``, which also
      reaches the objects that depend on it. A subclass of this container would not.
    - The application starts and stops the objects (`lifecycle`). The container's own resources have no order unless
      they depend on each other, and of several errors at the stop only one would be raised.
    """

    settings: providers.Dependency[Any] = providers.Dependency(instance_of=BaseSettings)
    clock: providers.Provider[Any] = providers.ThreadSafeSingleton(SystemClock)
    broker: providers.Dependency[Any] = providers.Dependency()
    converter: providers.Provider[Any] = providers.ThreadSafeSingleton(JsonMessageConverter)
    observation: providers.Provider[Any] = providers.ThreadSafeSingleton(Observation)
    trace_of: providers.Provider[Any] = providers.Object(TraceDispatcher)
    template: providers.ThreadSafeSingleton[Any] = providers.ThreadSafeSingleton(
        new_template,
        RocketMQTemplate,
        broker,
        converter,
        settings.provided.rocketmq,
        trace_of,
        observation,
    )
    converter_of_class: providers.Provider[Any] = providers.Object(lambda kind: kind())
    broker_of: providers.Provider[Any] = providers.Object(no_other_cluster)
    listeners: providers.ThreadSafeSingleton[Any] = providers.ThreadSafeSingleton(
        ListenerRegistry,
        broker,
        converter,
        resolve=settings.provided.resolve_text,
        is_enabled=settings.provided.rocketmq.consumer.is_listener_enabled,
        retry_defaults=settings.provided.mqtemplate.listener.retry_defaults,
        broker_of=broker_of,
        converter_of_class=converter_of_class,
        trace_of=trace_of,
        enabled=settings.provided.mqtemplate.listener.enabled,
        only=settings.provided.mqtemplate.listener.only,
        observation=observation,
    )
    schedules: providers.Provider[Any] = providers.ThreadSafeSingleton(
        Schedules, broker, topic=settings.provided.mqtemplate.schedules.topic
    )
