"""The objects of every application, as providers of dependency-injector. The context adds the application's own."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from dependency_injector import providers

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.message_trace import MessageTrace, TraceDispatcher, TraceOf
from mqtemplate.clock import SystemClock
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.rocketmq import RocketMQSettings
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.listener.registry import ListenerRegistry, no_other_cluster
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.template.rocketmq_template import RocketMQTemplate

_DEFAULT_GROUP = "mqtemplate-producer"


def new_template(
    kind: type[RocketMQTemplate],
    broker: Broker,
    converter: MessageConverter,
    settings: RocketMQSettings,
    trace_of: TraceOf,
    observation: Observation,
    *,
    middlewares: Iterable[object] = (),
) -> RocketMQTemplate:
    """Return a template over a broker, as the settings describe it.

    Args:
        trace_of: Returns the sender of trace records.
        observation: Measures or traces the sends.
        middlewares: Middlewares around each send, the outermost first.
    """
    producer, receiving = settings.producer, settings.receiving
    if producer.enable_msg_trace:
        trace = trace_of(broker, producer.customized_trace_topic, is_cloud=settings.access_channel == "CLOUD")
        observation = MessageTrace(trace, producer.group or _DEFAULT_GROUP, broker.clock, observation)
    return kind(
        broker,
        converter=converter,
        send_message_timeout=timedelta(milliseconds=producer.send_message_timeout),
        max_message_size=producer.max_message_size,
        producer_group=producer.group,
        consumer_group=receiving.group,
        consumer_topic=receiving.topic,
        selector_type=receiving.selector_type,
        selector_expression=receiving.selector_expression,
        message_model=receiving.message_model,
        middlewares=middlewares,
        observation=observation,
    )


class BuiltInProviders:
    """Providers of settings, clock, broker, converter, template, listeners and schedules; each builds on first use.

    - `providers.ThreadSafeSingleton` throughout: several threads may build a plain singleton several times.
    - A starter or the application sets ``broker``, and may replace any other object by ``override``, which also
      reaches the objects that depend on it.
    - The application starts and stops the objects (`lifecycle`). dependency-injector's resources have no order unless
      they depend on each other, and of several errors at the stop only one would be raised.
    """

    def __init__(self, settings: AppSettings) -> None:
        self.settings: providers.Provider[Any] = providers.Object(settings)
        self.clock: providers.Provider[Any] = providers.ThreadSafeSingleton(SystemClock)
        self.broker: providers.Dependency[Any] = providers.Dependency()
        self.converter: providers.Provider[Any] = providers.ThreadSafeSingleton(JsonMessageConverter)
        self.observation: providers.Provider[Any] = providers.ThreadSafeSingleton(Observation)
        self.trace_of: providers.Provider[Any] = providers.Object(TraceDispatcher)
        self.converter_of_class: providers.Provider[Any] = providers.Object(lambda kind: kind())
        self.broker_of: providers.Provider[Any] = providers.Object(no_other_cluster)
        self.template: providers.ThreadSafeSingleton[Any] = providers.ThreadSafeSingleton(
            new_template,
            RocketMQTemplate,
            self.broker,
            self.converter,
            settings.rocketmq,
            self.trace_of,
            self.observation,
        )
        self.listeners: providers.ThreadSafeSingleton[Any] = providers.ThreadSafeSingleton(
            ListenerRegistry,
            self.broker,
            self.converter,
            resolve=settings.resolve_text,
            is_enabled=settings.rocketmq.consumer.is_listener_enabled,
            retry_defaults=settings.mqtemplate.listener.retry_defaults,
            broker_of=self.broker_of,
            converter_of_class=self.converter_of_class,
            trace_of=self.trace_of,
            enabled=settings.mqtemplate.listener.enabled,
            only=settings.mqtemplate.listener.only,
            observation=self.observation,
        )
        self.schedules: providers.Provider[Any] = providers.ThreadSafeSingleton(
            Schedules, self.broker, topic=settings.mqtemplate.schedules.topic
        )
