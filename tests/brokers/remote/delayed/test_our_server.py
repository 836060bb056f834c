"""Control over the pending messages of our own servers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mqtemplate.broker import Capability, DelayedMessages
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker
from mqtemplate.brokers.remote.delayed import our_server as control
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.delay_store import RecordLookup
from mqtemplate.delay.recall_handle import RecallHandle, decode_handle, encode_handle
from mqtemplate.errors import (
    BrokerError,
    DelayError,
    MessageError,
    RemoteConnectError,
    RemoteTimeoutError,
    UnsupportedError,
)
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.operations import BrokerAccess, DelayedOperations
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.own_requests import (
    CountPendingMessagesRequestHeader,
    GetPendingMessagesRequestHeader,
    PendingCountsData,
    PendingMessagesData,
    checked_answer,
)
from mqtemplate.remoting.protocol.bodies.route import RegisterBrokerBody, TopicConfig, TopicConfigSerializeWrapper
from mqtemplate.remoting.protocol.headers.admin import RegisterBrokerRequestHeader
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.server.processors import client as processors
from tests.brokers.remote.clients import ANYWHERE, client, join, remote, server, take
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.server.tool import Tool
from tests.waiting import eventually

HOUR_MS = 3_600_000


@contextmanager
def two_servers() -> Iterator[list[LocalCluster]]:
    """Start two servers of one cluster. The second one is registered with the name server of the first one."""
    with ExitStack() as stack:
        engines = [
            EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE, broker_name=name))
            for name in ("broker-a", "broker-b")
        ]
        settings = BrokerServerSettings(listen=ANYWHERE, broker_registration_enable=True)
        clusters = [stack.enter_context(LocalCluster(engine, settings)) for engine in engines]
        for engine in engines:
            engine.create_topic("orders", 1)
        name_server = stack.enter_context(Tool(clusters[0].address))
        register(clusters[1], name_server)
        yield clusters


def register(other: LocalCluster, name_server: Tool) -> None:
    """Register a server with the name server of another one. The registration ends with the connection."""
    table = {"orders": TopicConfig(topic_name="orders", read_queue_nums=1, write_queue_nums=1)}
    wrapper = TopicConfigSerializeWrapper(topic_config_table=table)
    body = RegisterBrokerBody(topic_config_serialize_wrapper=wrapper).encode()
    header = RegisterBrokerRequestHeader(
        broker_name=other.engine.name,
        broker_addr=str(other.address),
        cluster_name="DefaultCluster",
        ha_server_addr="",
        broker_id=0,
        body_crc32=zlib.crc32(body) & 0x7FFF_FFFF,
    )
    name_server.request_ok(RequestCode.REGISTER_BROKER, header, body)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RemoteBroker]:
    """A client of both servers."""
    with two_servers() as clusters, client(clusters[0].address, tmp_path) as broker:
        yield broker


def delayed(key: str, delay_ms: int) -> Message:
    return Message("orders", b"x", {Property.TIMER_DELAY_MS: str(delay_ms), Property.KEYS: key})


def send_to_both(broker: RemoteBroker, count: int = 5) -> list[str]:
    """Send messages to the two servers by turns, and return their keys in the order of their deliver times."""
    keys = [f"key-{number}" for number in range(count)]
    for number, key in enumerate(keys):
        queue = MessageQueue("orders", ("broker-a", "broker-b")[number % 2], 0)
        broker.sends.send(delayed(key, HOUR_MS + number * 1_000), queue)
    return keys


# --- several servers --------------------------------------------------------------------------------


def test_pages_have_the_messages_of_all_servers_by_their_deliver_times(broker: RemoteBroker) -> None:
    keys = send_to_both(broker)
    query, cursor, pages = PendingQuery(topic="orders"), None, []

    while cursor or not pages:
        page = broker.delayed.pending(query, 2, cursor)
        pages.append([message.keys for message in page.messages])
        cursor = page.cursor

    assert pages == [keys[:2], keys[2:4], keys[4:]]
    assert broker.delayed.pending(query, 5).cursor is None
    assert broker.delayed.pending(PendingQuery(topic="orders", key="key-3")).messages[0].keys == "key-3"


def test_counts_are_those_of_all_servers(broker: RemoteBroker) -> None:
    send_to_both(broker)

    counts = broker.delayed.count_pending(PendingQuery(topic="orders"), 24 * HOUR_MS)

    assert counts.total == sum(counts.buckets.values()) == 5
    assert broker.delayed.count_pending(PendingQuery(topic="orders", tag="none")).total == 0


def test_a_key_is_looked_up_on_all_servers_and_a_handle_on_its_own(broker: RemoteBroker) -> None:
    send_to_both(broker, 2)
    [second] = broker.delayed.pending(PendingQuery(key="key-1")).messages
    assert decode_handle(second.handle).broker_name == "broker-b"

    assert broker.delayed.cancel(second.handle).count == 1
    assert broker.delayed.cancel(key="key-1").status is ScheduleChangeStatus.CANCELLED, (
        "the other server does not know it"
    )
    assert broker.delayed.reschedule(key="key-0", deliver_ms=1).status is ScheduleChangeStatus.RESCHEDULED
    assert broker.delayed.cancel(key="unknown").status is ScheduleChangeStatus.UNKNOWN


# --- one server -------------------------------------------------------------------------------------


def test_many_handles_and_long_pages_take_several_requests(our_client: RemoteBroker) -> None:
    """One request has at most 256 handles, and one response at most 1,000 messages."""
    sent = our_client.sends.send_batch([delayed("batch", HOUR_MS)] * 1_100)

    assert len(our_client.delayed.pending(PendingQuery(topic="orders"), 2_000).messages) == 1_100
    assert our_client.delayed.cancel(sent.handle).count == 1_100
    assert our_client.delayed.cancel(sent.handle).status is ScheduleChangeStatus.CANCELLED


def test_names_are_those_of_the_namespace(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path, namespace="prod") as broker:
        for key in ("one", "two"):
            broker.sends.send(delayed(key, HOUR_MS))
        [first, _] = broker.delayed.pending(PendingQuery(topic="orders")).messages

        assert first.topic == "orders"
        assert cluster.engine.delayed.count_pending(PendingQuery(topic="prod%orders")).total == 2
        assert broker.delayed.count_pending(PendingQuery(topic="orders")).total == 2
        assert broker.delayed.cancel(first.handle).count == 1
        assert broker.delayed.cancel(key="two", topic="orders").count == 1


def test_a_client_with_a_namespace_sees_and_changes_only_its_messages(tmp_path: Path) -> None:
    """Without a topic, too. The retries of its groups are its own."""
    with (
        server() as cluster,
        client(cluster.address, tmp_path, namespace="prod") as prod,
        client(cluster.address, tmp_path, namespace="product") as other,
        client(cluster.address, tmp_path) as outside,
    ):
        for broker in (prod, other, outside):
            broker.sends.send(delayed("4466", HOUR_MS))
        member = join(prod, "work")
        prod.sends.send(Message("work", b"hard"))
        member.send_back(take(member, 1)[0], 18)

        assert {each.topic for each in prod.delayed.pending(PendingQuery()).messages} == {"orders", "%RETRY%billing"}
        assert [broker.delayed.count_pending(PendingQuery()).total for broker in (prod, other, outside)] == [2, 1, 4]
        assert prod.delayed.reschedule(key="4466", deliver_ms=prod.clock.now_ms() + 2 * HOUR_MS).count == 1
        assert prod.delayed.cancel(key="4466").count == 1
        assert other.delayed.count_pending(PendingQuery(key="4466")).total == 1
        assert outside.delayed.cancel(key="4466").count == 2


# --- scans in steps ---------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server compare ten messages for one request."""
    monkeypatch.setattr(control, "_STEP", 10)


