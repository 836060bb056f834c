"""Listeners: decorated functions and classes that handle messages. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.listener.attributes import ListenerSpec
    from mqtemplate.listener.calling.depends import Depends
    from mqtemplate.listener.calling.send import ResultSender, Send, publishes
    from mqtemplate.listener.consume_status import ConsumeStatus, ContainerState
    from mqtemplate.listener.consuming.container import ListenerContainer
    from mqtemplate.listener.current import add_current_message, current_group, current_message, current_messages
    from mqtemplate.listener.decorator import LISTENER_ATTRIBUTE, ListenerAttributes, listener_specs, message_listener
    from mqtemplate.listener.discovery import make_endpoints
    from mqtemplate.listener.endpoint import Endpoint
    from mqtemplate.listener.failures.outcomes import DeadLetter, RetryLater
    from mqtemplate.listener.failures.schedule import Backoff
    from mqtemplate.listener.handler_result import BatchFailure
    from mqtemplate.listener.headers import message_headers
    from mqtemplate.listener.registration.enhancers import listener_enhancer
    from mqtemplate.listener.registration.preparation import PreparedConsumer
    from mqtemplate.listener.registration.tags import on_tag
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
    "Depends",
    "Endpoint",
    "ListenerAttributes",
    "ListenerContainer",
    "ListenerRegistry",
    "ListenerSettings",
    "ListenerSpec",
    "PreparedConsumer",
    "ResultSender",
    "RetryDefaults",
    "RetryLater",
    "Send",
    "add_current_message",
    "check_subscriptions",
    "current_group",
    "current_message",
    "current_messages",
    "default_resolve",
    "listener_enhancer",
    "listener_specs",
    "make_endpoints",
    "message_headers",
    "message_listener",
    "on_tag",
    "publishes",
    "resolve_spec",
]

__getattr__ = late_import(
    __name__,
    {
        "Backoff": "mqtemplate.listener.failures.schedule",
        "BatchFailure": "mqtemplate.listener.handler_result",
        "ConsumeMode": "mqtemplate.listener.settings",
        "ConsumeStatus": "mqtemplate.listener.consume_status",
        "ContainerState": "mqtemplate.listener.consume_status",
        "DeadLetter": "mqtemplate.listener.failures.outcomes",
        "Depends": "mqtemplate.listener.calling.depends",
        "Endpoint": "mqtemplate.listener.endpoint",
        "LISTENER_ATTRIBUTE": "mqtemplate.listener.decorator",
        "ListenerAttributes": "mqtemplate.listener.decorator",
        "ListenerContainer": "mqtemplate.listener.consuming.container",
        "ListenerRegistry": "mqtemplate.listener.registry",
        "ListenerSettings": "mqtemplate.listener.settings",
        "ListenerSpec": "mqtemplate.listener.attributes",
        "PreparedConsumer": "mqtemplate.listener.registration.preparation",
        "ResultSender": "mqtemplate.listener.calling.send",
        "RetryDefaults": "mqtemplate.listener.settings",
        "RetryLater": "mqtemplate.listener.failures.outcomes",
        "Send": "mqtemplate.listener.calling.send",
        "add_current_message": "mqtemplate.listener.current",
        "check_subscriptions": "mqtemplate.listener.registry",
        "current_group": "mqtemplate.listener.current",
        "current_message": "mqtemplate.listener.current",
        "current_messages": "mqtemplate.listener.current",
        "default_resolve": "mqtemplate.listener.resolution",
        "listener_enhancer": "mqtemplate.listener.registration.enhancers",
        "listener_specs": "mqtemplate.listener.decorator",
        "make_endpoints": "mqtemplate.listener.discovery",
        "message_headers": "mqtemplate.listener.headers",
        "message_listener": "mqtemplate.listener.decorator",
        "on_tag": "mqtemplate.listener.registration.tags",
        "publishes": "mqtemplate.listener.calling.send",
        "resolve_spec": "mqtemplate.listener.resolution",
    },
)
