"""The broker contract on the remote broker with Apache RocketMQ 5.5.0 and 4.9.7."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.peer.jvm import unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.broker import Broker, Capability, TopicMessageType
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.errors import BrokerError, UnsupportedError
from mqtemplate.message import MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.remoting.protocol.bodies.route import TopicConfigSerializeWrapper
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import GetAllTopicConfigRequestHeader
from mqtemplate.testing.contract import BrokerContract, BrokerUnderTest
from mqtemplate.topics import TIMER_TOPIC
from tests.waiting import eventually

pytestmark = pytest.mark.conformance

LONGEST_DELAY_MS = 3 * 86_400_000
OPTIONS = {
    "timerMaxDelaySec": LONGEST_DELAY_MS // 1_000,
    "transactionTimeOut": 1_000,
    "transactionCheckInterval": 1_000,
}
REQUEST_TIMEOUT_MS = 30_000
"""On a busy machine RocketMQ has taken more than the default of 3 s to create a topic."""
EARLY_MS = 1_000
"""RocketMQ's timer wheel has slots of one second, and rounds down."""


@contextmanager
def cluster(folder: Path, version: str, **special: object) -> Iterator[str]:
    """A cluster of one broker; gives the address of its name server."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    options = OPTIONS | {"haListenPort": free_port()} | special  # 4.x has a fixed default
    with NameServer(version) as names, RocketMQ(folder, names, options):
        until_registered(names.address)
        yield names.address


def until_registered(address: str) -> None:
    """Wait until the broker has registered at its name server, some time after its start."""

    def is_registered() -> bool:
        with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
            return broker.name == "broker-a"

    eventually(is_registered, "the broker has registered", timeout_s=90)


@contextmanager
def connected(address: str, folder: Path, **settings: Any) -> Iterator[BrokerUnderTest]:
    def connect() -> Broker:
        broker = RemoteBroker(
            RemoteSettings(
                name_servers=(address,), offset_path=folder, request_timeout_ms=REQUEST_TIMEOUT_MS, **settings
            )
        )
        broker.start()
        return broker

    def restart() -> Broker:
        """Restart the application; the cluster keeps running."""
        under_test.broker.close()
        return connect()

    under_test = BrokerUnderTest.on_real_clock(
        connect(), restart=restart, early_ms=EARLY_MS, longest_delay_ms=LONGEST_DELAY_MS, checks_within_ms=5_000
    )
    try:
        yield under_test
    finally:
        under_test.broker.close()


@pytest.fixture(scope="module")
def rocketmq_5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("rocketmq-5"), "5.5.0") as address:
        yield address


@pytest.fixture(scope="module")
def rocketmq_4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("rocketmq-4"), "4.9.7") as address:
        yield address


NOT_BY_ROCKETMQ = {
    "test_after_the_last_retry_a_message_is_a_dead_letter": "a member stores it at the next delivery, later",
    "test_messages_of_one_key_are_delivered_in_order_and_do_not_block_others": "its broker locks the whole queue",
}
"""Tests of POP -> why they do not hold with brokers of RocketMQ."""


class TestRocketMQ5(BrokerContract):
    @pytest.fixture
    def under_test(self, request: pytest.FixtureRequest, rocketmq_5: str, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        if reason := NOT_BY_ROCKETMQ.get(request.node.name):
            pytest.skip(reason)
        with connected(rocketmq_5, tmp_path) as under_test:
            yield under_test


@pytest.mark.thorough
class TestRocketMQ4(BrokerContract):
    @pytest.fixture
    def under_test(self, rocketmq_4: str, tmp_path: Path) -> Iterator[BrokerUnderTest]:
        with connected(rocketmq_4, tmp_path) as under_test:
            yield under_test


_BOTH = {
    Capability.DELAY_LEVEL,
    Capability.QUERY,
    Capability.TRANSACTION,
    Capability.REQUEST_REPLY,
    Capability.SQL92,
    Capability.PENDING,
}


def test_a_cluster_of_5_has_timers(rocketmq_5: str, tmp_path: Path) -> None:
    with connected(rocketmq_5, tmp_path) as under_test:
        assert under_test.broker.capabilities == _BOTH | {
            Capability.TIMER,
            Capability.TIMER_CHANGE,
            Capability.PENDING_KEY_STEPS,
            Capability.RETRY_DELAY,
            Capability.POP,
        }


@pytest.mark.thorough
def test_a_cluster_of_4_has_no_timers(rocketmq_4: str, tmp_path: Path) -> None:
    with connected(rocketmq_4, tmp_path) as under_test:
        assert under_test.broker.capabilities == _BOTH


# --- pending messages: read from the system topics --------------------------------------------------


@pytest.fixture(params=["5.5.0", pytest.param("4.9.7", marks=pytest.mark.thorough)])
def rocketmq(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"5.5.0": "rocketmq_5", "4.9.7": "rocketmq_4"}[request.param]))


def test_rocketmq_lists_messages_with_a_level(rocketmq: str, tmp_path: Path) -> None:
    with connected(rocketmq, tmp_path) as under_test:
        topic, broker = under_test.topic(), under_test.broker
        key = under_test.name("4466")
        for level, tag in (("5", "paid"), ("4", "refunded")):
            sent = under_test.send(topic, level, properties={Property.DELAY: level, Property.KEYS: f"x {key}"}, tag=tag)

        first, second = broker.delayed.pending(PendingQuery(topic=topic)).messages

        assert [(each.delay_level, each.tags, each.keys) for each in (first, second)] == [
            (4, "refunded", f"x {key}"),
            (5, "paid", f"x {key}"),
        ]
        assert first.deliver_ms == first.store_timestamp + 30_000
        assert broker.delayed.pending(PendingQuery(topic=topic, tag="paid")).messages == (second,)
        assert broker.delayed.pending(PendingQuery(key=key)).messages == (first, second)
        assert broker.delayed.pending(PendingQuery(key=sent.msg_id)).messages == (first,)
        assert broker.delayed.count_pending(PendingQuery(topic=topic, before_ms=second.deliver_ms)).total == 1


def test_rocketmq_lists_a_message_with_a_level_until_it_is_due(rocketmq: str, tmp_path: Path) -> None:
    with connected(rocketmq, tmp_path) as under_test:
        topic = under_test.topic()
        under_test.send(topic, "due", properties={Property.DELAY: "1"})
        query = PendingQuery(topic=topic)
        before = under_test.broker.delayed.count_pending(query).total

        under_test.take_one(under_test.join("billing", topic))

        assert (before, under_test.broker.delayed.count_pending(query).total) == (1, 0)


def test_rocketmq_cannot_change_a_message_with_a_level(rocketmq: str, tmp_path: Path) -> None:
    """It recalls only messages with a timer. Both ways to name the message say so, and change nothing."""
    with connected(rocketmq, tmp_path) as under_test:
        topic, broker = under_test.topic(), under_test.broker
        key = under_test.name("4466")
        under_test.send(topic, "stays", properties={Property.DELAY: "5", Property.KEYS: key})
        [message] = broker.delayed.pending(PendingQuery(topic=topic)).messages

        with pytest.raises(
            UnsupportedError, match="has delay level 5, and RocketMQ recalls only messages with a timer"
        ):
            broker.delayed.cancel(message.handle)
        with pytest.raises(UnsupportedError, match="only messages with a timer"):
            broker.delayed.cancel(key=key)
        with pytest.raises(UnsupportedError, match="only messages with a timer"):
            broker.delayed.reschedule(message.handle, under_test.now_ms())
        assert broker.delayed.pending(PendingQuery(topic=topic)).messages == (message,)


@pytest.mark.thorough
def test_a_cluster_of_4_cancels_nothing(rocketmq_4: str, tmp_path: Path) -> None:
    with (
        connected(rocketmq_4, tmp_path) as under_test,
        pytest.raises(
            UnsupportedError, match=r"has no timers and cancels no message; brokers can cancel from RocketMQ 5"
        ),
    ):
        under_test.broker.delayed.cancel(key="4466")


def test_too_many_delayed_messages_are_an_error_with_the_setting(rocketmq_5: str, tmp_path: Path) -> None:
    with connected(rocketmq_5, tmp_path, pending_read_limit=1) as under_test:
        topic, key = under_test.topic(), under_test.name("4466")
        for _ in range(2):
            under_test.send(topic, "x", properties={Property.TIMER_DELAY_SEC: "60", Property.KEYS: key})

        with pytest.raises(
            BrokerError, match=r"more than 1 delayed messages.*raise mqtemplate.cluster.pending-read-limit"
        ):
            under_test.broker.delayed.count_pending(PendingQuery())
        assert under_test.broker.delayed.count_pending(PendingQuery(key=key)).total == 2


def test_the_index_lists_what_a_query_without_it_lists(rocketmq_5: str, tmp_path: Path) -> None:
    """Timers, levels and cancelled messages of other clients; also those that come after the first read."""
    path = tmp_path / "pending.sqlite"
    with connected(rocketmq_5, tmp_path) as plain, connected(rocketmq_5, tmp_path, pending_index=path) as indexed:
        topic = plain.topic()
        for number in range(40):
            delay = {Property.DELAY: "18"} if number % 4 == 0 else {Property.TIMER_DELAY_SEC: str(600 + number)}
            sent = plain.send(topic, "x", properties={Property.KEYS: f"k{number}", **delay})
            if number % 10 == 3:
                assert sent.handle is not None
                assert plain.broker.delayed.cancel(sent.handle).count == 1
            if number == 20:
                indexed.broker.delayed.pending(PendingQuery())
        query = PendingQuery(topic=topic)
        expected = plain.broker.delayed.pending(query).messages

        def is_current() -> bool:
            return indexed.broker.delayed.pending(query).messages == expected

        assert len(expected) == 36
        eventually(is_current, "the index has all records")
        assert indexed.broker.delayed.count_pending(query) == plain.broker.delayed.count_pending(query)
        console = indexed.broker.delay_console
        assert console is not None
        [state] = console.brokers()
        assert state.problem is None
        assert {each.level: each.delay_ms for each in state.levels}[18] == 7_200_000


def test_a_client_with_a_namespace_lists_only_its_messages(rocketmq_5: str, tmp_path: Path) -> None:
    with connected(rocketmq_5, tmp_path, namespace="shop") as inside, connected(rocketmq_5, tmp_path) as outside:
        topic, key = inside.topic(), inside.name("4466")
        for under_test in (inside, outside):
            sent = under_test.send(topic, "x", properties={Property.TIMER_DELAY_SEC: "60", Property.KEYS: key})

        [message] = inside.broker.delayed.pending(PendingQuery(topic=topic)).messages

        assert message.topic == topic
        assert message.msg_id != sent.msg_id
        assert inside.broker.delayed.cancel(key=key).count == 1
        assert [each.msg_id for each in outside.broker.delayed.pending(PendingQuery(topic=topic)).messages] == [
            sent.msg_id
        ]


def test_rocketmq_stores_the_type_of_a_topic(rocketmq_5: str, tmp_path: Path) -> None:
    with connected(rocketmq_5, tmp_path) as under_test:
        topic, broker = under_test.name("typed"), under_test.broker
        broker.create_topic(topic, 2, message_type=TopicMessageType.DELAY)

        client = broker._client  # type: ignore[attr-defined]
        request = RemotingCommand.request(RequestCode.GET_ALL_TOPIC_CONFIG, GetAllTopicConfigRequestHeader())
        response = client.context.call(client.context.routes.address("broker-a"), request, "read the topics")
        config = TopicConfigSerializeWrapper.decode(response.body).topic_config_table[topic]

        assert (config.attributes, config.write_queue_nums) == ({"message.type": "DELAY"}, 2)


# --- cancel and reschedule: recall, and recall after another send -----------------------------------


def set_broker_config(under_test: BrokerUnderTest, line: str) -> None:
    client = under_test.broker._client  # type: ignore[attr-defined]
    request = RemotingCommand.request(RequestCode.UPDATE_BROKER_CONFIG, body=line.encode())
    client.context.call(client.context.routes.address("broker-a"), request, "configure the broker")


def test_a_broker_that_recalls_nothing_gets_no_second_message(rocketmq_5: str, tmp_path: Path) -> None:
    """It is RocketMQ's default. The client asks before it sends the message again."""
    with connected(rocketmq_5, tmp_path) as under_test:
        topic = under_test.topic()
        sent = under_test.send(topic, "stays", properties={Property.TIMER_DELAY_SEC: "60"})
        set_broker_config(under_test, "recallMessageEnable=false")
        try:
            with pytest.raises(UnsupportedError, match="set recallMessageEnable=true on the broker"):
                under_test.broker.delayed.reschedule(sent.handle, under_test.now_ms() + 120_000)
            under_test.reopen()
            capabilities = under_test.broker.capabilities
        finally:
            set_broker_config(under_test, "recallMessageEnable=true")

        assert [
            message.handle for message in under_test.broker.delayed.pending(PendingQuery(topic=topic)).messages
        ] == [sent.handle]
        assert Capability.TIMER_CHANGE not in capabilities


