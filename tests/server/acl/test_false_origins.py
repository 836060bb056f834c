"""Retries and dead letters that a client writes itself: an operator's resend publishes nothing where it may not send.

An account that consumes a topic has the right SUB on it. It may write to the retry topic and the dead letter topic of
its own group, and an operator may send the dead letters there to the topic that they name.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.errors import MessageError
from mqtemplate.message import Message, MessageExt
from mqtemplate.operations import BrokerAccess, DeadLetters
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.remoting.protocol.messages import encode_batch, encode_properties_text
from mqtemplate.results import TransactionState
from mqtemplate.server import Account, AclSettings, Right
from tests.server.serving import SECRET, RecordingConnection, Serving

ACCOUNTS = (
    Account(
        access_key="attacker",
        secret_key=SECRET,
        topic_perms={"mine": Right.PUB | Right.SUB, "read-only": Right.SUB},
        group_perms={"my-group": Right.SUB},
    ),
    Account(access_key="operator", secret_key=SECRET, admin=True),
)
COMMIT = TransactionState.COMMIT
TOPICS = ("mine", "read-only", "theirs")
RETRY, DEAD = "%RETRY%my-group", "%DLQ%my-group"
FORGED = ({"RETRY_TOPIC": "{}"}, {"DLQ_ORIGIN_TOPIC": "{}"}, {"RETRY_TOPIC": "mine", "DLQ_ORIGIN_TOPIC": "{}"})


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(acl=AclSettings(accounts=ACCOUNTS)) as serving:
        for topic in (*TOPICS, RETRY, DEAD):
            serving.engine.create_topic(topic, 1)
        serving.server.groups.ensure("my-group")
        yield serving


@pytest.fixture
def attacker() -> RecordingConnection:
    return RecordingConnection(access_key="attacker")


def stored(serving: Serving, topic: str) -> list[MessageExt]:
    queue = serving.engine.queues(topic)[0]
    return list(serving.engine.reader.pull(queue, 0).messages)


def send_back(
    serving: Serving, over: RecordingConnection, message: MessageExt, properties: dict[str, str] | None = None
) -> None:
    """Send a message back as a dead letter."""
    header = ConsumerSendMsgBackRequestHeader(
        offset=message.physical_offset,
        group="my-group",
        delay_level=-1,
        properties=encode_properties_text(properties or {}),
    )
    response = serving.request(RequestCode.CONSUMER_SEND_MSG_BACK, header, over=over)
    assert response is not None
    assert response.code == ResponseCode.SUCCESS, response


def resend(serving: Serving, *, only_group: bool = False) -> str:
    """Send each dead letter again as an operator does; return the error, if there is one."""
    letters = DeadLetters(BrokerAccess(serving.engine))
    try:
        for letter in letters.find("my-group"):
            letters.resend([letter], only_group=only_group)
    except MessageError as exc:
        return str(exc)
    return ""


def write(serving: Serving, over: RecordingConnection, way: str, properties: dict[str, str]) -> None:
    """Bring a message with these properties into the dead letter topic of the account's group, in one of many ways."""
    properties = {"ORIGIN_MESSAGE_ID": "0" * 32, "UNIQ_KEY": "0A", **properties}
    if way == "own topic":
        serving.send("mine", b"forged", properties, over=over)
        send_back(serving, over, stored(serving, "mine")[0])
    elif way == "retry topic":
        serving.send(RETRY, b"forged", properties, over=over)
        send_back(serving, over, stored(serving, RETRY)[0])
    elif way == "retries used up":
        serving.send(RETRY, b"forged", properties, over=over, reconsume_times=17, max_reconsume_times=16)
    elif way == "dead letter topic":
        serving.send(DEAD, b"forged", properties, over=over)
    elif way == "batch":
        body = encode_batch([Message(DEAD, b"forged", properties)])
        serving.send(DEAD, body, code=RequestCode.SEND_BATCH_MESSAGE, batch=True, over=over)
    elif way == "sent back":
        serving.send("mine", b"forged", over=over)
        send_back(serving, over, stored(serving, "mine")[0], properties)
    elif way == "delayed":
        serving.send(RETRY, b"forged", properties | {"DELAY": "1"}, over=over)
        serving.advance(2_000)
        send_back(serving, over, stored(serving, RETRY)[0])
    elif way == "transaction":
        serving.send("mine", b"forged", properties | {"TRAN_MSG": "true", "PGROUP": "g"}, over=over)
        serving.engine.engine.transactions.end(0, 0, "g", COMMIT)
        serving.engine.store.flush()
        send_back(serving, over, stored(serving, "mine")[0])
    else:
        serving.send_sequenced(Message(DEAD, b"forged", properties), over=over)
    assert [each.body for each in stored(serving, DEAD)] == [b"forged"]


