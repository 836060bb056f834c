"""JSON bodies: what fastjson writes is read, and what we write is what fastjson would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies import fastjson
from mqtemplate.remoting.protocol.bodies.fastjson import dumps, loads
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumeStats,
    HeartbeatData,
    LockBatchRequestBody,
    OffsetWrapper,
    QueryCorrectionOffsetBody,
    ResetOffsetBody,
    UserInfo,
)
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody, encode_list
from mqtemplate.remoting.protocol.bodies.route import (
    BrokerData,
    KVTable,
    QueueData,
    TopicConfig,
    TopicRouteData,
    TopicStatsTable,
)
from tests.remoting.protocol import code_tables as bodies
from tests.remoting.protocol.code_tables import REQUEST_BODIES, RESPONSE_BODIES
from tests.remoting.protocol.golden_file import golden
from tests.remoting.protocol.strategies import bodies as bodies_of

KINDS = [
    kind
    for kind in vars(bodies).values()
    if isinstance(kind, type) and issubclass(kind, JsonBody) and kind is not JsonBody
]

ANOTHER_NAME = {"UnlockBatchRequestBody": LockBatchRequestBody}

PASSED_OVER = {
    # static topics, texts beside numbers, and what the proxy keeps: read past, not written
    "QueryConsumeTimeSpanBody": {"consumeTimeStampStr", "maxTimeStampStr", "minTimeStampStr"},
    "RegisterBrokerBody": {"mappingDataVersion", "topicQueueMappingDetailMap", "topicQueueMappingInfoMap"},
    "SubscriptionGroupConfig": {"subscriptionDataSet"},
    "SubscriptionGroupList": {"subscriptionDataSet"},
    "SubscriptionGroupWrapper": {"subscriptionDataSet"},
    "TopicRouteData": {"topicQueueMappingByBroker"},
}

QUEUE = MessageQueue("T", "broker-a", 3)
QUEUE_TEXT = '{"brokerName":"broker-a","queueId":3,"topic":"T"}'


def without(value: Any, names: set[str]) -> Any:
    """*value* without the fields of these names, however deep they are."""
    if isinstance(value, dict):
        return {name: without(item, names) for name, item in value.items() if name not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", golden("body2"))
def test_each_body_is_written_as_java_writes_it(name: str) -> None:
    """To the character, keys that are numbers or objects included."""
    text = golden("body2")[name]
    kind = ANOTHER_NAME.get(name) or getattr(bodies, name)

    ours = kind.decode(text.encode()).encode()

    assert loads(ours) == without(loads(text.encode()), PASSED_OVER.get(name, set()))
    assert ours.decode() == text or name in PASSED_OVER


@pytest.mark.parametrize("name", golden("body1"))
def test_both_of_javas_json_libraries_mean_the_same(name: str) -> None:
    """Up to 5.4 it is fastjson 1, which writes more, such as references to what stands elsewhere."""
    kind = ANOTHER_NAME.get(name) or getattr(bodies, name)

    assert kind.decode(golden("body1")[name].encode()) == kind.decode(golden("body2")[name].encode())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(data=st.data())
def test_a_body_survives_being_text(kind: type[JsonBody], data: st.DataObject) -> None:
    made = data.draw(bodies_of(kind))

    assert kind.decode(made.encode()) == made


@given(kind=st.sampled_from(KINDS), data=st.binary(max_size=60))
def test_any_bytes_are_a_body_or_raise_our_own_error(kind: type[JsonBody], data: bytes) -> None:
    try:
        made = kind.decode(data)
    except RemoteProtocolError:
        return
    assert kind.decode(made.encode()) == made


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_any_type_in_any_field_is_read_or_raises_our_own_error(kind: type[JsonBody], data: st.DataObject) -> None:
    value = loads(data.draw(bodies_of(kind)).encode())
    name = data.draw(st.sampled_from(sorted(value) or ["none"]))
    value[name] = data.draw(_VALUES)
    try:
        made = kind.decode(json.dumps(value, default=str, skipkeys=True).encode())
    except RemoteProtocolError:
        return
    assert kind.decode(made.encode()) == made


# --- maps whose keys are not texts ------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        QUEUE_TEXT,
        ' { "topic" : "T", "queueId":3,"brokerName":"broker-a" , "later":[{}] } ',
        json.dumps(QUEUE_TEXT),
    ],
)
def test_a_message_queue_as_a_key_is_read_bare_and_within_quotes(key: str) -> None:
    text = f'{{"offsetTable":{{{key}:7}}}}'

    assert ResetOffsetBody.decode(text.encode()).offset_table == {QUEUE: 7}


def test_a_message_queue_as_a_key_is_written_bare() -> None:
    """Quoted, 5.5.0 would not read it."""
    stats = ConsumeStats(offset_table={QUEUE: OffsetWrapper(broker_offset=9, consumer_offset=4, last_timestamp=1)})

    assert stats.encode().decode() == (
        f'{{"consumeTps":0.0,"offsetTable":{{{QUEUE_TEXT}:{{"brokerOffset":9,"consumerOffset":4,"lastTimestamp":1}}}}}}'
    )


@pytest.mark.parametrize("text", ['{0:"a:1",-1:"b:2"}', '{"0":"a:1","-1":"b:2"}', '{ 0 :"a:1"\n,\t-1: "b:2"}'])
def test_a_number_as_a_key_is_read_bare_and_within_quotes(text: str) -> None:
    body = f'{{"brokerAddrs":{text},"brokerName":"broker-a"}}'

    assert BrokerData.decode(body.encode()).broker_addrs == {0: "a:1", -1: "b:2"}


def test_a_number_as_a_key_is_written_bare_unless_standard_json_is_asked_for() -> None:
    body = QueryCorrectionOffsetBody(correction_offsets={3: 7})

    assert body.encode() == b'{"correctionOffsets":{3:7}}'
    assert body.encode(standard=True) == b'{"correctionOffsets":{"3":7}}'


def test_a_route_in_standard_json_is_what_any_reader_takes() -> None:
    """Quotes around every key, keys sorted, nothing but ASCII."""
    route = TopicRouteData(
        queue_datas=[QueueData(broker_name="é", read_queue_nums=4, write_queue_nums=4)],
        broker_datas=[BrokerData(cluster="c", broker_name="é", broker_addrs={0: "127.0.0.1:10911"})],
    )

    text = route.encode(standard=True)

    assert text == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"\\u00e9","cluster":"c",'
        b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"\\u00e9","perm":6,'
        b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
    )
    assert TopicRouteData.decode(text) == route


def test_brackets_in_a_text_do_not_lead_the_reader_astray() -> None:
    text = '{"table":{"a":"{0:1}","b":"\\"}","c":"{\\"k\\":[1,2"}, "later":{1:[{"x":{{}:{}}}]}}'

    assert KVTable.decode(text.encode()).table == {"a": "{0:1}", "b": '"}', "c": '{"k":[1,2'}


def as_key(value: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(value.items()))


_KEYS = st.text(max_size=3) | st.integers().map(str)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.dictionaries(
            st.dictionaries(st.text(max_size=2), st.integers(), max_size=2).map(as_key), inner, max_size=2
        )
    ),
    max_leaves=8,
)


@given(value=_JSON)
def test_whatever_is_written_is_read(value: Any) -> None:
    assert loads(dumps(value).encode("utf-8", "surrogatepass")) == value


@given(value=_JSON)
def test_patience_reads_standard_json_as_the_standard_library_does(value: Any) -> None:
    text = dumps(value)
    try:
        expected = json.loads(text)
    except ValueError:
        return

    assert fastjson._Reader(f"\n {text} ").read() == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1,",
        '{"a":}',
        "{1:2",
        "{1 2}",
        "[1 2]",
        "{[1]:2}",
        '{1:"a',
        "{1:2}}",
        "{1:tru}",
        "{1:1.}",
        "{,}",
        "{1:01}",
    ],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text.encode())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{0:" * 100_000, "{{" * 100_000])
def test_brackets_without_end_are_refused_and_not_followed(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="the body is no JSON, a KVTable was expected"):
        KVTable.decode(text.encode())


# --- what is missing, null, or of another type ------------------------------------------------------


def test_what_is_missing_or_null_is_what_java_means_by_it() -> None:
    heartbeat = HeartbeatData.decode(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","unitMode":null},null]}')

    (group,) = heartbeat.consumer_data_set
    assert (group.unit_mode, group.message_model, heartbeat.heartbeat_fingerprint) == (False, "CLUSTERING", 0)
    assert heartbeat.producer_data_set == []


def test_numbers_and_booleans_may_come_as_texts_and_texts_as_numbers() -> None:
    """Fastjson casts them, so other writers may have got away with it."""
    text = b'{"topicName":7,"readQueueNums":"4","writeQueueNums":4.0,"order":"TRUE"}'

    assert TopicConfig.decode(text) == TopicConfig(topic_name="7", read_queue_nums=4, write_queue_nums=4, order=True)


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (TopicRouteData, "[]", "the body is no TopicRouteData: it must be an object, got \\[\\]"),
        (TopicRouteData, '{"queueDatas":[]}', "the body is no TopicRouteData: brokerDatas is missing"),
        (
            TopicRouteData,
            '{"brokerDatas":[],"queueDatas":[{"brokerName":"a","readQueueNums":[],"writeQueueNums":1}]}',
            "queueDatas\\[0\\].readQueueNums must be a number of 64 bits, got \\[\\]",
        ),
        (ResetOffsetBody, '{"offsetTable":{{"topic":"T","queueId":1}:1}}', "'brokerName' is missing"),
        (ResetOffsetBody, '{"offsetTable":{"x":1}}', "must be a message queue, got 'x'"),
        (ResetOffsetBody, f'{{"offsetTable":{{{QUEUE_TEXT}:"x"}}}}', "must be a number, got 'x'"),
        (TopicConfig, '{"topicName":{}}', "topicName must be a text, got {}"),
        (TopicConfig, '{"topicName":"T","order":1}', "order must be true or false, got 1"),
        (TopicConfig, '{"topicName":"T","perm":9223372036854775808}', "perm must be a number of 64 bits"),
        (TopicConfig, '{"topicName":"T","perm":NaN}', "perm must be a number, got nan"),
        (ConsumeStats, '{"consumeTps":"fast"}', "consumeTps must be a number, got 'fast'"),
        (QueryCorrectionOffsetBody, '{"correctionOffsets":{"x":1}}', "must be a number, got 'x'"),
        (LockBatchRequestBody, '{"consumerGroup":"g","clientId":"c","mqSet":{}}', "mqSet must be a list, got {}"),
    ],
)
def test_another_type_is_refused_with_its_place(kind: type[JsonBody], text: str, problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=problem):
        kind.decode(text.encode())


def test_half_a_character_becomes_a_question_mark() -> None:
    """Kept, one client's strange id would break every list that the server writes it into."""
    heartbeat = HeartbeatData.decode(rb'{"clientID":"\ud800 \ud83d\ude00","later":{{"a":"\udc00"}:1}}')

    assert heartbeat.client_id == "? \N{GRINNING FACE}"


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(MessageError, match="this KVTable cannot be written: .*; give texts UTF-8 can say"):
        KVTable(table={"a": "\ud800"}).encode()
    with pytest.raises(MessageError, match="this ConsumeStats cannot be written"):
        ConsumeStats(consume_tps=float("nan")).encode()


def test_lists_of_bodies_are_read_and_written() -> None:
    users = [UserInfo(username="a", user_type="Super"), UserInfo(username="b")]

    text = encode_list(users)

    assert text == b'[{"userType":"Super","username":"a"},{"username":"b"}]'
    assert UserInfo.decode_list(text) == users
    with pytest.raises(RemoteProtocolError, match="the body is no UserInfo: it must be a list, got {}"):
        UserInfo.decode_list(b"{}")


def test_the_tables_know_the_body_of_a_code() -> None:
    assert REQUEST_BODIES[RequestCode.HEART_BEAT] is HeartbeatData
    assert RESPONSE_BODIES[RequestCode.GET_TOPIC_STATS_INFO] is TopicStatsTable
    assert RequestCode.PULL_MESSAGE not in RESPONSE_BODIES  # its body is messages
