"""Registration and start of the further templates and their brokers."""

from __future__ import annotations

from typing import Any

from dependency_injector import providers

from mqtemplate.broker import Broker
from mqtemplate.context.injection.application_context import ApplicationContext
from mqtemplate.context.injection.new_template import new_template
from mqtemplate.context.templates.clusters import Clusters, start_broker
from mqtemplate.context.templates.template_specs import TemplateSpec, template_specs
from mqtemplate.converter import MessageConverter
from mqtemplate.message_trace.traces import Traces
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
    traces = Traces(context.lifecycle.push)
    context.container.trace_of.override(providers.Object(traces.dispatcher))
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
    trace_of = context.container.trace_of()

    def build(broker: Broker, converter: MessageConverter) -> RocketMQTemplate:
        return new_template(spec.kind, broker, converter, spec.settings.rocketmq, trace_of)

    context.add_qualified(spec.name, spec.kind, build, [broker, converter])


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