@pytest.mark.usefixtures("steps")
def test_other_requests_are_answered_between_the_steps_of_a_scan(tmp_path: Path) -> None:
    """The scan reads ten records at a time, and goes on from a cursor: it holds no thread of the server meanwhile."""
    with server() as cluster, client(cluster.address, tmp_path) as scanning, client(cluster.address, tmp_path) as other:
        for number in range(45):
            scanning.sends.send(delayed(f"key-{number}", HOUR_MS + number))
        progress: list[int] = []
        cancelled: list[int] = []

        def answer_others(count: int) -> None:
            progress.append(count)
            cancelled.append(other.delayed.cancel(key=f"key-{44 - len(progress)}").count)

        counts = scanning.delayed.count_pending(PendingQuery(tag="none"), on_compared=answer_others)
        assert (counts.total, len(progress) >= 4, set(cancelled)) == (0, True, {1})

        progress.clear()
        page = scanning.delayed.pending(PendingQuery(tag="none"), 5, on_compared=progress.append)
        assert (page.messages, page.cursor, len(progress) >= 3) == ((), None, True)


def test_a_list_of_all_messages_shows_progress(tmp_path: Path) -> None:
    """Each page is full after one step, since each message matches."""
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        for number in range(25):
            broker.sends.send(delayed(f"key-{number}", HOUR_MS + number))
        progress: list[int] = []

        found = list(DelayedOperations(BrokerAccess(broker)).all(PendingQuery(), 25, progress.append))

    assert (len(found), sum(progress)) == (25, 25)


