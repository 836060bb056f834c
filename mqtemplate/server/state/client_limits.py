"""All limits of one server, made from its settings."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.clock import Clock
from mqtemplate.metrics import Metrics
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.acl import ACCESS_KEY
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.state.creation import CreationLimit, CreationRate
from mqtemplate.server.state.quota import Owner, Quota, QuotaLimits
from mqtemplate.server.state.settings import BrokerServerSettings


class ClientLimits:
    """Limits of all objects that clients hold or create. Each kind has a metric of refused requests.

    Args:
        topic_count: Returns the number of topics that count for ``max_topics``.
        group_count: Returns the number of consumer groups.
        has_accounts: Access control is enabled, so the access key of a request names its account.

    Attributes:
        pulls: Held pulls.
        locks: Locks of queues.
        groups: Memberships of connected clients in groups of producers and consumers.
        subscriptions: Subscriptions of connected consumers. Long expressions count several times.
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
        *,
        has_accounts: bool,
    ) -> None:
        self._has_accounts = has_accounts
        share = settings.max_address_share

        def quota(kind: str, what: str, total: int, per_connection: int, key: str) -> Quota:
            limits = QuotaLimits.shared(total, per_connection, share)
            names = f"{key}, {key}-per-connection or max-address-share"
            return Quota(what, names, limits, metrics.counter(f"server.refused.{kind}"))

        self.pulls = quota(
            "pulls", "held pulls", settings.max_held_pulls, settings.max_held_pulls_per_connection, "max-held-pulls"
        )
        self.locks = quota(
            "locks", "locks", settings.max_queue_locks, settings.max_queue_locks_per_connection, "max-queue-locks"
        )
        self.groups = quota(
            "groups", "groups", settings.max_client_groups, settings.max_client_groups_per_connection,
            "max-client-groups",
        )  # fmt: skip
        self.subscriptions = quota(
            "subscriptions", "subscriptions", settings.max_subscriptions, settings.max_subscriptions_per_connection,
            "max-subscriptions",
        )  # fmt: skip
        rate = CreationRate(settings.auto_create_burst, settings.auto_create_per_second)
        refused = metrics.counter("server.refused.created")
        self.topics = CreationLimit(
            "topics",
            "max-topics, max-address-share, auto-create-burst or auto-create-per-second",
            clock, topic_count, settings.max_topics, share, rate, refused,
        )  # fmt: skip
        self.new_groups = CreationLimit(
            "groups",
            "max-groups, max-address-share, auto-create-burst or auto-create-per-second",
            clock, group_count, settings.max_groups, share, rate, refused,
        )  # fmt: skip

    def owner(self, connection: Connection, request: RemotingCommand) -> Owner:
        """Return the client that sent a request."""
        account = request.ext_fields.get(ACCESS_KEY) if self._has_accounts else None
        return Owner(connection.id, connection.remote.ip, account)

    def sweep(self) -> None:
        """Forget what is no longer needed. Called from time to time."""
        self.topics.sweep()
        self.new_groups.sweep()
