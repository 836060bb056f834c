"""Start and close of a broker that other processes are: the same for both protocols."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from mqtemplate.broker import Broker, not_running
from mqtemplate.brokers.remote.cluster.failures import Outages, log_failure
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.event_log import get_logger
from mqtemplate.processes import OwnerProcess
from mqtemplate.services import Service, ServiceThread

_log = get_logger("mqtemplate.remote")


class BrokerClient(Protocol):
    """All parts of a `ClientBroker` between one start and the next close."""

    outages: Outages

    def open(self) -> None:
        """Connect. Raise `BrokerError` if that is not possible."""

    def close(self) -> None:
        """Close the connections; pending requests end with an error."""

    def service_groups(self) -> Mapping[str, list[Service]]:
        """Return the services by thread: one that waits for a broker delays only the others of its thread."""


ClientT = TypeVar("ClientT", bound=BrokerClient)


class ClientBroker(Broker, Generic[ClientT]):
    """A broker whose requests go to other processes.

    It works in the process that starts it. After a fork, the child needs an object of its own; `close` does nothing
    there.

    Args:
        title: What the object is, for the errors after a fork.
    """

    def __init__(self, name: str, title: str, clock: Clock | None) -> None:
        self.name = name
        self.clock = clock or SystemClock()
        self._title = title
        self._lifecycle = threading.Lock()
        self._owner = OwnerProcess(title)
        self._started: ClientT | None = None
        self._threads: list[ServiceThread] = []

    @abstractmethod
    def _new_client(self) -> ClientT:
        """Return a client that is not open yet."""

    def _opened(self, client: ClientT) -> None:
        """Take over what an open client knows, such as capabilities."""

    def _leave(self, client: ClientT) -> None:
        """Unregister at the brokers, while the services still run."""

    def start(self) -> None:
        """Connect.

        Raises:
            RemoteConnectError: No server answers.
        """
        with self._lifecycle:
            if self._started is not None:
                return
            client = self._new_client()
            try:
                client.open()
                self._opened(client)
            except BaseException:
                client.close()
                raise
            self._owner = OwnerProcess(self._title)
            self._started = client
            if not self.clock.is_virtual:
                self._threads = [
                    ServiceThread(f"mqtemplate-{name}", services, self.clock, _report)
                    for name, services in client.service_groups().items()
                ]
                for thread in self._threads:
                    thread.start()
        _log.debug("broker.started", broker=self.name)

    def close(self) -> None:
        if not self._owner.is_current:
            return  # connections and threads belong to the parent process
        with self._lifecycle:
            client, self._started = self._started, None
            threads, self._threads = self._threads, []
            if client is None:
                return
            self._leave(client)
            for thread in threads:
                thread.stop()
            client.close()
        _log.debug("broker.stopped", broker=self.name)

    def services(self) -> Sequence[Service]:
        client = self._started
        return [] if client is None else [service for group in client.service_groups().values() for service in group]

    @property
    def _client(self) -> ClientT:
        if self._started is None:
            raise not_running(self.name)
        return self._started

    def outage(self) -> str | None:
        return "the client is not running" if self._started is None else self._started.outages.describe()


def _report(service: Service, error: Exception, repeated: int) -> None:
    """Log a failed step; the service repeats it."""
    if isinstance(error, BrokerError):
        log_failure(_log, "remote.service_failed", error, service=service.name, repeated=repeated)
    else:
        _log.error("remote.service_failed", service=service.name, repeated=repeated, exc_info=error)
