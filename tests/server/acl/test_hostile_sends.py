"""Sends of one account with everything that has a meaning inside a broker: nothing of it is stored, in any form.

A crash is a copy of the folder while the server runs: the files that a SIGKILL would leave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.recall_handle import decode_handle, encode_handle
from mqtemplate.message import INTERNAL_PROPERTIES, ORIGIN_PROPERTIES, Message, Property, parse_offset_msg_id
from mqtemplate.pending import PendingQuery
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.own_requests import SendSequencedResponseHeader
from mqtemplate.remoting.protocol.headers.message import (
    EndTransactionRequestHeader,
    SendMessageRequestHeader,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import encode_batch
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, Right
from tests.server.acl.crashes import SMALL, after_a_crash
from tests.server.serving import SECRET, RecordingConnection, Serving
from tests.server.tool import send_header

ACCOUNTS = (
    Account(
        access_key="their-owner",
        secret_key=SECRET,
        topic_perms={"theirs": Right.PUB | Right.SUB},
        group_perms={"their-group": Right.SUB},
    ),
    Account(
        access_key="attacker",
        secret_key=SECRET,
        topic_perms={"mine": Right.PUB | Right.SUB},
        group_perms={"my-group": Right.SUB},
    ),
)
GARBAGE = ("garbage", "-1", "9" * 5_000, "\N{BELL}[2J", "query 1 0 99", "theirs")
INTERNAL = sorted(INTERNAL_PROPERTIES - {"TIMER_DEL_UNIQKEY"})
BITS = [1 << bit for bit in range(31)] + [-(1 << 31), -1]


class Attack:
    """A server on a folder, and the requests of an account that has rights on its own topic and group only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.serving = Serving(
            engine=EmbeddedBroker(folder / "store", SMALL, VirtualClock()), acl=AclSettings(accounts=ACCOUNTS)
        )
        self.attacker = RecordingConnection(access_key="attacker")
        self.owner = RecordingConnection(access_key="their-owner")
        self.serving.server.load()
        for topic in ("theirs", "mine"):
            self.serving.engine.create_topic(topic, 1)

    def records(self, topic: str) -> list[StoredRecord]:
        """Return what is stored in queue 0 of a topic."""
        return records_of(self.serving.engine, topic)

    def crash(self) -> EmbeddedBroker:
        return after_a_crash(self.folder / "store", self.serving.clock.now_ms())


def records_of(broker: EmbeddedBroker, topic: str) -> list[StoredRecord]:
    units = broker.store.consume_queue(topic, 0).unit_tuples(0, 10_000)
    return [broker.store.read(offset, size) for offset, size, _ in units]


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Attack]:
    attack = Attack(tmp_path)
    yield attack
    attack.serving.engine.close()


# --- forms of a send ------------------------------------------------------------------------------------

Send = Callable[[Attack, dict[str, str], int], RemotingCommand | None]


def single(attack: Attack, properties: dict[str, str], sys_flag: int) -> RemotingCommand | None:
    return attack.serving.send("mine", b"x", properties, over=attack.attacker, sys_flag=sys_flag)


def long_names(attack: Attack, properties: dict[str, str], sys_flag: int) -> RemotingCommand | None:
    header = send_header("mine", properties=properties, kind=SendMessageRequestHeader, sys_flag=sys_flag)
    return attack.serving.request(RequestCode.SEND_MESSAGE, header, b"x", over=attack.attacker)


def one_way(attack: Attack, properties: dict[str, str], sys_flag: int) -> RemotingCommand | None:
    return attack.serving.send("mine", b"x", properties, over=attack.attacker, sys_flag=sys_flag, one_way=True)


def batch(attack: Attack, properties: dict[str, str], sys_flag: int) -> RemotingCommand | None:
    body = encode_batch([Message("mine", b"x", properties)] * 9)
    fields: dict[str, Any] = {"batch": True, "sys_flag": sys_flag}
    return attack.serving.send(
        "mine", body, properties, code=RequestCode.SEND_BATCH_MESSAGE, over=attack.attacker, **fields
    )


