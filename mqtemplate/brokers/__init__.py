"""The implementations of the `Broker` interface. Each is imported when it is used first."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.grpc.broker import GrpcBroker
    from mqtemplate.brokers.grpc.settings import GrpcSettings
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
    from mqtemplate.engine.settings import EmbeddedSettings


__all__ = ["EmbeddedBroker", "EmbeddedSettings", "GrpcBroker", "GrpcSettings", "RemoteBroker", "RemoteSettings"]

__getattr__ = late_import(
    __name__,
    {
        "EmbeddedBroker": "mqtemplate.brokers.embedded.broker",
        "EmbeddedSettings": "mqtemplate.engine.settings",
        "GrpcBroker": "mqtemplate.brokers.grpc.broker",
        "GrpcSettings": "mqtemplate.brokers.grpc.settings",
        "RemoteBroker": "mqtemplate.brokers.remote.broker",
        "RemoteSettings": "mqtemplate.brokers.remote.cluster.settings",
    },
)
