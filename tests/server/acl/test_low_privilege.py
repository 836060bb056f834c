"""Sequences of any requests of a low-privilege account: it reads nothing of others, and changes nothing of theirs.

After each sequence the files that a SIGKILL would leave are opened, by the doctor and by a broker.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.recall_handle import decode_handle, encode_handle
from mqtemplate.message import (
    INTERNAL_PROPERTIES,
    ORIGIN_PROPERTIES,
    Message,
    MessageQueue,
    SendSequence,
    parse_offset_msg_id,
)
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.headers.fields import BoundaryType, declared_fields
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import encode_batch, encode_properties_text
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches
from mqtemplate.results import TransactionState
from mqtemplate.server import Account, AclSettings, Right
from mqtemplate.server.acl.rights import ANY_ACCOUNT, RIGHTS
from mqtemplate.topics import is_broker_topic
from tests.remoting.protocol.code_tables import REQUEST_HEADERS
from tests.server.acl.crashes import SMALL, after_a_crash
from tests.server.serving import SECRET, RecordingConnection, Serving
from tests.thirds import examples

HIDDEN = b"this body is for others"
OWN_TOPICS = ("mine", "%RETRY%my-group", "%DLQ%my-group")
ACCOUNTS = (
    Account(access_key="administrator", secret_key=SECRET, admin=True),
    Account(
        access_key="low-privilege",
        secret_key=SECRET,
        topic_perms={"mine": Right.PUB | Right.SUB},
        group_perms={"my-group": Right.SUB},
    ),
)
QUEUE = MessageQueue("theirs", "broker-a", 0)


class Others:
    """A server on which other accounts have messages, a transaction, a consumer, a lock and settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        engine = EmbeddedBroker(folder / "store", SMALL, VirtualClock())
        self.serving = serving = Serving(engine=engine, acl=AclSettings(accounts=ACCOUNTS))
        serving.server.load()
        engine = serving.engine
        for topic in ("theirs", "mine"):
            engine.create_topic(topic, 1)
        self.client = RecordingConnection(access_key="administrator")
        serving.heartbeat("their-group", "theirs", over=self.client, client_id="their@1", producers=["requesters"])
        sent = engine.sends.send(Message("theirs", HIDDEN, {"KEYS": "4466"}))
        delayed = engine.sends.send(Message("theirs", HIDDEN, {"DELAY": "18", "KEYS": "4466"}))
        half = {"TRAN_MSG": "true", "PGROUP": "their-producers", "UNIQ_KEY": "0A0B"}
        response = serving.send("theirs", HIDDEN, half, sys_flag=4, over=self.client)
        assert response is not None
        self.half = response.header(SendMessageResponseHeader)
        engine.sends.send_sequenced([(Message("theirs", b"row"), QUEUE)], SendSequence("query", 1, 0))
        engine.engine.offsets.commit("their-group", "theirs", 0, 1)
        serving.server.locks.lock("their-group", "their@1", [QUEUE])
        serving.server.name_server.entries.put("shops", "berlin", "open")
        self.ids = [sent.offset_msg_id, delayed.offset_msg_id, self.half.msg_id]
        assert delayed.handle is not None
        self.handles = [delayed.handle, encode_handle(decode_handle(delayed.handle)._replace(topic="mine"))]
        self.offsets = [parse_offset_msg_id(each)[1] for each in self.ids]
        self._end = engine.store.end_offset

    def copied(self) -> int:
        """Return how often messages of others were stored again: requests may copy them to topics of the account."""
        store = self.serving.engine.store
        return store.read_bytes(self._end, store.end_offset - self._end).count(HIDDEN)

    def state(self) -> dict[str, object]:
        """Return all that belongs to others, or to the broker."""
        server, engine = self.serving.server, self.serving.engine
        info = server.clients.consumers.get("their-group")
        ends = engine.store.topic_ends().items()
        return {
            "topics": {
                topic: engine.topics.config(topic) for topic in engine.topics.names() if topic not in OWN_TOPICS
            },
            "groups": {name: config for name, config in server.groups.all().items() if name != "my-group"},
            "offsets": {key: each for key, each in engine.engine.offsets.all().items() if not _is_own(*key)},
            "messages": {name: end for name, end in ends if name not in OWN_TOPICS and not is_broker_topic(name)},
            "pending": engine.delayed.count_pending(PendingQuery(topic="theirs")).total,
            "members": info and info.client_ids(),
            "locked": server.locks.lock("their-group", "their@1", [QUEUE]),
            "entries": (server.name_server.entries.namespace("shops"), server.name_server.entries.namespace("x")),
            "brokers": (server.name_server.is_writable, server.name_server.others.all()),
            "levels": engine.delay_levels_ms,
        }

    def reply(self) -> None:
        """Send a reply to the client of others."""
        properties = {"MSG_TYPE": "reply", "CORRELATION_ID": "c", "REPLY_TO_CLIENT": "their@1"}
        code = RequestCode.SEND_REPLY_MESSAGE_V2
        self.serving.send("DefaultCluster_REPLY_TOPIC", HIDDEN, properties, code=code, over=self.client)

    def check_after_crash(self) -> None:
        """Assert that nothing of others is gone, and that their sequenced send is not stored again."""
        engine = self.serving.engine
        with after_a_crash(self.folder / "store", self.serving.clock.now_ms()) as broker:
            assert broker.store.topic_ends()["theirs"] == engine.store.topic_ends()["theirs"]
            assert broker.delayed.count_pending(PendingQuery(topic="theirs")).total == 1
            again = broker.sends.send_sequenced([(Message("theirs", b"row"), QUEUE)], SendSequence("query", 1, 0))
            assert (again.stored, again.repeated) == (0, 1)

    def can_commit(self) -> bool:
        """Return True if the transaction of others is still open: its producer commits it."""
        end = self.serving.engine.engine.transactions.end(
            self.half.queue_offset, self.offsets[2], "their-producers", TransactionState.COMMIT
        )
        return end is not None


