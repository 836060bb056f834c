"""Broker interface over the gRPC protocol of RocketMQ 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NoReturn

from mqtemplate.broker import BrokerAdmin, Capability, TopicMessageType
from mqtemplate.brokers.grpc.channels import Channels
from mqtemplate.brokers.grpc.consuming import GrpcPop
from mqtemplate.brokers.grpc.control import GrpcDelayedMessages, GrpcTransactions
from mqtemplate.brokers.grpc.member import GrpcGroups
from mqtemplate.brokers.grpc.producing import GrpcProducer, Later
from mqtemplate.brokers.grpc.sessions import ClientSession, ProxyContext, Routes, new_client_id
from mqtemplate.brokers.grpc.settings import GrpcSettings
from mqtemplate.brokers.remote.client_broker import ClientBroker
from mqtemplate.brokers.remote.cluster.failures import Outages, log_failure
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.results import PullResult
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import PeriodicService, Service
from mqtemplate.topics import check_send_topic

_log = get_logger("mqtemplate.remote")

CAPABILITIES = frozenset(
    {
        Capability.DELAY_LEVEL,
        Capability.TIMER,
        Capability.RETRY_DELAY,
        Capability.RECALL,
        Capability.TRANSACTION,
        Capability.SQL92,
        Capability.POP,
    }
)
"""Capabilities of every RocketMQ 5 broker behind a proxy."""

_FIRST_RETRY_LEVEL = 3
_INSTEAD = "set rocketmq.name-server to the name servers of the brokers"


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(f"{what}: RocketMQ's gRPC protocol does not have it; {_INSTEAD}")


class _Client:
    """All parts of a `GrpcBroker` between one start and the next close."""

    def __init__(self, settings: GrpcSettings, clock: Clock) -> None:
        self.outages = Outages(clock, settings.request_timeout_ms)
        self.channels = Channels(settings, self.outages)
        self.context = ProxyContext(settings, self.channels, new_client_id())
        self.routes = Routes(self.context)
        self.later = Later(clock)
        self.producer = GrpcProducer(self.context, self.routes, clock, self.later)
        self.pop = GrpcPop(self.context, self.routes)
        self.groups = GrpcGroups(self.pop, self.routes, self.producer)
        self.delayed = GrpcDelayedMessages(self.producer.session, self.routes, clock)
        self._refreshes = PeriodicService("grpc.routes", self._refresh, clock, settings.poll_route_interval_ms)
        self._heartbeats = PeriodicService("grpc.heartbeat", self._heartbeat, clock, settings.heartbeat_interval_ms)
        self._syncs = PeriodicService("grpc.settings", self._send_settings, clock, settings.settings_interval_ms)

    def open(self) -> None:
        """Find out that a proxy answers. A client without settings gets an answer too, whatever its status is.

        Raises:
            RemoteConnectError: None answers.
            BrokerError: Access control refuses this client.
        """
        context = self.context
        settings, request = context.settings, protos.HeartbeatRequest(client_type=int(ClientType.PRODUCER))
        endpoints = settings.parsed_endpoints
        answer = self.channels.call(
            endpoints, context.own_id, "Heartbeat", request, "first request", settings.request_timeout_ms
        )
        if answer.status.code == Code.UNAUTHORIZED:
            raise BrokerError(
                f"{endpoints} refuses this client: {answer.status.message}; check access-key and secret-key"
            )

    def _sessions(self) -> list[ClientSession]:
        return [self.producer.session, *self.pop.sessions()]

    def _refresh(self) -> int | None:
        try:
            self.routes.refresh()
        except BrokerError as exc:
            log_failure(_log, "remote.route_refresh_failed", exc)
        return None

    def _heartbeat(self) -> int | None:
        for session in self._sessions():
            session.heartbeat()
        return None

    def _send_settings(self) -> int | None:
        for session in self._sessions():
            session.send_settings()
        return None

    def service_groups(self) -> dict[str, list[Service]]:
        """Return the services by thread: one that waits for the proxy delays only the others of its thread."""
        return {
            "grpc": [self._refreshes, self._heartbeats, self._syncs],
            "grpc-retries": [self.later, self.outages],
        }

    def close(self) -> None:
        self.producer.close()
        self.groups.close()
        self.pop.close()
        self.producer.session.leave()
        self.channels.close()


class GrpcBroker(ClientBroker[_Client]):
    """A client of RocketMQ 5's proxy, over gRPC.

    - The proxy chooses the queue of each message, and which member receives it. Topics and groups are created by an
      administrator.
    - grpcio does not work in a child of a process that has used it.
    """

    def __init__(self, settings: GrpcSettings, clock: Clock | None = None) -> None:
        super().__init__(str(settings.parsed_endpoints), "this client of a proxy", clock)
        self.settings = settings
        self.capabilities = CAPABILITIES
        self._reader = _NoReader()
        self._requests = _NoRequests()

    def _new_client(self) -> _Client:
        return _Client(self.settings, self.clock)

    @property
    def _client(self) -> _Client:
        self._owner.check()  # grpcio does not work after a fork, and raises no error of its own
        return super()._client

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self._client.producer.encoder.levels.delays_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        delays_ms = self.delay_levels_ms
        return delays_ms[_FIRST_RETRY_LEVEL - 1 :] or delays_ms[-1:]

    # --- topics --------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """See `Broker.queues`; a missing topic is an error."""
        return [each.queue for each in self._client.routes.get(check_send_topic(topic)).writable]

    def create_topic(self, topic: str, queue_count: int = 4, *, message_type: TopicMessageType | None = None) -> None:
        """See `Broker.create_topic`; this protocol cannot do it."""
        wanted = "NORMAL (or FIFO, DELAY, TRANSACTION)" if message_type is None else message_type.value
        raise UnsupportedError(
            f"create topic {topic!r}: RocketMQ's gRPC protocol creates no topics; let an administrator do it: mqadmin "
            f"updateTopic -c DefaultCluster -t {topic} -w {queue_count} -r {queue_count} -a +message.type={wanted}"
        )

    def expect_topics(self, topics: Iterable[str]) -> None:
        """Do nothing: a listener of a topic that does not exist fails at its start."""

    def unreachable(self) -> Mapping[str, str | None]:
        try:
            self._client.open()
        except BrokerError as exc:
            return {self.name: str(exc)}
        return {self.name: None}

    def admin(self) -> BrokerAdmin:
        raise UnsupportedError(
            f"lists of topics and groups: RocketMQ's gRPC protocol does not have them; {_INSTEAD}, or turn off what "
            "shows them (mqtemplate.management.dashboard.enabled: false)"
        )

    # --- parts ---------------------------------------------------------------------------------

    @property
    def sends(self) -> GrpcProducer:
        return self._client.producer

    @property
    def requests(self) -> _NoRequests:
        return self._requests

    @property
    def transactions(self) -> GrpcTransactions:
        return self._client.producer.transactions

    @property
    def reader(self) -> _NoReader:
        return self._reader

    @property
    def groups(self) -> GrpcGroups:
        return self._client.groups

    @property
    def pop(self) -> GrpcPop:
        return self._client.pop

    @property
    def delayed(self) -> GrpcDelayedMessages:
        return self._client.delayed


# --- parts that the protocol does not have ----------------------------------------------------------


class _NoRequests:
    """Requests and replies, which the protocol does not have. A `Requests`."""

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        """Refuse."""
        _refuse("requests and replies")

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        """Refuse."""
        _refuse("requests and replies")


class _NoReader:
    """Reads of queues and queries, which the protocol does not have. A `MessageReader`."""

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        """Refuse."""
        _refuse("pulls")

    def min_offset(self, queue: MessageQueue) -> int:
        """Refuse."""
        _refuse("offsets of queues")

    def max_offset(self, queue: MessageQueue) -> int:
        """Refuse."""
        _refuse("offsets of queues")

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """Refuse."""
        _refuse("offsets of queues")

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        """Refuse."""
        _refuse("queries of messages by id")

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        """Refuse."""
        _refuse("queries of messages by key")
