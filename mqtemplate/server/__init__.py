"""TCP server for the embedded broker: RocketMQ's clients connect to it. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.server.acl.settings import Account, AclSettings, Right
    from mqtemplate.server.broker_server import BrokerServer, LocalCluster
    from mqtemplate.server.state.settings import BrokerServerSettings

__all__ = [
    "Account",
    "AclSettings",
    "BrokerServer",
    "BrokerServerSettings",
    "LocalCluster",
    "Right",
]

__getattr__ = late_import(
    __name__,
    {
        "Account": "mqtemplate.server.acl.settings",
        "AclSettings": "mqtemplate.server.acl.settings",
        "BrokerServer": "mqtemplate.server.broker_server",
        "BrokerServerSettings": "mqtemplate.server.state.settings",
        "LocalCluster": "mqtemplate.server.broker_server",
        "Right": "mqtemplate.server.acl.settings",
    },
)