def test_an_interrupted_reschedule_leaves_both_times_and_the_next_change_ends_that(
    rocketmq_5: str, tmp_path: Path
) -> None:
    """The message is sent again before the old one is recalled. A client that is killed in between loses nothing."""
    with connected(rocketmq_5, tmp_path) as under_test:
        topic, broker = under_test.topic(), under_test.broker
        sent = under_test.send(topic, "moved", properties={Property.TIMER_DELAY_SEC: "60"})
        again = {Property.TIMER_DELAY_SEC: "120", Property.UNIQ_KEY: sent.msg_id}
        under_test.send(topic, "moved", properties=again)  # the state after a kill between the two steps
        query = PendingQuery(topic=topic)
        listed = [message.msg_id for message in broker.delayed.pending(query).messages]

        result = broker.delayed.reschedule(sent.handle, under_test.now_ms() + 2_000)

        assert listed == [sent.msg_id, sent.msg_id]
        assert result.count == 1
        assert [message.handle for message in broker.delayed.pending(query).messages] == list(result.handles)
        assert under_test.take_one(under_test.join("billing", topic)).msg_id == sent.msg_id


def test_a_message_can_return_to_its_first_time(rocketmq_5: str, tmp_path: Path) -> None:
    """A recall deletes all messages with its id in one second, even later ones: it gets the next second."""
    with connected(rocketmq_5, tmp_path) as under_test:
        topic, broker = under_test.topic(), under_test.broker
        due_ms = under_test.now_ms() // 1_000 * 1_000 + 4_500
        sent = under_test.send(topic, "moved", properties={Property.TIMER_DELIVER_MS: str(due_ms)})

        broker.delayed.reschedule(sent.handle, due_ms + 60_000)
        broker.delayed.reschedule(sent.handle, due_ms)
        [pending] = broker.delayed.pending(PendingQuery(topic=topic)).messages
        member = under_test.join("billing", topic)

        assert pending.deliver_ms == due_ms // 1_000 * 1_000 + 1_000
        assert under_test.take_one(member).body == b"moved"
        assert broker.delayed.cancel(sent.handle).status is ScheduleChangeStatus.ALREADY_DELIVERED
        assert under_test.takes_nothing(member)


