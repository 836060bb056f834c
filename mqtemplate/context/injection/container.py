"""What every application has, as a dependency-injector container; the context adds the user's own."""

from __future__ import annotations

from typing import Any

from dependency_injector import containers, providers

from mqtemplate.clock import SystemClock
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerRegistry
from mqtemplate.template import RocketMQTemplate


class MQContainer(containers.DeclarativeContainer):
    """Settings, clock, broker, converter, template and listeners, each made when it is first asked for.

    - `providers.ThreadSafeSingleton` throughout: a plain singleton is built several times by several threads.
    - ``broker`` is filled by a starter or by the application, and any other may be: by ``override``, which
      reaches those that depend on it. A subclass of this container would not.
    - The start and stop of what is in here is the application's business (`lifecycle`), since the container's
      own resources have no order among those that do not know each other, and lose all errors of a stop but one.
    """

    settings: providers.Dependency[AppSettings] = providers.Dependency(instance_of=AppSettings)
    clock: providers.Provider[Any] = providers.ThreadSafeSingleton(SystemClock)
    broker: providers.Dependency[Any] = providers.Dependency()
    converter: providers.Provider[Any] = providers.ThreadSafeSingleton(JsonMessageConverter)
    template: providers.Provider[Any] = providers.ThreadSafeSingleton(
        RocketMQTemplate,
        broker,
        converter=converter,
        send_message_timeout=settings.provided.rocketmq.producer.send_message_timeout,
        max_message_size=settings.provided.rocketmq.producer.max_message_size,
        producer_group=settings.provided.rocketmq.producer.group,
        consumer_group=settings.provided.rocketmq.pull_consumer.group,
        consumer_topic=settings.provided.rocketmq.pull_consumer.topic,
        selector_type=settings.provided.rocketmq.pull_consumer.selector_type,
        selector_expression=settings.provided.rocketmq.pull_consumer.selector_expression,
        message_model=settings.provided.rocketmq.pull_consumer.message_model,
    )
    listeners: providers.Provider[Any] = providers.ThreadSafeSingleton(
        ListenerRegistry,
        broker,
        converter,
        resolve=settings.provided.resolve_text,
        is_enabled=settings.provided.rocketmq.consumer.is_listener_enabled,
    )
