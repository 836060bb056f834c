"""Broker interface over a RocketMQ cluster."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mqtemplate.broker import BrokerAdmin, Capability, DelayConsole, DelayedMessages, MessageReader, TopicMessageType
from mqtemplate.broker.hand_over import DelayLimits, FoundRecords
from mqtemplate.brokers.remote.admin import RemoteAdmin, RemoteHandOver
from mqtemplate.brokers.remote.client_broker import ClientBroker
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.routes import RouteTable
from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
from mqtemplate.brokers.remote.cluster_client import ClusterClient
from mqtemplate.brokers.remote.consuming.members import Members
from mqtemplate.brokers.remote.consuming.pop import RemotePop
from mqtemplate.brokers.remote.producing.answers import RemoteRequests, RemoteTransactions
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.clock import Clock
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.engine.group_rules import FIRST_RETRY_LEVEL
from mqtemplate.errors import BrokerError, ConfigurationError, MessageError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, check_send_topic

_log = get_logger("mqtemplate.remote")


class RemoteBroker(ClientBroker[ClusterClient]):
    """A client of a RocketMQ cluster.

    - Each object has its own client id and connections, so several of them in one process share nothing.
    - Its reads return all messages that it has sent.
    - `capabilities` depends on the versions of the cluster's brokers. It is set by `start`, and again within seconds
      after a broker has registered that was away, or after its upgrade.
    """

    def __init__(self, settings: RemoteSettings, clock: Clock | None = None) -> None:
        super().__init__("cluster", "this client of a cluster", clock)
        self.settings = settings
        self._levels = DelayLevels.parse(settings.message_delay_level)
        self.capabilities = frozenset[Capability]()

    def _new_client(self) -> ClusterClient:
        return ClusterClient(self.settings, self.clock, self._take_capabilities)

    def _take_capabilities(self, found: frozenset[Capability]) -> None:
        self.capabilities = found

    def _opened(self, client: ClusterClient) -> None:
        self.name, self.capabilities = client.name, client.known_capabilities

    def _leave(self, client: ClusterClient) -> None:
        client.leave()

    @property
    def client_context(self) -> ClientContext:
        """Routes, namespace and connections of this client, for the requests of administrators."""
        return self._client.context

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self._levels.delays_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return self._levels.delays_ms[FIRST_RETRY_LEVEL - 1 :] or self._levels.delays_ms[-1:]

    # --- topics --------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        return topic_queues(self._client.context, topic)

    def create_topic(self, topic: str, queue_count: int = 4, *, message_type: TopicMessageType | None = None) -> None:
        """Create a topic with *queue_count* queues on each broker, or give it more queues."""
        create_topic(self._client.context, topic, queue_count, message_type)

    def topic_names(self) -> Sequence[str]:
        routes = self._client.context.routes
        return [topic for topic in routes.name_servers.topics() if routes.has_applications(topic)]

    def expect_topics(self, topics: Iterable[str]) -> None:
        self._client.context.routes.unknown.expect(topics)

    def unreachable(self) -> Mapping[str, str | None]:
        found: dict[str, str | None] = {}
        for name in sorted(self._client.context.routes.brokers()):
            try:
                self.reader.min_offset(MessageQueue(SCHEDULE_TOPIC, name, 0))
                found[name] = None
            except BrokerError as exc:
                found[name] = str(exc)
        return found

    def admin(self) -> BrokerAdmin:
        return RemoteAdmin(self._client.context, self._client.members, self._client.delay_configs)

    @property
    def hand_over(self) -> RemoteHandOver:
        return RemoteHandOver(self._client.context)

    def delay_limits(self) -> DelayLimits:
        configs = [self._client.delay_configs.of(name) for name in self._client.context.routes.master_names()]
        slots_ms = [each.slot_ms for each in configs if each.slot_ms is not None]
        return DelayLimits(
            max_delay_ms=min(each.max_delay_ms for each in configs),
            precision_ms=max(slots_ms, default=1),
            levels_ms=configs[0].levels.delays_ms,
        )

    def find_records(self, topics: Sequence[str], msg_id: str) -> FoundRecords:
        names, messages = self._client.queries.records_of(topics, msg_id)
        return FoundRecords(frozenset(names), messages)

    # --- parts ---------------------------------------------------------------------------------

    @property
    def sends(self) -> Producer:
        return self._client.producer

    @property
    def requests(self) -> RemoteRequests:
        return self._client.requests

    @property
    def transactions(self) -> RemoteTransactions:
        return self._client.transactions

    @property
    def reader(self) -> MessageReader:
        return self._client.queries

    @property
    def groups(self) -> Members:
        return self._client.members

    @property
    def pop(self) -> RemotePop:
        client = self._client
        if Capability.POP not in self.capabilities:
            client.check_pop()
        return client.pop

    @property
    def delayed(self) -> DelayedMessages:
        return self._client.delayed

    @property
    def delay_console(self) -> DelayConsole | None:
        return self._client.delay_console

    def change_delay_levels(self, text: str) -> None:
        """Use another level table on each server, such as ``"1s 10s 2h"``.

        It survives a restart of the server, until the configuration there has another table than now. Pending messages
        keep their deliver time. With access control this needs an administrator.

        Raises:
            ConfigurationError: *text* is not a level table.
            UnsupportedError: A broker of the cluster is one of RocketMQ, which reads its table at start only.
        """
        levels = DelayLevels.parse(text, is_clamping=self.settings.clamp_delay_level)
        change_delay_levels(self._client.context, text)
        self._levels = self._client.producer.factory.levels = levels
        self._client.delay_configs.forget()


# --- topics ---------------------------------------------------------------------------------------


_WAIT_S = 5.0
_REPEAT_S = 0.01


def topic_queues(context: ClientContext, topic: str) -> Sequence[MessageQueue]:
    """See `Broker.queues`; of a missing topic, return the queues that its first message creates."""
    return context.routes.publish_route(check_send_topic(topic)).write_queues


def create_topic(
    context: ClientContext, topic: str, queue_count: int, message_type: TopicMessageType | None = None
) -> None:
    """Give *topic* at least *queue_count* queues on each broker, and wait until the name servers have them.

    Raises:
        BrokerError: A broker refused, or the name servers do not have the topic in time.
        UnsupportedError: A broker is RocketMQ 4, which ignores the type of a topic.
    """
    check_send_topic(topic)
    if queue_count < 1:
        raise MessageError(f"a topic has 1 queue or more, got queue_count {queue_count}")
    counts = _queue_counts(context.routes, topic)
    masters = context.routes.registered_masters()
    changed = [name for name in masters if counts[name] < queue_count or message_type is not None]
    if message_type is not None:
        _check_types(context, topic, message_type, masters)
    for name in changed:
        header = CreateTopicRequestHeader(
            topic=context.namespace.wrap(topic),
            default_topic=AUTO_CREATE_TOPIC,
            read_queue_nums=max(queue_count, counts[name]),
            write_queue_nums=max(queue_count, counts[name]),
            perm=Perm.READ | Perm.WRITE,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
            attributes=None if message_type is None else f"+message.type={message_type.value}",
        )
        request = RemotingCommand.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        context.call(masters[name], request, f"create topic {topic!r}")
    _wait_for_route(context.routes, topic, queue_count, changed)


def _check_types(
    context: ClientContext, topic: str, message_type: TopicMessageType, masters: Mapping[str, str]
) -> None:
    """Raise `UnsupportedError` if a broker is too old for the type of a topic."""
    context.instance.register_at(masters.values())
    old = [name for name, address in sorted(masters.items()) if context.instance.is_before_5(address)]
    if old:
        raise UnsupportedError(
            f"topic {topic!r} with messages of type {message_type.value}: broker {', '.join(old)} is RocketMQ 4, which "
            "ignores the type of a topic; leave the type out, or upgrade the broker"
        )


def _wait_for_route(routes: RouteTable, topic: str, queue_count: int, broker_names: list[str]) -> None:
    """Wait until the brokers have registered the topic at the name servers."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        counts = _queue_counts(routes, topic)
        if all(counts[name] >= queue_count for name in broker_names):
            return
        if time.monotonic() > deadline:
            raise BrokerError(
                f"topic {topic!r} was created on {', '.join(broker_names)}, but no name server has it after "
                f"{_WAIT_S:g} s; see that the brokers reach the name servers (namesrvAddr), and try again"
            )
        threading.Event().wait(_REPEAT_S)


