"""The remote broker on our own server: lifecycle, members, administration, security, and unsupported operations."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mqtemplate.broker import Capability, TopicMessageType
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.brokers.remote.cluster_client import ClusterClient
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.delay.recall_handle import RecallHandle, encode_handle
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    ForkedError,
    RemoteConnectError,
    UnsupportedError,
)
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.remoting import Credentials, RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import ConsumerRunningInfo
from mqtemplate.remoting.protocol.headers.group import GetConsumerRunningInfoRequestHeader, ResetOffsetRequestHeader
from mqtemplate.server import Account, AclSettings, LocalCluster
from mqtemplate.topics import AUTO_CREATE_TOPIC, RETRY_TOPIC_PREFIX
from tests.brokers.remote.clients import bodies, client, group_spec, join, one_queue, remote, send_numbers, server, take
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.waiting import eventually

# --- lifecycle ------------------------------------------------------------------------------------


def test_the_start_fails_if_no_name_server_answers() -> None:
    broker = RemoteBroker(RemoteSettings(name_servers=("127.0.0.1:1",)))

    with pytest.raises(RemoteConnectError, match=r"no name server answers.*127\.0\.0\.1:1.*rocketmq\.name-server"):
        broker.start()
    with pytest.raises(BrokerClosedError, match="not running; call start"):
        broker.queues("orders")


def test_a_start_that_fails_leaves_no_thread(our_server: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name server answers, and the broker does not tell what it can do."""
    before = set(threading.enumerate())

    def fail(self: ClusterClient) -> frozenset[Capability]:
        raise BrokerError("the broker restarts")

    monkeypatch.setattr(ClusterClient, "capabilities", fail)
    broker = RemoteBroker(RemoteSettings(name_servers=(str(our_server.address),)))

    with pytest.raises(BrokerError, match="restarts"):
        broker.start()

    assert set(threading.enumerate()) - before == set()


_NOT_BY_PROXY = {Capability.QUERY, Capability.PENDING, Capability.REQUEST_REPLY, Capability.TIMER_CHANGE}


@pytest.mark.parametrize(
    ("code", "is_proxy"),
    [
        (None, False),
        (ResponseCode.NO_PERMISSION, False),  # of a name server with access control
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, True),
    ],
)
def test_the_remoting_port_of_a_proxy_has_fewer_capabilities(code: int | None, is_proxy: bool) -> None:
    """RocketMQ's proxy answers no request about the cluster, and passes only those of producers and consumers on."""
    with ScriptedBroker() as cluster:
        cluster.topic(AUTO_CREATE_TOPIC)
        cluster.script(RequestCode.RECALL_MESSAGE, RemotingCommand.response)
        if code is not None:
            cluster.refuse(RequestCode.GET_BROKER_CLUSTER_INFO, code)

        with remote(cluster) as broker:
            assert broker.capabilities & _NOT_BY_PROXY == (set() if is_proxy else _NOT_BY_PROXY)
            assert broker.capabilities >= {Capability.DELAY_LEVEL, Capability.TIMER, Capability.TRANSACTION}


def test_a_proxy_without_the_default_topic_is_recognised_too() -> None:
    """The client then knows no broker at its start. An operation that a proxy does not have is refused with advice."""
    with ScriptedBroker() as cluster:
        cluster.topic("orders")
        cluster.refuse(RequestCode.GET_BROKER_CLUSTER_INFO, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)

        with remote(cluster) as broker:
            assert broker.capabilities & _NOT_BY_PROXY == set()
            broker.sends.send(Message("orders", b"x"))
            with pytest.raises(UnsupportedError, match=r"a proxy, set rocketmq\.name-server to the name servers"):
                broker.delayed.count_pending(PendingQuery())


# --- capabilities of brokers that come later --------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as cluster:
        cluster.topic(AUTO_CREATE_TOPIC)
        cluster.script(RequestCode.RECALL_MESSAGE, RemotingCommand.response)
        yield cluster


_OF_5 = {Capability.TIMER, Capability.POP, Capability.TIMER_CHANGE}


def step_services(broker: RemoteBroker, clock: VirtualClock, milliseconds: int) -> None:
    """Let a time pass for the services of a client."""
    clock.move_ms(milliseconds)
    for _ in range(3):  # one may trigger another
        for service in broker.services():
            service.step()


