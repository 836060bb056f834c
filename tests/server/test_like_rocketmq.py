"""The same requests to our server and to RocketMQ 5.5.0: the same codes and the same numbers come back.

Where we response otherwise on purpose, `OTHERWISE` says so, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.peer.rocketmq import NameServer, RocketMQ, free_port, why_not
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, RequestCode, Version
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    ConsumerData,
    HeartbeatData,
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
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    PullMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from mqtemplate.remoting.protocol.messages import encode_batch
from mqtemplate.remoting.protocol.properties import encode_properties_text
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.serving import subscription

pytestmark = pytest.mark.conformance

ANY_PORT = HostAddress("127.0.0.1", 0)
QUEUE = MessageQueue("orders", "broker-a", 0)
NUMBERS = ("queueId", "queueOffset", "nextBeginOffset", "minOffset", "maxOffset", "suggestWhichBrokerId", "offset")

OTHERWISE = {
    # label -> our code, RocketMQ's code, why
    "a batch of nothing": (13, 1, "a message that nobody can take, and no failure of the broker"),
    "a send without fields": (29, 1, "the request is wrong, and stays wrong with the next broker"),
    "a heartbeat that is no JSON": (29, 1, "alike"),
    "a pull with an expression of its own that cannot be read": (23, 0, "RocketMQ then selects everything"),
    "a pull with an expression of an unknown kind": (23, 0, "alike"),
    "an offset of a queue that is not there": (29, 0, "no consumer reads it"),
    "an offset of a group that nobody made": (0, 26, "groups are made by the first request that names them"),
    "the offset of a new group in an empty queue": (
        0,
        22,
        "what comes before the client has asked again is not missed",
    ),
    "a heartbeat of a group with an illegal name": (
        26,
        0,
        "it would have no retry topic; RocketMQ takes it in silence",
    ),
}


class Ask(NamedTuple):
    """One request; its label reads behind "the response to"."""

    label: str
    code: int
    header: CommandHeader | None = None
    body: bytes = b""

    def command(self) -> RemotingCommand:
        request = RemotingCommand.request(self.code, self.header, self.body)
        request.language, request.version = LanguageCode.JAVA, Version.V5_5_0
        return request


def send(label: str, topic: str = "orders", body: bytes = b"x", *, batch: bool = False, **more: Any) -> Ask:
    fields: dict[str, Any] = {
        "producer_group": "p",
        "topic": topic,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "queue_id": 0,
        "sys_flag": 0,
        "born_timestamp": 1_700_000_000_000,
        "flag": 0,
        "batch": batch,
        **more,
    }
    fields["properties"] = encode_properties_text(more.get("properties", {}))
    code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
    return Ask(label, code, SendMessageRequestHeaderV2(**fields), body)


def pull(label: str, queue_offset: int, topic: str = "orders", **more: Any) -> Ask:
    fields: dict[str, Any] = {
        "consumer_group": "g",
        "topic": topic,
        "queue_id": 0,
        "queue_offset": queue_offset,
        "max_msg_nums": 32,
        "sys_flag": PullSysFlag.SUBSCRIPTION,
        "commit_offset": 0,
        "suspend_timeout_millis": 1_000,
        "sub_version": 1,
        "subscription": "*",
        "expression_type": "TAG",
        **more,
    }
    return Ask(label, RequestCode.PULL_MESSAGE, PullMessageRequestHeader(**fields))


def heartbeat(label: str, group: str) -> Ask:
    wanted = [subscription("orders"), subscription(f"%RETRY%{group}")]
    consumer = ConsumerData(group_name=group, subscription_data_set=wanted)
    return Ask(
        label, RequestCode.HEART_BEAT, None, HeartbeatData(client_id="c1", consumer_data_set=[consumer]).encode()
    )


def query(label: str, queue_id: int = 0, topic: str = "orders", **more: Any) -> Ask:
    header = QueryConsumerOffsetRequestHeader(consumer_group="g", topic=topic, queue_id=queue_id, **more)
    return Ask(label, RequestCode.QUERY_CONSUMER_OFFSET, header)


def commit(label: str, group: str = "g", topic: str = "orders", queue_id: int = 0) -> Ask:
    header = UpdateConsumerOffsetRequestHeader(consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=3)
    return Ask(label, RequestCode.UPDATE_CONSUMER_OFFSET, header)


def lock(label: str, client_id: str, code: int = RequestCode.LOCK_BATCH_MQ) -> Ask:
    return Ask(
        label, code, None, LockBatchRequestBody(consumer_group="g", client_id=client_id, mq_set=[QUEUE]).encode()
    )


def check(label: str, kind: str, expression: str) -> Ask:
    data = subscription("orders", expression, kind)
    body = CheckClientRequestBody(client_id="c1", group="g", subscription_data=data).encode()
    return Ask(label, RequestCode.CHECK_CLIENT_CONFIG, None, body)


def back(label: str, offset: int, group: str = "g") -> Ask:
    header = ConsumerSendMsgBackRequestHeader(
        offset=offset, group=group, delay_level=0, origin_topic="orders", origin_msg_id="0A"
    )
    return Ask(label, RequestCode.CONSUMER_SEND_MSG_BACK, header)


def of_queue(label: str, code: int, topic: str = "orders", queue_id: int = 0) -> Ask:
    kind = GetMaxOffsetRequestHeader if code == RequestCode.GET_MAX_OFFSET else TopicQueueRequestHeader
    return Ask(label, code, kind(topic=topic, queue_id=queue_id))


def since(label: str, timestamp: int, topic: str = "orders") -> Ask:
    header = SearchOffsetRequestHeader(topic=topic, queue_id=0, timestamp=timestamp)
    return Ask(label, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)


TWO = encode_batch([Message("orders", b"1"), Message("orders", b"2")])
LONGEST_MS = 100 * 86_400
ASKS = [
    send("the first message of a topic", properties={"UNIQ_KEY": "0A" * 16, "TAGS": "a"}),
    send("a message to another queue", queue_id=3),
    send("a message to a queue that is not there", queue_id=9),
    send("a message to the schedule topic", "SCHEDULE_TOPIC_XXXX"),
    send("a message to the half topic", "RMQ_SYS_TRANS_HALF_TOPIC"),
    send("a message to a topic with an illegal name", "a b"),
    send("a message to a topic with a long name", "x" * 128),
    send("a message whose topic has no pattern", "fresh", default_topic="nowhere"),
    send("a message with large properties", properties={"n": "x" * 33_000}),
    send("a message with a large body", body=b"x" * (5 << 20)),
    send("a message with a level", properties={"DELAY": "1"}, queue_id=1),  # comes while the others are asked
    send("a message with a level too high", properties={"DELAY": "99"}, queue_id=1),
    send("a message with a timer", properties={"TIMER_DELAY_SEC": "3600"}),
    send("a message with a timer that is no number", properties={"TIMER_DELAY_SEC": "soon"}),
    send("a message with a timer too far", properties={"TIMER_DELAY_SEC": str(LONGEST_MS)}),
    send("a message with a timer that is over", properties={"TIMER_DELIVER_MS": "1000"}),
    send("a retry for a group that nobody made", "%RETRY%nobody"),
    send("a batch", body=TWO, batch=True),
    send("a batch of nothing", body=b"", batch=True),
    send("a half message", properties={"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": "0B" * 16}, sys_flag=4),
    Ask("a send without fields", RequestCode.SEND_MESSAGE_V2),
    pull("a pull of an unknown topic", 0, "nowhere"),
    pull("a pull without a heartbeat", 0, sys_flag=0, consumer_group="silent"),
    heartbeat("a heartbeat", "g"),
    pull("a pull", 0, sys_flag=0),
    pull("a pull of a topic that was not subscribed to", 0, "TBW102", sys_flag=0),
    pull("a pull with a newer subscription", 0, sys_flag=0, sub_version=9),
    pull("a pull at the end that may not wait", 4),
    pull("a pull at the end that waits", 4, sys_flag=PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND),
    pull("a pull behind the end", 1_000),
    pull("a pull before the begin", -1),
    pull("a pull of an empty queue", 0, queue_id=2),
    pull("a pull behind the end of an empty queue", 5, queue_id=2),
    pull("a pull of a queue that is not there", 0, queue_id=9),
    pull("a pull of a tag that nobody sent", 0, subscription="zzz"),
    pull("a pull by SQL92", 0, subscription="TAGS = 'a'", expression_type="SQL92"),
    pull("a pull with an expression of its own that cannot be read", 0, subscription="a >", expression_type="SQL92"),
    pull("a pull with an expression of an unknown kind", 0, subscription="a", expression_type="XPATH"),
    pull("a pull of a group with an illegal name", 0, consumer_group="a b"),
    query("the offset of a new group"),
    query("the offset of a new group that wants to be told", set_zero_if_not_found=False),
    query("the offset of a new group in an empty queue", 2),
    query("an offset in an unknown topic", topic="nowhere"),
    commit("an offset"),
    query("the offset of a group"),
    commit("an offset of an unknown topic", topic="nowhere"),
    commit("an offset of a group that nobody made", group="nobody-2"),
    commit("an offset of a queue that is not there", queue_id=9),
    of_queue("the end of a queue", RequestCode.GET_MAX_OFFSET),
    of_queue("the end of an empty queue", RequestCode.GET_MAX_OFFSET, queue_id=2),
    of_queue("the end of an unknown topic", RequestCode.GET_MAX_OFFSET, "nowhere"),
    of_queue("the begin of a queue", RequestCode.GET_MIN_OFFSET),
    of_queue("the begin of an unknown topic", RequestCode.GET_MIN_OFFSET, "nowhere"),
    of_queue("the first time of an empty queue", RequestCode.GET_EARLIEST_MSG_STORETIME, queue_id=2),
    of_queue("the first time of an unknown topic", RequestCode.GET_EARLIEST_MSG_STORETIME, "nowhere"),
    since("a search from the begin of time", 0),
    since("a search from its end", 99_999_999_999_999),
    since("a search in an unknown topic", 0, "nowhere"),
    Ask("the members", RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequestHeader(consumer_group="g")),
    Ask("no members", RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequestHeader(consumer_group="nobody")),
    lock("a lock", "c1"),
    lock("a lock that another one has", "c2"),
    send("a retry of an ordered group", "%RETRY%g", reconsume_times=1, max_reconsume_times=16),
    lock("the end of a lock", "c1", RequestCode.UNLOCK_BATCH_MQ),
    send("a retry", "%RETRY%g", reconsume_times=1, max_reconsume_times=16),
    send("a retry too many", "%RETRY%g", reconsume_times=17, max_reconsume_times=16),
    send("a batch for a retry topic", "%RETRY%g", TWO, batch=True),
    back("a message that was given back", 0),
    back("a message that is not there", 5),
    back("a message given back by a group that nobody made", 0, "nobody-3"),
    pull("a pull of dead letters", 0, "%DLQ%g"),
    check("a tag", "TAG", "a"),
    check("an expression", "SQL92", "a > 1"),
    check("an expression that cannot be read", "SQL92", "a >"),
    check("an expression of an unknown kind", "XPATH", "a"),
    heartbeat("a heartbeat of a group with an illegal name", "a b"),
    Ask("a heartbeat that is no JSON", RequestCode.HEART_BEAT, None, b"{"),
    Ask(
        "a farewell",
        RequestCode.UNREGISTER_CLIENT,
        UnregisterClientRequestHeader(client_id="c1", consumer_group="g"),
    ),
    Ask("an unknown code", 7_777),
]


def responses(address: str) -> dict[str, RemotingCommand]:
    """By label. The requests build on each other, so they are asked once and in this order."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    try:
        return {ask.label: client.invoke(address, ask.command(), 20_000) for ask in ASKS}
    finally:
        client.close()


