"""Limits of one connection, address and account: what a client holds or creates does not grow without a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.clients import Owner
from mqtemplate.errors import StoreFullError
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Counter
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import ACCESS_KEY
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerData,
    HeartbeatData,
    LockBatchRequestBody,
    ProducerData,
    SubscriptionGroupConfig,
)
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.acl.callers import Callers
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.limits import CreationLimit, CreationRate, Quota, QuotaLimits
from tests.server.serving import RecordingConnection, Serving, subscription

# --- quotas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "holder", "limit"),
    [
        (QuotaLimits(9, 2, 9), "this connection", 2),
        (QuotaLimits(9, 9, 2), "the address 10.0.0.9", 2),
        (QuotaLimits(2, 9, 9), "all clients together", 2),
    ],
)
def test_a_quota_names_the_limit_that_a_request_would_exceed(limits: QuotaLimits, holder: str, limit: int) -> None:
    counter = Counter()
    quota, owner = Quota("locks", "max-queue-locks", limits, counter), Owner(1, "10.0.0.9")
    quota.take(owner, 2)

    with pytest.raises(RefusedError) as caught:
        quota.take(owner)

    assert caught.value.code == ResponseCode.SYSTEM_BUSY
    assert str(caught.value) == (
        f"{holder} may have {limit} locks at one time, and this request would exceed that; let the client have fewer, "
        "or raise max-queue-locks"
    )
    assert (len(quota), counter.value) == (2, 1)
    quota.give(owner, 2)
    quota.take(owner, 2)


def test_a_check_counts_nothing() -> None:
    counter = Counter()
    quota, owner = Quota("locks", "max-queue-locks", QuotaLimits(9, 2, 9), counter), Owner(1, "10.0.0.9")

    quota.check(owner, 2)

    assert (len(quota), counter.value) == (0, 0)
    with pytest.raises(RefusedError, match="this connection may have 2 locks"):
        quota.check(owner, 3)
    assert (len(quota), counter.value) == (0, 1)


def test_an_account_has_a_quota_over_all_its_addresses() -> None:
    quota = Quota("locks", "max-queue-locks", QuotaLimits(9, 9, 2), Counter())
    quota.take(Owner(1, "10.0.0.1", "shop"))
    quota.take(Owner(2, "10.0.0.2", "shop"))

    with pytest.raises(RefusedError, match="the account 'shop' may have 2 locks"):
        quota.take(Owner(3, "10.0.0.3", "shop"))

    quota.take(Owner(4, "10.0.0.3", "10.0.0.1"))  # an account may have the name of an address


def test_an_address_has_a_share_of_the_total_but_as_much_as_a_connection() -> None:
    assert QuotaLimits.shared(1_000, 100, 0.5).per_address == 500
    assert QuotaLimits.shared(1_000, 700, 0.5).per_address == 700
    assert QuotaLimits.shared(50, 700, 0.5).per_address == 50


# --- what clients hold ------------------------------------------------------------------------------


def heartbeat(serving: Serving, over: RecordingConnection, **data: Any) -> RemotingCommand:
    body = HeartbeatData(client_id=f"client-{over.id}", **data).encode()
    response = serving.request(RequestCode.HEART_BEAT, None, body, over=over)
    assert response is not None
    return response


def producers(count: int, prefix: str = "g") -> dict[str, Any]:
    return {"producer_data_set": [ProducerData(group_name=f"{prefix}-{number}") for number in range(count)]}


def consumers(count: int, *topics: str, prefix: str = "g") -> dict[str, Any]:
    subscriptions = [subscription(topic) for topic in topics]
    return {
        "consumer_data_set": [
            ConsumerData(group_name=f"{prefix}-{number}", subscription_data_set=subscriptions)
            for number in range(count)
        ]
    }


def test_the_end_of_a_connection_looks_at_its_own_groups_only(serving: Serving) -> None:
    """It looked at each of a million groups of other connections, in the I/O thread."""
    heartbeat(serving, RecordingConnection(), **producers(500))
    leaving = RecordingConnection()
    heartbeat(serving, leaving, **producers(2, "leaving"))
    clients = serving.server.clients
    looked_at = LookedAt(clients._producers)
    clients._producers = looked_at

    clients.forget(leaving.id)

    assert looked_at.names == {"leaving-0", "leaving-1"}
    assert len(looked_at) == 500


def test_the_end_of_a_connection_is_done_in_parts(serving: Serving) -> None:
    """The release of 10,000 held pulls, or of as many locks, held the I/O thread for 15 to 20 ms."""
    leaving = RecordingConnection()
    heartbeat(serving, leaving, **producers(250), **consumers(150, "orders"))
    serving.engine.create_topic("orders", 1)
    for _ in range(120):
        serving.pull("reader", "orders", sys_flag=PullSysFlag.SUSPEND | PullSysFlag.SUBSCRIPTION, over=leaving)
    queues = [MessageQueue("orders", "broker-a", queue) for queue in range(230)]
    body = LockBatchRequestBody(consumer_group="g-0", client_id="client", mq_set=queues).encode()
    serving.request(RequestCode.LOCK_BATCH_MQ, None, body, over=leaving)
    limits, loop = serving.server.limits, serving.server.remoting.loop

    serving.disconnect(leaving)
    held = [(len(limits.groups), len(limits.pulls), len(limits.locks))]
    while loop._callbacks:
        loop._run_callbacks()
        held.append((len(limits.groups), len(limits.pulls), len(limits.locks)))

    assert held == [(200, 20, 130), (50, 0, 30), (0, 0, 0)]
    assert serving.server.clients.consumers == {}
    assert serving.server.clients.producer_groups() == {}


def test_the_end_of_a_connection_goes_on_after_a_notice_that_failed(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, staying = RecordingConnection(), RecordingConnection()
    for connection in (leaving, staying):
        heartbeat(serving, connection, **consumers(150, "orders"))
    failures = [OSError("it is gone")]

    def send_one_way(notice: object) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(staying, "send_one_way", send_one_way)
    loop = serving.server.remoting.loop

    with pytest.raises(OSError, match="it is gone"):
        serving.disconnect(leaving)
    loop._run_callbacks()

    assert not loop._callbacks
    assert len(serving.server.limits.groups) == 150


class LookedAt(dict[str, Any]):
    """A dictionary that notes which entries are read."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.names: set[str] = set()

    def __iter__(self) -> Any:
        raise AssertionError("all groups were visited")

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


