"""The broker contract over gRPC: with our own server, and with Apache RocketMQ 5.5.0 and its proxy in both modes.

The protocol creates no topics and groups, and reads no queues. The tests do that with the remoting protocol, beside the
broker under test.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from mqtemplate import ConsumeMode, MQApplication, RetryLater, RocketMQTemplate, message_listener
from mqtemplate.broker import Broker, ConsumerSpec, MessageReader, Registration
from mqtemplate.brokers import (
    EmbeddedBroker,
    EmbeddedSettings,
    GrpcBroker,
    GrpcSettings,
    RemoteBroker,
    RemoteSettings,
)
from mqtemplate.brokers.grpc.consuming import GrpcPop
from mqtemplate.brokers.grpc.member import GrpcGroups, PopMember
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.remoting.identity import ClientTls, Credentials
from mqtemplate.results import SendStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.testing.contract import (
    BrokerUnderTest,
    DelayContract,
    PopContract,
    ReceiveContract,
    ScheduleChangeContract,
    SelectorContract,
    SendContract,
    TransactionContract,
)
from mqtemplate.topics import DLQ_TOPIC_PREFIX
from tests.conformance.grpc_clients.servers import (
    Administrator,
    GrpcServer,
    cluster_proxy,
    guarded_proxy,
    local_proxy,
)
from tests.conformance.servers import ACCOUNT
from tests.contract.test_remote_server import free_address
from tests.waiting import eventually

LONGEST_DELAY_MS = 86_400_000
EARLY_MS = 1_000
"""RocketMQ's timer wheel has slots of one second, and rounds down."""
REQUEST_TIMEOUT_MS = 30_000

_QUEUE = "the proxy chooses the queue of a message"
_FLAG = "the protocol does not carry the flag of a message"
_LEVEL = "the client turns a level into a time, and RocketMQ's timers may be a second early"
NOT_OVER_GRPC = {
    "test_a_result_has_the_position_of_the_message": _QUEUE,
    "test_a_message_arrives_as_it_was_sent": _FLAG,
    "test_messages_are_distributed_over_all_queues": _QUEUE,
    "test_a_queue_keeps_the_order_of_its_messages": _QUEUE,
    "test_an_unknown_topic_is_created": "the protocol creates no topics",
    "test_the_topics_of_applications_are_listed": "the protocol lists no topics",
    "test_a_deleted_topic_is_gone_with_its_messages": "the protocol deletes no topics",
    "test_a_batch_is_stored_in_one_queue_and_in_order": _QUEUE,
    "test_a_batch_is_stored_in_the_given_queue": _QUEUE,
    "test_each_of_many_messages_at_the_same_time_has_its_own_position": _FLAG,
    "test_a_level_delays_a_message": _LEVEL,
    "test_messages_with_equal_levels_keep_the_order_of_their_queue": _QUEUE,
    "test_delayed_messages_are_delivered_after_a_restart": _LEVEL,
    "test_a_delayed_message_keeps_tag_keys_properties_and_queue": _QUEUE,
    "test_a_commit_delivers_the_message_as_it_was_sent": _FLAG,
    "test_a_pull_with_sql92_skips_messages_that_do_not_match": "the protocol has no pulls",
}


NOT_BY_ROCKETMQ = {
    "test_after_the_last_retry_a_message_is_a_dead_letter": "it creates the topic with the first dead letter, later",
    "test_a_dead_letter_is_acknowledged": "its proxy does not store the origin of a dead letter",
    "test_messages_of_one_key_are_delivered_in_order_and_do_not_block_others": "its broker locks the whole queue",
}


class AdministeredBroker(GrpcBroker):
    """A broker over gRPC, with an administrator and a reader that use the remoting protocol."""

    def __init__(self, server: GrpcServer, folder: Path, topics: Sequence[str]) -> None:
        super().__init__(
            GrpcSettings(endpoints=server.endpoint, request_timeout_ms=REQUEST_TIMEOUT_MS, topics=tuple(topics))
        )
        self._server = server
        self.beside = RemoteBroker(RemoteSettings(name_servers=(server.address,), offset_path=folder))
        self.topics = list(topics)
        self.has_order = False
        self.topic_type = "MIXED"

    def start(self) -> None:
        self.beside.start()
        super().start()

    def close(self) -> None:
        super().close()
        self.beside.close()

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        with Administrator(self._server) as administrator:
            administrator.create_topic(topic, self.topic_type, queues=queue_count)
        self.topics.append(topic)
        self._client.routes.forget(topic)

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        return self.beside.queues(topic) if topic.startswith(DLQ_TOPIC_PREFIX) else super().queues(topic)

    @property
    def reader(self) -> MessageReader:  # type: ignore[override]
        return self.beside.reader

    @property
    def pop(self) -> GrpcPop:
        return _CreatedPop(super().pop, self._server, ordered=self.has_order)  # type: ignore[return-value]

    @property
    def groups(self) -> GrpcGroups:
        return _CreatedGroups(super().groups, self._server)  # type: ignore[return-value]


