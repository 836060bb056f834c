"""The remote broker over our own server: life, names, secrets, locks, administration, and what a cluster cannot do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from mqtemplate.broker import ConsumeFromWhere, Consumer, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.clock import SystemClock
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    ForkedError,
    MessageError,
    RemoteConnectError,
    UnsupportedError,
)
from mqtemplate.message import HostAddress, Message, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.remoting import Credentials, RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerRunningInfo
from mqtemplate.remoting.protocol.headers.group import GetConsumerRunningInfoRequestHeader, ResetOffsetRequestHeader
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from tests.brokers.scripted_cluster import ScriptedBroker

ANYWHERE = HostAddress("127.0.0.1", 0)


@contextmanager
def server(**settings: Any) -> Iterator[LocalCluster]:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    with LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE), **settings) as cluster:
        yield cluster


@contextmanager
def client(cluster: LocalCluster, folder: Path, **settings: Any) -> Iterator[RemoteBroker]:
    made = RemoteSettings(name_servers=(str(cluster.address),), offset_path=folder, **settings)
    with RemoteBroker(made) as broker:
        yield broker


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with server() as cluster:
        yield cluster


def join(broker: RemoteBroker, topic: str, group: str = "billing", **settings: Any) -> Consumer:
    settings.setdefault("consume_from_where", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    return broker.subscribe(ConsumerSpec(group=group, subscriptions={topic: TagSelector()}, **settings))


def until(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, f"still not: {what}"
        try:
            SimpleQueue[None]().get(timeout=0.01)
        except Empty:
            continue


# --- life -----------------------------------------------------------------------------------------


def test_a_cluster_that_is_not_there_is_told_at_the_start() -> None:
    broker = RemoteBroker(RemoteSettings(name_servers=("127.0.0.1:1",)))

    with pytest.raises(RemoteConnectError, match=r"no name server answers.*127\.0\.0\.1:1.*rocketmq\.name-server"):
        broker.start()
    with pytest.raises(BrokerClosedError, match="not running; call start"):
        broker.queues("orders")


def test_a_broker_may_be_started_again(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker:
        broker.send(Message("orders", b"x"))
        broker.start()
        broker.close()
        broker.close()
        broker.start()

        assert broker.send(Message("orders", b"y")).queue_offset >= 0


def test_a_member_ends_with_its_broker(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker:
        member = join(broker, "orders")

    with pytest.raises(BrokerClosedError, match="was closed"):
        member.poll(1)


def test_a_child_of_a_fork_is_told_to_make_a_broker_of_its_own(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker:
        broker.send(Message("orders", b"x"))
        child = os.fork()
        if child == 0:  # nothing of the test's may run here
            try:
                broker.send(Message("orders", b"from the child"))
            except ForkedError:
                os._exit(42)
            finally:
                os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        assert broker.send(Message("orders", b"still here")).queue_offset >= 0


def test_two_brokers_of_one_process_are_two_clients(cluster: LocalCluster, tmp_path: Path) -> None:
    """They share a group as two processes would."""
    with client(cluster, tmp_path) as one, client(cluster, tmp_path) as other:
        one.create_topic("orders", 4)
        members = [join(one, "orders"), join(other, "orders")]

        until(
            lambda: [sum(q.topic == "orders" for q in member.assignment()) for member in members] == [2, 2],
            "they share",
        )


# --- members --------------------------------------------------------------------------------------


def test_a_topic_that_comes_later_is_found_soon(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker, client(cluster, tmp_path) as sender:
        member = join(broker, "later")
        sender.send(Message("later", b"x"))
        taken: list[bytes] = []

        until(lambda: taken.extend(m.body for m in member.poll(8, 50)) or taken, "the message came")

        assert taken == [b"x"]


def test_new_queues_of_a_topic_are_shared_out(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path, poll_name_server_interval_ms=50) as broker, client(cluster, tmp_path) as other:
        broker.create_topic("orders", 2)
        member = join(broker, "orders")

        other.create_topic("orders", 5)

        until(lambda: sum(queue.topic == "orders" for queue in member.assignment()) == 5, "all five queues")


def test_commits_reach_the_broker_by_themselves(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path, persist_consumer_offset_interval_ms=20) as broker:
        queue = broker.send(Message("orders", b"x")).message_queue
        member = join(broker, "orders")
        member.commit(queue, 1)

        until(lambda: cluster.engine.committed_offset("billing", queue) == 1, "the broker knows it")


def test_a_commit_of_a_queue_that_went_away_is_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    """Another member has it, and may be further."""
    with client(cluster, tmp_path) as broker:
        broker.create_topic("orders", 1)
        [queue] = broker.queues("orders")
        stranger = replace(queue, queue_id=7)
        member = join(broker, "orders")

        member.commit(stranger, 5)

        assert member.committed(stranger) is None


def test_a_lock_that_was_not_renewed_stops_reading_until_it_is_back(cluster: LocalCluster, tmp_path: Path) -> None:
    """The broker may have given it to another member, so what is read on may be handled twice and out of order."""
    with client(cluster, tmp_path, lock_live_ms=1) as broker:
        broker.create_topic("orders", 1)
        [queue] = broker.queues("orders")
        broker.send(Message("orders", b"x"))
        member = join(broker, "orders")
        assert member.lock(queue)

        until(lambda: member.locks.lost() == {queue}, "it is lost")  # type: ignore[attr-defined]

        assert member.poll(8) == []
        member.unlock(queue)
        assert [message.body for message in member.poll(8)] == [b"x"]


def test_a_regained_lock_reads_on_where_the_group_stands(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path, lock_live_ms=1, lock_interval_ms=3_600_000) as broker:
        broker.create_topic("orders", 1)
        [queue] = broker.queues("orders")
        for body in (b"handled by another", b"next"):
            broker.send(Message("orders", body))
        member = join(broker, "orders")
        member.lock(queue)
        until(lambda: member.locks.lost() == {queue}, "it is lost")  # type: ignore[attr-defined]
        cluster.engine.commit_offset("billing", queue, 1)

        member.renew_locks()  # type: ignore[attr-defined]
        member.unlock(queue)

        assert [message.body for message in member.poll(8)] == [b"next"]


def test_what_a_broker_will_not_take_back_is_sent_to_the_retry_topic(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker:
        queue = broker.send(Message("orders", b"hard", {Property.KEYS: "4466"})).message_queue
        member = join(broker, "orders")
        [message] = broker.pull(queue, 0).messages
        message.physical_offset += 1  # so that the broker does not find it

        member.send_back(message, delay_level=1)
        taken: list[Any] = []
        until(lambda: taken.extend(m for m in member.poll(8, 50) if m.reconsume_times) or taken, "it came again")

        [again] = taken
        assert (again.topic, again.body, again.keys, again.reconsume_times) == ("orders", b"hard", "4466", 1)
        assert again.msg_id == message.msg_id


def test_an_administrator_may_send_a_group_back(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker:
        broker.create_topic("orders", 1)
        [queue] = broker.queues("orders")
        for number in range(3):
            broker.send(Message("orders", b"%d" % number))
        member = join(broker, "orders")
        until(lambda: member.position(queue) == 3 or not member.poll(8, 50), "all were read")

        member.reset({queue: 1})  # type: ignore[attr-defined]

        assert [message.body for message in member.poll(8)] == [b"1", b"2"]
        assert broker.committed_offset("billing", queue) == 1


@pytest.fixture
def tool() -> Iterator[RemotingClient]:
    """What an administrator's tool asks with."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    yield client
    client.close()


