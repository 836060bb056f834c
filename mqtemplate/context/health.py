"""Health of an application: its brokers and its listeners, as a probe reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mqtemplate.broker import Broker
from mqtemplate.listener.container.container import ListenerContainer


@dataclass(frozen=True, slots=True)
class Health:
    """State of an application at one moment, without a request to a broker.

    Attributes:
        is_ready: True if the application is started and every listener with ``auto_startup`` runs.
        brokers: Name -> reason why the broker cannot be reached now; None if it can. The names are those of
            `MQApplication.brokers`.
        listeners: Id -> state, such as ``running``.
    """

    is_ready: bool
    brokers: Mapping[str, str | None]
    listeners: Mapping[str, str]

    @property
    def is_up(self) -> bool:
        """True if the application is ready and all brokers can be reached."""
        return self.is_ready and not any(self.brokers.values())


def read_health(is_started: bool, brokers: Mapping[str, Broker], containers: Sequence[ListenerContainer]) -> Health:
    """Return the health of an application over all its brokers and listeners."""
    return Health(
        is_ready=is_started and all(each.is_running for each in containers if each.endpoint.settings.auto_startup),
        brokers={name: broker.outage() for name, broker in brokers.items()},
        listeners={each.endpoint.id: each.state.value for each in containers},
    )