def sequenced(attack: Attack, properties: dict[str, str], sys_flag: int) -> RemotingCommand | None:
    sequenced.version += 1  # type: ignore[attr-defined]
    message = Message("mine", b"x", properties)
    return attack.serving.send_sequenced(message, over=attack.attacker, version=sequenced.version)  # type: ignore[attr-defined]


sequenced.version = 0  # type: ignore[attr-defined]


def half(attack: Attack, properties: dict[str, str], sys_flag: int) -> RemotingCommand | None:
    own = {"TRAN_MSG": "true", "PGROUP": "my-group"}
    return attack.serving.send("mine", b"x", properties | own, over=attack.attacker, sys_flag=sys_flag)


def delayed(attack: Attack, properties: dict[str, str], sys_flag: int) -> RemotingCommand | None:
    delay = {"TIMER_DELAY_MS": "5000"}
    return attack.serving.send("mine", b"x", properties | delay, over=attack.attacker, sys_flag=sys_flag)


FORMS: tuple[Send, ...] = (single, long_names, one_way, batch, sequenced, half, delayed)
by_form = pytest.mark.parametrize("send", FORMS, ids=lambda send: send.__name__)


@by_form
def test_no_bit_and_no_internal_property_of_a_client_is_stored(attack: Attack, send: Send) -> None:
    """Each bit and each property with each kind of value. After a crash the store opens, with all messages.

    Bits of a transaction would hide a message from the recovery; `__SEQUENCE=garbage` would end each start.
    """
    for bit in BITS:
        send(attack, {"__SEQUENCE": "garbage", "KEYS": "k"}, bit)
    for name in INTERNAL:
        for value in GARBAGE:
            send(attack, {name: value}, SysFlag.SEQUENCED)
    attack.serving.advance(6_000)

    stored = attack.records("mine")
    assert len(stored) >= (0 if send is half else len(BITS) + len(INTERNAL) * len(GARBAGE))
    own = {"__SEQUENCE"} if send is sequenced else set()
    delays = {name for name in INTERNAL_PROPERTIES if name.startswith(("TIMER_", "REAL_"))} if send is delayed else {}
    for record in [*stored, *attack.records("RMQ_SYS_TRANS_HALF_TOPIC")]:
        names = INTERNAL_PROPERTIES & decode_properties(record.properties_bytes).keys()
        is_half = record.topic != "mine"
        assert names <= own.union(delays, {"REAL_TOPIC", "REAL_QID", "TRANSACTION_CHECK_TIMES"} if is_half else ())
        assert record.sys_flag & ~(SysFlag.OF_CLIENTS | (SysFlag.SEQUENCED if own else 0)) == 0
    with attack.crash() as broker:
        assert [each.body for each in records_of(broker, "mine")] == [each.body for each in stored]


@by_form
@pytest.mark.parametrize("name", sorted(ORIGIN_PROPERTIES))
def test_a_message_for_an_ordinary_topic_has_no_origin(attack: Attack, send: Send, name: str) -> None:
    send(attack, {name: "theirs"}, 0)
    attack.serving.advance(6_000)

    for record in [*attack.records("mine"), *attack.records("RMQ_SYS_TRANS_HALF_TOPIC")]:
        assert name not in decode_properties(record.properties_bytes)


@pytest.mark.parametrize("send", [single, long_names, batch, sequenced, half, delayed], ids=lambda send: send.__name__)
def test_a_delete_marker_of_a_client_is_refused(attack: Attack, send: Send) -> None:
    """Without its mark it would be delivered to consumers. The error says how a message is cancelled."""
    response = send(attack, {"TIMER_DEL_UNIQKEY": "theirs+0A0B", "UNIQ_KEY": "0A0B"}, 0)

    assert response is not None
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert response.remark == (
        "property TIMER_DEL_UNIQKEY is one that only brokers write; to cancel a delayed message, pass its handle to "
        "cancel (Java: recallMessage)"
    )


