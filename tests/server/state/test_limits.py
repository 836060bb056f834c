"""Limits of one connection, address and account: what a client holds or creates does not grow without a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.clients import Owner
from mqtemplate.message import HostAddress, MessageQueue
from mqtemplate.metrics import Counter
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import ACCESS_KEY
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerData,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    ProducerData,
)
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.limits import ClientLimits, CreationLimit, CreationRate, Quota, QuotaLimits
from tests.server.serving import RecordingConnection, Serving, subscription

HOLD = PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND
FOREIGN = HostAddress("10.0.0.9", 1)


def refused(serving: Serving, kind: str) -> int:
    count = serving.engine.metrics.snapshot()[f"server.refused.{kind}"]
    assert isinstance(count, int)
    return count


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


def test_a_connection_holds_a_limited_number_of_pulls_and_others_still_may() -> None:
    with Serving(BrokerServerSettings(max_held_pulls_per_connection=2, max_held_pulls=5)) as serving:
        serving.send("orders")
        hostile, neighbour = RecordingConnection(), RecordingConnection()
        for _ in range(2):
            assert serving.pull("group", "orders", 1, sys_flag=HOLD, over=hostile) is None

        response = serving.pull("group", "orders", 1, sys_flag=HOLD, over=hostile)

        assert response is not None
        assert response.code == ResponseCode.SYSTEM_BUSY
        assert "this connection may have 2 held pulls" in (response.remark or "")
        assert serving.pull("group", "orders", 1, sys_flag=HOLD, over=neighbour) is not None  # max-address-share
        abroad = RecordingConnection(FOREIGN)
        assert serving.pull("group", "orders", 1, sys_flag=HOLD, over=abroad) is None
        assert refused(serving, "pulls") == 2
        serving.server.hold.forget(hostile)  # type: ignore[arg-type]
        assert serving.pull("group", "orders", 1, sys_flag=HOLD, over=neighbour) is None


def test_the_time_that_a_pull_waits_is_limited(serving: Serving) -> None:
    """Otherwise a pull with 2^62 milliseconds would be held for ever."""
    serving.send("orders")

    assert serving.pull("group", "orders", 1, sys_flag=HOLD, suspend_timeout_millis=1 << 62) is None
    serving.advance(119_000)
    assert len(serving.server.hold) == 1
    serving.advance(1_000)

    assert len(serving.server.hold) == 0
    assert serving.connection.replies[-1].code == ResponseCode.PULL_NOT_FOUND


def lock(serving: Serving, group: str, numbers: range, over: RecordingConnection) -> RemotingCommand:
    queues = [MessageQueue("orders", "broker-a", number) for number in numbers]
    body = LockBatchRequestBody(consumer_group=group, client_id=f"client-{over.id}", mq_set=queues)
    response = serving.request(RequestCode.LOCK_BATCH_MQ, None, body.encode(), over=over)
    assert response is not None
    return response


def test_a_connection_has_a_limited_number_of_locks_and_a_renewal_counts_once() -> None:
    with Serving(BrokerServerSettings(max_queue_locks_per_connection=3)) as serving:
        hostile, neighbour = RecordingConnection(), RecordingConnection()
        for _ in range(2):
            assert lock(serving, "one", range(2), hostile).code == ResponseCode.SUCCESS

        response = lock(serving, "two", range(2), hostile)

        assert (response.code, refused(serving, "locks")) == (ResponseCode.SYSTEM_BUSY, 1)
        assert "this connection may have 3 locks" in (response.remark or "")
        assert lock(serving, "two", range(1), hostile).code == ResponseCode.SUCCESS
        assert lock(serving, "three", range(3), neighbour).code == ResponseCode.SUCCESS


def test_the_locks_of_a_closed_connection_are_released_and_expired_ones_are_forgotten() -> None:
    """An expired lock was kept until the next request for its group, which a hostile client never sends."""
    with Serving() as serving:
        first, second = RecordingConnection(), RecordingConnection()
        lock(serving, "one", range(3), first)
        lock(serving, "two", range(3), second)

        serving.server.locks.forget(first.id)
        taken = LockBatchResponseBody.decode(lock(serving, "one", range(3), second).body)

        assert len(taken.lock_ok_mq_set) == 3
        assert len(serving.server.limits.locks) == 6
        serving.advance(71_000)
        assert len(serving.server.limits.locks) == 0


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


def test_a_connection_has_a_limited_number_of_groups() -> None:
    with Serving(BrokerServerSettings(max_client_groups_per_connection=3)) as serving:
        hostile, neighbour = RecordingConnection(), RecordingConnection()
        assert heartbeat(serving, hostile, **producers(3)).code == ResponseCode.SUCCESS
        assert heartbeat(serving, hostile, **producers(3)).code == ResponseCode.SUCCESS

        more = heartbeat(serving, hostile, **producers(2, "other"))
        consumer = heartbeat(serving, hostile, **consumers(1, "orders"))

        assert more.code == consumer.code == ResponseCode.SYSTEM_BUSY
        assert "this connection may have 3 groups" in (more.remark or "")
        assert len(serving.server.clients.producer_groups()) == 3
        assert heartbeat(serving, neighbour, **consumers(3, "orders")).code == ResponseCode.SUCCESS
        serving.server.clients.forget(hostile.id)
        serving.server.clients.forget(neighbour.id)
        assert (len(serving.server.limits.groups), len(serving.server.limits.subscriptions)) == (0, 0)


def test_a_connection_has_a_limited_number_of_subscriptions_and_long_ones_count_more() -> None:
    with Serving(BrokerServerSettings(max_subscriptions_per_connection=4)) as serving:
        hostile = RecordingConnection()
        assert heartbeat(serving, hostile, **consumers(1, "a", "b", "c")).code == ResponseCode.SUCCESS
        assert heartbeat(serving, hostile, **consumers(1, "a", "b")).code == ResponseCode.SUCCESS
        assert heartbeat(serving, hostile, **consumers(1, "a", "c", prefix="h")).code == ResponseCode.SUCCESS

        response = heartbeat(serving, hostile, **consumers(1, "d", prefix="i"))

        assert response.code == ResponseCode.SYSTEM_BUSY
        assert "this connection may have 4 subscriptions" in (response.remark or "")
        assert (
            serving.heartbeat("x", "t", over=RecordingConnection(), expression="x" * 400).code == ResponseCode.SUCCESS
        )
        response = serving.heartbeat("y", "t", over=RecordingConnection(), expression="x" * 1_000)
        assert response.code == ResponseCode.SYSTEM_BUSY


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


def test_a_heartbeat_with_many_new_groups_writes_each_table_once(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote both tables whole for each group: a thousand groups held a thread for minutes."""
    files, written = serving.engine.store.store_files, []
    write = files.write_bytes
    monkeypatch.setattr(files, "write_bytes", lambda name, data: written.append(name) or write(name, data))

    assert heartbeat(serving, serving.connection, **consumers(100, "orders")).code == ResponseCode.SUCCESS

    assert sorted(written) == ["config/subscriptionGroup.json", "config/topics.json"]
    assert serving.engine.topics.queue_count("%RETRY%g-99") == 1
    stored = json.loads(files.read_bytes("config/subscriptionGroup.json") or b"")
    assert len(stored["subscriptionGroupTable"]) == 100


