"""Listeners: decorated functions and classes that handle messages. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.listener.container.container import ListenerContainer
    from mqtemplate.listener.container.membership import ContainerState
    from mqtemplate.listener.declaration.attributes import ListenerSpec
    from mqtemplate.listener.declaration.decorator import (
        LISTENER_ATTRIBUTE,
        ListenerAttributes,
        listener_specs,
        message_listener,
    )
    from mqtemplate.listener.declaration.hooks import PreparedConsumer, listener_enhancer
    from mqtemplate.listener.declaration.resolution import default_resolve, resolve_spec
    from mqtemplate.listener.declaration.results import ConsumeStatus, ResultSender, publishes
    from mqtemplate.listener.declaration.settings import (
        Backoff,
        ConsumeMode,
        ListenerSettings,
        MessageRequestMode,
        RetryDefaults,
    )
    from mqtemplate.listener.declaration.tags import on_tag
    from mqtemplate.listener.discovery import make_endpoints
    from mqtemplate.listener.failures.failure import BatchFailure, DeadLetter, RetryLater
    from mqtemplate.listener.handler.current import (
        add_current_message,
        current_group,
        current_message,
        current_messages,
    )
    from mqtemplate.listener.handler.payload import message_headers
    from mqtemplate.listener.handler.plan import Endpoint
    from mqtemplate.listener.handler.providers import Depends
    from mqtemplate.listener.registry import ListenerRegistry, check_subscriptions
    from mqtemplate.template.options import Send

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
    "MessageRequestMode",
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

_NAMES = {
    "container.container": "ListenerContainer",
    "container.membership": "ContainerState",
    "declaration.attributes": "ListenerSpec",
    "declaration.decorator": "LISTENER_ATTRIBUTE ListenerAttributes listener_specs message_listener",
    "declaration.hooks": "PreparedConsumer listener_enhancer",
    "declaration.resolution": "default_resolve resolve_spec",
    "declaration.results": "ConsumeStatus ResultSender Send publishes",
    "declaration.settings": "Backoff ConsumeMode ListenerSettings MessageRequestMode RetryDefaults",
    "declaration.tags": "on_tag",
    "discovery": "make_endpoints",
    "failures.failure": "BatchFailure DeadLetter RetryLater",
    "handler.current": "add_current_message current_group current_message current_messages",
    "handler.payload": "message_headers",
    "handler.plan": "Endpoint",
    "handler.providers": "Depends",
    "registry": "ListenerRegistry check_subscriptions",
}
"""Module -> the public names that it defines."""

__getattr__ = late_import(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
)
