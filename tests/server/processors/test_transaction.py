"""Transactions of remote producers: ends, and checks of transactions that were not ended."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from mqtemplate.message import MessageExt, parse_offset_msg_id
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.codes import FLAG_ONE_WAY
from mqtemplate.remoting.protocol.headers.message import (
    CheckTransactionStateRequestHeader,
    EndTransactionRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.results import TransactionState
from tests.server.serving import RecordingConnection, Serving

UNKNOWN, COMMIT, ROLLBACK = 0, 8, 12


def send_half(serving: Serving, body: bytes = b"half", **properties: str) -> SendMessageResponseHeader:
    """Send a half message like Java's ``TransactionMQProducer``, and return the header of the response."""
    marked = {"TRAN_MSG": "true", "PGROUP": "producers", "UNIQ_KEY": "0A0B", **properties}
    response = serving.send("orders", body, marked, sys_flag=4, queue_id=1)
    assert response is not None
    assert response.code == ResponseCode.SUCCESS
    return response.header(SendMessageResponseHeader)


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
    at = parse_offset_msg_id(sent.msg_id)[1] if physical_offset is None else physical_offset
    header = EndTransactionRequestHeader(
        producer_group=group,
        tran_state_table_offset=sent.queue_offset,
        commit_log_offset=at,
        commit_or_rollback=state,
        msg_id="0A0B",
        transaction_id="0A0B",
    )
    return serving.request(RequestCode.END_TRANSACTION, header, one_way=one_way)


def checks(connection: RecordingConnection) -> list[tuple[CheckTransactionStateRequestHeader, MessageExt]]:
    """Return the transaction checks that the producer received."""
    found = []
    for pushed in connection.pushed:
        if pushed.code == RequestCode.CHECK_TRANSACTION_STATE:
            [message] = decode_messages(pushed.body, "broker-a")
            found.append((pushed.header(CheckTransactionStateRequestHeader), message))
    return found


def test_a_committed_message_is_delivered(serving: Serving) -> None:
    sent = send_half(serving)
    before = serving.read("orders", queue_id=1)

    end(serving, sent, COMMIT)

    [message] = serving.read("orders", queue_id=1)
    assert before == []
    assert (message.body, message.transaction_id) == (b"half", "0A0B")
    assert message.properties["PGROUP"] == "producers"


def test_a_rolled_back_message_is_never_delivered(serving: Serving) -> None:
    end(serving, send_half(serving), ROLLBACK)
    serving.advance(600_000)

    assert serving.read("orders", queue_id=1) == []
    assert serving.engine.engine.transactions.open_count == 0


def test_a_two_way_end_gets_a_response_when_it_is_durable(serving: Serving) -> None:
    response = end(serving, send_half(serving), COMMIT, one_way=False)

    assert response is not None
    assert response.code == ResponseCode.SUCCESS


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
        ({"group": "others"}, "belongs to producer group 'producers'"),
        ({"physical_offset": 7}, "is at physical offset"),
        ({"state": 3}, "commitOrRollback must be 0 (unknown), 8 (commit) or 12 (rollback), got 3"),
    ],
)
def test_an_invalid_end_is_refused_and_logged(serving: Serving, options: dict[str, int], remark: str) -> None:
    sent = send_half(serving)

    response = end(serving, sent, options.pop("state", COMMIT), one_way=False, **options)  # type: ignore[arg-type]

    assert response is not None
    assert response.code == ResponseCode.SYSTEM_ERROR
    assert remark in (response.remark or "")
    assert serving.engine.engine.transactions.open_count == 1


def test_a_one_way_end_that_is_refused_is_logged(serving: Serving) -> None:
    """Its producer receives no response."""
    with capture_logs() as logs:
        end(serving, send_half(serving), COMMIT, group="others")

    [entry] = [entry for entry in logs if entry["event"] == "server.end_refused"]
    assert (entry["group"], entry["msg_id"]) == ("others", "0A0B")


def test_a_producer_of_the_group_receives_the_check(serving: Serving) -> None:
    """The message has the real topic, the header has the offsets of the half message: Java's client expects both."""
    serving.heartbeat("", producers=["producers"])
    sent = send_half(serving, TAGS="paid")

    serving.advance(6_000)

    [(header, message)] = checks(serving.connection)
    [pushed] = serving.connection.pushed
    half = serving.engine.store.read_at(header.commit_log_offset)
    assert half is not None
    assert pushed.flag == FLAG_ONE_WAY
    assert (header.msg_id, header.transaction_id, header.topic) == ("0A0B", "0A0B", "RMQ_SYS_TRANS_HALF_TOPIC")
    assert header.tran_state_table_offset == half.queue_offset > (sent.queue_offset or 0)
    assert parse_offset_msg_id(header.offset_msg_id or "")[1] == half.physical_offset
    assert (message.topic, message.queue_id, message.body, message.tags) == ("orders", 1, b"half", "paid")
    assert message.properties["PGROUP"] == "producers"


def test_the_response_to_a_check_ends_the_transaction(serving: Serving) -> None:
    serving.heartbeat("", producers=["producers"])
    send_half(serving)
    serving.advance(6_000)
    [(header, _)] = checks(serving.connection)

    response = EndTransactionRequestHeader(
        producer_group="producers",
        tran_state_table_offset=header.tran_state_table_offset,
        commit_log_offset=header.commit_log_offset,
        commit_or_rollback=COMMIT,
        from_transaction_check=True,
        msg_id="0A0B",
    )
    serving.request(RequestCode.END_TRANSACTION, response, one_way=True)
    serving.advance(120_000)

    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]
    assert len(checks(serving.connection)) == 1


def test_an_end_after_a_check_is_accepted(serving: Serving) -> None:
    """The local transaction took a minute, and the broker checked it in that time."""
    serving.heartbeat("", producers=["producers"])
    sent = send_half(serving)
    serving.advance(60_000)

    end(serving, sent, COMMIT)
    serving.advance(600_000)

    assert len(checks(serving.connection)) == 2
    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]


def test_a_producer_that_connects_receives_the_deferred_checks_at_once(serving: Serving) -> None:
    send_half(serving)
    serving.advance(6_000)

    serving.heartbeat("", producers=["producers"])
    serving.advance(1)

    assert len(checks(serving.connection)) == 1


def test_after_a_producer_disconnected_another_one_receives_the_checks(serving: Serving) -> None:
    closed, connected = RecordingConnection(), RecordingConnection()
    serving.heartbeat("", producers=["producers"], over=closed, client_id="a")
    serving.heartbeat("", producers=["producers"], over=connected, client_id="b")
    closed.is_open = False
    send_half(serving)

    serving.advance(40_000)

    assert checks(closed) == []
    assert len(checks(connected)) == 2


def test_a_producer_group_of_this_process_is_checked_here(serving: Serving) -> None:
    """The half message may come from a remote producer of the same group."""
    checked: list[MessageExt] = []

    def check(message: MessageExt) -> TransactionState:
        checked.append(message)
        return TransactionState.COMMIT

    serving.engine.check_transactions("producers", check)
    send_half(serving)

    serving.advance(6_000)

    assert [message.msg_id for message in checked] == ["0A0B"]
    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]


def test_without_a_producer_the_check_is_deferred_and_not_counted(serving: Serving) -> None:
    send_half(serving)
    serving.advance(3_600_000)

    serving.heartbeat("", producers=["producers"])
    serving.advance(30_000)

    assert [message.properties["TRANSACTION_CHECK_TIMES"] for _, message in checks(serving.connection)] == ["1"]