class _CreatedPop:
    """POP by groups that are created before their first member joins."""

    def __init__(self, pop: GrpcPop, server: GrpcServer, *, ordered: bool) -> None:
        self._pop = pop
        self._server = server
        self._ordered = ordered

    def join(self, spec: ConsumerSpec) -> Registration:
        with Administrator(self._server) as administrator:
            administrator.create_group(spec.group, retries=spec.max_reconsume_times, ordered=self._ordered)
        return self._pop.join(spec)

    def __getattr__(self, name: str) -> object:
        return getattr(self._pop, name)


class _CreatedGroups:
    """Groups that are created before their first member joins."""

    def __init__(self, groups: GrpcGroups, server: GrpcServer) -> None:
        self._groups = groups
        self._server = server

    def subscribe(self, spec: ConsumerSpec) -> PopMember:
        with Administrator(self._server) as administrator:
            administrator.create_group(spec.group)
        return self._groups.subscribe(spec)


@contextmanager
def our_server(folder: Path) -> Iterator[GrpcServer]:
    """A server of this project in this process, with both protocols."""
    remoting, grpc = free_address(), free_address()
    engine = EmbeddedBroker(
        folder / "store",
        EmbeddedSettings(
            listen_host=remoting,
            mapped_file_size_commit_log=16 * 1024 * 1024,
            mapped_file_size_consume_queue=20_000,
            timer_max_delay_sec=LONGEST_DELAY_MS // 1_000,
            transaction_timeout_ms=1_000,
            transaction_check_interval_ms=1_000,
        ),
    )
    cluster = LocalCluster(engine, BrokerServerSettings(listen=remoting, grpc_listen=grpc))
    cluster.start()
    try:
        yield GrpcServer(str(grpc), str(remoting))
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    with our_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    with local_proxy(tmp_path_factory.mktemp("proxy")) as server:
        yield server


@pytest.fixture(scope="module")
def proxy_of_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    with cluster_proxy(tmp_path_factory.mktemp("cluster")) as server:
        yield server


@contextmanager
def connected(proxy: GrpcServer, folder: Path, topics: Sequence[str] = ()) -> Iterator[AdministeredBroker]:
    with AdministeredBroker(proxy, folder, topics) as broker:
        yield broker


class _OverGrpc(
    SendContract,
    DelayContract,
    ScheduleChangeContract,
    SelectorContract,
    TransactionContract,
    ReceiveContract,
    PopContract,
):
    """The parts of the contract that the protocol can do. A subclass has the fixture ``server``."""

    NOT_HERE: ClassVar[Mapping[str, str]] = {}
    """Test -> reason why the server of the class cannot do it."""

    @pytest.fixture
    def early_ms(self) -> int:
        """Longest time by which a timer of the broker may be early."""
        return 0

    @pytest.fixture
    def under_test(
        self, request: pytest.FixtureRequest, server: GrpcServer, early_ms: int, tmp_path: Path
    ) -> Iterator[BrokerUnderTest]:
        name = request.function.__name__
        if reason := NOT_OVER_GRPC.get(name) or self.NOT_HERE.get(name):
            pytest.skip(reason)

        def connect(topics: Sequence[str] = ()) -> Broker:
            broker = AdministeredBroker(server, tmp_path, topics)
            broker.has_order = name.endswith(("do_not_block_others", "later_ones_of_its_key"))
            if "checked" in name:  # A proxy in CLUSTER mode sends checks for topics of this type only.
                broker.topic_type = "TRANSACTION"
            broker.start()
            return broker

        def restart() -> Broker:
            """Restart the application; the server keeps running."""
            before = under_test.broker
            assert isinstance(before, AdministeredBroker)
            before.close()
            return connect(before.topics)

        under_test = BrokerUnderTest.on_real_clock(
            connect(),
            restart=restart,
            timeout_ms=40_000,
            early_ms=early_ms,
            longest_delay_ms=LONGEST_DELAY_MS,
            checks_within_ms=20_000,
        )
        try:
            yield under_test
        finally:
            under_test.broker.close()


