"""The same requests to this server and to RocketMQ 5.5.0: the responses have the same codes and the same numbers.

`DIFFERENT` lists the deliberate differences and their reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.peer.jvm import unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, RequestCode, Version
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    LockBatchRequestBody,
    LockBatchResponseBody,
)
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.headers.group import (
    ConsumerGroupRequestHeader,
    GetMaxOffsetRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    TopicQueueRequestHeader,
    UnregisterClientRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader
from mqtemplate.remoting.protocol.messages import decode_messages, encode_batch
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.serving import subscription
from tests.server.tool import heartbeat_body, pull_header, send_header

pytestmark = pytest.mark.conformance

ANY_PORT = HostAddress("127.0.0.1", 0)
QUEUE = MessageQueue("orders", "broker-a", 0)
NUMBERS = ("queueId", "queueOffset", "nextBeginOffset", "minOffset", "maxOffset", "suggestWhichBrokerId", "offset")

DIFFERENT = {
    # label -> code of this server, RocketMQ's code, reason
    "an empty batch": (13, 1, "the message is illegal, the broker has not failed"),
    "a send without fields": (29, 1, "the request is wrong, and a retry with another broker cannot help"),
    "a heartbeat that is no JSON": (29, 1, "the request is wrong, and a retry with another broker cannot help"),
    "a pull with an invalid expression in the request": (23, 0, "RocketMQ then selects all messages"),
    "a pull with an expression of an unknown type": (23, 0, "RocketMQ then selects all messages"),
    "a commit for a missing queue": (29, 0, "no consumer reads the queue"),
    "a commit for a missing group": (0, 26, "the first request that names a group creates it"),
    "the offset of a new group in an empty queue": (
        0,
        22,
        "messages that arrive before the client queries again are not skipped",
    ),
    "a heartbeat of a group with an illegal name": (
        26,
        0,
        "the group could have no retry topic; RocketMQ accepts the heartbeat",
    ),
}


class Case(NamedTuple):
    """One request. The label completes the words "the response to"."""

    label: str
    code: int
    header: CommandHeader | None = None
    body: bytes = b""

    def command(self) -> RemotingCommand:
        request = RemotingCommand.request(self.code, self.header, self.body)
        request.language, request.version = LanguageCode.JAVA, Version.V5_5_0
        return request


def send(label: str, topic: str = "orders", body: bytes = b"x", *, batch: bool = False, **more: Any) -> Case:
    code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
    return Case(label, code, send_header(topic, producer_group="p", batch=batch, **more), body)


def pull(label: str, queue_offset: int, topic: str = "orders", *, consumer_group: str = "g", **more: Any) -> Case:
    fields = {"suspend_timeout_millis": 1_000, "subscription": "*", "expression_type": "TAG", **more}
    return Case(label, RequestCode.PULL_MESSAGE, pull_header(topic, queue_offset, group=consumer_group, **fields))


def heartbeat(label: str, group: str) -> Case:
    body = heartbeat_body("c1", group, subscription("orders"), subscription(f"%RETRY%{group}"))
    return Case(label, RequestCode.HEART_BEAT, None, body)


def query(label: str, queue_id: int = 0, topic: str = "orders", **more: Any) -> Case:
    header = QueryConsumerOffsetRequestHeader(consumer_group="g", topic=topic, queue_id=queue_id, **more)
    return Case(label, RequestCode.QUERY_CONSUMER_OFFSET, header)


def commit(label: str, group: str = "g", topic: str = "orders", queue_id: int = 0) -> Case:
    header = UpdateConsumerOffsetRequestHeader(consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=3)
    return Case(label, RequestCode.UPDATE_CONSUMER_OFFSET, header)


def lock(label: str, client_id: str, code: int = RequestCode.LOCK_BATCH_MQ) -> Case:
    return Case(
        label, code, None, LockBatchRequestBody(consumer_group="g", client_id=client_id, mq_set=[QUEUE]).encode()
    )


def check(label: str, kind: str, expression: str) -> Case:
    data = subscription("orders", expression, kind)
    body = CheckClientRequestBody(client_id="c1", group="g", subscription_data=data).encode()
    return Case(label, RequestCode.CHECK_CLIENT_CONFIG, None, body)


def send_back(label: str, offset: int, group: str = "g") -> Case:
    header = ConsumerSendMsgBackRequestHeader(
        offset=offset, group=group, delay_level=0, origin_topic="orders", origin_msg_id="0A"
    )
    return Case(label, RequestCode.CONSUMER_SEND_MSG_BACK, header)


def of_queue(label: str, code: int, topic: str = "orders", queue_id: int = 0) -> Case:
    kind = GetMaxOffsetRequestHeader if code == RequestCode.GET_MAX_OFFSET else TopicQueueRequestHeader
    return Case(label, code, kind(topic=topic, queue_id=queue_id))


def since(label: str, timestamp: int, topic: str = "orders") -> Case:
    header = SearchOffsetRequestHeader(topic=topic, queue_id=0, timestamp=timestamp)
    return Case(label, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)


TWO = encode_batch([Message("orders", b"1"), Message("orders", b"2")])
TOO_LONG_SEC = 100 * 86_400
CASES = [
    send("the first message of a topic", properties={"UNIQ_KEY": "0A" * 16, "TAGS": "a"}),
    send("a message to another queue", queue_id=3),
    send("a message to a missing queue", queue_id=9),
    send("a message to the schedule topic", "SCHEDULE_TOPIC_XXXX"),
    send("a message to the half topic", "RMQ_SYS_TRANS_HALF_TOPIC"),
    send("a message to a topic with an illegal name", "a b"),
    send("a message to a topic with a long name", "x" * 128),
    send("a message whose default topic is missing", "fresh", default_topic="nowhere"),
    send("a message with large properties", properties={"n": "x" * 33_000}),
    send("a message with a large body", body=b"x" * (5 << 20)),
    send("a message with a level", properties={"DELAY": "1"}, queue_id=1),  # delivered during the next requests
    send("a message with a level too high", properties={"DELAY": "99"}, queue_id=1),
    send("a message with a timer", properties={"TIMER_DELAY_SEC": "3600"}),
    send("a message with a timer that is not a number", properties={"TIMER_DELAY_SEC": "soon"}),
    send("a message with a timer beyond the maximum", properties={"TIMER_DELAY_SEC": str(TOO_LONG_SEC)}),
    send("a message with a deliver time in the past", properties={"TIMER_DELIVER_MS": "1000"}),
    send("a retry for a missing group", "%RETRY%missing"),
    send("a batch", body=TWO, batch=True),
    send("an empty batch", body=b"", batch=True),
    send("a half message", properties={"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": "0B" * 16}, sys_flag=4),
    Case("a send without fields", RequestCode.SEND_MESSAGE_V2),
    pull("a pull of a missing topic", 0, "nowhere"),
    pull("a pull without a heartbeat", 0, sys_flag=0, consumer_group="silent"),
    heartbeat("a heartbeat", "g"),
    pull("a pull", 0, sys_flag=0),
    pull("a pull of a topic without a subscription", 0, "TBW102", sys_flag=0),
    pull("a pull with a newer subscription", 0, sys_flag=0, sub_version=9),
    pull("a pull at the end that may not be held", 4),
    pull("a pull at the end that is held", 4, sys_flag=PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND),
    pull("a pull after the end", 1_000),
    pull("a pull before the start", -1),
    pull("a pull of an empty queue", 0, queue_id=2),
    pull("a pull after the end of an empty queue", 5, queue_id=2),
    pull("a pull of a missing queue", 0, queue_id=9),
    pull("a pull of a tag that no message has", 0, subscription="zzz"),
    pull("a pull by SQL92", 0, subscription="TAGS = 'a'", expression_type="SQL92"),
    pull("a pull with an invalid expression in the request", 0, subscription="a >", expression_type="SQL92"),
    pull("a pull with an expression of an unknown type", 0, subscription="a", expression_type="XPATH"),
    pull("a pull of a group with an illegal name", 0, consumer_group="a b"),
    query("the offset of a new group"),
    query("the offset of a new group without the default of zero", set_zero_if_not_found=False),
    query("the offset of a new group in an empty queue", 2),
    query("an offset in a missing topic", topic="nowhere"),
    commit("a commit"),
    query("the offset of a group"),
    commit("a commit for a missing topic", topic="nowhere"),
    commit("a commit for a missing group", group="missing-2"),
    commit("a commit for a missing queue", queue_id=9),
    of_queue("the end of a queue", RequestCode.GET_MAX_OFFSET),
    of_queue("the end of an empty queue", RequestCode.GET_MAX_OFFSET, queue_id=2),
    of_queue("the end of a missing topic", RequestCode.GET_MAX_OFFSET, "nowhere"),
    of_queue("the start of a queue", RequestCode.GET_MIN_OFFSET),
    of_queue("the start of a missing topic", RequestCode.GET_MIN_OFFSET, "nowhere"),
    of_queue("the earliest store time of an empty queue", RequestCode.GET_EARLIEST_MSG_STORETIME, queue_id=2),
    of_queue("the earliest store time of a missing topic", RequestCode.GET_EARLIEST_MSG_STORETIME, "nowhere"),
    since("a search by time 0", 0),
    since("a search by a time in the future", 99_999_999_999_999),
    since("a search in a missing topic", 0, "nowhere"),
    Case("the members", RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequestHeader(consumer_group="g")),
    Case("no members", RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequestHeader(consumer_group="missing")),
    lock("a lock", "c1"),
    lock("a lock that another client holds", "c2"),
    send("a retry of an ordered group", "%RETRY%g", reconsume_times=1, max_reconsume_times=16),
    lock("an unlock", "c1", RequestCode.UNLOCK_BATCH_MQ),
    send("a retry", "%RETRY%g", reconsume_times=1, max_reconsume_times=16),
    send("a retry above the maximum", "%RETRY%g", reconsume_times=17, max_reconsume_times=16),
    send("a batch for a retry topic", "%RETRY%g", TWO, batch=True),
    send_back("a message that is sent back", 0),
    send_back("a missing message that is sent back", 5),
    send_back("a message that is sent back by a missing group", 0, "missing-3"),
    pull("a pull of dead letters", 0, "%DLQ%g"),
    check("a tag", "TAG", "a"),
    check("an expression", "SQL92", "a > 1"),
    check("an invalid expression", "SQL92", "a >"),
    check("an expression of an unknown type", "XPATH", "a"),
    heartbeat("a heartbeat of a group with an illegal name", "a b"),
    Case("a heartbeat that is no JSON", RequestCode.HEART_BEAT, None, b"{"),
    Case(
        "an unregistration",
        RequestCode.UNREGISTER_CLIENT,
        UnregisterClientRequestHeader(client_id="c1", consumer_group="g"),
    ),
    Case("an unknown code", 7_777),
]


def responses(address: str) -> dict[str, RemotingCommand]:
    """Return the responses by label. The requests build on each other, so they are sent once and in this order."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    try:
        return {case.label: client.invoke(address, case.command(), 20_000) for case in CASES}
    finally:
        client.close()