class Both(NamedTuple):
    ours: dict[str, RemotingCommand]
    theirs: dict[str, RemotingCommand]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("theirs")
    port = free_port()
    with NameServer() as names, RocketMQ(folder, names, {"listenPort": port}):
        theirs = responses(f"127.0.0.1:{port}")
    settings = BrokerServerSettings(listen=ANY_PORT)
    with (
        EmbeddedBroker(None, EmbeddedSettings(listen_host=ANY_PORT)) as engine,
        BrokerServer(engine, settings) as server,
    ):
        yield Both(responses(str(server.address)), theirs)


@pytest.mark.parametrize("label", [ask.label for ask in ASKS])
def test_the_answer_is_rocketmqs(both: Both, label: str) -> None:
    """Code and numbers; and what Java's clients fail without is there."""
    ours, theirs = both.ours[label], both.theirs[label]

    if label in OTHERWISE:
        assert (ours.code, theirs.code) == OTHERWISE[label][:2]
        return

    assert ours.code == theirs.code, f"{ours}; RocketMQ: {theirs}"
    for name in NUMBERS:
        assert ours.ext_fields.get(name) == theirs.ext_fields.get(name), name
    assert (ours.body == b"") == (theirs.body == b"")


def test_the_locks_that_are_given_are_rocketmqs(both: Both) -> None:
    for label in ("a lock", "a lock that another one has"):
        given = [LockBatchResponseBody.decode(side[label].body).lock_ok_mq_set for side in both]

        assert given[0] == given[1]
