"""Registration and start of the further templates and their brokers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dependency_injector import providers

from mqtemplate.broker import Broker
from mqtemplate.context.injection.application_context import ApplicationContext
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.templates.clusters import Clusters, start_broker
from mqtemplate.context.templates.template_specs import TemplateSpec, template_specs
from mqtemplate.converter import MessageConverter
from mqtemplate.template.rocketmq_template import RocketMQTemplate


def register_templates(context: ApplicationContext) -> None:
    """Register the further templates and their brokers, after the starters. Nothing is opened yet.

    Raises:
        ConfigurationError: A name is not allowed or used twice, or a class lacks its section.
        UnsupportedError: A key is set that the broker of a template does not support.
    """
    clusters = Clusters(context)
    with context.contributions("configuration"):
        context.register(clusters, name="mqtemplate.clusters")
    for spec in template_specs(context.settings, context.components):
        _register(spec, clusters, context)
    context.container.broker_of.override(providers.Object(clusters.broker_of))
    context.container.converter_of_class.override(providers.Object(lambda kind: _converter_of(kind, context)))


def _converter_of(kind: type, context: ApplicationContext) -> MessageConverter:
    """Return the converter that a listener names by its class: that of the application, else a new one."""
    found: Any = context.get(kind) if context.has(kind) else context.call(kind)
    converter: MessageConverter = found
    return converter


def _register(spec: TemplateSpec, clusters: Clusters, context: ApplicationContext) -> None:
    broker = clusters.add_template(spec)
    converter = context.definition_for(MessageConverter)
    options = template_options(spec.settings)

    def build(broker: Broker, converter: MessageConverter) -> RocketMQTemplate:
        return spec.kind(broker, converter=converter, **options)

    context.add_qualified(spec.name, spec.kind, build, [broker, converter])


def template_options(settings: AppSettings) -> Mapping[str, Any]:
    """Return the arguments of a template's constructor that the configuration sets."""
    producer, receiving = settings.rocketmq.producer, settings.rocketmq.pull_consumer
    return {
        "send_message_timeout": producer.send_message_timeout,
        "max_message_size": producer.max_message_size,
        "producer_group": producer.group,
        "consumer_group": receiving.group,
        "consumer_topic": receiving.topic,
        "selector_type": receiving.selector_type,
        "selector_expression": receiving.selector_expression,
        "message_model": receiving.message_model,
    }


def start_templates(context: ApplicationContext) -> None:
    """Start the brokers of the templates, and build the templates.

    Raises:
        RemoteConnectError: A cluster cannot be reached; a note names the template.
    """
    for name, definition in context.get(Clusters).definitions():
        broker = context.build(definition)
        context.lifecycle.push(f"broker of rocketmq.templates.{name}", broker.close)
        start_broker(broker, f"rocketmq.templates.{name}")
    for definition in context.qualified(RocketMQTemplate):
        template = context.build(definition)
        context.lifecycle.push(f"template {definition.qualifier}", template.close)