def test_a_tool_sees_how_a_member_is(cluster: LocalCluster, tmp_path: Path, tool: RemotingClient) -> None:
    with client(cluster, tmp_path) as broker:
        broker.create_topic("orders", 1)
        [queue] = broker.queues("orders")
        broker.send(Message("orders", b"x"))
        member = join(broker, "orders")
        assert member.poll(8, 10_000)
        member.commit(queue, 1)
        client_id = member.instance.id  # type: ignore[attr-defined]

        header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id=client_id, jstack_enable=True)
        request = RemotingCommand.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        info = ConsumerRunningInfo.decode(tool.invoke(str(cluster.address), request, 10_000).body)

        assert info.mq_table[queue].commit_offset == 1
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert {data.topic for data in info.subscription_set} == {"orders", "%RETRY%billing"}
        assert info.jstack is not None
        assert "mqtemplate-remote-groups" in info.jstack


def test_a_tool_sends_a_group_back_in_time(cluster: LocalCluster, tmp_path: Path, tool: RemotingClient) -> None:
    with client(cluster, tmp_path) as broker:
        broker.create_topic("orders", 1)
        [queue] = broker.queues("orders")
        for number in range(3):
            broker.send(Message("orders", b"%d" % number))
        member = join(broker, "orders")
        read: list[bytes] = []
        until(lambda: read.extend(m.body for m in member.poll(8, 50)) or len(read) == 3, "all were read")
        member.commit(queue, 3)

        header = ResetOffsetRequestHeader(topic="orders", group="billing", timestamp=0, is_force=True)
        answer = tool.invoke(
            str(cluster.address), RemotingCommand.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header), 10_000
        )

        assert answer.code == ResponseCode.SUCCESS
        until(lambda: read.extend(m.body for m in member.poll(8, 50)) or len(read) == 6, "they came again")
        assert read[3:] == [b"0", b"1", b"2"]


