"""Transactions of remote producers: ends, and checks of transactions that were not ended."""

from __future__ import annotations

from structlog.testing import capture_logs

from mqtemplate.message import MessageExt, parse_offset_msg_id
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import (
    EndTransactionRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.results import TransactionState
from tests.server.serving import Serving

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


def test_a_one_way_end_that_is_refused_is_logged(serving: Serving) -> None:
    """Its producer receives no response."""
    with capture_logs() as logs:
        end(serving, send_half(serving), COMMIT, group="others")

    [entry] = [entry for entry in logs if entry["event"] == "server.end_refused"]
    assert (entry["group"], entry["msg_id"]) == ("others", "0A0B")


def test_a_producer_group_of_this_process_is_checked_here(serving: Serving) -> None:
    """The half message may come from a remote producer of the same group."""
    checked: list[MessageExt] = []

    def check(message: MessageExt) -> TransactionState:
        checked.append(message)
        return TransactionState.COMMIT

    serving.engine.transactions.check_transactions("producers", check)
    send_half(serving)

    serving.advance(6_000)

    assert [message.msg_id for message in checked] == ["0A0B"]
    assert [message.body for message in serving.read("orders", queue_id=1)] == [b"half"]
