"""Limits of what clients hold and create, so that one client cannot take the memory or the time of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.engine.clients import Owner
from mqtemplate.metrics import Counter, Metrics
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.settings import BrokerServerSettings


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

    def check(self, owner: Owner, count: int) -> None:
        """Check that a client may have *count* more objects.

        Raises:
            RefusedError: A limit would be exceeded.
        """
        self.take(owner, count, keeps=False)

    def take(self, owner: Owner, count: int = 1, *, keeps: bool = True) -> None:
        """Count *count* more objects of a client: all of them or none.

        Args:
            keeps: False: only check if that is permitted.

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
            elif not keeps:
                return
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


class CreationRate(NamedTuple):
    """The rate at which the clients of one address, or of one account, may create objects.

    Attributes:
        burst: So many at once.
        per_second: So many in each second after that.
    """

    burst: int
    per_second: float


@dataclass(slots=True)
class _Creator:
    """The objects that one address or account has created.

    Attributes:
        tokens: How many it may create now.
        updated_ms: Time to which *tokens* belongs.
        created: Number since the server started.
    """

    tokens: float
    updated_ms: int
    created: int = 0


class CreationLimit:
    """Limits what clients create without an administrator. Thread-safe.

    One address, or one account, may create a share of the total. Its rate is limited too, since each new object
    writes a file.

    Args:
        what: The objects in the plural, for the error.
        settings: Names of the settings to change, for the error.
        count: Returns the number of objects that exist.
        max_total: With so many objects, clients may create no more.
        share: Part of *max_total* that one address or account may create.
        refused: Counts the refused requests.
    """

    def __init__(
        self,
        what: str,
        settings: str,
        clock: Clock,
        count: Callable[[], int],
        max_total: int,
        share: float,
        rate: CreationRate,
        refused: Counter,
    ) -> None:
        self._what = what
        self._settings = settings
        self._clock = clock
        self._count = count
        self._max_total = max_total
        self._max_created = max(int(max_total * share), 1)
        self._rate = rate
        self._refused = refused
        self._lock = threading.Lock()
        self._creators: dict[str | tuple[str], _Creator] = {}  # address, (account,) -> what it created

    @contextmanager
    def creating(self, owner: Owner, count: int = 1) -> Iterator[None]:
        """Let a client create *count* objects in the block. If it raises an error, none of them counts.

        Without that a full disk, on which clients try again and again, would use up what they may create.

        Raises:
            RefusedError: As `take`.
        """
        self.take(owner, count)
        try:
            yield
        except BaseException:
            with self._lock:
                for creator in self._creators_of(owner):
                    creator.created -= count
            raise

    def take(self, owner: Owner, count: int = 1) -> None:
        """Let a client create *count* objects: all of them or none.

        Raises:
            RefusedError: A limit would be exceeded.
        """
        total = self._count() + count
        with self._lock:
            creators = self._creators_of(owner)
            reason = self._reason(creators, count, total)
            if reason is None:
                for creator in creators:
                    creator.tokens -= count
                    creator.created += count
                return
            self._refused.add()
        raise RefusedError(ResponseCode.SYSTEM_BUSY, f"{reason}; create them with mqadmin, or raise {self._settings}")

    def _reason(self, creators: list[_Creator], count: int, total: int) -> str | None:
        if total > self._max_total:
            return f"clients may create {self._what} until there are {self._max_total}, and there are {total - count}"
        if any(creator.created + count > self._max_created for creator in creators):
            return f"the clients of one address or account may create {self._max_created} {self._what}"
        if any(creator.tokens < count for creator in creators):
            burst, per_second = self._rate
            return (
                f"the clients of one address or account may create {burst} {self._what} at once, and {per_second:g} "
                "per second after that"
            )
        return None

    def _creators_of(self, owner: Owner) -> list[_Creator]:
        """Return the entries of an address and, if there is one, of an account."""
        keys: list[str | tuple[str]] = [owner.address]
        if owner.account is not None:
            keys.append((owner.account,))
        return [self._creator(key) for key in keys]

    def _creator(self, key: str | tuple[str]) -> _Creator:
        """Return the entry of an address or an account, with its tokens of now."""
        now_ms = self._clock.steady_ms()
        creator = self._creators.get(key)
        if creator is None:
            creator = self._creators[key] = _Creator(self._rate.burst, now_ms)
        gained = max(now_ms - creator.updated_ms, 0) * self._rate.per_second / 1_000
        creator.tokens = min(self._rate.burst, creator.tokens + gained)
        creator.updated_ms = now_ms
        return creator

    def sweep(self) -> None:
        """Forget the addresses that have created nothing: each refused client left one."""
        with self._lock:
            self._creators = {key: creator for key, creator in self._creators.items() if creator.created}


class ClientLimits:
    """Limits of all objects that clients hold or create. Each kind has a metric of refused requests.

    Args:
        topic_count: Returns the number of topics that count for ``max_topics``.
        group_count: Returns the number of consumer groups.

    Attributes:
        pulls: Held pulls.
        locks: Locks of queues.
        groups: Memberships of connected clients in groups of producers and consumers.
        subscriptions: Subscriptions of connected consumers. Long expressions count several times.
        grpc_clients: Clients of the gRPC protocol that have sent their settings.
        topics: Topics that first messages create.
        new_groups: Consumer groups that clients create.
    """

    def __init__(
        self,
        settings: BrokerServerSettings,
        clock: Clock,
        metrics: Metrics,
        topic_count: Callable[[], int],
        group_count: Callable[[], int],
    ) -> None:
        share = settings.max_address_share

        def quota(kind: str, what: str, setting: str) -> Quota:
            total, per_connection = getattr(settings, setting), getattr(settings, f"{setting}_per_connection")
            key = setting.replace("_", "-")
            names = f"{key}, {key}-per-connection or max-address-share"
            limits = QuotaLimits.shared(total, per_connection, share)
            return Quota(what, names, limits, metrics.counter(f"server.refused.{kind}"))

        self.pulls = quota("pulls", "held pulls", "max_held_pulls")
        self.locks = quota("locks", "locks", "max_queue_locks")
        self.groups = quota("groups", "groups", "max_client_groups")
        self.subscriptions = quota("subscriptions", "subscriptions", "max_subscriptions")
        self.grpc_clients = quota("grpc_clients", "gRPC clients", "max_grpc_clients")
        rate = CreationRate(settings.auto_create_burst, settings.auto_create_per_second)
        refused = metrics.counter("server.refused.created")

        def creation(what: str, count: Callable[[], int], total: int) -> CreationLimit:
            names = f"max-{what}, max-address-share, auto-create-burst or auto-create-per-second"
            return CreationLimit(what, names, clock, count, total, share, rate, refused)

        self.topics = creation("topics", topic_count, settings.max_topics)
        self.new_groups = creation("groups", group_count, settings.max_groups)

    def sweep(self) -> None:
        """Forget what is no longer needed. Called from time to time."""
        self.topics.sweep()
        self.new_groups.sweep()
