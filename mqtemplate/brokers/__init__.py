"""The implementations of the `Broker` interface. Each is imported when it is used first."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.embedded.settings import EmbeddedSettings
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.brokers.remote.cluster.settings import RemoteSettings

__all__ = ["EmbeddedBroker", "EmbeddedSettings", "RemoteBroker", "RemoteSettings"]

__getattr__ = late_import(
    __name__,
    {
        "EmbeddedBroker": "mqtemplate.brokers.embedded.broker",
        "EmbeddedSettings": "mqtemplate.brokers.embedded.settings",
        "RemoteBroker": "mqtemplate.brokers.remote.broker",
        "RemoteSettings": "mqtemplate.brokers.remote.cluster.settings",
    },
)