@pytest.mark.usefixtures("steps")
def test_a_scan_in_steps_finds_what_one_scan_does(broker: RemoteBroker) -> None:
    keys = send_to_both(broker, 60)
    query = PendingQuery(topic="orders")

    first = broker.delayed.pending(query, 25)
    rest = broker.delayed.pending(query, 100, first.cursor)

    assert [each.keys for each in first.messages + rest.messages] == keys
    assert rest.cursor is None
    assert broker.delayed.count_pending(query, 1_000).total == 60
    assert len(broker.delayed.count_pending(query, 1_000).buckets) == 60


@pytest.mark.usefixtures("steps")
def test_a_scan_without_progress_ends_after_its_time_and_says_what_helps() -> None:
    clock = VirtualClock()
    scan = control._SteppedQuery(clock, 2_000, None)
    clock.move_ms(1_999)
    scan.step_done("count pending messages")
    clock.move_ms(1)

    text = r"not finished after 2s, in which up to 20 messages were compared; filter by time or by key"
    with pytest.raises(RemoteTimeoutError, match=text):
        scan.step_done("count pending messages")


def test_an_older_client_gets_the_whole_answer_at_once() -> None:
    """It sends no number of records, and reads no cursor."""
    with server() as cluster, Tool(cluster.address) as tool:
        engine = cluster.engine
        for number in range(25):
            engine.sends.send(delayed(f"key-{number}", HOUR_MS + number))
        counting = CountPendingMessagesRequestHeader(topic="orders", bucket_millis=HOUR_MS)
        listing = GetPendingMessagesRequestHeader(topic="orders", max_count=10)

        counts = tool.request_ok(RequestCode.COUNT_PENDING_MESSAGES, counting)
        page = tool.request_ok(RequestCode.GET_PENDING_MESSAGES, listing)

        assert (PendingCountsData.decode(counts.body).total, b"cursor" in counts.body) == (25, False)
        assert len(PendingMessagesData.decode(page.body).messages) == 10
        assert set(json.loads(page.body)) == {"hasMore", "messages"}


def test_an_older_server_answers_a_newer_client_at_once() -> None:
    """It ignores the number of records, and its responses have no cursor, which ends the scan."""
    assert PendingCountsData.decode(b'{"total":3,"buckets":{0:3}}').cursor is None
    assert PendingMessagesData.decode(b'{"messages":[],"hasMore":false}').cursor is None


def test_messages_are_found_by_a_property(broker: RemoteBroker) -> None:
    """Also a value with the separator. Pages and counts have only those."""
    for number, tenant in enumerate(("T", "U", "T=1", "T")):
        message = delayed(f"key-{number}", HOUR_MS + number)
        broker.sends.send(Message(message.topic, b"x", {**message.properties, "tenant": tenant}))

    def keys(value: str) -> list[str | None]:
        return [each.keys for each in broker.delayed.pending(PendingQuery(with_property=("tenant", value))).messages]

    assert (keys("T"), keys("T=1"), keys("V")) == (["key-0", "key-3"], ["key-2"], [])
    assert broker.delayed.count_pending(PendingQuery(with_property=("tenant", "T"))).total == 2


def test_an_older_server_that_ignores_the_property_is_an_error() -> None:
    """Its answer has all messages, and a change of what matches would reach them."""
    request = GetPendingMessagesRequestHeader(max_count=10, compared_property="tenant=T")
    answer = PendingMessagesData.decode(b'{"messages":[],"hasMore":false}')

    with pytest.raises(UnsupportedError) as raised:
        checked_answer(request, answer)

    assert "the server does not compare properties of pending messages (got 'tenant=T'): it has an older" in str(
        raised.value
    )


