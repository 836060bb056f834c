"""Remote producers end their transactions, and are asked about the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from mqtemplate.message import MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.codes import FLAG_ONE_WAY
from mqtemplate.remoting.protocol.headers.message import (
    CheckTransactionStateRequestHeader,
    EndTransactionRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_messages, decode_offset_msg_id
from mqtemplate.results import TransactionState
from tests.server.serving import RecordingConnection, Serving

UNKNOWN, COMMIT, ROLLBACK = 0, 8, 12


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving


def send_half(serving: Serving, body: bytes = b"half", **properties: str) -> SendMessageResponseHeader:
    """As Java's ``TransactionMQProducer``: gives the header of the answer."""
    marked = {"TRAN_MSG": "true", "PGROUP": "producers", "UNIQ_KEY": "0A0B", **properties}
    answer = serving.send("orders", body, marked, sys_flag=4, queue_id=1)
    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS
    return answer.header(SendMessageResponseHeader)


def end(
    serving: Serving,
    sent: SendMessageResponseHeader,
    state: int,
    *,
    group: str = "producers",
    one_way: bool = True,
    physical_offset: int | None = None,
) -> RemotingCommand | None:
    assert sent.queue_offset is not None
    at = decode_offset_msg_id(sent.msg_id)[1] if physical_offset is None else physical_offset
    header = EndTransactionRequestHeader(
        producer_group=group,
        tran_state_table_offset=sent.queue_offset,
        commit_log_offset=at,
        commit_or_rollback=state,
        msg_id="0A0B",
        transaction_id="0A0B",
    )
    return serving.ask(RequestCode.END_TRANSACTION, header, one_way=one_way)


def questions(connection: RecordingConnection) -> list[tuple[CheckTransactionStateRequestHeader, MessageExt]]:
    found = []
    for pushed in connection.pushed:
        if pushed.code == RequestCode.CHECK_TRANSACTION_STATE:
            [message] = decode_messages(pushed.body, "broker-a")
            found.append((pushed.header(CheckTransactionStateRequestHeader), message))
    return found


def test_a_commit_delivers(serving: Serving) -> None:
    sent = send_half(serving)
    before = serving.read("orders", queue_id=1)

    end(serving, sent, COMMIT)

    [message] = serving.read("orders", queue_id=1)
    assert before == []
    assert (message.body, message.transaction_id) == (b"half", "0A0B")
    assert message.properties["PGROUP"] == "producers"


def test_a_rollback_drops(serving: Serving) -> None:
    end(serving, send_half(serving), ROLLBACK)
    serving.advance(600_000)

    assert serving.read("orders", queue_id=1) == []
    assert serving.engine.transactions.open_count == 0


def test_who_wants_an_answer_gets_it_when_the_end_is_safe(serving: Serving) -> None:
    answer = end(serving, send_half(serving), COMMIT, one_way=False)

    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS


def test_a_delay_counts_from_the_commit(serving: Serving) -> None:
    sent = send_half(serving, DELAY="2")
    serving.advance(60_000)

    end(serving, sent, COMMIT)
    serving.advance(4_000)
    before = serving.read("orders", queue_id=1)
    serving.advance(1_000)

    assert before == []
    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        ({"group": "thieves"}, "belongs to producer group 'producers'"),
        ({"physical_offset": 7}, "is at physical offset"),
        ({"state": 3}, "commitOrRollback is 3; it is 0 for unknown, 8 to commit, 12 to roll back"),
    ],
)
def test_a_wrong_end_is_refused_and_logged(serving: Serving, options: dict[str, int], remark: str) -> None:
    sent = send_half(serving)

    answer = end(serving, sent, options.pop("state", COMMIT), one_way=False, **options)  # type: ignore[arg-type]

    assert answer is not None
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert remark in (answer.remark or "")
    assert serving.engine.transactions.open_count == 1


