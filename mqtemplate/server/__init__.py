"""TCP server for the embedded broker: RocketMQ's clients connect to it. Names are imported when they are used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqtemplate.server.acl.settings import Account, AclSettings, Right
    from mqtemplate.server.broker_server import BrokerServer, LocalCluster
    from mqtemplate.server.settings import BrokerServerSettings

__all__ = [
    "Account",
    "AclSettings",
    "BrokerServer",
    "BrokerServerSettings",
    "LocalCluster",
    "Right",
]

_MODULES = {
    "Account": "mqtemplate.server.acl.settings",
    "AclSettings": "mqtemplate.server.acl.settings",
    "BrokerServer": "mqtemplate.server.broker_server",
    "BrokerServerSettings": "mqtemplate.server.settings",
    "LocalCluster": "mqtemplate.server.broker_server",
    "Right": "mqtemplate.server.acl.settings",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
