"""The application: configuration, dependency injection, starters, life cycle."""

from mqtemplate.context.application import MQApplication
from mqtemplate.context.autoconfigure import AutoConfiguration
from mqtemplate.context.config.source import load_settings
from mqtemplate.context.injection.application_context import ApplicationContext, ConditionOutcome, Part
from mqtemplate.context.injection.container import MQContainer
from mqtemplate.context.injection.marks import Section, Value, service
from mqtemplate.context.logging import configure_logging, event_formatter, has_handlers, show_events
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker_support import check_embedded_support, unneeded_keys
from mqtemplate.context.settings.remote_settings import remote_settings

__all__ = [
    "AppSettings",
    "ApplicationContext",
    "AutoConfiguration",
    "ConditionOutcome",
    "MQApplication",
    "MQContainer",
    "Part",
    "Section",
    "Value",
    "check_embedded_support",
    "configure_logging",
    "event_formatter",
    "has_handlers",
    "load_settings",
    "remote_settings",
    "service",
    "show_events",
    "unneeded_keys",
]
