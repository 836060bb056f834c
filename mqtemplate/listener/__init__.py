"""Decorated listeners: what calls users when messages arrive."""

from mqtemplate.listener.batch import BatchFailure
from mqtemplate.listener.consuming.container import ContainerState, ListenerContainer
from mqtemplate.listener.current import add_current_message, current_group, current_message, current_messages
from mqtemplate.listener.decorator import LISTENER_ATTRIBUTE, ListenerSpec, listener_specs, message_listener
from mqtemplate.listener.endpoint import Endpoint, make_endpoints
from mqtemplate.listener.headers import message_headers
from mqtemplate.listener.modes import ConsumeMode, ConsumeStatus
from mqtemplate.listener.registry import ListenerRegistry, check_subscriptions
from mqtemplate.listener.resolution import ListenerSettings, default_resolve, resolve_spec

__all__ = [
    "LISTENER_ATTRIBUTE",
    "BatchFailure",
    "ConsumeMode",
    "ConsumeStatus",
    "ContainerState",
    "Endpoint",
    "ListenerContainer",
    "ListenerRegistry",
    "ListenerSettings",
    "ListenerSpec",
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