WAYS = (
    "own topic",
    "retry topic",
    "retries used up",
    "dead letter topic",
    "batch",
    "sent back",
    "delayed",
    "transaction",
    "sequenced",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("topic", ["theirs", "read-only"])
@pytest.mark.parametrize("forged", FORGED, ids="+".join)
def test_a_resend_publishes_nothing_where_the_writer_may_not_send(
    serving: Serving, attacker: RecordingConnection, forged: dict[str, str], topic: str, way: str
) -> None:
    write(serving, attacker, way, {name: value.format(topic) for name, value in forged.items()})

    resend(serving)

    assert stored(serving, topic) == []


@pytest.mark.parametrize("way", ["retry topic", "dead letter topic", "sequenced"])
def test_an_origin_to_which_the_account_may_send_is_kept(
    serving: Serving, attacker: RecordingConnection, way: str
) -> None:
    """Java's consumer sends a retry itself if the broker does not take it back, and Spark's sends rows."""
    write(serving, attacker, way, {"RETRY_TOPIC": "mine"})

    assert resend(serving) == ""
    assert [each.body for each in stored(serving, "mine")] == [b"forged"]


def test_the_consumer_of_a_retry_sees_the_topic_that_it_reads(serving: Serving, attacker: RecordingConnection) -> None:
    """The right to read is enough for the name. The error of the resend says why the id is missing, and what to do."""
    write(serving, attacker, "retry topic", {"RETRY_TOPIC": "read-only"})

    [retry], [dead] = stored(serving, RETRY), stored(serving, DEAD)
    assert (retry.properties["RETRY_TOPIC"], "ORIGIN_MESSAGE_ID" in retry.properties) == ("read-only", False)
    assert resend(serving) == (
        f"dead letter {dead.offset_msg_id} names topic 'read-only', but without the id of a message there "
        "(ORIGIN_MESSAGE_ID): the client that wrote it may not send to that topic; check its body, then send it to the "
        "group only (--only-group), or with: send"
    )
    assert resend(serving, only_group=True) == ""
    assert [each.body for each in stored(serving, RETRY)] == [b"forged", b"forged"]


def test_a_message_that_a_reader_sends_back_is_sent_again_as_it_was(
    serving: Serving, attacker: RecordingConnection
) -> None:
    """The broker copies it from its log. The reader may add the cause of the failure only."""
    serving.engine.sends.send(Message("read-only", b"order", {"KEYS": "7", "amount": "1"}))
    [original] = stored(serving, "read-only")
    added = {"amount": "1000000", "approved": "yes", "KEYS": "8", "dead_letter_message": "no such customer"}

    send_back(serving, attacker, original, added)

    [dead] = stored(serving, DEAD)
    assert dead.properties["dead_letter_message"] == "no such customer"
    assert resend(serving) == ""
    again = stored(serving, "read-only")[-1]
    assert (again.body, again.keys) == (b"order", "7")
    assert (again.properties["amount"], again.properties.get("approved")) == ("1", None)


def test_a_dead_letter_of_an_earlier_version_with_a_false_origin_keeps_its_real_topic(serving: Serving) -> None:
    """A record of an ordinary topic that is sent back comes from that topic, whatever its properties say."""
    serving.engine.create_topic("mine", 1)
    draft, _ = serving.engine.engine.drafts.make(Message("mine", b"forged"), 0, serving.clock.now_ms())
    draft.properties += b"RETRY_TOPIC\x01theirs\x02ORIGIN_MESSAGE_ID\x010A\x02"
    serving.engine.engine.writer.put(draft, "mine", 0)
    serving.engine.store.flush()
    attacker = RecordingConnection(access_key="attacker")

    send_back(serving, attacker, stored(serving, "mine")[0])

    [dead] = stored(serving, DEAD)
    assert (dead.properties["RETRY_TOPIC"], dead.properties["DLQ_ORIGIN_TOPIC"]) == ("mine", "mine")


def test_a_number_of_retries_that_cannot_grow_is_no_reason_to_refuse(
    serving: Serving, attacker: RecordingConnection
) -> None:
    """A client sets it. A message that could neither be retried nor become a dead letter would block its consumer."""
    serving.send("mine", b"x", over=attacker, reconsume_times=2**31 - 1)

    send_back(serving, attacker, stored(serving, "mine")[0])

    assert [each.reconsume_times for each in stored(serving, DEAD)] == [2**31 - 1]


def test_a_forged_mark_does_not_hide_dead_letters(serving: Serving, attacker: RecordingConnection) -> None:
    """Marks are messages, and without access control each client may send to their topic."""
    write(serving, attacker, "dead letter topic", {})
    letters = DeadLetters(BrokerAccess(serving.engine))
    serving.engine.create_topic("mqtemplate_dead_letter_marks", 1)
    for body in (b"{", b"[]", b'{"state":"purged"}', b'{"state":[],"ids":1}', b'{"state":"purged","ids":[[1]]}'):
        serving.engine.sends.send(Message("mqtemplate_dead_letter_marks", body, {"KEYS": "my-group"}))

    assert len(list(letters.find("my-group"))) == 1
