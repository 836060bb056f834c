"""The implementations of the `Broker` interface. Each is imported when it is used first."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.embedded.settings import EmbeddedSettings
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.brokers.remote.settings import RemoteSettings

__all__ = ["EmbeddedBroker", "EmbeddedSettings", "RemoteBroker", "RemoteSettings"]

_MODULES = {
    "EmbeddedBroker": "mqtemplate.brokers.embedded.broker",
    "EmbeddedSettings": "mqtemplate.brokers.embedded.settings",
    "RemoteBroker": "mqtemplate.brokers.remote.broker",
    "RemoteSettings": "mqtemplate.brokers.remote.settings",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
