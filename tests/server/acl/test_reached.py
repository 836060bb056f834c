"""Access control of what a request reaches: the topic of a stored message, a transaction, a client ID."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.message import Message, parse_offset_msg_id
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    EndTransactionRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.server import Account, AclSettings, Right
from tests.server.serving import SECRET, RecordingConnection, Serving

COMMIT, ROLLBACK = 8, 12
NO_RIGHT = (
    "access key 'attacker' has no right SUB on the topic of the message at physical offset {} "
    "(36 CONSUMER_SEND_MSG_BACK)"
)
ACCOUNTS = (
    Account(
        access_key="shop-owner",
        secret_key=SECRET,
        topic_perms={"orders": Right.PUB, "invoices": Right.SUB},
        group_perms={"billing": Right.SUB},
    ),
    Account(
        access_key="attacker",
        secret_key=SECRET,
        topic_perms={"own": Right.PUB | Right.SUB},
        group_perms={"attackers": Right.SUB},
    ),
    Account(
        access_key="reads-nearly-all",
        secret_key=SECRET,
        default_topic_perm=Right.PUB | Right.SUB,
        default_group_perm=Right.SUB,
        topic_perms={"orders": Right.DENY},
    ),
)


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(acl=AclSettings(accounts=ACCOUNTS)) as serving:
        for topic in ("orders", "invoices", "own"):
            serving.engine.create_topic(topic, 1)
        yield serving


@pytest.fixture
def owner() -> RecordingConnection:
    return RecordingConnection(access_key="shop-owner")


@pytest.fixture
def attacker() -> RecordingConnection:
    return RecordingConnection(access_key="attacker")


# --- messages that are sent back ------------------------------------------------------------------------


def send_back(serving: Serving, over: RecordingConnection, group: str, physical_offset: int) -> RemotingCommand:
    header = ConsumerSendMsgBackRequestHeader(offset=physical_offset, group=group, delay_level=-1)
    response = serving.request(RequestCode.CONSUMER_SEND_MSG_BACK, header, over=over)
    assert response is not None
    return response


def stored_in(serving: Serving, topic: str, **properties: str) -> int:
    """Store a message and return its physical offset."""
    return parse_offset_msg_id(serving.engine.sends.send(Message(topic, b"secret", properties)).offset_msg_id)[1]


def test_a_message_is_sent_back_only_with_the_right_to_read_its_topic(
    serving: Serving, owner: RecordingConnection, attacker: RecordingConnection
) -> None:
    """The copy is in the retry or dead letter topic of the group, and the account may read that one."""
    at = stored_in(serving, "invoices")

    refused = send_back(serving, attacker, "attackers", at)
    permitted = send_back(serving, owner, "billing", at)

    assert (refused.code, refused.remark) == (
        ResponseCode.NO_PERMISSION,
        NO_RIGHT.format(at),
    )
    assert permitted.code == ResponseCode.SUCCESS
    assert [topic for topic in serving.engine.store.topic_ends() if topic.startswith("%DLQ%")] == ["%DLQ%billing"]


def test_a_retried_message_is_sent_back_with_the_right_to_its_group(
    serving: Serving, owner: RecordingConnection, attacker: RecordingConnection
) -> None:
    serving.engine.create_topic("%RETRY%billing", 1)
    at = stored_in(serving, "%RETRY%billing")

    assert send_back(serving, owner, "billing", at).code == ResponseCode.SUCCESS
    assert send_back(serving, attacker, "attackers", at).code == ResponseCode.NO_PERMISSION


def test_a_delayed_message_is_not_read_by_sending_it_back(serving: Serving) -> None:
    """It is stored in a topic of the broker, to which default rights do not apply."""
    at = stored_in(serving, "orders", DELAY="18")

    response = send_back(serving, RecordingConnection(access_key="reads-nearly-all"), "any", at)

    assert response.code == ResponseCode.NO_PERMISSION


def test_default_rights_do_not_open_the_topics_of_the_broker(serving: Serving) -> None:
    """They contain delayed messages and half messages of all topics, of denied ones too."""
    reader = RecordingConnection(access_key="reads-nearly-all")
    topics = ["SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC", "%DLQ%SCHEDULE", "invoices"]
    stored_in(serving, "orders", DELAY="18")

    responses = [serving.pull("any", topic, over=reader) for topic in topics]

    refused = [response is not None and response.code == ResponseCode.NO_PERMISSION for response in responses]
    assert refused == [True, True, True, True, False]


# --- transactions ---------------------------------------------------------------------------------------


def send_half(serving: Serving, over: RecordingConnection) -> SendMessageResponseHeader:
    properties = {"TRAN_MSG": "true", "PGROUP": "producers", "UNIQ_KEY": "0A0B"}
    response = serving.send("orders", b"secret", properties, sys_flag=4, over=over)
    assert response is not None
    return response.header(SendMessageResponseHeader)


def end(
    serving: Serving, over: RecordingConnection, sent: SendMessageResponseHeader, state: int, topic: str | None = None
) -> RemotingCommand:
    header = EndTransactionRequestHeader(
        topic=topic,
        producer_group="producers",
        tran_state_table_offset=sent.queue_offset,
        commit_log_offset=parse_offset_msg_id(sent.msg_id)[1],
        commit_or_rollback=state,
        msg_id="0A0B",
    )
    response = serving.request(RequestCode.END_TRANSACTION, header, over=over)
    assert response is not None
    return response


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("topic", [None, "own"])
def test_a_transaction_ends_only_with_the_right_to_send_to_its_topic(
    serving: Serving, owner: RecordingConnection, attacker: RecordingConnection, state: int, topic: str | None
) -> None:
    """The request of an older client names no topic, and that of an attacker another one."""
    sent = send_half(serving, owner)

    refused = end(serving, attacker, sent, state, topic)
    still_open = serving.engine.engine.transactions.open_count
    permitted = end(serving, owner, sent, state)

    assert (refused.code, refused.remark) == (
        ResponseCode.NO_PERMISSION,
        "access key 'attacker' has no right PUB on the topic of half message 0 (37 END_TRANSACTION)",
    )
    assert (still_open, permitted.code, serving.engine.engine.transactions.open_count) == (1, ResponseCode.SUCCESS, 0)


def test_a_half_message_is_sent_only_to_producers_that_may_send_to_its_topic(
    serving: Serving, owner: RecordingConnection, attacker: RecordingConnection
) -> None:
    """Any account may join a producer group: a check contains the body of the half message."""
    serving.heartbeat("", producers=["producers"], over=attacker, client_id="attacker@1")
    send_half(serving, owner)
    serving.advance(60_000)
    before = checks(attacker)

    serving.heartbeat("", producers=["producers"], over=owner, client_id="owner@1")
    serving.advance(60_000)

    assert (before, checks(attacker)) == (0, 0)
    assert checks(owner) > 0


def checks(connection: RecordingConnection) -> int:
    return sum(pushed.code == RequestCode.CHECK_TRANSACTION_STATE for pushed in connection.pushed)


# --- client IDs -----------------------------------------------------------------------------------------


def reply(serving: Serving, over: RecordingConnection) -> None:
    properties = {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "requester@1", "TTL": "3000"}
    serving.send("DefaultCluster_REPLY_TOPIC", b"secret", properties, code=RequestCode.SEND_REPLY_MESSAGE_V2, over=over)


def replies(connection: RecordingConnection) -> int:
    return sum(pushed.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT for pushed in connection.pushed)


def test_a_client_id_belongs_to_one_account_while_its_client_is_connected(
    serving: Serving, owner: RecordingConnection, attacker: RecordingConnection
) -> None:
    """A reply goes to the latest connection of a client ID."""
    serving.heartbeat("", producers=["requesters"], over=owner, client_id="requester@1")

    taken = serving.heartbeat("", producers=["requesters"], over=attacker, client_id="requester@1")
    reply(serving, owner)

    assert (taken.code, taken.remark) == (
        ResponseCode.NO_PERMISSION,
        "client ID 'requester@1' is in use by another account; give this client another instance name",
    )
    assert (replies(owner), replies(attacker)) == (1, 0)


def test_a_client_reconnects_with_its_id_while_its_old_connection_seems_open(
    serving: Serving, owner: RecordingConnection
) -> None:
    again = RecordingConnection(access_key="shop-owner")
    serving.heartbeat("", producers=["requesters"], over=owner, client_id="requester@1")

    response = serving.heartbeat("", producers=["requesters"], over=again, client_id="requester@1")

    assert response.code == ResponseCode.SUCCESS


def test_a_client_id_is_released_when_all_its_connections_are_closed(
    serving: Serving, owner: RecordingConnection, attacker: RecordingConnection
) -> None:
    second = RecordingConnection(access_key="shop-owner")
    codes = []
    for connection in (owner, second):
        serving.heartbeat("", producers=["requesters"], over=connection, client_id="requester@1")
    for connection in (owner, second):
        serving.disconnect(connection)
        codes.append(serving.heartbeat("", producers=["x"], over=attacker, client_id="requester@1").code)

    assert codes == [ResponseCode.NO_PERMISSION, ResponseCode.SUCCESS]


def test_one_connection_has_a_limited_number_of_client_ids(serving: Serving, owner: RecordingConnection) -> None:
    for number in range(256):
        serving.heartbeat("", producers=["x"], over=owner, client_id=f"client@{number}")

    known = serving.heartbeat("", producers=["x"], over=owner, client_id="client@0")
    one_more = serving.heartbeat("", producers=["x"], over=owner, client_id="client@256")

    assert known.code == ResponseCode.SUCCESS
    assert (one_more.code, one_more.remark) == (
        ResponseCode.SYSTEM_BUSY,
        "one connection may have 256 client IDs; open another connection",
    )


def test_without_access_control_client_ids_are_not_bound() -> None:
    with Serving() as serving:
        first = serving.heartbeat("", producers=["x"], over=RecordingConnection(), client_id="client@1")
        second = serving.heartbeat("", producers=["x"], over=RecordingConnection(), client_id="client@1")

    assert (first.code, second.code) == (ResponseCode.SUCCESS, ResponseCode.SUCCESS)