# --- what clients create ----------------------------------------------------------------------------


def test_many_new_groups_are_written_once_after_the_heartbeats(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tables were written for each group, later for each heartbeat: the flushes held the sends of others."""
    files, written = serving.engine.store.store_files, []
    write = files.write_bytes
    monkeypatch.setattr(files, "write_bytes", lambda name, data: written.append(name) or write(name, data))

    for number in range(6):
        joining = consumers(100, "orders", prefix=f"g-{number}")
        assert heartbeat(serving, serving.connection, **joining).code == ResponseCode.SUCCESS
    before, count = list(written), serving.engine.topics.queue_count("%RETRY%g-5-99")
    write_tables(serving)

    assert (before, count) == ([], 1)
    assert sorted(written) == ["config/subscriptionGroup.json", "config/topics.json"]
    stored = json.loads(files.read_bytes("config/subscriptionGroup.json") or b"")
    assert len(stored["subscriptionGroupTable"]) == 600


def test_a_retry_topic_is_written_before_its_first_message(serving: Serving) -> None:
    """A crash may lose a group that has just joined, but no topic that has messages."""
    sent = serving.send("orders")
    assert sent is not None
    heartbeat(serving, serving.connection, **consumers(2, "orders"))
    before = topics_on_disk(serving)

    header = ConsumerSendMsgBackRequestHeader(offset=0, group="g-0", delay_level=0)
    sent_back = serving.request(RequestCode.CONSUMER_SEND_MSG_BACK, header)

    assert sent_back is not None
    assert sent_back.code == ResponseCode.SUCCESS
    assert "%RETRY%g-0" not in before
    assert "%RETRY%g-0" in topics_on_disk(serving)


def topics_on_disk(serving: Serving) -> set[str]:
    stored = json.loads(serving.engine.store.store_files.read_bytes("config/topics.json") or b"")
    return set(stored["topicConfigTable"])


def test_the_groups_that_joined_are_in_the_file_when_the_server_has_stopped() -> None:
    with Serving() as serving:
        heartbeat(serving, serving.connection, **consumers(1, "orders"))
        serving.server.stop()
        stored = json.loads(serving.engine.store.store_files.read_bytes("config/subscriptionGroup.json") or b"")
    assert list(stored["subscriptionGroupTable"]) == ["g-0"]
    assert "%RETRY%g-0" in topics_on_disk(serving)  # written when the engine was closed


def test_a_heartbeat_with_many_new_groups_looks_at_each_other_group_once(serving: Serving) -> None:
    """It looked at each group for each new one, to find those that subscribe to its retry topic."""
    heartbeat(serving, RecordingConnection(), **consumers(100, "orders", prefix="other"))
    clients = serving.server.clients
    clients.consumers = looked_at = CountedLooks(clients.consumers)

    heartbeat(serving, serving.connection, **consumers(100, "orders"))

    assert looked_at.count == 1


def test_a_member_gets_one_notice_of_the_topics_that_are_created_at_once(serving: Serving) -> None:
    watching = RecordingConnection()
    heartbeat(serving, watching, **consumers(1, "%RETRY%g-0", "%RETRY%g-1", "%RETRY%g-2", prefix="watching"))
    watching.pushed.clear()

    heartbeat(serving, serving.connection, **consumers(3, "orders"))

    assert [notice.code for notice in watching.pushed] == [RequestCode.NOTIFY_CONSUMER_IDS_CHANGED]


class CountedLooks(dict[str, Any]):
    """A dictionary that counts how often its values are listed."""

    count = 0

    def values(self) -> Any:
        self.count += 1
        return super().values()


def test_a_heartbeat_above_the_limit_of_new_groups_makes_no_settings_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The settings of each group were made before the refusal: a client may repeat that without end."""
    made: list[str] = []

    def config(group_name: str) -> SubscriptionGroupConfig:
        made.append(group_name)
        return SubscriptionGroupConfig(group_name=group_name)

    monkeypatch.setattr("mqtemplate.server.state.groups.SubscriptionGroupConfig", config)
    with Serving(BrokerServerSettings(auto_create_burst=5)) as serving:
        refused = heartbeat(serving, serving.connection, **consumers(6, "orders", prefix="many"))
        accepted = heartbeat(serving, serving.connection, **consumers(5, "orders"))

    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "may create 5 groups at once" in (refused.remark or "")
    assert accepted.code == ResponseCode.SUCCESS
    assert made == [f"g-{number}" for number in range(5)]


def test_a_heartbeat_stops_when_its_connection_is_closed(serving: Serving) -> None:
    leaving = RecordingConnection()
    leaving.is_open = False

    heartbeat(serving, leaving, **consumers(3, "orders"))

    assert serving.server.clients.groups_of_topic("orders") == []
    assert len(serving.server.limits.groups) == 0


def test_clients_create_a_limited_number_of_topics_and_one_address_a_share() -> None:
    clock, counter = VirtualClock(), Counter()
    exists = 7
    limit = CreationLimit("topics", "max-topics", clock, lambda: exists, 10, 0.2, CreationRate(100, 100.0), counter)
    here, abroad = Owner(1, "10.0.0.1"), Owner(2, "10.0.0.2")
    limit.take(here, 2)

    with pytest.raises(RefusedError, match="the clients of one address or account may create 2 topics; create them"):
        limit.take(Owner(3, "10.0.0.1"))
    limit.take(abroad)
    exists = 10
    with pytest.raises(RefusedError, match="clients may create topics until there are 10, and there are 10; create"):
        limit.take(abroad)

    assert counter.value == 2
    limit.sweep()
    with pytest.raises(RefusedError, match="one address or account may create 2 topics|until there are 10"):
        limit.take(here)


def test_what_a_full_disk_does_not_let_clients_create_does_not_count() -> None:
    """Clients try again and again. They had used up their share when the disk had space again, until a restart."""
    clock = VirtualClock()
    settings = BrokerServerSettings(max_topics=40, max_groups=40, max_address_share=0.1)
    with Serving(settings, EmbeddedBroker(None, None, clock)) as serving:
        files = serving.engine.store.store_files
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "write_bytes", full_disk)
            for _ in range(10):
                sent = serving.send("orders")
                assert sent is not None
                assert sent.code != ResponseCode.SUCCESS
                clock.move_ms(60_000)

        sent = serving.send("orders")

        assert sent is not None
        assert sent.code == ResponseCode.SUCCESS


