"""TCP server for the embedded broker: RocketMQ's clients connect to it."""

from mqtemplate.server.acl.settings import Account, AclSettings, Right
from mqtemplate.server.broker_server import BrokerServer, LocalCluster
from mqtemplate.server.settings import BrokerServerSettings

__all__ = ["Account", "AclSettings", "BrokerServer", "BrokerServerSettings", "LocalCluster", "Right"]
