"""The `BrokerSource` interface: the broker of the dashboard, for several threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path

from mqtemplate.admin.broker_admin import BrokerAdmin


class BrokerSource(ABC):
    """Administration of one broker, for the requests of several threads.

    Attributes:
        label: Name of the broker for a reader, such as its directory.
        path: The store directory; None if there is none on this machine.
    """

    label: str
    path: Path | None = None

    @abstractmethod
    def reading(self) -> AbstractContextManager[BrokerAdmin]:
        """Return the administration for reading, for a ``with`` block."""

    @abstractmethod
    def changing(self) -> AbstractContextManager[BrokerAdmin]:
        """Return the administration for changes, for a ``with`` block.

        Raises:
            StoreLockedError: The broker is a store directory that another process has open.
        """

    @property
    @abstractmethod
    def is_snapshot(self) -> bool:
        """True if readers see a snapshot, whose clock stands still."""

    @abstractmethod
    def close(self) -> None:
        """Close what this object has opened."""
