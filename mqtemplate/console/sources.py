"""Brokers of the dashboard, for several threads: a broker that is open, a cluster, a store directory; and each of them
for one account."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mqtemplate.broker import Broker
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import BrokerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.operations.access import BrokerAccess, StoreAccess
from mqtemplate.operations.account import AccountBroker, AccountRights


class BrokerSource(ABC):
    """Administration of one broker, for the requests of several threads.

    Attributes:
        label: Name of the broker for a reader, such as its directory.
        path: The store directory; None if it is not on this machine.
    """

    label: str
    path: Path | None = None

    @abstractmethod
    def reading(self) -> AbstractContextManager[BrokerAccess]:
        """Return the administration for reading, for a ``with`` block."""

    @abstractmethod
    def changing(self) -> AbstractContextManager[BrokerAccess]:
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


_log = get_logger("mqtemplate.dashboard")

_LEAST_AGE_S = 5.0
_COST_FACTOR = 20
_CLOSE_S = 5.0
"""Most time to wait at the end for threads that read."""


class OpenSource(BrokerSource):
    """A broker that is open: embedded in this process, or a cluster. It is not closed here."""

    def __init__(self, access: BrokerAccess, label: str) -> None:
        self.label = label
        self._access = access
        self.path = access.broker.path

    @contextmanager
    def reading(self) -> Iterator[BrokerAccess]:
        yield self._access

    changing = reading

    @property
    def is_snapshot(self) -> bool:
        return False

    def close(self) -> None:
        return


class ClusterSource(BrokerSource):
    """A cluster, to which the first reader connects: one that does not answer stops nothing else.

    While no name server answers, readers get the error, and one of them tries again each few seconds.

    Args:
        broker: A client that is not started.
    """

    def __init__(self, broker: Broker, label: str) -> None:
        self.label = label
        self._broker = broker
        self._lock = threading.Lock()
        self._access: BrokerAccess | None = None
        self._error = ""
        self._next_s = 0.0

    @contextmanager
    def reading(self) -> Iterator[BrokerAccess]:
        yield self._connected()

    changing = reading

    def _connected(self) -> BrokerAccess:
        with self._lock:
            if self._access is not None:
                return self._access
            if self._error and time.monotonic() < self._next_s:
                raise BrokerError(self._error)
            try:
                self._broker.start()
            except MQTemplateError as exc:
                self._error, self._next_s = str(exc), time.monotonic() + _LEAST_AGE_S
                raise
            self._access = BrokerAccess(self._broker)
            return self._access

    @property
    def is_snapshot(self) -> bool:
        return False

    def close(self) -> None:
        with self._lock:  # not while a reader connects
            self._broker.close()


class AccountSource(BrokerSource):
    """A broker as one account may use it. It is not closed here."""

    def __init__(self, source: BrokerSource, rights: AccountRights) -> None:
        self.label = source.label
        self._source = source
        self._rights = rights
        # No path: the figures of the disk and of the store are of all topics.

    @contextmanager
    def reading(self) -> Iterator[BrokerAccess]:
        with self._source.reading() as access:
            yield BrokerAccess(AccountBroker(access.broker, self._rights))

    @contextmanager
    def changing(self) -> Iterator[BrokerAccess]:
        with self._source.changing() as access:
            yield BrokerAccess(AccountBroker(access.broker, self._rights))

    @property
    def is_snapshot(self) -> bool:
        return self._source.is_snapshot

    def close(self) -> None:
        return


class _Opened:
    """A `StoreAccess` that is closed when it was replaced and its last reader has finished."""

    def __init__(self, access: StoreAccess, age_s: float) -> None:
        self.access = access
        self.expires_s = time.monotonic() + age_s
        self.readers = 0
        self.is_replaced = False


class FolderSource(BrokerSource):
    """A store directory: a snapshot of it, and from the first change on the directory itself.

    An old snapshot is replaced in a thread of its own, so no reader waits for it.

    Args:
        path: The store directory of a broker that was started at least once.
        least_age_s: Time that a snapshot is used at least.
        cost_factor: A snapshot is used at least this many times as long as it took to open.

    Raises:
        StoreError: The directory is missing, or is not a store.
    """

    def __init__(
        self,
        path: Path,
        settings: EmbeddedSettings | None = None,
        *,
        least_age_s: float = _LEAST_AGE_S,
        cost_factor: float = _COST_FACTOR,
    ) -> None:
        self.label = str(path)
        self.path = path
        self._settings = settings
        self._least_age_s, self._cost_factor = least_age_s, cost_factor
        self._lock = threading.Lock()
        self._reader_ended = threading.Condition(self._lock)
        self._refresh: threading.Thread | None = None
        self._is_owner = False
        self._is_closed = False
        self._current = self._open_snapshot()

    @contextmanager
    def reading(self) -> Iterator[BrokerAccess]:
        with self._lock:
            opened = self._current
            opened.readers += 1
            if not self._is_owner and time.monotonic() > opened.expires_s and self._refresh is None:
                self._refresh = threading.Thread(target=self._replace, name="mqtemplate-dashboard", daemon=True)
                self._refresh.start()
        try:
            yield opened.access
        finally:
            with self._lock:
                opened.readers -= 1
                self._reader_ended.notify_all()
                is_unused = opened.is_replaced and not opened.readers
            if is_unused:
                opened.access.close()

    @contextmanager
    def changing(self) -> Iterator[BrokerAccess]:
        self._become_owner()
        with self.reading() as access:
            yield access

    @property
    def is_snapshot(self) -> bool:
        return not self._is_owner

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            current = self._current
            self._reader_ended.wait_for(lambda: not current.readers, _CLOSE_S)
        current.access.close()

    # --- opening -------------------------------------------------------------------------------

    def _open_snapshot(self) -> _Opened:
        start_s = time.monotonic()
        assert self.path is not None
        access = StoreAccess(self.path, self._settings)
        access.broker.clock.now_ms()  # the first use of the broker opens it
        cost_s = time.monotonic() - start_s
        return _Opened(access, max(self._least_age_s, self._cost_factor * cost_s))

    def _replace(self) -> None:
        try:
            opened = self._open_snapshot()
        except MQTemplateError as exc:
            _log.warning("dashboard.snapshot_failed", path=self.label, reason=str(exc))
            with self._lock:
                self._current.expires_s = time.monotonic() + self._least_age_s
                self._refresh = None
            return
        self._swap(opened)

    def _swap(self, opened: _Opened) -> None:
        """Let new readers use *opened*, unless there is a better one by now."""
        with self._lock:
            self._refresh = None
            is_late = self._is_closed or (self._is_owner and opened.access.broker.clock.is_virtual)
            unused = opened if is_late else self._current
            if not is_late:
                self._current = opened
            unused.is_replaced = True
            is_unused = not unused.readers
        if is_unused:
            unused.access.close()

    def _become_owner(self) -> None:
        with self._lock:
            if self._is_owner:
                return
            assert self.path is not None
            access = StoreAccess(self.path, self._settings)
            access.open_for_changes()
            self._is_owner = True
        self._swap(_Opened(access, 0))