def test_consumers_join_new_groups_while_the_disk_is_full() -> None:
    """They were refused, and could not read what makes the disk full. The groups are written when it has space."""
    with Serving(BrokerServerSettings(), EmbeddedBroker(None, None, VirtualClock())) as serving:
        files = serving.engine.store.store_files
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "write_bytes", full_disk)
            joined = heartbeat(serving, serving.connection, **consumers(2, "orders"))
            for _ in range(2):
                with pytest.raises(StoreFullError):
                    write_tables(serving)
        write_tables(serving)

        assert joined.code == ResponseCode.SUCCESS
        stored = json.loads(files.read_bytes("config/subscriptionGroup.json") or b"")
        assert sorted(stored["subscriptionGroupTable"]) == ["g-0", "g-1"]


def write_tables(serving: Serving) -> None:
    """Let the service write that writes the tables five seconds after a change."""
    serving.clock.move_ms(5_000)
    serving.engine.engine.entry_writer.service.step()


def full_disk(name: str, data: bytes) -> None:
    raise StoreFullError(f"no space for {name}")


def test_with_access_control_the_account_of_a_request_is_limited() -> None:
    """The access key of a request counts only if its signature was checked: otherwise anybody may name any key."""
    connection: Any = RecordingConnection()
    request = RemotingCommand(RequestCode.HEART_BEAT, ext_fields={ACCESS_KEY: "shop-owner"})

    without, with_accounts = (Callers(has_accounts=each).of(connection, request) for each in (False, True))

    assert without.owner == Owner(connection.id, "127.0.0.1", None)
    assert with_accounts.owner == Owner(connection.id, "127.0.0.1", "shop-owner")
