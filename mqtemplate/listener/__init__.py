"""Listeners: decorated functions and classes that handle messages."""

from mqtemplate.listener.attributes import ListenerSpec
from mqtemplate.listener.consuming.container import ContainerState, ListenerContainer
from mqtemplate.listener.current import add_current_message, current_group, current_message, current_messages
from mqtemplate.listener.decorator import LISTENER_ATTRIBUTE, ListenerAttributes, listener_specs, message_listener
from mqtemplate.listener.discovery import make_endpoints
from mqtemplate.listener.endpoint import Endpoint
from mqtemplate.listener.failures.outcomes import DeadLetter, RetryLater
from mqtemplate.listener.failures.schedule import Backoff
from mqtemplate.listener.handler_result import BatchFailure, ConsumeStatus
from mqtemplate.listener.headers import message_headers
from mqtemplate.listener.registry import ListenerRegistry, check_subscriptions
from mqtemplate.listener.resolution import default_resolve, resolve_spec
from mqtemplate.listener.settings import ConsumeMode, ListenerSettings, RetryDefaults

__all__ = [
    "LISTENER_ATTRIBUTE",
    "Backoff",
    "BatchFailure",
    "ConsumeMode",
    "ConsumeStatus",
    "ContainerState",
    "DeadLetter",
    "Endpoint",
    "ListenerAttributes",
    "ListenerContainer",
    "ListenerRegistry",
    "ListenerSettings",
    "ListenerSpec",
    "RetryDefaults",
    "RetryLater",
    "add_current_message",
    "check_subscriptions",
    "current_group",
    "current_message",
    "current_messages",
    "default_resolve",
    "listener_specs",
    "make_endpoints",
    "message_headers",
    "message_listener",
    "resolve_spec",
]