def test_what_describes_the_body_is_kept(attack: Attack) -> None:
    single(attack, {"TAGS": "t"}, 0x303)

    assert [record.sys_flag for record in attack.records("mine")] == [0x303]


def test_a_reply_has_no_internal_property(attack: Attack) -> None:
    serving, requester = attack.serving, attack.owner
    serving.heartbeat("", producers=["p"], over=requester, client_id="their@1")
    reply = {"MSG_TYPE": "reply", "CORRELATION_ID": "c", "REPLY_TO_CLIENT": "their@1"}
    forged = dict.fromkeys((*INTERNAL, *sorted(ORIGIN_PROPERTIES)), "theirs")

    code = RequestCode.SEND_REPLY_MESSAGE_V2
    serving.send("c_REPLY_TOPIC", b"x", reply | forged, code=code, over=attack.attacker, sys_flag=-2)

    [pushed] = requester.pushed
    words = set(pushed.ext_fields["properties"].replace("\2", "\1").split("\1"))
    assert not (INTERNAL_PROPERTIES | ORIGIN_PROPERTIES) & words
    assert pushed.ext_fields["sysFlag"] == str(SysFlag.OF_CLIENTS & -2)


def test_an_application_in_the_brokers_process_cannot_set_them_either(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "store", SMALL, VirtualClock()) as broker:
        broker.create_topic("mine", 1)
        forged = dict.fromkeys((*INTERNAL, *sorted(ORIGIN_PROPERTIES)), "garbage")
        broker.sends.send(Message("mine", b"x", forged))
        broker.sends.send_batch([Message("mine", b"x", forged)] * 20)
        broker.sends.send_one_way(Message("mine", b"x", forged))

        for record in records_of(broker, "mine"):
            assert decode_properties(record.properties_bytes).keys() == {"UNIQ_KEY"}


# --- sequenced sends ------------------------------------------------------------------------------------


def stored_and_repeated(response: RemotingCommand) -> tuple[int, int]:
    assert response.code == ResponseCode.SUCCESS, response
    answer = response.header(SendSequencedResponseHeader)
    return answer.stored, answer.repeated


def test_the_application_id_of_another_account_drops_none_of_its_rows(attack: Attack) -> None:
    """Otherwise the rows of the owner would be dropped as repeats, with a success response."""
    forged = attack.serving.send_sequenced(Message("mine", b"x"), over=attack.attacker, version=2**63 - 1)
    rows = [Message("theirs", b"row") for _ in range(3)]

    first = attack.serving.send_sequenced(*rows, over=attack.owner)
    again = attack.serving.send_sequenced(*rows, over=attack.owner)

    assert stored_and_repeated(forged) == (1, 0)
    assert (stored_and_repeated(first), stored_and_repeated(again)) == ((3, 0), (0, 3))


def test_each_account_has_its_numbers_after_a_crash(attack: Attack) -> None:
    attack.serving.send_sequenced(Message("theirs", b"row"), over=attack.owner)
    attack.serving.send_sequenced(Message("mine", b"x"), over=attack.attacker, version=9)

    with attack.crash() as broker:
        attack.serving.engine.close()
        attack.serving = Serving(engine=broker, acl=AclSettings(accounts=ACCOUNTS))
        attack.serving.server.load()
        repeated = attack.serving.send_sequenced(Message("theirs", b"row"), over=attack.owner)

        assert stored_and_repeated(repeated) == (0, 1)


def test_consumers_do_not_read_the_access_key_in_a_sequenced_message(attack: Attack) -> None:
    attack.serving.send_sequenced(Message("theirs", b"row"), over=attack.owner)

    assert b"their-owner" not in attack.records("theirs")[0].properties_bytes


