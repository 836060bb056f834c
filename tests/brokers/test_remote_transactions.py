"""The producer's half of transactions on the wire: what is asked, and what is answered on which connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.message import HostAddress, Message, MessageExt, Property
from mqtemplate.record.layout import SysFlag
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.message import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from mqtemplate.remoting.protocol.messages import encode_message
from mqtemplate.results import TransactionState
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.scripted_cluster import ScriptedBroker

PATIENCE_S = 20
HOST = HostAddress("127.0.0.1", 10911)
ANYWHERE = HostAddress("127.0.0.1", 0)


class RecordingChannel:
    """Keeps what is sent over it."""

    remote = HOST

    def __init__(self) -> None:
        self._sent: SimpleQueue[RemotingCommand] = SimpleQueue()

    def send_one_way(self, request: RemotingCommand) -> None:
        self._sent.put(request)

    def next_end(self) -> tuple[RemotingCommand, EndTransactionRequestHeader]:
        request = self._sent.get(timeout=PATIENCE_S)
        return request, request.header(EndTransactionRequestHeader)

    def is_silent(self) -> bool:
        try:
            self._sent.get(timeout=0.05)
        except Empty:
            return True
        return False


def question(group: str, number: int = 0) -> RemotingCommand:
    """A broker asks about a half message."""
    half = MessageExt(
        topic="orders", body=b"x", properties={Property.PRODUCER_GROUP: group, Property.UNIQ_KEY: f"ID{number}"},
        broker_name="broker-a", queue_id=0, queue_offset=0, physical_offset=500, store_size=0, sys_flag=0, body_crc=0,
        born_timestamp=0, born_host=HOST, store_timestamp=0, store_host=HOST, reconsume_times=0,
        prepared_transaction_offset=0,
    )  # fmt: skip
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
    with ScriptedBroker() as cluster, RemoteBroker(RemoteSettings(name_servers=(cluster.address,))) as broker:
        yield broker


def ask(broker: RemoteBroker, channel: RecordingChannel, request: RemotingCommand) -> None:
    link = broker._link
    assert link is not None
    link.transactions.on_check(channel, request)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "bits"),
    [
        (TransactionState.COMMIT, SysFlag.TRANSACTION_COMMIT),
        (TransactionState.ROLLBACK, SysFlag.TRANSACTION_ROLLBACK),
        (TransactionState.UNKNOWN, 0),
    ],
)
def test_a_question_is_answered_on_its_own_connection(broker: RemoteBroker, state: TransactionState, bits: int) -> None:
    """By the offsets that the broker said, since it may have stored the half message anew."""
    channel = RecordingChannel()
    broker.check_transactions("shop", lambda message: state)

    ask(broker, channel, question("shop"))
    request, header = channel.next_end()

    assert (request.code, request.is_one_way) == (RequestCode.END_TRANSACTION, True)
    assert (header.producer_group, header.commit_or_rollback, header.from_transaction_check) == ("shop", bits, True)
    assert (header.tran_state_table_offset, header.commit_log_offset) == (7, 500)
    assert (header.msg_id, header.transaction_id) == ("ID0", "ID0")


def test_a_check_that_fails_counts_as_unknown_and_says_why(broker: RemoteBroker) -> None:
    def fail(message: MessageExt) -> TransactionState:
        raise ValueError("no database")

    channel = RecordingChannel()
    broker.check_transactions("shop", fail)

    ask(broker, channel, question("shop"))
    request, header = channel.next_end()

    assert header.commit_or_rollback == 0
    assert request.remark == "checkLocalTransactionState raised ValueError: no database"


def test_a_question_for_a_group_that_nobody_answers_for_is_left_open(broker: RemoteBroker) -> None:
    channel = RecordingChannel()

    ask(broker, channel, question("shop"))

    assert channel.is_silent()


def test_no_more_questions_wait_than_may(broker: RemoteBroker) -> None:
    """The one too many is left open; its broker asks again."""
    channel, begun, go_on = RecordingChannel(), threading.Event(), threading.Event()

    def slow(message: MessageExt) -> TransactionState:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return TransactionState.COMMIT

    broker.check_transactions("shop", slow, threads=1, max_waiting=1)
    ask(broker, channel, question("shop", 1))
    assert begun.wait(PATIENCE_S)
    ask(broker, channel, question("shop", 2))
    ask(broker, channel, question("shop", 3))
    go_on.set()

    answered = {channel.next_end()[1].msg_id for _ in range(2)}
    assert answered == {"ID1", "ID2"}
    assert channel.is_silent()


def test_a_checker_that_was_closed_leaves_the_client_s_own_group_registered(tmp_path: Path) -> None:
    """Replies find their way by it."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    with LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE)) as cluster:
        settings = RemoteSettings(name_servers=(str(cluster.address),), producer_group="shop", offset_path=tmp_path)
        with RemoteBroker(settings) as broker:
            broker.check_transactions("shop", lambda message: TransactionState.COMMIT).close()
            where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
            spec = ConsumerSpec(group="answers", subscriptions={"asks": TagSelector()}, consume_from_where=where)
            broker.create_topic("asks", 1)
            member = broker.subscribe(spec)

            future = broker.request(Message("asks", b"?"), None, PATIENCE_S * 1_000)
            [request] = member.poll(1, PATIENCE_S * 1_000)
            broker.reply(request, b"!")

            assert future.result(PATIENCE_S).body == b"!"
