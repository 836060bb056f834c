"""The delay console on Apache RocketMQ: each of its versions and timers, several brokers, a replica, an account."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.errors import BrokerError, SendError, UnsupportedError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChangeStatus
from mqtemplate.remoting import Credentials
from tests.conformance.grpc_clients.accounts import User
from tests.conformance.grpc_clients.servers import Administrator, GrpcServer
from tests.conformance.servers import ACCOUNT
from tests.waiting import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("rocketmq"),
]

HOUR_MS = 3_600_000
_AUTH = "org.apache.rocketmq.auth"


@contextmanager
def console(address: str, folder: Path, **settings: object) -> Iterator[RemoteBroker]:
    """Open a client whose pending messages come from an index in *folder*."""
    patient = {"request_timeout_ms": PATIENCE_S * 1_000}  # a busy machine does not let its requests fail
    given = {"pending_index": folder / "pending.sqlite", "offset_path": folder / "offsets", **patient, **settings}
    broker = RemoteBroker(RemoteSettings(name_servers=tuple(address.split(";")), **given))  # type: ignore[arg-type]
    with broker as client:
        eventually(lambda: _has_broker(client), "a broker is registered")
        yield client


def _has_broker(client: RemoteBroker) -> bool:
    """Return True if the name server has a broker: RocketMQ's broker starts before it has registered."""
    try:
        return bool(client.client_context.routes.registered_masters())
    except BrokerError:
        return False


def pending(client: RemoteBroker, count: int, query: PendingQuery | None = None) -> list[PendingMessage]:
    """Return the pending messages, as soon as there are so many."""

    def found() -> list[PendingMessage] | None:
        client.delay_console.update_index(lambda _: None)  # type: ignore[union-attr]  # RocketMQ has it
        messages = client.delayed.pending(query or PendingQuery()).messages
        return list(messages) if len(messages) == count else None

    return eventually(found, f"{count} messages are pending") or []


def send(names: NameServer, version: str = "5.5.0") -> None:
    """Let RocketMQ's client send two messages with levels, and with 5.x two timers."""
    with JavaClient(names, version) as java:
        java.connect()
        for number, level in enumerate((17, 18)):
            java.send({"topic": "orders", "body": b"x", "keys": f"level-{number}", "tags": "paid", "level": level})
        for number in range(2 if version.startswith("5") else 0):
            delay_ms = (number + 3) * HOUR_MS
            java.send({"topic": "orders", "body": b"x", "keys": f"timer-{number}", "delay_ms": delay_ms})


@pytest.mark.parametrize("options", [{}, {"timerRocksDBEnable": "true"}], ids=["wheel", "RocksDB"])
def test_timers_and_levels_are_found_moved_and_cancelled(options: Mapping[str, object], tmp_path: Path) -> None:
    with NameServer() as names, RocketMQ(tmp_path / "store", names, {"timerMaxDelaySec": 864_000, **options}):
        send(names)
        with console(names.address, tmp_path) as client:
            found = pending(client, 4)
            [by_key] = client.delayed.pending(PendingQuery(key="timer-1")).messages
            tagged = client.delayed.pending(PendingQuery(tag="paid")).messages
            counted = client.delayed.count_pending(PendingQuery(topic="orders")).total
            moved = client.delayed.reschedule(by_key.handle, client.clock.now_ms() + 50 * HOUR_MS)
            cancelled = client.delayed.cancel(key="timer-0")
            left = pending(client, 3)
            [state] = client.delay_console.brokers()  # type: ignore[union-attr]

    assert [each.keys for each in found] == ["level-0", "level-1", "timer-0", "timer-1"]
    assert [each.delay_level for each in found] == [17, 18, 0, 0]
    assert ([each.keys for each in tagged], counted) == (["level-0", "level-1"], 4)
    assert (moved.status, cancelled.status) == (ScheduleChangeStatus.RESCHEDULED, ScheduleChangeStatus.CANCELLED)
    assert [each.keys for each in left] == ["level-0", "level-1", "timer-1"]
    assert (state.problem, state.has_timers, state.late_ms < HOUR_MS) == (None, True, True)
    assert [(each.level, each.pending) for each in state.levels if each.pending] == [(17, 1), (18, 1)]