# --- who the client is ----------------------------------------------------------------------------


def test_namespaces_keep_applications_apart(cluster: LocalCluster, tmp_path: Path) -> None:
    with (
        client(cluster, tmp_path, namespace="prod") as prod,
        client(cluster, tmp_path, namespace="test") as test,
        client(cluster, tmp_path) as outside,
    ):
        prod.send(Message("orders", b"of prod"))
        test.send(Message("orders", b"of test"))
        member = join(prod, "orders")
        [message] = member.poll(8, 10_000)

        member.send_back(message, delay_level=1)
        [again] = member.poll(8, 10_000)

        assert (message.body, message.topic, again.topic, again.reconsume_times) == (b"of prod", "orders", "orders", 1)
        retry = f"{RETRY_TOPIC_PREFIX}billing"
        assert {queue.topic for queue in member.assignment()} == {"orders", retry}
        found = [outside.max_offset(queue) for queue in outside.queues("prod%orders")]
        assert sum(found) == 1


def test_a_wrong_secret_is_told_with_what_to_look_at(tmp_path: Path) -> None:
    acl = AclSettings(accounts=(Account(access_key="shop-account", secret_key="s3cret-of-shop", admin=True),))
    with server(acl=acl) as cluster:
        right = Credentials(access_key="shop-account", secret_key="s3cret-of-shop")
        with client(cluster, tmp_path, credentials=right) as broker:
            assert broker.send(Message("orders", b"x")).queue_offset == 0

        wrong = replace(right, secret_key="guessed-secret")
        stranger = RemoteBroker(RemoteSettings(name_servers=(str(cluster.address),), credentials=wrong))
        with pytest.raises(BrokerError, match=r"NO_PERMISSION.*look at the topic's perm, at access-key") as refused:
            stranger.start()

    assert "guessed-secret" not in str(refused.value)


# --- what a cluster cannot do ---------------------------------------------------------------------


def test_what_no_cluster_can_do_says_why_and_what_to_do_instead(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker:
        with pytest.raises(UnsupportedError, match=r"cannot move a message that waits; cancel it by its handle"):
            broker.reschedule("handle", 1)
        with pytest.raises(UnsupportedError, match="does not show what waits"):
            broker.pending(PendingQuery())
        with pytest.raises(UnsupportedError, match="does not count what waits"):
            broker.count_pending(PendingQuery())
        with pytest.raises(UnsupportedError, match="cancels by handle only"):
            broker.cancel(key="4466")
        with pytest.raises(MessageError, match="one of the two"):
            broker.cancel()
        with pytest.raises(MessageError, match="is not a handle of a pending message"):
            broker.cancel("4466")


def test_a_timer_is_cancelled_by_its_handle(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster, tmp_path) as broker:
        handle = broker.send(Message("orders", b"x", {Property.TIMER_DELAY_SEC: "60"})).handle

        assert broker.cancel(handle).status is ScheduleChangeStatus.CANCELLED
        assert cluster.engine.count_pending(PendingQuery(topic="orders")).total == 0


@pytest.mark.parametrize(
    ("code", "remark", "error", "text"),
    [
        (
            ResponseCode.NO_PERMISSION,
            "recall failed, operation is forbidden",
            UnsupportedError,
            "recallMessageEnable=true",
        ),
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "370", UnsupportedError, "brokers can cancel from RocketMQ 5.3 on"),
        (ResponseCode.TOPIC_NOT_EXIST, "no topic", Exception, "create the topic"),
    ],
)
def test_a_recall_that_is_refused_names_the_setting(code: int, remark: str, error: type[Exception], text: str) -> None:
    from mqtemplate.delay.recall_handle import RecallHandle, encode_handle

    far = time.time_ns() // 1_000_000 + 60_000
    handle = encode_handle(RecallHandle("orders", "broker-a", far, "7F000001", 0))
    with ScriptedBroker() as scripted:
        scripted.refuse(RequestCode.RECALL_MESSAGE, code, remark)
        settings = RemoteSettings(name_servers=(scripted.address,))
        with RemoteBroker(settings) as broker, pytest.raises(error, match=text):
            broker.cancel(handle)


def test_a_handle_whose_time_has_come_is_not_asked_about() -> None:
    from mqtemplate.delay.recall_handle import RecallHandle, encode_handle

    with ScriptedBroker() as scripted, RemoteBroker(RemoteSettings(name_servers=(scripted.address,))) as broker:
        handle = encode_handle(RecallHandle("orders", "broker-a", 1, "7F000001", 0))

        assert broker.cancel(handle).status is ScheduleChangeStatus.ALREADY_DELIVERED
        assert scripted.count(RequestCode.RECALL_MESSAGE) == 0
