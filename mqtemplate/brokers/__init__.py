"""Those who keep the port's promises."""

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.embedded.settings import EmbeddedSettings
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.brokers.remote.settings import RemoteSettings

__all__ = ["EmbeddedBroker", "EmbeddedSettings", "RemoteBroker", "RemoteSettings"]