def _is_own(group: str, topic: str) -> bool:
    return group == "CID_RMQ_SYS_TRANS" or (group == "my-group" and topic in OWN_TOPICS)


# --- requests -------------------------------------------------------------------------------------------

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
PHASES = (Phase.reuse, Phase.generate)
"""Without shrinking: it would start thousands of servers."""
TOPICS = (
    "mine",
    "mine",
    "mine",
    "theirs",
    "%RETRY%my-group",
    "%RETRY%their-group",
    "%DLQ%their-group",
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "TBW102",
    "DefaultCluster_REPLY_TOPIC",
)
GROUPS = ("my-group", "my-group", "their-group", "their-producers", "CLIENT_INNER_PRODUCER")
PROPERTIES = (
    {},
    {"KEYS": "4466", "REAL_TOPIC": "theirs", "REAL_QID": "0"},
    {"DELAY": "1", "REAL_TOPIC": "theirs", "REAL_QID": "0"},
    {"TIMER_DELAY_MS": "10", "REAL_TOPIC": "theirs"},
    {"RETRY_TOPIC": "theirs", "ORIGIN_MESSAGE_ID": "0A0B", "DELAY": "1"},
    {"TRAN_MSG": "true", "PGROUP": "their-producers", "UNIQ_KEY": "0A0B", "REAL_TOPIC": "theirs"},
    {"MSG_TYPE": "reply", "CORRELATION_ID": "c", "REPLY_TO_CLIENT": "their@1"},
)
FORGED = ("garbage", "theirs", "0A0B", "9" * 400, "query 9 0 99", "-1")
"""Values of internal properties."""
BITS = (0, 0, -1, *(1 << bit for bit in range(31)), -(1 << 31))


@st.composite
def properties(draw: st.DrawFn) -> dict[str, str]:
    """Return properties, mostly with one that has a meaning inside a broker."""
    chosen = draw(st.sampled_from(PROPERTIES))
    name = draw(st.sampled_from(("", *sorted(INTERNAL_PROPERTIES | ORIGIN_PROPERTIES))))
    return chosen | ({name: draw(st.sampled_from(FORGED))} if name else {})


