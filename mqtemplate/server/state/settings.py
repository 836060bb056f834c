"""Settings of a broker server, beside the settings of its engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import Ge, Gt, Le, MinLen

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings of a server that an operator chooses. The names are the ones in RocketMQ's ``BrokerConfig``.

    The ranges in the types apply to values from ``application.yml``.
    """

    listen: HostAddress = HostAddress("127.0.0.1", 10911)
    """Address of the listener socket; with port 0 the operating system chooses the port."""

    advertise: HostAddress | None = None
    """Address that clients get, if it is not ``listen``: needed if that is ``0.0.0.0``. Its host may be a name, which
    clients resolve at each connect."""

    grpc_listen: HostAddress | None = None
    """Address for RocketMQ's gRPC clients, such as ``127.0.0.1:8081``; without it they are not served. Needs the extra
    ``grpc``."""

    grpc_advertise: HostAddress | None = None
    """Address that gRPC clients get, a host name or a numeric address with a port: all their calls go there. By default
    the host of ``advertise``, with the port of *grpc_listen*."""

    cluster_name: Annotated[str, MinLen(1)] = "DefaultCluster"
    """Name of the cluster in routes and in the property ``CLUSTER`` of messages."""

    auto_create_topic_enable: bool = True
    """True: the first message to a topic creates it."""

    default_topic_queue_nums: Annotated[int, Ge(1), Le(1_024)] = 8
    """Most queues of a topic that the first message of a client creates. Java clients request 4."""

    auto_create_subscription_group: bool = True
    """True: the first heartbeat of a consumer creates its group."""

    enable_property_filter: bool = True
    """True: consumers may select messages by SQL92."""

    recall_message_enable: bool = True
    """True: producers may recall delayed messages."""

    broker_registration_enable: bool = False
    """True: other brokers may register with the name server. A registration can redirect any topic; with access control
    it needs an administrator."""

    strict_subscriptions: bool = False
    """True: a member with other subscriptions than its group is refused. False: server and clients log a warning."""

    max_batch_messages: Annotated[int, Ge(1)] = 4_096
    """Most messages in one batch. ``max-message-size`` limits its bytes."""

    max_held_pulls: Annotated[int, Ge(1)] = 100_000
    """Most pulls that wait for messages at one time. One more is answered as busy."""

    max_held_pulls_per_connection: Annotated[int, Ge(1)] = 10_000
    """The same for one connection. A consumer holds one for each of its queues."""

    max_suspend_ms: Annotated[int, Ge(1)] = 120_000
    """Longest time in milliseconds that a pull waits for messages, whatever its client requests."""

    max_queue_locks: Annotated[int, Ge(1)] = 100_000
    """Most locks of queues that ordered consumers hold."""

    max_queue_locks_per_connection: Annotated[int, Ge(1)] = 10_000
    """The same for one connection."""

    max_client_groups: Annotated[int, Ge(1)] = 100_000
    """Most groups of connected producers and consumers. A group counts once for each of its members."""

    max_client_groups_per_connection: Annotated[int, Ge(1)] = 1_000
    """The same for one connection."""

    max_subscriptions: Annotated[int, Ge(1)] = 200_000
    """Most subscriptions of connected consumers. An expression counts once more for each 256 characters."""

    max_subscriptions_per_connection: Annotated[int, Ge(1)] = 10_000
    """The same for one connection."""

    max_grpc_clients: Annotated[int, Ge(1)] = 100_000
    """Most clients of the gRPC protocol that are known by their settings."""

    max_grpc_clients_per_connection: Annotated[int, Ge(1)] = 1_000
    """The same for those that sent their settings over one connection."""

    max_topics: Annotated[int, Ge(1)] = 20_000
    """With so many topics, first messages create no more. An administrator may."""

    max_groups: Annotated[int, Ge(1)] = 20_000
    """With so many consumer groups, clients create no more. An administrator may."""

    auto_create_burst: Annotated[int, Ge(1)] = 1_000
    """Topics, and consumer groups, that the clients of one address or account may create at once."""

    auto_create_per_second: Annotated[float, Gt(0)] = 10.0
    """The same for each second after that."""

    max_address_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """Part of each total above that the clients of one address, or of one account, may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerServerSettings(ServerOptions):
    """All settings of a broker server. Sizes are in bytes, times in milliseconds.

    Records and message ids contain the embedded broker's ``listen_host``, and so do routes without *advertise*. Where
    its port is 0 or the port of *listen*, routes contain the port that the server really has.

    Raises:
        ConfigurationError: A setting has an invalid value.
    """

    region_id: str = "DefaultRegion"
    """Region in answers to sends, for clients that trace their messages."""

    trace_on: bool = True
    """True: answers allow clients to trace their messages."""

    max_pull_count: int = 32
    """Most messages in one answer, whatever the client requests."""

    max_pull_bytes: int = 256 << 10
    """Most bytes in one answer. An answer may always contain one message."""

    client_expire_ms: int = 120_000
    """A client without a heartbeat for so long is removed from its groups."""

    client_scan_interval_ms: int = 10_000
    """Time between two scans for such clients."""

    rebalance_lock_max_live_ms: int = 60_000
    """Time after which the lock of a queue ends without a renewal."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if type(value) is int and value < 1:
                raise ConfigurationError(f"{name.replace('_', '-')} must be 1 or more, got {value}")
        if not self.cluster_name:
            raise ConfigurationError("cluster-name is empty; give a name such as DefaultCluster")

    def added_properties(self) -> dict[str, str]:
        """Return the properties that the server adds to each message that is not in a batch."""
        return {
            "MSG_REGION": self.region_id,
            "TRACE_ON": "true" if self.trace_on else "false",
            "CLUSTER": self.cluster_name,
        }
