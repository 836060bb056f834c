"""Transaction checks: the answer to each check, on the connection of the check."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from mqtemplate.brokers import RemoteBroker
from mqtemplate.message import HostAddress, Message, MessageExt, Property
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.message import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from mqtemplate.results import TransactionState
from tests.brokers.remote.clients import client, join, message_ext, remote, server, take
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.remoting.protocol.other_side import encode_message
from tests.waiting import PATIENCE_S

HOST = HostAddress("127.0.0.1", 10911)


class RecordingChannel:
    """Records the requests that are sent over it."""

    remote = HOST

    def __init__(self) -> None:
        self._sent: SimpleQueue[RemotingCommand] = SimpleQueue()

    def send_one_way(self, request: RemotingCommand) -> None:
        self._sent.put(request)

    def next_end(self) -> tuple[RemotingCommand, EndTransactionRequestHeader]:
        request = self._sent.get(timeout=PATIENCE_S)
        return request, request.header(EndTransactionRequestHeader)

    def is_unused(self) -> bool:
        try:
            self._sent.get(timeout=0.05)
        except Empty:
            return True
        return False


def check_request(group: str, number: int = 0) -> RemotingCommand:
    """Return a broker's check of a half message."""
    properties = {Property.PRODUCER_GROUP: group, Property.UNIQ_KEY: f"ID{number}"}
    half = message_ext(properties=properties, physical_offset=500, store_size=0)
    header = CheckTransactionStateRequestHeader(
        topic="RMQ_SYS_TRANS_HALF_TOPIC",
        tran_state_table_offset=7,
        commit_log_offset=500,
        transaction_id=f"ID{number}",
        broker_name="broker-a",
    )
    return RemotingCommand.request(RequestCode.CHECK_TRANSACTION_STATE, header, encode_message(half), one_way=True)


@pytest.fixture
def broker() -> Iterator[RemoteBroker]:
    with ScriptedBroker() as cluster, remote(cluster) as broker:
        yield broker


def check(broker: RemoteBroker, channel: RecordingChannel, request: RemotingCommand) -> None:
    broker._client.transactions.on_check(channel, request)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "bits"),
    [
        (TransactionState.COMMIT, SysFlag.TRANSACTION_COMMIT),
        (TransactionState.ROLLBACK, SysFlag.TRANSACTION_ROLLBACK),
        (TransactionState.UNKNOWN, 0),
    ],
)
def test_a_check_is_answered_on_its_connection(broker: RemoteBroker, state: TransactionState, bits: int) -> None:
    """It repeats the offsets of the check: the broker may have stored the half message again."""
    channel = RecordingChannel()
    broker.transactions.check_transactions("shop", lambda message: state)

    check(broker, channel, check_request("shop"))
    request, header = channel.next_end()

    assert (request.code, request.is_one_way) == (RequestCode.END_TRANSACTION, True)
    assert (header.producer_group, header.commit_or_rollback, header.from_transaction_check) == ("shop", bits, True)
    assert (header.tran_state_table_offset, header.commit_log_offset) == (7, 500)
    assert (header.msg_id, header.transaction_id) == ("ID0", "ID0")


def test_a_failed_check_is_answered_with_unknown_and_the_exception(broker: RemoteBroker) -> None:
    def fail(message: MessageExt) -> TransactionState:
        raise ValueError("no database")

    channel = RecordingChannel()
    broker.transactions.check_transactions("shop", fail)

    check(broker, channel, check_request("shop"))
    request, header = channel.next_end()

    assert header.commit_or_rollback == 0
    assert request.remark == "checkLocalTransactionState raised ValueError: no database"


def test_a_check_for_a_group_without_a_checker_is_not_answered(broker: RemoteBroker) -> None:
    channel = RecordingChannel()

    check(broker, channel, check_request("shop"))

    assert channel.is_unused()


def test_a_check_beyond_the_limit_is_not_answered(broker: RemoteBroker) -> None:
    """The broker repeats it."""
    channel, started, may_end = RecordingChannel(), threading.Event(), threading.Event()

    def slow(message: MessageExt) -> TransactionState:
        started.set()
        assert may_end.wait(PATIENCE_S)
        return TransactionState.COMMIT

    broker.transactions.check_transactions("shop", slow, threads=1, max_waiting=1)
    check(broker, channel, check_request("shop", 1))
    assert started.wait(PATIENCE_S)
    check(broker, channel, check_request("shop", 2))
    check(broker, channel, check_request("shop", 3))
    may_end.set()

    answered = {channel.next_end()[1].msg_id for _ in range(2)}
    assert answered == {"ID1", "ID2"}
    assert channel.is_unused()


def test_the_client_s_own_group_stays_registered_when_its_checker_is_closed(tmp_path: Path) -> None:
    """Brokers route replies by it."""
    with server() as cluster, client(cluster.address, tmp_path, producer_group="shop") as broker:
        broker.transactions.check_transactions("shop", lambda message: TransactionState.COMMIT).close()
        broker.create_topic("requests", 1)
        member = join(broker, "requests")

        future = broker.requests.request(Message("requests", b"?"), None, PATIENCE_S * 1_000)
        [request] = take(member, 1)
        broker.requests.reply(request, b"!")

        assert future.result(PATIENCE_S).body == b"!"