def test_without_access_control_the_key_is_the_application_id(tmp_path: Path) -> None:
    """The table of an earlier version stays valid."""
    with Serving() as serving:
        serving.engine.create_topic("orders", 1)
        serving.send_sequenced(Message("orders", b"x"))

        assert (
            decode_properties(records_of(serving.engine, "orders")[0].properties_bytes)["__SEQUENCE"] == "query 1 0 0"
        )


@pytest.mark.parametrize("prefix", ["", "%RETRY%", "%DLQ%"])
def test_a_sequenced_send_creates_no_more_than_an_ordinary_one(prefix: str) -> None:
    """Topics and groups are limited for each account, whatever request creates them."""
    account = Account(
        access_key="creator",
        secret_key=SECRET,
        default_topic_perm=Right.PUB | Right.SUB,
        default_group_perm=Right.SUB,
    )
    burst = 5
    with Serving(BrokerServerSettings(auto_create_burst=burst), acl=AclSettings(accounts=(account,))) as serving:
        creator = RecordingConnection(access_key="creator")
        before = serving.engine.topics.count()
        for number in range(burst + 5):
            response = serving.send_sequenced(Message(f"{prefix}new-{number}", b"x"), over=creator, version=number)

        assert response.code == ResponseCode.SYSTEM_BUSY
        assert "auto-create-burst" in str(response.remark)
        assert serving.engine.topics.count() - before <= 2 * burst + 2


def test_one_account_displaces_only_its_own_applications(tmp_path: Path) -> None:
    """Otherwise repeats of the other account would be stored again."""
    few = EmbeddedSettings(max_send_sequences=4)
    serving = Serving(engine=EmbeddedBroker(None, few, VirtualClock()), acl=AclSettings(accounts=ACCOUNTS))
    with serving:
        for topic in ("theirs", "mine"):
            serving.engine.create_topic(topic, 1)
        owner, attacker = (RecordingConnection(access_key=key) for key in ("their-owner", "attacker"))
        serving.send_sequenced(Message("theirs", b"row"), over=owner)
        for number in range(10):
            serving.clock.move_ms(1)
            serving.send_sequenced(Message("mine", b"x"), over=attacker, app_id=f"flood-{number}")

        repeated = serving.send_sequenced(Message("theirs", b"row"), over=owner)

    assert stored_and_repeated(repeated) == (0, 1)


