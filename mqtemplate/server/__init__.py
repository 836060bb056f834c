"""The embedded broker with a door to the street: RocketMQ's clients come in by it."""

from mqtemplate.server.acl_settings import Account, AclSettings, Right
from mqtemplate.server.broker_server import BrokerServer
from mqtemplate.server.local_cluster import LocalCluster
from mqtemplate.server.settings import BrokerServerSettings

__all__ = ["Account", "AclSettings", "BrokerServer", "BrokerServerSettings", "LocalCluster", "Right"]