def test_a_one_way_end_that_is_refused_is_logged(serving: Serving) -> None:
    """Its sender hears nothing."""
    with capture_logs() as logs:
        end(serving, send_half(serving), COMMIT, group="thieves")

    [entry] = [entry for entry in logs if entry["event"] == "server.end_refused"]
    assert (entry["group"], entry["msg_id"]) == ("thieves", "0A0B")


def test_a_producer_of_the_group_is_asked(serving: Serving) -> None:
    """The message is for the real topic, the places are those of the half message, as Java's client takes them."""
    serving.heartbeat("", producers=["producers"])
    sent = send_half(serving, TAGS="paid")

    serving.advance(6_000)

    [(header, message)] = questions(serving.connection)
    [pushed] = serving.connection.pushed
    half = serving.engine.store.read_at(header.commit_log_offset)
    assert half is not None
    assert pushed.flag == FLAG_ONE_WAY
    assert (header.msg_id, header.transaction_id, header.topic) == ("0A0B", "0A0B", "RMQ_SYS_TRANS_HALF_TOPIC")
    assert header.tran_state_table_offset == half.queue_offset > (sent.queue_offset or 0)
    assert decode_offset_msg_id(header.offset_msg_id or "")[1] == half.physical_offset
    assert (message.topic, message.queue_id, message.body, message.tags) == ("orders", 1, b"half", "paid")
    assert message.properties["PGROUP"] == "producers"


def test_the_answer_to_a_question_ends_the_transaction(serving: Serving) -> None:
    serving.heartbeat("", producers=["producers"])
    send_half(serving)
    serving.advance(6_000)
    [(header, _)] = questions(serving.connection)

    answer = EndTransactionRequestHeader(
        producer_group="producers",
        tran_state_table_offset=header.tran_state_table_offset,
        commit_log_offset=header.commit_log_offset,
        commit_or_rollback=COMMIT,
        from_transaction_check=True,
        msg_id="0A0B",
    )
    serving.ask(RequestCode.END_TRANSACTION, answer, one_way=True)
    serving.advance(120_000)

    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]
    assert len(questions(serving.connection)) == 1


def test_a_late_end_by_the_first_answer_counts(serving: Serving) -> None:
    """The local transaction took a minute, and the producer was asked meanwhile."""
    serving.heartbeat("", producers=["producers"])
    sent = send_half(serving)
    serving.advance(60_000)

    end(serving, sent, COMMIT)
    serving.advance(600_000)

    assert len(questions(serving.connection)) == 2
    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]


def test_who_comes_late_is_asked_at_once_about_what_nobody_could_be_asked(serving: Serving) -> None:
    send_half(serving)
    serving.advance(6_000)

    serving.heartbeat("", producers=["producers"])
    serving.advance(1)

    assert len(questions(serving.connection)) == 1


def test_another_producer_of_the_group_is_asked_when_one_is_gone(serving: Serving) -> None:
    gone, there = RecordingConnection(), RecordingConnection()
    serving.heartbeat("", producers=["producers"], over=gone, client_id="a")
    serving.heartbeat("", producers=["producers"], over=there, client_id="b")
    gone.is_open = False
    send_half(serving)

    serving.advance(40_000)

    assert questions(gone) == []
    assert len(questions(there)) == 2


def test_a_group_of_this_process_is_asked_here(serving: Serving) -> None:
    """Embedded and remote producers side by side."""
    asked: list[MessageExt] = []

    def check(message: MessageExt) -> TransactionState:
        asked.append(message)
        return TransactionState.COMMIT

    serving.engine.check_transactions("producers", check)
    send_half(serving)

    serving.advance(6_000)

    assert [message.msg_id for message in asked] == ["0A0B"]
    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]


def test_without_a_producer_the_question_waits(serving: Serving) -> None:
    send_half(serving)
    serving.advance(3_600_000)

    serving.heartbeat("", producers=["producers"])
    serving.advance(30_000)

    assert [message.properties["TRANSACTION_CHECK_TIMES"] for _, message in questions(serving.connection)] == ["1"]
