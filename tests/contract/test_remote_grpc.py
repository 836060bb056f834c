"""The broker contract over gRPC, with Apache RocketMQ 5.5.0 and its proxy in LOCAL mode.

The protocol creates no topics and groups, and reads no queues. The tests do that with the remoting protocol, beside the
broker under test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mqtemplate.broker import Broker, ConsumerSpec, MessageReader
from mqtemplate.brokers import GrpcBroker, GrpcSettings, RemoteBroker, RemoteSettings
from mqtemplate.brokers.grpc.member import GrpcGroups, PopMember
from mqtemplate.message import MessageQueue
from mqtemplate.testing.contract import (
    BrokerUnderTest,
    DelayContract,
    ReceiveContract,
    ScheduleChangeContract,
    SelectorContract,
    SendContract,
    TransactionContract,
)
from mqtemplate.topics import DLQ_TOPIC_PREFIX
from tests.conformance.grpc_clients.servers import Administrator, GrpcServer, local_proxy

pytestmark = pytest.mark.conformance

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


class AdministeredBroker(GrpcBroker):
    """A broker over gRPC, with an administrator and a reader that use the remoting protocol."""

    def __init__(self, server: GrpcServer, folder: Path, topics: Sequence[str]) -> None:
        super().__init__(
            GrpcSettings(endpoints=server.endpoint, request_timeout_ms=REQUEST_TIMEOUT_MS, topics=tuple(topics))
        )
        self._server = server
        self.beside = RemoteBroker(RemoteSettings(name_servers=(server.address,), offset_path=folder))
        self.topics = list(topics)

    def start(self) -> None:
        self.beside.start()
        super().start()

    def close(self) -> None:
        super().close()
        self.beside.close()

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        with Administrator(self._server) as administrator:
            administrator.create_topic(topic, "MIXED", queues=queue_count)
        self.topics.append(topic)
        self._client.routes.forget(topic)

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        return self.beside.queues(topic) if topic.startswith(DLQ_TOPIC_PREFIX) else super().queues(topic)

    @property
    def reader(self) -> MessageReader:  # type: ignore[override]
        return self.beside.reader

    @property
    def groups(self) -> GrpcGroups:
        return _CreatedGroups(super().groups, self._server)  # type: ignore[return-value]


class _CreatedGroups:
    """Groups that are created before their first member joins."""

    def __init__(self, groups: GrpcGroups, server: GrpcServer) -> None:
        self._groups = groups
        self._server = server

    def subscribe(self, spec: ConsumerSpec) -> PopMember:
        with Administrator(self._server) as administrator:
            administrator.create_group(spec.group)
        return self._groups.subscribe(spec)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    options = {"enableMixedMessageType": "true", "timerFlushIntervalMs": 10_000}
    with local_proxy(tmp_path_factory.mktemp("proxy"), options) as server:
        yield server


class TestRocketMQsProxy(
    SendContract,
    DelayContract,
    ScheduleChangeContract,
    SelectorContract,
    TransactionContract,
    ReceiveContract,
):
    @pytest.fixture
    def under_test(
        self, request: pytest.FixtureRequest, proxy: GrpcServer, tmp_path: Path
    ) -> Iterator[BrokerUnderTest]:
        if reason := NOT_OVER_GRPC.get(request.function.__name__):
            pytest.skip(reason)

        def connect(topics: Sequence[str] = ()) -> Broker:
            broker = AdministeredBroker(proxy, tmp_path, topics)
            broker.start()
            return broker

        def restart() -> Broker:
            """Restart the application; the proxy keeps running."""
            before = under_test.broker
            assert isinstance(before, AdministeredBroker)
            before.close()
            return connect(before.topics)

        under_test = BrokerUnderTest.on_real_clock(
            connect(),
            restart=restart,
            timeout_ms=40_000,
            early_ms=EARLY_MS,
            longest_delay_ms=LONGEST_DELAY_MS,
            checks_within_ms=20_000,
        )
        try:
            yield under_test
        finally:
            under_test.broker.close()
