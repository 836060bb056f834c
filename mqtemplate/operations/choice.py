"""The administration of any broker.

The one place that knows the kinds of brokers: it ends when `Broker` has a method ``admin`` of its own.
"""

from __future__ import annotations

from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.errors import ConfigurationError
from mqtemplate.operations.broker_admin import BrokerAdmin
from mqtemplate.operations.embedded import EmbeddedAdmin
from mqtemplate.operations.remote import RemoteAdmin


def admin_of(broker: Broker) -> BrokerAdmin:
    """Return the administration of a started broker.

    Raises:
        ConfigurationError: It is of another kind.
    """
    if isinstance(broker, EmbeddedBroker):
        return EmbeddedAdmin(broker)
    if isinstance(broker, RemoteBroker):
        return RemoteAdmin(broker, broker.client_context)
    raise ConfigurationError(
        f"the dashboard needs an embedded broker or a cluster, and the broker is a {type(broker).__name__}; "
        "turn mqtemplate.management.dashboard.enabled off"
    )
