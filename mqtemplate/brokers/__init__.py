"""Those who keep the port's promises."""

from mqtemplate.brokers.embedded import EmbeddedBroker
from mqtemplate.brokers.settings import EmbeddedSettings

__all__ = ["EmbeddedBroker", "EmbeddedSettings"]
