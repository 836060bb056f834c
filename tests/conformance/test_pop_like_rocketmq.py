"""The same POP requests to this server and to RocketMQ 5.5.0: the responses have the same codes and contents.

`DIFFERENT` lists the deliberate differences and their reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import (
    BatchAckMessageRequestBody,
    ConsumeStats,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
)
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader
from mqtemplate.remoting.protocol.headers.group import GetConsumeStatsRequestHeader, GetMaxOffsetRequestHeader
from mqtemplate.remoting.protocol.headers.pop import ChangeInvisibleTimeResponseHeader, PopMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.processors.pop_commands import GROUP, TOPIC, PopClient, Popped, changed, read
from tests.server.serving import subscription
from tests.server.tool import heartbeat_body, send_header
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]

ANY_PORT = HostAddress("127.0.0.1", 0)
_TIMEOUT_MS = 60_000

Facts = dict[str, object]
"""Label -> what is compared of a response."""

DIFFERENT: dict[str, tuple[object, object, str]] = {
    # label -> facts of this server, of RocketMQ, reason
    "the progress before an acknowledgement": ((3, 0), (3, 3), "RocketMQ commits when it delivers"),
    "the progress after an acknowledgement": ((3, 1), (3, 3), "RocketMQ commits when it delivers"),
    "an acknowledgement without a handle": (13, 1, "the request is wrong, the broker has not failed"),
    "the properties of a retry": (
        ["1ST_POP_TIME", "KEYS", "ORIGIN_GROUP", "ORIGIN_MESSAGE_ID", "POP_CK", "RETRY_TOPIC", "TAGS"],
        ["1ST_POP_TIME", "KEYS", "ORIGIN_GROUP", "POP_CK", "TAGS"],
        "a dead letter can be sent again to its topic",
    ),
    "an ordered acknowledgement of another message": (208, 13, "the same code as for other ended deliveries"),
    "an assignment by another strategy": (29, None, "the client logs the reason; it has no queues either way"),
    **dict.fromkeys(
        (
            "another change with the handle before the change",
            "an acknowledgement with the handle before the change",
            "an acknowledgement after the invisible time",
            "a change after the invisible time",
        ),
        (208, 0, "the client learns that the request has no effect"),
    ),
    **dict.fromkeys(
        ("an ordered pop of a blocked queue", "an ordered pop of a queue that is still blocked"),
        ((210, 1), (210, 0), "RocketMQ does not count the messages of a blocked queue"),
    ),
}


class Wire:
    """A connection to a broker, for `PopClient`."""

    def __init__(self, address: str) -> None:
        self.clock = SystemClock()
        self._address = address
        self._client = RemotingClient(RemotingClientSettings(), self.clock)

    def request(self, code: int, header: Any = None, body: bytes = b"", *, over: object = None) -> RemotingCommand:
        request = RemotingCommand.request(code, header, body)
        request.language, request.version = LanguageCode.JAVA, Version.V5_5_0
        return self._client.invoke(self._address, request, _TIMEOUT_MS)

    def close(self) -> None:
        self._client.close()


class Steps:
    """The requests, in their order, and the facts of their responses.

    Args:
        commits_deliveries: The broker commits what it delivers, in a thread of its own.
    """

    def __init__(self, wire: Wire, *, commits_deliveries: bool) -> None:
        self._wire = wire
        self._commits_deliveries = commits_deliveries
        self._client = PopClient(wire)  # type: ignore[arg-type]
        self.facts: Facts = {}

    def run(self) -> Facts:
        for step in (
            self.refused,
            self.empty,
            self.popped,
            self.acknowledged,
            self.changed,
            self.expired,
            self.ordered,
            self.looked_at,
            self.assigned,
        ):
            step()
        return self.facts

    # --- helpers -------------------------------------------------------------------------------

    def create(self, topic: str) -> None:
        header = CreateTopicRequestHeader(
            topic=topic,
            default_topic="TBW102",
            read_queue_nums=1,
            write_queue_nums=1,
            perm=6,
            topic_filter_type="SINGLE_TAG",
            order=False,
        )
        assert self._wire.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header).code == ResponseCode.SUCCESS

    def send(self, topic: str, *texts: bytes, **properties: str) -> None:
        for text in texts:
            header = send_header(topic, producer_group="p", queue_id=0, properties=properties)
            response = self._wire.request(RequestCode.SEND_MESSAGE_V2, header, text)
            assert response.code == ResponseCode.SUCCESS, response
        end = int(response.ext_fields["queueOffset"]) + 1
        eventually(lambda: self.max_offset(topic) == end, "RocketMQ has the messages in its consume queue")

    def max_offset(self, topic: str) -> int:
        header = GetMaxOffsetRequestHeader(topic=topic, queue_id=0)
        return int(self._wire.request(RequestCode.GET_MAX_OFFSET, header).ext_fields["offset"])

    def pop(self, label: str, **fields: Any) -> list[Popped]:
        response = self._client.send_pop(**{"poll_time": 0} | fields)
        assert response is not None
        self.facts[label] = _facts_of_pop(response)
        return read(response) if response.code == ResponseCode.SUCCESS else []

    def code(self, label: str, response: RemotingCommand) -> RemotingCommand:
        self.facts[label] = int(response.code)
        return response

    # --- steps ---------------------------------------------------------------------------------

    def refused(self) -> None:
        self.create(TOPIC)
        for label, fields in (
            ("a pop of a missing topic", {"topic": "nowhere"}),
            ("a pop of a missing queue", {"queue_id": 9}),
            ("a pop of too many messages", {"max_msg_nums": 33}),
            ("a pop with an expression that is not valid", {"exp": "a >", "exp_type": "SQL92"}),
            ("a pop whose client has stopped waiting", {"born_time": self._wire.clock.now_ms() - 60_000}),
        ):
            response = self._client.send_pop(**{"poll_time": 0} | fields)
            assert response is not None
            self.code(label, response)

    def empty(self) -> None:
        self.pop("a pop without messages that may not wait")
        self.pop("a pop without messages that waits", poll_time=1_000)

    def popped(self) -> None:
        self.send(TOPIC, b"one", b"three", TAGS="a")
        self.send(TOPIC, b"two", TAGS="b")
        self.pop("a pop of another group by tag", consumer_group="audit", exp="b", exp_type="TAG")
        self.pop("a pop of another group after that", consumer_group="audit")
        self.first = self.pop("a pop of two messages", max_msg_nums=2)
        self.first += self.pop("a pop of the rest", max_msg_nums=2)

    def acknowledged(self) -> None:
        one, three = self.first[:2]
        self.stats("the progress before an acknowledgement")
        self.code("an acknowledgement", self._client.send_ack(one))
        self.code("the same acknowledgement", self._client.send_ack(one))
        self.stats("the progress after an acknowledgement")
        for label, fields in (
            ("an acknowledgement in a missing topic", {"topic": "nowhere"}),
            ("an acknowledgement in a missing queue", {"queue_id": 9}),
            ("an acknowledgement after the end of the queue", {"offset": 99}),
            ("an acknowledgement before the start of the queue", {"offset": -1}),
            ("an acknowledgement without a handle", {"extra_info": "no handle"}),
        ):
            self.code(label, self._client.send_ack(three, **fields))
        self.code("acknowledgements of several", self._client.ack_all([three]))
        self.code("acknowledgements of a missing queue", self._client.ack_all([three], queue_id=9))
        none = BatchAckMessageRequestBody(broker_name="broker-a").encode()
        self.code("acknowledgements of none", self._client.answer(RequestCode.BATCH_ACK_MESSAGE, body=none))

    def stats(self, label: str) -> None:
        if self._commits_deliveries:
            eventually(lambda: len(set(self.progress())) == 1, "all deliveries are committed")
        self.facts[label] = self.progress()

    def progress(self) -> tuple[int, int]:
        header = GetConsumeStatsRequestHeader(consumer_group=GROUP, topic=TOPIC)
        table = ConsumeStats.decode(self._wire.request(RequestCode.GET_CONSUME_STATS, header).body).offset_table
        (offsets,) = [each for queue, each in table.items() if queue.topic == TOPIC]
        return offsets.broker_offset, offsets.consumer_offset

    def changed(self) -> None:
        (two,) = self.first[2:]
        for label, fields in (
            ("a change in a missing topic", {"topic": "nowhere"}),
            ("a change in a missing queue", {"queue_id": 9}),
            ("a change after the end of the queue", {"offset": 99}),
        ):
            self.code(label, self._client.send_change(two, 1_000, **fields))
        response = self.code("a change", self._client.send_change(two, 30_000))
        self.facts["the new time"] = response.header(ChangeInvisibleTimeResponseHeader).invisible_time
        new = changed(two, response)
        self.code("another change with the handle before the change", self._client.send_change(two, 30_000))
        self.code("an acknowledgement with the handle before the change", self._client.send_ack(two))
        self.code("an acknowledgement with the new handle", self._client.send_ack(new))

    def expired(self) -> None:
        self.create("expiring")
        self.send("expiring", b"late", TAGS="a", KEYS="k")
        (first,) = self.pop("a pop for a second", topic="expiring", invisible_time=1_000)
        (again,) = self.pop("the pop after that", topic="expiring", poll_time=20_000)
        self.facts["the handle of a retry"] = again.extra_info.split(" ")[4:6]
        names = set(again.message.properties) - {"MSG_REGION", "TRACE_ON", "CLUSTER", "UNIQ_KEY", "WAIT"}
        self.facts["the properties of a retry"] = sorted(names)
        fields = {"topic": "expiring"}
        self.code("an acknowledgement after the invisible time", self._client.send_ack(first, **fields))
        self.code("a change after the invisible time", self._client.send_change(first, 1_000, **fields))
        retry = {"topic": f"%RETRY%{GROUP}_expiring"}
        self.code("an acknowledgement of the retry", self._client.send_ack(again, **retry))

    def ordered(self) -> None:
        self.create("ordered")
        self.send("ordered", b"a", b"b", b"c")
        ordered: dict[str, Any] = {"topic": "ordered", "order": True, "invisible_time": 2_000}
        first = self.pop("an ordered pop", max_msg_nums=2, **ordered)
        self.pop("an ordered pop of a blocked queue", **ordered)
        self.code("an ordered acknowledgement", self._client.send_ack(first[0], topic="ordered"))
        self.pop("an ordered pop of a queue that is still blocked", **ordered)
        self.code(
            "an ordered acknowledgement of another message", self._client.send_ack(first[0], topic="ordered", offset=2)
        )
        again = self.pop("an ordered pop after the invisible time", poll_time=10_000, **ordered)
        for popped in again:
            self.code("an ordered acknowledgement of the last message", self._client.send_ack(popped, topic="ordered"))
        self.pop("an ordered pop of an attempt", attempt_id="x", **ordered | {"topic": "expiring"})

    def looked_at(self) -> None:
        self.code("a peek without messages", self._client.peek())
        self.facts["a notification without messages"] = self._client.notification(poll_time=0)
        self.facts["a notification that waits"] = self._client.notification(poll_time=1_000)
        self.send(TOPIC, b"four")
        response = self.code("a peek", self._client.peek())
        self.facts["the messages of a peek"] = [each.body for each in decode_messages(response.body, "broker-a")]
        self.facts["a notification"] = self._client.notification(poll_time=0)
        self.facts["the number of held pops"] = self._client.held()
        self.pop("a pop after the peek")

    def assigned(self) -> None:
        self.facts["an assignment without members"] = self.query()
        self._wire.request(RequestCode.HEART_BEAT, None, heartbeat_body("c1", GROUP, subscription(TOPIC)))
        self.facts["an assignment"] = eventually(self.query, "the broker has the route of the topic")
        for label, fields in (
            ("the mode of a missing topic", {"topic": "nowhere"}),
            ("the mode of a retry topic", {"topic": f"%RETRY%{GROUP}"}),
            ("the mode of a new group", {"consumer_group": "new"}),
            ("a mode", {}),
        ):
            given = {"topic": TOPIC, "consumer_group": GROUP, "mode": "POP"} | fields
            body = SetMessageRequestModeRequestBody(**given).encode()
            self.code(label, self._wire.request(RequestCode.SET_MESSAGE_REQUEST_MODE, None, body))
        self.facts["an assignment to pop"] = self.query()
        self.facts["an assignment in a missing topic"] = self.query(topic="nowhere")
        self.facts["an assignment by another strategy"] = self.query(strategy_name="OTHER")

    def query(self, **fields: str) -> object:
        body = QueryAssignmentRequestBody(**{"topic": TOPIC, "consumer_group": GROUP, "client_id": "c1"} | fields)
        response = self._wire.request(RequestCode.QUERY_ASSIGNMENT, None, body.encode())
        if response.code != ResponseCode.SUCCESS:
            return int(response.code)
        found = QueryAssignmentResponseBody.decode(response.body).message_queue_assignments
        return None if found is None else [(each.message_queue.queue_id, each.mode) for each in found]


def _facts_of_pop(response: RemotingCommand) -> object:
    header = response.header(PopMessageResponseHeader)
    if response.code != ResponseCode.SUCCESS:
        return int(response.code), header.rest_num
    popped = read(response)
    return {
        "messages": [(each.message.topic, each.body, each.count) for each in popped],
        "start_offset_info": header.start_offset_info,
        "msg_offset_info": header.msg_offset_info,
        "order_count_info": header.order_count_info or None,
        "is_ordered": header.revive_qid == 999,
        "invisible_time": header.invisible_time,
        "rest": header.rest_num,
        "has_handle": ["POP_CK" in each.message.properties for each in popped],
    }


class Both(NamedTuple):
    actual: Facts
    expected: Facts


def _run(address: str, *, commits_deliveries: bool) -> Facts:
    wire = Wire(address)
    try:
        return Steps(wire, commits_deliveries=commits_deliveries).run()
    finally:
        wire.close()


@pytest.fixture(scope="module")
def both(rocketmq: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder: Path = tmp_path_factory.mktemp("expected")
    port = free_port()
    with NameServer() as names, RocketMQ(folder, names, {"listenPort": port}):
        expected = _run(f"127.0.0.1:{port}", commits_deliveries=True)
    with (
        EmbeddedBroker(None, EmbeddedSettings(listen_host=ANY_PORT)) as engine,
        BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server,
    ):
        yield Both(_run(str(server.address), commits_deliveries=False), expected)


def test_the_responses_equal_rocketmqs(both: Both) -> None:
    compared = {label: (both.actual.get(label), facts) for label, facts in both.expected.items()}
    found = {label: pair for label, pair in compared.items() if pair[0] != pair[1]}

    assert found == {label: (ours, theirs) for label, (ours, theirs, _) in DIFFERENT.items()}