class Both(NamedTuple):
    actual: dict[str, RemotingCommand]
    expected: dict[str, RemotingCommand]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("expected")
    port = free_port()
    with NameServer() as names, RocketMQ(folder, names, {"listenPort": port}):
        expected = responses(f"127.0.0.1:{port}")
    settings = BrokerServerSettings(listen=ANY_PORT)
    with (
        EmbeddedBroker(None, EmbeddedSettings(listen_host=ANY_PORT, clamp_delay_level=True)) as engine,
        BrokerServer(engine, settings) as server,
    ):
        yield Both(responses(str(server.address)), expected)


@pytest.mark.parametrize("label", [case.label for case in CASES])
def test_the_response_equals_rocketmqs(both: Both, label: str) -> None:
    """The codes are equal, and the numbers that Java's clients require."""
    actual, expected = both.actual[label], both.expected[label]

    if label in DIFFERENT:
        assert (actual.code, expected.code) == DIFFERENT[label][:2]
        return

    assert actual.code == expected.code, f"{actual}; RocketMQ: {expected}"
    for name in NUMBERS:
        assert actual.ext_fields.get(name) == expected.ext_fields.get(name), name
    assert (actual.body == b"") == (expected.body == b"")


def test_the_locked_queues_equal_rocketmqs(both: Both) -> None:
    for label in ("a lock", "a lock that another client holds"):
        locked = [LockBatchResponseBody.decode(side[label].body).lock_ok_mq_set for side in both]

        assert locked[0] == locked[1]


def test_the_properties_of_stored_messages_equal_rocketmqs(both: Both) -> None:
    """It adds some to each message that is sent alone, and none to the messages of a batch. We add a missing id."""
    actual, expected = (
        [
            (message.body, {name: value for name, value in message.properties.items() if name != "UNIQ_KEY"})
            for message in decode_messages(side["a pull"].body, "broker-a")
        ]
        for side in both
    )

    assert actual == expected
    assert (b"2", {}) in expected, "the second message of the batch"