def test_a_client_that_starts_before_the_brokers_finds_what_they_can_do(cluster: ScriptedBroker) -> None:
    """It asks the name server each second as long as that has no broker."""
    clock, cluster.is_registered = VirtualClock(), False
    with remote(cluster, clock=clock) as broker:
        assert Capability.TIMER_CHANGE not in broker.capabilities

        cluster.is_registered = True
        step_services(broker, clock, 1_000)
        step_services(broker, clock, 1_000)

        assert broker.capabilities >= _OF_5


def test_the_upgrade_of_a_broker_at_its_address_is_noticed(cluster: ScriptedBroker) -> None:
    clock, cluster.version = VirtualClock(), Version.V4_9_7
    with remote(cluster, clock=clock) as broker:
        assert broker.capabilities.isdisjoint(_OF_5)

        cluster.version = Version.V5_3_3
        step_services(broker, clock, 30_000)

        assert broker.capabilities >= _OF_5


def test_the_upgrade_of_a_broker_that_gets_another_address_is_noticed(cluster: ScriptedBroker) -> None:
    clock, cluster.version = VirtualClock(), Version.V4_9_7
    with ScriptedBroker() as upgraded, remote(cluster, clock=clock) as broker:
        upgraded.script(RequestCode.RECALL_MESSAGE, RemotingCommand.response)

        cluster.move_to(upgraded)
        for _ in range(3):
            step_services(broker, clock, 30_000)

        assert broker.capabilities >= _OF_5


def test_an_older_broker_that_joins_takes_capabilities_away(cluster: ScriptedBroker) -> None:
    clock = VirtualClock()
    with ScriptedBroker("broker-b", Version.V4_9_7) as old, remote(cluster, clock=clock) as broker:
        assert broker.capabilities >= _OF_5

        cluster.others = [old]
        for _ in range(3):
            step_services(broker, clock, 30_000)

        assert broker.capabilities.isdisjoint(_OF_5)


def test_a_broker_that_is_restarted_with_recalls_is_noticed(cluster: ScriptedBroker) -> None:
    """Its version is as before. The client registers again, since the connection ended."""
    clock = VirtualClock()
    cluster.refuse(RequestCode.RECALL_MESSAGE, ResponseCode.NO_PERMISSION)
    with remote(cluster, clock=clock) as broker:
        assert Capability.TIMER_CHANGE not in broker.capabilities

        cluster.script(RequestCode.RECALL_MESSAGE, RemotingCommand.response)
        cluster.lose_connections()

        def is_found() -> bool:
            step_services(broker, clock, 1_000)  # the connection ends in a thread
            return Capability.TIMER_CHANGE in broker.capabilities

        eventually(is_found, "the client finds that recalls are enabled")


def test_a_broker_can_be_started_again(our_client: RemoteBroker) -> None:
    our_client.sends.send(Message("orders", b"x"))
    our_client.start()
    our_client.close()
    our_client.close()
    our_client.start()

    assert our_client.sends.send(Message("orders", b"y")).queue_offset >= 0


def test_a_member_is_closed_with_its_broker(our_server: LocalCluster, tmp_path: Path) -> None:
    with client(our_server.address, tmp_path) as broker:
        member = join(broker, "orders")

    with pytest.raises(BrokerClosedError, match="was closed"):
        member.poll(1)


def test_a_forked_child_gets_an_error(our_client: RemoteBroker) -> None:
    our_client.sends.send(Message("orders", b"x"))
    child = os.fork()
    if child == 0:  # the child must not return into the test run
        try:
            our_client.sends.send(Message("orders", b"from the child"))
        except ForkedError:
            our_client.close()  # does nothing, and does not wait for a thread that is missing
            os._exit(42)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert our_client.sends.send(Message("orders", b"still here")).queue_offset >= 0


def test_two_brokers_of_one_process_are_two_clients(our_server: LocalCluster, tmp_path: Path) -> None:
    """They share the queues of a group, as two processes do."""
    with client(our_server.address, tmp_path) as one, client(our_server.address, tmp_path) as other:
        one.create_topic("orders", 4)
        members = [join(one, "orders"), join(other, "orders")]

        eventually(
            lambda: [sum(q.topic == "orders" for q in member.assignment()) for member in members] == [2, 2],
            "each member has two queues",
        )


# --- members --------------------------------------------------------------------------------------


def test_a_topic_that_is_created_later_is_found(our_server: LocalCluster, tmp_path: Path) -> None:
    with client(our_server.address, tmp_path) as broker, client(our_server.address, tmp_path) as sender:
        member = join(broker, "later")
        sender.sends.send(Message("later", b"x"))

        assert bodies(take(member, 1)) == [b"x"]


