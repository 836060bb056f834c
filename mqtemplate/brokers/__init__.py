"""Those who keep the port's promises."""

from mqtemplate.brokers.embedded import EmbeddedBroker
from mqtemplate.brokers.remote import RemoteBroker
from mqtemplate.brokers.remote_settings import RemoteSettings
from mqtemplate.brokers.settings import EmbeddedSettings

__all__ = ["EmbeddedBroker", "EmbeddedSettings", "RemoteBroker", "RemoteSettings"]
