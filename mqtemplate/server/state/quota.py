"""Quotas: how many objects of one kind a connection, an address, an account and all clients together may hold."""

from __future__ import annotations

import threading
from typing import NamedTuple

from mqtemplate.metrics import Counter
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.requests.response import RefusedError


class Owner(NamedTuple):
    """The client that holds an object.

    Attributes:
        connection: ID of its connection.
        address: IP address of the connection.
        account: Its access key. None without access control.
    """

    connection: int
    address: str
    account: str | None = None


class QuotaLimits(NamedTuple):
    """Largest numbers of one kind of object.

    Attributes:
        total: For all clients together.
        per_connection: For one connection.
        per_address: For all connections of one IP address, and for all of one account.
    """

    total: int
    per_connection: int
    per_address: int

    @classmethod
    def shared(cls, total: int, per_connection: int, share: float) -> QuotaLimits:
        """Return limits by which one address has the given share of the total, but not less than one connection."""
        return cls(total, per_connection, min(total, max(per_connection, int(total * share))))


class Quota:
    """Counts the objects of one kind that clients hold. Thread-safe.

    Args:
        what: The objects in the plural, for the error.
        settings: Names of the settings to change, for the error.
        refused: Counts the refused requests.
    """

    def __init__(self, what: str, settings: str, limits: QuotaLimits, refused: Counter) -> None:
        self._what = what
        self._settings = settings
        self._limits = limits
        self._refused = refused
        self._lock = threading.Lock()
        self._held: dict[int | str | tuple[str], int] = {}  # connection, address, (account,) -> number
        self._total = 0

    def __len__(self) -> int:
        """Return the number of objects of all clients."""
        return self._total

    def take(self, owner: Owner, count: int = 1) -> None:
        """Count *count* more objects of a client: all of them or none.

        Raises:
            RefusedError: A limit would be exceeded.
        """
        connection, address, account = owner
        limits = self._limits
        with self._lock:
            held = self._held
            of_connection = held.get(connection, 0) + count
            of_address = held.get(address, 0) + count
            of_account = 0 if account is None else held.get((account,), 0) + count
            total = self._total + count
            if (
                of_connection > limits.per_connection
                or of_address > limits.per_address
                or of_account > limits.per_address
                or total > limits.total
            ):
                self._refused.add()
            else:
                held[connection], held[address], self._total = of_connection, of_address, total
                if account is not None:
                    held[account,] = of_account
                return
        holder, limit = next(
            (holder, limit)
            for holder, number, limit in (
                ("this connection", of_connection, limits.per_connection),
                (f"the address {address}", of_address, limits.per_address),
                (f"the account {account!r}", of_account, limits.per_address),
                ("all clients together", total, limits.total),
            )
            if number > limit
        )
        raise RefusedError(
            ResponseCode.SYSTEM_BUSY,
            f"{holder} may have {limit} {self._what} at one time, and this request would exceed that; let the client "
            f"have fewer, or raise {self._settings}",
        )

    def give(self, owner: Owner, count: int = 1) -> None:
        """Count *count* objects of a client less."""
        connection, address, account = owner
        with self._lock:
            self._total -= count
            self._reduce(connection, count)
            self._reduce(address, count)
            if account is not None:
                self._reduce((account,), count)

    def _reduce(self, key: int | str | tuple[str], count: int) -> None:
        left = self._held[key] - count
        if left:
            self._held[key] = left
        else:
            del self._held[key]