def test_new_queues_of_a_topic_are_assigned(our_server: LocalCluster, tmp_path: Path) -> None:
    with (
        client(our_server.address, tmp_path, poll_name_server_interval_ms=50) as broker,
        client(our_server.address, tmp_path) as other,
    ):
        broker.create_topic("orders", 2)
        member = join(broker, "orders")

        other.create_topic("orders", 5)

        eventually(
            lambda: sum(queue.topic == "orders" for queue in member.assignment()) == 5, "the member has five queues"
        )


def test_commits_are_sent_to_the_broker_periodically(our_server: LocalCluster, tmp_path: Path) -> None:
    with client(our_server.address, tmp_path, persist_consumer_offset_interval_ms=20) as broker:
        queue = broker.sends.send(Message("orders", b"x")).message_queue
        member = join(broker, "orders")
        member.commit(queue, 1)

        eventually(
            lambda: our_server.engine.groups.committed_offset("billing", queue) == 1, "the broker has the offset"
        )


def test_a_commit_of_a_queue_that_is_not_assigned_is_ignored(our_client: RemoteBroker) -> None:
    """Another member has the queue, and may have committed a higher offset."""
    queue = one_queue(our_client)
    other = replace(queue, queue_id=7)
    member = join(our_client, "orders")

    member.commit(other, 5)

    assert member.committed(other) is None


def test_a_queue_whose_lock_was_not_renewed_is_not_polled(our_server: LocalCluster, tmp_path: Path) -> None:
    """Another member may have the lock now, so its messages could be handled twice and out of order."""
    with client(our_server.address, tmp_path, lock_live_ms=1) as broker:
        queue = one_queue(broker)
        broker.sends.send(Message("orders", b"x"))
        member = join(broker, "orders")
        assert member.lock(queue)

        eventually(lambda: member.locks.lost() == {queue}, "the lock is lost")  # type: ignore[attr-defined]

        assert member.poll(8) == []
        member.unlock(queue)
        assert bodies(member.poll(8)) == [b"x"]


def test_a_queue_whose_lock_is_regained_continues_at_the_committed_offset(
    our_server: LocalCluster, tmp_path: Path
) -> None:
    with client(our_server.address, tmp_path, lock_live_ms=1, lock_interval_ms=3_600_000) as broker:
        queue = one_queue(broker)
        for body in (b"handled by another", b"next"):
            broker.sends.send(Message("orders", body))
        member = join(broker, "orders")
        member.lock(queue)
        eventually(lambda: member.locks.lost() == {queue}, "the lock is lost")  # type: ignore[attr-defined]
        our_server.engine.groups.commit_offset("billing", queue, 1)

        member.renew_locks()  # type: ignore[attr-defined]
        member.unlock(queue)

        assert bodies(member.poll(8)) == [b"next"]


def test_a_message_that_cannot_be_sent_back_is_copied_to_the_retry_topic(our_client: RemoteBroker) -> None:
    queue = our_client.sends.send(Message("orders", b"hard", {Property.KEYS: "4466"})).message_queue
    member = join(our_client, "orders")
    [message] = our_client.reader.pull(queue, 0).messages
    message.physical_offset += 1  # the broker has no message there

    member.send_back(message, delay_level=1)
    original, redelivered = take(member, 2)

    assert original.reconsume_times == 0
    assert (redelivered.topic, redelivered.body, redelivered.keys) == ("orders", b"hard", "4466")
    assert (redelivered.reconsume_times, redelivered.msg_id) == (1, message.msg_id)