class TestOurServer(_OverGrpc):
    @pytest.fixture
    def server(self, ours: GrpcServer) -> GrpcServer:
        return ours


@pytest.mark.conformance
class TestRocketMQsProxy(_OverGrpc):
    NOT_HERE = NOT_BY_ROCKETMQ

    @pytest.fixture
    def server(self, proxy: GrpcServer) -> GrpcServer:
        return proxy

    @pytest.fixture
    def early_ms(self) -> int:
        return EARLY_MS


@pytest.mark.conformance
@pytest.mark.thorough
class TestRocketMQsProxyInClusterMode(TestRocketMQsProxy):
    """The proxy has a process of its own, beside the broker."""

    @pytest.fixture
    def server(self, proxy_of_cluster: GrpcServer) -> GrpcServer:
        return proxy_of_cluster


# --- beyond the contract --------------------------------------------------------------------------


@pytest.mark.conformance
def test_a_level_becomes_a_time_that_can_be_recalled(proxy: GrpcServer, tmp_path: Path) -> None:
    with connected(proxy, tmp_path) as broker:
        topic, before_ms = _topic(broker), broker.clock.now_ms()
        kept = broker.sends.send(Message(topic, b"kept", {Property.DELAY: "1"}))
        recalled = broker.sends.send(Message(topic, b"recalled", {Property.DELAY: "3"}))

        assert broker.delayed.cancel(recalled.handle).status is ScheduleChangeStatus.CANCELLED
        member = broker.groups.subscribe(ConsumerSpec(group=f"g-{topic}", subscriptions={topic: TagSelector("*")}))
        [message] = _take(member, 1)

        assert (message.body, message.msg_id) == (b"kept", kept.msg_id)
        assert message.store_timestamp >= before_ms + 1_000 - EARLY_MS
        assert broker.delayed.cancel(recalled.handle).status is ScheduleChangeStatus.CANCELLED


@pytest.mark.conformance
def test_messages_of_one_hash_key_stay_in_order(proxy: GrpcServer, tmp_path: Path) -> None:
    with connected(proxy, tmp_path) as broker:
        topic = _topic(broker)
        for number in range(20):
            broker.sends.send(Message(topic, b"%d" % number, {Property.SHARDING_KEY: "customer-7"}))
        member = broker.groups.subscribe(ConsumerSpec(group=f"g-{topic}", subscriptions={topic: TagSelector("*")}))

        messages = _take(member, 20)

        assert [int(message.body) for message in messages] == list(range(20))
        assert len({message.queue_id for message in messages}) == 1


@pytest.mark.parametrize("mode", ["PULL", "POP"])
@pytest.mark.parametrize("server", ["ours", pytest.param("proxy", marks=pytest.mark.conformance)])
def test_an_application_runs_over_grpc_as_it_is(
    request: pytest.FixtureRequest, server: str, mode: str, tmp_path: Path
) -> None:
    """Listeners with retries, dead letters and delays, and ``receive``. The settings differ in one key."""
    proxy: GrpcServer = request.getfixturevalue(server)
    with connected(proxy, tmp_path) as broker, Administrator(proxy) as administrator:
        topic = _topic(broker)
        billing, readers = f"billing-{topic}", f"readers-{topic}"
        for group in (billing, readers):
            administrator.create_group(group)
        handled: list[tuple[str, int]] = []

        @message_listener(
            topic=topic,
            consumer_group=billing,
            selector_expression="paid",
            max_reconsume_times=1,
            request_mode=mode,
        )
        def bill(order: str, message: MessageExt) -> None:
            handled.append((order, message.reconsume_times))
            if order == "poison" or (order == "hard" and message.reconsume_times == 0):
                raise RetryLater(delay="1s")

        settings = {
            "rocketmq.endpoints": proxy.endpoint,
            "rocketmq.simple-consumer.consumer-group": readers,
            "rocketmq.simple-consumer.topic": topic,
        }
        with MQApplication(bill, settings=settings, environment={}) as app:
            template = app.get(RocketMQTemplate)
            for order in ("good", "hard", "poison"):
                template.sync_send(f"{topic}:paid", order)
            template.sync_send(f"{topic}:open", "open")
            eventually(lambda: len(handled) >= 5, "all orders are handled", timeout_s=60)
            received = []

            def has_all() -> bool:
                received.extend(template.receive(str, timeout=1_000))
                return len(received) >= 4

            eventually(has_all, "all orders are received", timeout_s=60)

        dead = broker.queues(f"{DLQ_TOPIC_PREFIX}{billing}")
        eventually(lambda: sum(map(broker.reader.max_offset, dead)) == 1, "the poison is with the dead letters")
        assert sorted(handled) == [("good", 0), ("hard", 0), ("hard", 1), ("poison", 0), ("poison", 1)]
        assert sorted(received) == ["good", "hard", "open", "poison"]