def test_a_heartbeat_stops_when_its_connection_is_closed(serving: Serving) -> None:
    leaving = RecordingConnection()
    leaving.is_open = False

    heartbeat(serving, leaving, **consumers(3, "orders"))

    assert serving.server.clients.groups_of_topic("orders") == []
    assert len(serving.server.limits.groups) == 0


def test_clients_create_groups_at_a_limited_rate() -> None:
    with Serving(BrokerServerSettings(auto_create_burst=3, auto_create_per_second=1)) as serving:
        assert heartbeat(serving, serving.connection, **consumers(3, "orders")).code == ResponseCode.SUCCESS

        response = heartbeat(serving, serving.connection, **consumers(5, "orders"))

        assert response.code == ResponseCode.SYSTEM_BUSY
        assert response.remark == (
            "the clients of one address or account may create 3 groups at once, and 1 per second after that; create "
            "them with mqadmin, or raise max-groups, max-address-share, auto-create-burst or auto-create-per-second"
        )
        assert refused(serving, "created") == 1
        assert serving.server.groups.find("g-3") is None
        serving.advance(2_000)
        assert heartbeat(serving, serving.connection, **consumers(5, "orders")).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("create", ["send", "pull"])
def test_topics_and_groups_that_clients_create_by_any_request_are_limited(create: str) -> None:
    settings = BrokerServerSettings(auto_create_burst=2, auto_create_per_second=0.001)
    with Serving(settings) as serving:
        serving.engine.create_topic("orders")

        def request(number: int, over: RecordingConnection) -> RemotingCommand | None:
            if create == "send":
                return serving.send(f"topic-{number}", over=over)
            return serving.pull(f"group-{number}", "orders", over=over, sys_flag=PullSysFlag.SUBSCRIPTION)

        codes = [response.code for number in range(4) if (response := request(number, serving.connection))]
        abroad = request(9, RecordingConnection(FOREIGN))

    assert codes[2:] == [ResponseCode.SYSTEM_BUSY] * 2
    assert ResponseCode.SYSTEM_BUSY not in codes[:2]
    assert abroad is not None
    assert abroad.code != ResponseCode.SYSTEM_BUSY


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


def test_with_access_control_the_account_of_a_request_is_limited() -> None:
    """The access key of a request counts only if its signature was checked: otherwise anybody may name any key."""
    connection: Any = RecordingConnection()
    request = RemotingCommand(RequestCode.HEART_BEAT, ext_fields={ACCESS_KEY: "shop-owner"})
    with Serving() as serving:
        assert serving.server.limits.owner(connection, request) == Owner(connection.id, "127.0.0.1", None)
        settings, engine = BrokerServerSettings(), serving.engine
        limits = ClientLimits(settings, engine.clock, engine.metrics, lambda: 0, lambda: 0, has_accounts=True)
        assert limits.owner(connection, request) == Owner(connection.id, "127.0.0.1", "shop-owner")