def test_the_scan_of_a_client_that_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older client waits for one long answer, and closes its connection after its timeout."""
    reads: list[int] = []
    connections: list[Connection] = []
    read, limit = RecordLookup.at, processors._limit

    def seen(connection: Connection, max_records: int | None) -> object:
        connections.append(connection)
        return limit(connection, max_records)

    monkeypatch.setattr(processors, "_limit", seen)
    with server() as cluster, Tool(cluster.address) as tool:
        cluster.engine.sends.send_batch([delayed("many", HOUR_MS)] * 2_000)

        def read_until_gone(self: RecordLookup, physical_offset: int, size: int = 0) -> object:
            reads.append(physical_offset)
            if len(reads) == 300:
                tool.close()
                eventually(lambda: not connections[0].is_open, "the server has noticed")
            return read(self, physical_offset, size)

        monkeypatch.setattr(RecordLookup, "at", read_until_gone)
        header = CountPendingMessagesRequestHeader(tag="none", bucket_millis=HOUR_MS)
        with pytest.raises(RemoteConnectError):
            tool.request(RequestCode.COUNT_PENDING_MESSAGES, header)
    # The server has stopped, after the work that ran.
    assert 300 <= len(reads) <= 300 + 256


@pytest.fixture(params=["ours", "rocketmq"])
def either(request: pytest.FixtureRequest) -> Iterator[RemoteBroker]:
    """A client of our server, and one of a broker without our requests."""
    if request.param == "ours":
        yield request.getfixturevalue("our_client")
    else:
        with ScriptedBroker() as scripted, remote(scripted) as broker:
            yield broker


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda delayed: delayed.cancel(), r"by its handle or by key=\.\.\., and by one of them"),
        (lambda delayed: delayed.reschedule("handle", 1, key="4466"), "by one of them"),
        (lambda delayed: delayed.cancel(key="two words"), "key must be one word, got 'two words'"),
        (lambda delayed: delayed.cancel("4466"), "'4466' is not a handle of a pending message"),
        (lambda delayed: delayed.pending(PendingQuery(), 0), "max_count must be 1 or more, got 0"),
        (lambda delayed: delayed.pending(PendingQuery(), 1, "now"), "'now' is not a cursor; pass PendingPage.cursor"),
        (lambda delayed: delayed.pending(PendingQuery(), 1, "WzFd"), "'WzFd' is not a cursor"),
        (lambda delayed: delayed.count_pending(PendingQuery(), 0), "must be 1 ms or more, got 0"),
    ],
)
def test_wrong_arguments_are_refused(
    either: RemoteBroker, call: Callable[[DelayedMessages], object], text: str
) -> None:
    with pytest.raises(MessageError, match=text):
        call(either.delayed)


def test_a_change_that_no_server_can_make_is_refused(our_client: RemoteBroker) -> None:
    handle = our_client.sends.send(delayed("far", HOUR_MS)).handle
    elsewhere = encode_handle(RecallHandle("orders", "broker-z", 1, "7F", 0))

    with pytest.raises(BrokerError, match="broker 'broker-z' is in no known route"):
        our_client.delayed.cancel(elsewhere)
    with pytest.raises(DelayError, match="allowed are"):
        our_client.delayed.reschedule(handle, 1 << 60)


def test_a_server_that_forbids_recalls_changes_no_message(tmp_path: Path) -> None:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    settings = BrokerServerSettings(listen=ANYWHERE, recall_message_enable=False)
    with LocalCluster(engine, settings) as cluster, client(cluster.address, tmp_path) as broker:
        handle = broker.sends.send(delayed("kept", HOUR_MS)).handle

        assert Capability.SCHEDULE_CHANGE not in broker.capabilities
        with pytest.raises(UnsupportedError, match="set recall-message-enable to true"):
            broker.delayed.cancel(handle)
        assert broker.delayed.count_pending(PendingQuery(topic="orders")).total == 1


def test_the_capabilities_are_those_that_the_server_announces(
    our_client: RemoteBroker, our_server: LocalCluster
) -> None:
    assert our_client.capabilities == our_server.engine.capabilities - {Capability.LOCAL_FILES} | {
        Capability.RECORD_BLOCK
    }