# --- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("send", [single, batch, sequenced], ids=lambda send: send.__name__)
@pytest.mark.parametrize(("sent_ms", "stored_ms"), [(2**63 - 1, 253_402_214_399_999), (-(2**63), 0), (10**15, None)])
def test_a_time_of_birth_is_one_that_calendars_have(
    attack: Attack, send: Send, sent_ms: int, stored_ms: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one message keeps commands and pages from showing all the others of its topic."""
    request = attack.serving.request

    def with_time(code: int, header: Any = None, *args: Any, **kwargs: Any) -> RemotingCommand | None:
        return request(code, dataclasses.replace(header, born_timestamp=sent_ms), *args, **kwargs)

    monkeypatch.setattr(attack.serving, "request", with_time)

    send(attack, {}, 0)

    expected = 253_402_214_399_999 if stored_ms is None else stored_ms
    assert {record.born_timestamp for record in attack.records("mine")} == {expected}


def test_properties_of_a_transaction_leave_room_for_its_checks(attack: Attack) -> None:
    """Otherwise neither a check nor its end by the broker could be stored, and it would stay open for ever."""
    response = half(attack, {"own": "x" * 32_480}, 0)

    assert response is not None
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "in a transaction; move data into the body" in str(response.remark)


def test_a_message_id_with_spaces_can_be_cancelled_by_its_handle(attack: Attack) -> None:
    """Its handle separates words by spaces. A call for a key must not end in the middle of its messages."""
    engine = attack.serving.engine
    delayed(attack, {"UNIQ_KEY": "a b 7", "KEYS": "k"}, 0)
    delayed(attack, {"UNIQ_KEY": "0A0B", "KEYS": "k"}, 0)

    moved = engine.delayed.reschedule(key="k", deliver_ms=attack.serving.clock.now_ms() + 60_000)

    assert (moved.count, engine.delayed.cancel(",".join(moved.handles)).count) == (2, 2)


def _prepared(attack: Attack, handle: str, over: RecordingConnection, *, long: bool) -> RemotingCommand:
    """Send a half message of the sender's own topic whose commit cancels the message of a handle."""
    topic, group = ("mine", "my-group") if over is attack.attacker else ("theirs", "their-group")
    properties = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": "0A0B", Property.CANCELS: handle}
    if long:
        header = send_header(topic, properties=properties, kind=SendMessageRequestHeader, sys_flag=4)
        response = attack.serving.request(RequestCode.SEND_MESSAGE, header, b"new", over=over)
    else:
        response = attack.serving.send(topic, b"new", properties, over=over, sys_flag=4)
    assert response is not None
    return response


def _commit(attack: Attack, prepared: RemotingCommand, over: RecordingConnection) -> None:
    sent = prepared.header(SendMessageResponseHeader)
    header = EndTransactionRequestHeader(
        producer_group="my-group" if over is attack.attacker else "their-group",
        tran_state_table_offset=sent.queue_offset,
        commit_log_offset=parse_offset_msg_id(sent.msg_id)[1],
        commit_or_rollback=SysFlag.TRANSACTION_COMMIT,
        msg_id="0A0B",
        transaction_id="0A0B",
    )
    attack.serving.request(RequestCode.END_TRANSACTION, header, over=over)


@pytest.mark.parametrize("long", [False, True], ids=["short names", "long names"])
def test_a_commit_cancels_only_messages_of_topics_that_the_account_may_send_to(attack: Attack, long: bool) -> None:
    """As `cancel` does. The handle of another topic's message is refused before anything is stored."""
    engine = attack.serving.engine
    theirs = str(engine.sends.send(Message("theirs", b"old", {"DELAY": "18"})).handle)
    mine = str(engine.sends.send(Message("mine", b"own", {"DELAY": "18"})).handle)

    for handles in (theirs, f"{mine},{theirs}"):
        refused = _prepared(attack, handles, attack.attacker, long=long)
        assert refused.code == ResponseCode.NO_PERMISSION
        assert "the message that the commit cancels" in str(refused.remark)
    assert engine.engine.transactions.open_count == 0
    assert engine.delayed.count_pending(PendingQuery()).total == 2

    _commit(attack, _prepared(attack, mine, attack.attacker, long=long), attack.attacker)
    assert engine.delayed.count_pending(PendingQuery(topic="mine")).total == 0
    _commit(attack, _prepared(attack, theirs, attack.owner, long=long), attack.owner)
    assert engine.delayed.count_pending(PendingQuery()).total == 0
    assert [len(attack.records(topic)) for topic in ("mine", "theirs")] == [1, 1]


def test_a_commit_cancels_nothing_by_a_handle_with_another_topic(attack: Attack) -> None:
    """The account may send to the topic that the handle names, and the message is one of another topic."""
    engine = attack.serving.engine
    handle = decode_handle(str(engine.sends.send(Message("theirs", b"old", {"DELAY": "18"})).handle))
    forged = encode_handle(handle._replace(topic="mine"))

    prepared = _prepared(attack, forged, attack.attacker, long=False)
    assert prepared.code == ResponseCode.SUCCESS
    _commit(attack, prepared, attack.attacker)

    assert engine.delayed.count_pending(PendingQuery(topic="theirs")).total == 1
    assert engine.engine.transactions.open_count == 0
    assert attack.records("mine") == []