def test_rocketmq_4_has_levels_only(tmp_path: Path) -> None:
    with NameServer("4.9.7") as names, RocketMQ(tmp_path / "store", names):
        send(names, "4.9.8")
        with console(names.address, tmp_path) as client:
            found = pending(client, 2)
            [state] = client.delay_console.brokers()  # type: ignore[union-attr]
            total = client.delayed.count_pending(PendingQuery()).total

    assert [(each.keys, each.delay_level) for each in found] == [("level-0", 17), ("level-1", 18)]
    assert (state.problem, state.has_timers, total) == (None, False, 2)
    assert [(each.level, each.pending) for each in state.levels if each.pending] == [(17, 1), (18, 1)]


def test_records_of_several_brokers_are_read_from_a_replica_where_there_is_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = stack.enter_context(NameServer())
        brokers = {
            "master-a": {"brokerName": "broker-a", "brokerRole": "ASYNC_MASTER"},
            "replica": {"brokerName": "broker-a", "brokerRole": "SLAVE", "brokerId": 1, "slaveReadEnable": "true"},
            "master-b": {"brokerName": "broker-b"},
        }
        for folder, options in brokers.items():
            stack.enter_context(RocketMQ(tmp_path / folder, names, options))
        with console(names.address, tmp_path) as client:
            client.create_topic("orders", 1)
            for number, queue in enumerate([*client.queues("orders")] * 20):
                due = {Property.TIMER_DELAY_MS: str((number + 1) * HOUR_MS // 10), Property.KEYS: f"{number}"}
                client.sends.send(Message("orders", b"x", due), queue)
            _await_replica(client)
            found = pending(client, 40)
            states = client.delay_console.brokers()  # type: ignore[union-attr]
            abandoned = client._client._console._reader._not_by_replica  # type: ignore[union-attr]

    assert {each.keys for each in found} == {str(number) for number in range(40)}
    assert abandoned == set(), "the replica had all records of broker-a"
    assert [(each.broker, each.problem) for each in states] == [("broker-a", None), ("broker-b", None)]


def _await_replica(client: RemoteBroker) -> None:
    """Wait until the replica of broker-a is registered and has all of its timers."""
    from mqtemplate.message import MessageQueue
    from mqtemplate.topics import TIMER_TOPIC

    queue, context = MessageQueue(TIMER_TOPIC, "broker-a", 0), client.client_context

    def has_all() -> bool:
        context.routes.forget(TIMER_TOPIC)
        if 1 not in context.routes.brokers().get("broker-a", {}):
            context.routes.refresh()
            return False
        result = client._client.queries.pull(queue, 19, 1, broker_id=1)
        return bool(result.messages)

    eventually(has_all, "the replica has the records")


def test_a_name_server_that_is_down_at_the_start_or_fails_later_changes_nothing(tmp_path: Path) -> None:
    dead = f"127.0.0.1:{free_port()}"
    with NameServer() as first, NameServer() as second:
        addresses = (dead, first.address, second.address)
        options = {"namesrvAddr": f"{first.address};{second.address}", "timerMaxDelaySec": 864_000}
        with RocketMQ(tmp_path / "store", first, options):
            send(second)
            with console(";".join(addresses), tmp_path) as client:
                before = pending(client, 4)
                first.kill()
                [by_key] = client.delayed.pending(PendingQuery(key="timer-1")).messages
                moved = client.delayed.reschedule(by_key.handle, client.clock.now_ms() + 50 * HOUR_MS)
                cancelled = client.delayed.cancel(key="timer-0")
                after = pending(client, 3)
                [state] = client.delay_console.brokers()  # type: ignore[union-attr]
            (tmp_path / "fresh").mkdir()
            with console(";".join(addresses), tmp_path / "fresh") as client:
                found_again = pending(client, 3)

    assert [each.keys for each in before] == ["level-0", "level-1", "timer-0", "timer-1"]
    assert (moved.status, cancelled.status) == (ScheduleChangeStatus.RESCHEDULED, ScheduleChangeStatus.CANCELLED)
    assert [each.keys for each in after] == [each.keys for each in found_again] == ["level-0", "level-1", "timer-1"]
    assert state.problem is None


class RocketMQWithAccounts(RocketMQ):
    """A broker of RocketMQ 4 with access control.

    Args:
        accounts: The content of its ``plain_acl.yml``.
    """

    def __init__(self, folder: Path, names: NameServer, accounts: Mapping[str, object]) -> None:
        super().__init__(folder, names, {"aclEnable": "true"})
        self._accounts = accounts

    def _configuration(self, home: Path) -> dict[str, object]:
        (home / "conf/plain_acl.yml").write_text(json.dumps(self._accounts))
        return super()._configuration(home)


def test_an_account_of_rocketmq_4_that_may_only_read_sees_the_messages_and_changes_nothing(tmp_path: Path) -> None:
    viewer = Credentials(access_key="console-viewer", secret_key="secret-of-the-viewer")
    read_only = {
        "admin": False,
        "defaultTopicPerm": "DENY",
        "defaultGroupPerm": "DENY",
        "topicPerms": ["SCHEDULE_TOPIC_XXXX=SUB", "rmq_sys_wheel_timer=SUB", "orders=SUB"],
        "groupPerms": ["TOOLS_CONSUMER=SUB"],
    }
    accounts = {
        "globalWhiteRemoteAddresses": [],
        "accounts": [
            {"accessKey": ACCOUNT.access_key, "secretKey": ACCOUNT.secret_key, "admin": True},
            {"accessKey": viewer.access_key, "secretKey": viewer.secret_key, **read_only},
        ],
    }
    with NameServer("4.9.7") as names, RocketMQWithAccounts(tmp_path / "store", names, accounts):
        (tmp_path / "root").mkdir()
        with console(names.address, tmp_path / "root", credentials=ACCOUNT) as client:
            client.create_topic("orders", 1)
            for level in ("17", "18"):
                client.sends.send(Message("orders", b"x", {Property.DELAY: level, Property.KEYS: f"level-{level}"}))
        with console(names.address, tmp_path, credentials=viewer) as client:
            found = pending(client, 2)
            shown = client.delayed.pending(PendingQuery(key="level-17")).messages
            state = client.delay_console.index_state()  # type: ignore[union-attr]
            [broker] = client.delay_console.brokers()  # type: ignore[union-attr]
            with pytest.raises(UnsupportedError, match="has no timers and cancels no message"):
                client.delayed.cancel(key="level-17")
            with pytest.raises(SendError, match="No default permission for topic:orders"):
                client.sends.send(Message("orders", b"x", {Property.DELAY: "18"}))
            still = pending(client, 2)

    assert [each.keys for each in found] == [each.keys for each in still] == ["level-17", "level-18"]
    assert [each.keys for each in shown] == ["level-17"]
    assert state is not None
    assert (state.is_complete, state.notes) == (True, ())
    assert (broker.problem, broker.has_timers) == (None, False)


def test_an_account_that_may_only_read_sees_the_messages_and_changes_nothing(tmp_path: Path) -> None:
    viewer = User(Credentials(access_key="console-viewer", secret_key="secret-of-the-viewer"), "SUB|GET")
    root = {"username": ACCOUNT.access_key, "password": ACCOUNT.secret_key, "userType": "Super"}
    inner = {"accessKey": ACCOUNT.access_key, "secretKey": ACCOUNT.secret_key}
    options = {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
        "authConfigPath": str(tmp_path / "auth"),
        "initAuthenticationUser": json.dumps(root),
        "innerClientAuthenticationCredentials": json.dumps(inner),
    }
    with NameServer() as names, RocketMQ(tmp_path / "store", names, options):
        (tmp_path / "root").mkdir()
        with console(names.address, tmp_path / "root", credentials=ACCOUNT) as client:
            client.create_topic("orders", 1)
            client.sends.send(Message("orders", b"x", {Property.DELAY: "18", Property.KEYS: "level"}))
            timer = {Property.TIMER_DELAY_MS: str(3 * HOUR_MS), Property.KEYS: "timer"}
            handle = client.sends.send(Message("orders", b"x", timer)).handle or ""
        with Administrator(GrpcServer("", names.address, account=ACCOUNT)) as administrator:
            administrator.create_user(viewer)
        with console(names.address, tmp_path, credentials=viewer.credentials) as client:
            found = pending(client, 2)
            state = client.delay_console.index_state()  # type: ignore[union-attr]
            [broker] = client.delay_console.brokers()  # type: ignore[union-attr]
            with pytest.raises(BrokerError) as refused:
                client.delayed.cancel(handle)
            still = pending(client, 2)

    assert [each.keys for each in found] == [each.keys for each in still] == ["level", "timer"]
    assert state is not None
    assert (state.is_complete, state.notes) == (True, ())  # the settings of a broker need no right
    assert broker.problem is None
    assert "permission" in str(refused.value).lower()