def _queue_counts(routes: RouteTable, topic: str) -> Counter[str]:
    """Look up the number of queues of each broker."""
    routes.forget(topic)
    route = routes.existing(topic)
    return Counter(queue.broker_name for queue in (route.write_queues if route is not None else ()))


# --- delay levels ---------------------------------------------------------------------------------


_LEVEL_RESPONSES = (ResponseCode.SUCCESS, ResponseCode.INVALID_PARAMETER)


def change_delay_levels(context: ClientContext, text: str) -> None:
    """See `RemoteBroker.change_delay_levels`."""
    advice = "cannot be changed from here: a RocketMQ broker reads them at start; set messageDelayLevel in its settings"
    for address in _own_servers(context, "the delay levels", f"{advice} and restart it"):
        request = RemotingCommand.request(
            RequestCode.UPDATE_BROKER_CONFIG, body=f"messageDelayLevel={' '.join(text.split())}\n".encode()
        )
        response = context.call(address, request, "change the delay levels", accept=_LEVEL_RESPONSES)
        if response.code == ResponseCode.INVALID_PARAMETER:
            raise ConfigurationError(response.remark or f"{text!r} is not a level table")


def _own_servers(context: ClientContext, what: str, advice: str) -> Sequence[str]:
    """Return the addresses of all brokers, if they are servers of this library.

    Raises:
        UnsupportedError: One of them is a broker of RocketMQ, or there is no broker.
    """
    masters, instance = context.routes.masters(), context.instance
    instance.register_at(masters)
    # One that has refused the heartbeat is not known: the next request tells why it refuses.
    others = [address for address in masters if address in instance.versions and not instance.announced.get(address)]
    if others or not masters:
        raise UnsupportedError(f"{what} of {', '.join(others) or 'this cluster'} {advice}")
    return masters


def reload_configuration(context: ClientContext) -> dict[str, ReloadedConfig]:
    """Let each server read its configuration again. Return the results by address.

    Raises:
        UnsupportedError: A broker of the cluster is one of RocketMQ, which reads its configuration at start only.
        BrokerError: A server refused it; with access control this needs an administrator.
    """
    advice = "cannot be read again from here: a RocketMQ broker reads it at start; restart it"
    return {
        address: ReloadedConfig.decode(
            context.call(address, RemotingCommand.request(RequestCode.RELOAD_CONFIG), "reload the configuration").body
        )
        for address in _own_servers(context, "the configuration", advice)
    }
