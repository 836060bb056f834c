"""The broker of a listener that names another cluster than that of the application."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.broker import Broker
from mqtemplate.errors import UnsupportedError
from mqtemplate.listener.registration.cluster_choice import ClusterChoice

BrokerOf = Callable[[str, ClusterChoice], Broker]
"""Function that returns the broker of a cluster: (listener, choice) -> broker."""


def no_other_cluster(listener: str, choice: ClusterChoice) -> Broker:
    """Refuse any other cluster than the one of the registry, where no application connects to others.

    Raises:
        UnsupportedError: Always.
    """
    named = f"broker is {choice.broker!r}" if choice.broker else f"name_server is {choice.name_server!r}"
    raise UnsupportedError(
        f"listener {listener}: {named}, and this registry has one broker only; let an MQApplication start the "
        "listener, or create a registry over the broker of that cluster"
    )
