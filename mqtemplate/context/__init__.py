"""The application: configuration, dependency injection, starters, life cycle. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.context.application import Health, MQApplication
    from mqtemplate.context.autoconfigure import AutoConfiguration, register_broker
    from mqtemplate.context.components import is_spark_listener
    from mqtemplate.context.injection.application_context import (
        ApplicationContext,
        BrokerFactory,
        ConditionOutcome,
        Part,
    )
    from mqtemplate.context.injection.marks import Named, Section, Value, service
    from mqtemplate.context.logging import configure_logging, event_formatter, show_events
    from mqtemplate.context.settings.app import AppSettings
    from mqtemplate.context.settings.clients import (
        check_embedded_support,
        grpc_settings,
        remote_settings,
        unneeded_keys,
    )
    from mqtemplate.context.settings.source import ExplainedSetting, explain_settings, load_settings
    from mqtemplate.context.templates import ext_consumer, ext_template
    from mqtemplate.event_log import has_handlers

__all__ = [
    "AppSettings",
    "ApplicationContext",
    "AutoConfiguration",
    "BrokerFactory",
    "ConditionOutcome",
    "ExplainedSetting",
    "Health",
    "MQApplication",
    "Named",
    "Part",
    "Section",
    "Value",
    "check_embedded_support",
    "configure_logging",
    "event_formatter",
    "explain_settings",
    "ext_consumer",
    "ext_template",
    "grpc_settings",
    "has_handlers",
    "is_spark_listener",
    "load_settings",
    "register_broker",
    "remote_settings",
    "service",
    "show_events",
    "unneeded_keys",
]

__getattr__ = late_import(
    __name__,
    {
        "AppSettings": "mqtemplate.context.settings.app",
        "ApplicationContext": "mqtemplate.context.injection.application_context",
        "AutoConfiguration": "mqtemplate.context.autoconfigure",
        "BrokerFactory": "mqtemplate.context.injection.application_context",
        "ConditionOutcome": "mqtemplate.context.injection.application_context",
        "Health": "mqtemplate.context.application",
        "ExplainedSetting": "mqtemplate.context.settings.source",
        "MQApplication": "mqtemplate.context.application",
        "Named": "mqtemplate.context.injection.marks",
        "Part": "mqtemplate.context.injection.application_context",
        "Section": "mqtemplate.context.injection.marks",
        "Value": "mqtemplate.context.injection.marks",
        "check_embedded_support": "mqtemplate.context.settings.clients",
        "configure_logging": "mqtemplate.context.logging",
        "event_formatter": "mqtemplate.context.logging",
        "ext_consumer": "mqtemplate.context.templates",
        "ext_template": "mqtemplate.context.templates",
        "explain_settings": "mqtemplate.context.settings.source",
        "grpc_settings": "mqtemplate.context.settings.clients",
        "has_handlers": "mqtemplate.event_log",
        "is_spark_listener": "mqtemplate.context.components",
        "load_settings": "mqtemplate.context.settings.source",
        "register_broker": "mqtemplate.context.autoconfigure",
        "remote_settings": "mqtemplate.context.settings.clients",
        "service": "mqtemplate.context.injection.marks",
        "show_events": "mqtemplate.context.logging",
        "unneeded_keys": "mqtemplate.context.settings.clients",
    },
)