@pytest.fixture
def tool() -> Iterator[RemotingClient]:
    """Client of an administration tool."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    yield client
    client.close()


def test_a_tool_gets_the_state_of_a_member(
    our_client: RemoteBroker, our_server: LocalCluster, tool: RemotingClient
) -> None:
    queue = one_queue(our_client)
    our_client.sends.send(Message("orders", b"x"))
    member = join(our_client, "orders")
    assert member.poll(8, 10_000)
    member.commit(queue, 1)
    client_id = member.context.instance.id  # type: ignore[attr-defined]

    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id=client_id, jstack_enable=True)
    request = RemotingCommand.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    info = ConsumerRunningInfo.decode(tool.invoke(str(our_server.address), request, 10_000).body)

    assert info.mq_table[queue].commit_offset == 1
    assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
    assert {data.topic for data in info.subscription_set} == {"orders", "%RETRY%billing"}
    assert info.jstack is not None
    assert "mqtemplate-remote-groups" in info.jstack


def test_a_tool_gets_the_state_of_a_member_that_receives_by_pop(
    our_client: RemoteBroker, our_server: LocalCluster, tool: RemotingClient
) -> None:
    """It has no queues of its own."""
    one_queue(our_client)
    our_client.pop.join(group_spec("billing", "orders"))
    [member] = our_client.admin().group("billing").members

    header = GetConsumerRunningInfoRequestHeader(consumer_group="billing", client_id=member.client_id)
    request = RemotingCommand.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
    info = ConsumerRunningInfo.decode(tool.invoke(str(our_server.address), request, 10_000).body)

    assert info.mq_table == {}
    assert {data.topic for data in info.subscription_set} == {"orders", "%RETRY%billing"}


def test_a_tool_resets_the_offsets_of_a_group_by_time(
    our_client: RemoteBroker, our_server: LocalCluster, tool: RemotingClient
) -> None:
    queue = one_queue(our_client)
    send_numbers(our_client, 3)
    member = join(our_client, "orders")
    take(member, 3)
    member.commit(queue, 3)

    header = ResetOffsetRequestHeader(topic="orders", group="billing", timestamp=0, is_force=True)
    response = tool.invoke(
        str(our_server.address), RemotingCommand.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header), 10_000
    )

    assert response.code == ResponseCode.SUCCESS
    assert bodies(take(member, 3)) == [b"0", b"1", b"2"]
    assert our_client.groups.committed_offset("billing", queue) == 0


# --- namespaces and credentials -------------------------------------------------------------------


def test_namespaces_separate_applications(our_server: LocalCluster, tmp_path: Path) -> None:
    with (
        client(our_server.address, tmp_path, namespace="prod") as prod,
        client(our_server.address, tmp_path, namespace="test") as test,
        client(our_server.address, tmp_path) as outside,
    ):
        prod.sends.send(Message("orders", b"of prod"))
        test.sends.send(Message("orders", b"of test"))
        member = join(prod, "orders")
        [message] = member.poll(8, 10_000)

        member.send_back(message, delay_level=1)
        [redelivered] = member.poll(8, 10_000)

        assert (message.body, message.topic) == (b"of prod", "orders")
        assert (redelivered.topic, redelivered.reconsume_times) == ("orders", 1)
        retry = f"{RETRY_TOPIC_PREFIX}billing"
        assert {queue.topic for queue in member.assignment()} == {"orders", retry}
        found = [outside.reader.max_offset(queue) for queue in outside.queues("prod%orders")]
        assert sum(found) == 1


def test_a_wrong_secret_key_is_refused_with_advice(tmp_path: Path) -> None:
    acl = AclSettings(accounts=(Account(access_key="shop-account", secret_key="s3cret-of-shop", admin=True),))
    with server(acl=acl) as cluster:
        right = Credentials(access_key="shop-account", secret_key="s3cret-of-shop")
        with client(cluster.address, tmp_path, credentials=right) as broker:
            assert broker.sends.send(Message("orders", b"x")).queue_offset == 0

        wrong = replace(right, secret_key="guessed-secret")
        intruder = RemoteBroker(RemoteSettings(name_servers=(str(cluster.address),), credentials=wrong))
        with pytest.raises(BrokerError, match=r"NO_PERMISSION.*check the topic's perm, access-key") as refused:
            intruder.start()

    assert "guessed-secret" not in str(refused.value)


# --- unsupported operations -----------------------------------------------------------------------


def test_a_cluster_of_4_refuses_changes_of_pending_messages_with_the_alternative() -> None:
    with ScriptedBroker(version=Version.V4_9_7) as scripted, remote(scripted) as broker:
        for change in (broker.delayed.cancel, partial(broker.delayed.reschedule, deliver_ms=1)):
            with pytest.raises(UnsupportedError, match=r"cancels no message.*or use the embedded broker or our server"):
                change(key="4466")


@pytest.mark.parametrize(
    ("code", "remark", "error", "text"),
    [
        (ResponseCode.NO_PERMISSION, "recall failed, it is forbidden", UnsupportedError, "recallMessageEnable=true"),
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "370", UnsupportedError, "brokers can cancel from RocketMQ 5.3 on"),
        (ResponseCode.TOPIC_NOT_EXIST, "no topic", Exception, "create the topic"),
    ],
)
def test_a_refused_recall_raises_an_error_with_the_setting(
    code: int, remark: str, error: type[Exception], text: str
) -> None:
    far = time.time_ns() // 1_000_000 + 60_000
    handle = encode_handle(RecallHandle("orders", "broker-a", far, "7F000001", 0))
    with ScriptedBroker() as scripted:
        scripted.refuse(RequestCode.RECALL_MESSAGE, code, remark)
        with remote(scripted) as broker, pytest.raises(error, match=text):
            broker.delayed.cancel(handle)


def test_a_handle_of_a_delivered_message_is_not_recalled() -> None:
    with ScriptedBroker() as scripted, remote(scripted) as broker:
        handle = encode_handle(RecallHandle("orders", "broker-a", 1, "7F000001", 0))

        assert broker.delayed.cancel(handle).status is ScheduleChangeStatus.ALREADY_DELIVERED
        assert scripted.count(RequestCode.RECALL_MESSAGE) == 0


# --- types of messages, and deleted topics --------------------------------------------------------------


def test_a_topic_has_the_type_of_its_messages(tmp_path: Path) -> None:
    """A topic that exists keeps its queues, and its type if none is given."""
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        broker.create_topic("orders", 4, message_type=TopicMessageType.FIFO)
        broker.create_topic("orders", 5)
        broker.create_topic("orders", 2, message_type=TopicMessageType.MIXED)

        config = cluster.engine.topics.config("orders")
        assert config is not None
        assert (config["attributes"], config["writeQueueNums"]) == ({"message.type": "MIXED"}, 5)


def test_an_old_broker_has_no_types_of_messages(tmp_path: Path) -> None:
    """RocketMQ 4 would create the topic and ignore the type."""
    with ScriptedBroker(version=Version.V4_9_7) as old, client(old.address, tmp_path) as broker:
        with pytest.raises(
            UnsupportedError, match="messages of type FIFO: broker broker-a is RocketMQ 4, which ignores the type"
        ):
            broker.create_topic("orders", 4, message_type=TopicMessageType.FIFO)
        assert old.count(RequestCode.UPDATE_AND_CREATE_TOPIC) == 0


def test_a_deleted_topic_is_deleted_at_all_brokers_and_its_route_forgotten(tmp_path: Path) -> None:
    with ScriptedBroker("broker-a") as one, ScriptedBroker("broker-b") as other:
        one.others = [other]
        one.topic("orders")
        for each in (one, other):
            each.script(RequestCode.DELETE_TOPIC_IN_BROKER, RemotingCommand.response)
        one.script(RequestCode.DELETE_TOPIC_IN_NAMESRV, RemotingCommand.response)
        with client(one.address, tmp_path) as broker:
            broker.queues("orders")
            before = one.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)

            broker.delete_topic("orders")
            broker.queues("orders")

            counts = [each.count(RequestCode.DELETE_TOPIC_IN_BROKER) for each in (one, other)]
            assert (counts, one.count(RequestCode.DELETE_TOPIC_IN_NAMESRV)) == ([1, 1], 1)
            assert one.count(RequestCode.GET_ROUTEINFO_BY_TOPIC) == before + 1


# --- groups and retries -------------------------------------------------------------------


def test_a_group_is_created_once_and_keeps_its_offsets(our_client: RemoteBroker) -> None:
    our_client.create_topic("orders", 1)
    [queue] = our_client.queues("orders")
    our_client.admin().create_group("billing")
    our_client.groups.commit_offset("billing", queue, 0)

    our_client.admin().create_group("billing")

    assert our_client.admin().group_names() == ["billing"]
    assert our_client.groups.committed_offset("billing", queue) == 0


def test_a_retry_that_is_sent_keeps_its_number_of_retries(our_client: RemoteBroker) -> None:
    our_client.admin().create_group("billing")
    our_client.create_topic(RETRY_TOPIC_PREFIX + "billing", 1)
    [queue] = our_client.queues(RETRY_TOPIC_PREFIX + "billing")
    retries = {Property.RECONSUME_TIME: "3", Property.MAX_RECONSUME_TIMES: "4"}

    our_client.sends.send(Message(queue.topic, b"o-1", {Property.RETRY_TOPIC: "orders"} | retries), queue)

    [stored] = our_client.reader.pull(queue, 0).messages
    assert stored.reconsume_times == 3
    assert not retries.keys() & stored.properties.keys()