topics, groups = st.sampled_from(TOPICS), st.sampled_from(GROUPS)
client_ids = st.sampled_from(("their@1", "low@1"))


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return a body with the members of all bodies: each request takes its own ones."""
    queue = {"topic": draw(topics), "brokerName": "broker-a", "queueId": 0}
    subscription = {"topic": draw(topics), "subString": "*", "subVersion": 1}
    consumer = {"groupName": draw(groups), "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    consumers = [consumer | {"subscriptionDataSet": [subscription]}] if draw(st.booleans()) else []
    body = {
        "clientID": draw(client_ids),
        "clientId": draw(client_ids),
        "consumerGroup": draw(groups),
        "group": draw(groups),
        "groupName": draw(groups),
        "mqSet": [queue],
        "consumerDataSet": consumers,
        "producerDataSet": [{"groupName": draw(groups)}],
        "subscriptionData": subscription,
        "topicConfigList": [{"topicName": draw(topics), "readQueueNums": 1, "writeQueueNums": 1, "perm": 2}],
        "groupConfigList": [{"groupName": draw(groups), "consumeEnable": False}],
    }
    return json.dumps(body).encode()


@st.composite
def requests(draw: st.DrawFn, codes: tuple[int, ...], others: Others) -> RemotingCommand:
    """Return a request of any code. Its fields name what the account may use, or what belongs to others."""
    code = draw(st.one_of(st.sampled_from(sorted(RIGHTS)), st.sampled_from(sorted(RIGHTS)), st.sampled_from(codes)))
    kind = REQUEST_HEADERS.get(code)
    fields: dict[str, str] = {}
    if kind is not None:
        values = {field.name: draw(_values(field, others)) for field, _, _ in declared_fields(kind)}
        fields = kind(**values).to_ext_fields()
        fields.pop(draw(st.sampled_from(("", "", "", *fields))), None)
    body = draw(bodies())
    if code == RequestCode.SEND_SEQUENCED_MESSAGES:
        topic = draw(topics)
        body = encode_queue_batches([(Message(topic, b"x", draw(properties())), 0)], {topic: topic})
    elif code == RequestCode.SEND_BATCH_MESSAGE:
        body = encode_batch([Message("any", b"x", draw(properties())), Message("any", b"y", draw(properties()))])
    request = RemotingCommand(code, 7, draw(st.sampled_from((0, 0, 0, 2))), ext_fields=fields, body=body)
    request.version = draw(st.sampled_from((399, 479)))
    return request


def _values(field: dataclasses.Field[object], others: Others) -> st.SearchStrategy[Any]:
    kind, name = str(field.type), field.name
    if "bool" in kind:
        return st.booleans()
    if "Boundary" in kind:
        return st.just(BoundaryType.LOWER)
    if "Long" in kind or "int" in kind:
        numbers: dict[str, tuple[int, ...] | list[int]] = {
            "sys_flag": BITS,
            "version": (1, 9, 2**63 - 1),
            "commit_or_rollback": (0, 8, 12),
            "tran_state_table_offset": (others.half.queue_offset, 1),
            "commit_log_offset": others.offsets[2:],
            "offset": others.offsets,
            "delay_level": (0, -1, 1),
        }
        return st.sampled_from(numbers.get(name, (0, 0, 1, -1, 6, 32, *others.offsets)))
    if name == "properties":
        return properties().map(encode_properties_text)
    if name == "app_id":
        return st.just("query")
    if "handle" in name:
        return st.sampled_from(others.handles)
    if "topic" in name:
        return topics
    if name == "producer_group":
        return st.sampled_from(("their-producers", "my-group"))
    if "group" in name:
        return groups
    if "client" in name:
        return client_ids
    return st.sampled_from(("4466", "0A0B", "*", "shops", "berlin", "broker-a", *others.ids))


# --- the property ---------------------------------------------------------------------------------------


@settings(
    max_examples=examples(40),
    deadline=None,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_a_low_privilege_account_reads_and_changes_nothing_of_others(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_sequence(data, Others(Path(folder)))


def check_sequence(data: st.DataObject, others: Others) -> None:
    serving, attacker = others.serving, RecordingConnection(access_key="low-privilege")
    codes = tuple(sorted(serving.server.all_processors))
    before = others.state()
    responses = []
    for request in data.draw(st.lists(requests(codes, others), min_size=20, max_size=40)):
        sign_command(request, "low-privilege", SECRET)
        serving.clock.move_ms(1)
        responses.append((request.code, serving.process(attacker, request)))
    assert others.copied() == 0
    others.reply()
    serving.advance(6_000)  # the time of a transaction check

    received = [*attacker.replies, *attacker.pushed, *(response for _, response in responses if response is not None)]
    assert not [str(command) for command in received if HIDDEN in command.body]
    assert others.state() == before
    others.check_after_crash()
    assert others.can_commit()
    for code, response in responses:
        if response is not None and code not in RIGHTS and code not in ANY_ACCOUNT:
            assert response.code in (ResponseCode.NO_PERMISSION, ResponseCode.SYSTEM_ERROR), RequestCode(code)
    serving.engine.close()