def test_a_reschedule_within_the_same_second_changes_nothing(rocketmq_5: str, tmp_path: Path) -> None:
    with connected(rocketmq_5, tmp_path) as under_test:
        topic, broker = under_test.topic(), under_test.broker
        sent = under_test.send(topic, "stays", properties={Property.TIMER_DELAY_SEC: "60"})
        [before] = broker.delayed.pending(PendingQuery(topic=topic)).messages

        result = broker.delayed.reschedule(sent.handle, before.deliver_ms + 500)

        assert (result.count, result.handles) == (1, (sent.handle,))
        assert broker.delayed.pending(PendingQuery(topic=topic)).messages == (before,)


def test_the_status_of_a_cancelled_timer_stays_the_same_when_its_time_has_passed(
    rocketmq_5: str, tmp_path: Path
) -> None:
    with connected(rocketmq_5, tmp_path) as under_test:
        topic = under_test.topic(queue_count=1)
        member = under_test.join("billing", topic)
        cancelled = under_test.send(topic, "cancelled", properties={Property.TIMER_DELAY_SEC: "3"})
        kept = under_test.send(topic, "kept", properties={Property.TIMER_DELAY_SEC: "3"})

        result = under_test.broker.delayed.cancel(cancelled.handle)
        under_test.pass_time(4_000)

        assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 1)
        assert under_test.take_one(member).body == b"kept"
        assert under_test.takes_nothing(member)
        assert under_test.broker.delayed.cancel(cancelled.handle).status is ScheduleChangeStatus.CANCELLED
        assert under_test.broker.delayed.cancel(kept.handle).status is ScheduleChangeStatus.ALREADY_DELIVERED


def test_a_timer_that_was_stored_again_is_listed_once_and_can_be_cancelled(tmp_path: Path) -> None:
    """RocketMQ stores a timer again that is further away than the window of its wheel, here ten seconds."""
    with (
        cluster(tmp_path / "store", "5.5.0", timerRollWindowSlot=10) as address,
        connected(address, tmp_path) as under_test,
    ):
        topic, broker = under_test.topic(), under_test.broker
        sent = under_test.send(topic, "far", properties={Property.TIMER_DELAY_SEC: "3600"})
        query = PendingQuery(topic=topic)
        eventually(
            lambda: broker.reader.max_offset(MessageQueue(TIMER_TOPIC, "broker-a", 0)) > 1, "it was stored again"
        )

        [message] = broker.delayed.pending(query).messages

        assert message.roll_count >= 1
        assert message.handle == sent.handle
        assert broker.delayed.cancel(message.handle).count == 1
        assert broker.delayed.pending(query).messages == ()