@pytest.mark.parametrize("mode", ["PULL", "POP"])
@pytest.mark.parametrize("server", ["ours", pytest.param("proxy", marks=pytest.mark.conformance)])
def test_a_listener_in_order_retries_before_it_goes_on(
    request: pytest.FixtureRequest, server: str, mode: str, tmp_path: Path
) -> None:
    """The group is one for messages in order. The second message fails once, and the later ones wait for it."""
    proxy: GrpcServer = request.getfixturevalue(server)
    with connected(proxy, tmp_path) as broker, Administrator(proxy) as administrator:
        topic = _topic(broker)
        administrator.create_group(f"billing-{topic}", ordered=True)
        handled: list[int] = []

        @message_listener(
            topic=topic,
            consumer_group=f"billing-{topic}",
            consume_mode=ConsumeMode.ORDERLY,
            request_mode=mode,
            suspend_current_queue_time_millis=100,
        )
        def bill(order: str) -> None:
            handled.append(int(order))
            if handled == [0, 1]:
                raise ValueError("once")

        with MQApplication(bill, settings={"rocketmq.endpoints": proxy.endpoint}, environment={}) as app:
            template = app.get(RocketMQTemplate)
            for number in range(6):
                template.sync_send(topic, str(number), hash_key="customer-7")
            eventually(lambda: len(handled) >= 7, "all orders are handled", timeout_s=60)

        assert handled == [0, 1, 1, 2, 3, 4, 5]


@pytest.mark.conformance
@pytest.mark.parametrize("kind", ["authority", "insecure"])
def test_a_client_speaks_tls(proxy: GrpcServer, tmp_path: Path, kind: str) -> None:
    tls = ClientTls(trust_cert_path=str(proxy.authority)) if kind == "authority" else ClientTls(insecure=True)
    with connected(proxy, tmp_path) as administered:
        topic = _topic(administered)

        with GrpcBroker(GrpcSettings(endpoints=proxy.endpoint, tls=tls, request_timeout_ms=20_000)) as broker:
            assert broker.sends.send(Message(topic, b"over TLS"), timeout_ms=20_000).send_status is SendStatus.SEND_OK


@pytest.mark.conformance
def test_a_server_of_an_unknown_authority_is_refused(proxy: GrpcServer) -> None:
    broker = GrpcBroker(GrpcSettings(endpoints=proxy.endpoint, tls=ClientTls()))

    with pytest.raises(RemoteConnectError, match=r"no connection: .*CERTIFICATE_VERIFY_FAILED"):
        broker.start()


@pytest.mark.conformance
def test_a_client_without_an_account_is_refused(tmp_path: Path) -> None:
    """With one it sends; the wrong secret is named as one thing to check."""
    with guarded_proxy(tmp_path) as server, Administrator(server) as administrator:
        administrator.create_topic("orders", queues=1)
        settings = GrpcSettings(endpoints=server.endpoint, request_timeout_ms=20_000, credentials=ACCOUNT)

        with GrpcBroker(settings) as broker:
            assert broker.sends.send(Message("orders", b"x"), timeout_ms=20_000).send_status is SendStatus.SEND_OK
        wrong = replace(settings, credentials=Credentials(access_key=ACCOUNT.access_key, secret_key="wrong"))
        with pytest.raises(BrokerError, match="check access-key and secret-key"), GrpcBroker(wrong) as broker:
            broker.sends.send(Message("orders", b"x"))


def _topic(broker: AdministeredBroker) -> str:
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic)
    return topic


def _take(member: PopMember, count: int) -> list[MessageExt]:
    found: list[MessageExt] = []

    def has_all() -> bool:
        found.extend(member.poll(32, 100))
        return len(found) >= count

    eventually(has_all, f"{count} messages", timeout_s=60)
    return found
