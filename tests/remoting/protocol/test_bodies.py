"""JSON bodies: fastjson's text is read, and ours is what fastjson would write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies import json_body
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumeStats,
    HeartbeatData,
    LockBatchRequestBody,
    QueryCorrectionOffsetBody,
)
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody, dumps, loads
from mqtemplate.remoting.protocol.bodies.route import (
    BrokerData,
    KVTable,
    QueueData,
    TopicConfig,
    TopicRouteData,
)
from tests.remoting.protocol.code_tables import BODIES, rocketmq_name
from tests.remoting.protocol.golden_file import golden
from tests.remoting.protocol.other_side import ConsumeMessageDirectlyResult
from tests.remoting.protocol.strategies import instances, json_values

KINDS = [*BODIES.values(), ConsumeMessageDirectlyResult]
BY_NAME = {rocketmq_name(kind): kind for kind in KINDS} | {"UnlockBatchRequestBody": LockBatchRequestBody}

IGNORED = {
    # static topics, times as text beside the numbers, and data of the proxy: our classes ignore and do not write them
    "ClusterInfo": {"zoneName"},
    "ConsumeStatsList": {"totalInflightDiff"},
    "QueryConsumeQueueResponseBody": {"bitMap", "extendDataJson", "filterData", "msg"},
    "QueryConsumeTimeSpanBody": {"consumeTimeStampStr", "maxTimeStampStr", "minTimeStampStr"},
    "RegisterBrokerBody": {"mappingDataVersion", "topicQueueMappingDetailMap", "topicQueueMappingInfoMap"},
    "SubscriptionGroupConfig": {"subscriptionDataSet"},
    "SubscriptionGroupList": {"subscriptionDataSet"},
    "SubscriptionGroupWrapper": {"subscriptionDataSet"},
    "TopicRouteData": {"topicQueueMappingByBroker", "zoneName"},
}

QUEUE = MessageQueue("T", "broker-a", 3)
QUEUE_TEXT = '{"brokerName":"broker-a","queueId":3,"topic":"T"}'


def without(value: Any, names: set[str]) -> Any:
    """Return *value* without the fields of these names at any depth."""
    if isinstance(value, dict):
        return {name: without(item, names) for name, item in value.items() if name not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", golden("body2"))
def test_each_body_is_written_as_java_writes_it(name: str) -> None:
    """Character by character, including keys that are numbers or objects."""
    text = golden("body2")[name]

    ours = BY_NAME[name].decode(text.encode()).encode()

    assert loads(ours) == without(loads(text.encode()), IGNORED.get(name, set()))
    assert ours.decode() == text or name in IGNORED


@pytest.mark.parametrize("name", golden("body1"))
def test_the_text_of_both_fastjson_versions_is_read_alike(name: str) -> None:
    """RocketMQ up to 5.4 uses fastjson 1, which writes more, such as references to repeated values."""
    kind = BY_NAME[name]

    assert kind.decode(golden("body1")[name].encode()) == kind.decode(golden("body2")[name].encode())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(data=st.data())
def test_a_body_survives_encoding(kind: type[JsonBody], data: st.DataObject) -> None:
    instance = data.draw(instances(kind))

    assert kind.decode(instance.encode()) == instance


@given(kind=st.sampled_from(KINDS), data=st.binary(max_size=60))
def test_any_bytes_are_a_body_or_raise_our_own_error(kind: type[JsonBody], data: bytes) -> None:
    try:
        instance = kind.decode(data)
    except RemoteProtocolError:
        return
    assert kind.decode(instance.encode()) == instance


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_any_type_in_any_field_is_read_or_raises_our_own_error(kind: type[JsonBody], data: st.DataObject) -> None:
    value = loads(data.draw(instances(kind)).encode())
    name = data.draw(st.sampled_from(sorted(value) or ["none"]))
    value[name] = data.draw(json_values(max_leaves=4))
    try:
        instance = kind.decode(json.dumps(value, default=str, skipkeys=True).encode())
    except RemoteProtocolError:
        return
    assert kind.decode(instance.encode()) == instance


# --- maps whose keys are not texts ------------------------------------------------------------------


@pytest.mark.feature("trap 3")
@pytest.mark.parametrize("text", ['{0:"a:1",-1:"b:2"}', '{"0":"a:1","-1":"b:2"}', '{ 0 :"a:1"\n,\t-1: "b:2"}'])
def test_a_number_as_a_key_is_read_with_and_without_quotes(text: str) -> None:
    body = f'{{"brokerAddrs":{text},"brokerName":"broker-a"}}'

    read = BrokerData.decode(body.encode())

    assert read.broker_addrs == {0: "a:1", -1: "b:2"}
    assert b'{0:"a:1",-1:"b:2"}' in read.encode()


def test_only_standard_json_has_quotes_around_a_number_as_a_key() -> None:
    body = QueryCorrectionOffsetBody(correction_offsets={3: 7})

    assert body.encode() == b'{"correctionOffsets":{3:7}}'
    assert body.encode(standard=True) == b'{"correctionOffsets":{"3":7}}'


def test_any_reader_accepts_a_route_in_standard_json() -> None:
    """It has quotes around every key, sorted keys, and ASCII only."""
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


def test_brackets_inside_a_text_are_part_of_the_text() -> None:
    text = '{"table":{"a":"{0:1}","b":"\\"}","c":"{\\"k\\":[1,2"}, "later":{1:[{"x":{{}:{}}}]}}'

    assert KVTable.decode(text.encode()).table == {"a": "{0:1}", "b": '"}', "c": '{"k":[1,2'}


def as_key(value: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(value.items()))


_KEYS = st.text(max_size=3) | st.integers().map(str)
_DIALECT = st.recursive(
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


@given(value=_DIALECT)
def test_a_value_of_the_dialect_survives_encoding(value: Any) -> None:
    assert loads(dumps(value).encode("utf-8", "surrogatepass")) == value


@given(value=_DIALECT)
def test_the_reader_of_the_dialect_reads_standard_json_as_the_standard_library_does(value: Any) -> None:
    text = dumps(value)
    try:
        expected = json.loads(text)
    except ValueError:
        return

    assert json_body._DialectReader(f"\n {text} ").read() == expected


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{0:" * 100_000, "{{" * 100_000])
def test_a_text_that_is_nested_too_deep_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="the body is not JSON, a KVTable was expected"):
        KVTable.decode(text.encode())


# --- values that are missing, null, or of another type ----------------------------------------------


def test_a_missing_field_and_null_get_javas_default() -> None:
    heartbeat = HeartbeatData.decode(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","unitMode":null},null]}')

    (group,) = heartbeat.consumer_data_set
    assert (group.unit_mode, group.message_model, heartbeat.heartbeat_fingerprint) == (False, "CLUSTERING", 0)
    assert heartbeat.producer_data_set == []


def test_a_number_or_boolean_may_be_text_and_a_text_may_be_a_number() -> None:
    """fastjson converts them, so other writers may send them."""
    text = b'{"topicName":7,"readQueueNums":"4","writeQueueNums":4.0,"order":"TRUE"}'

    assert TopicConfig.decode(text) == TopicConfig(topic_name="7", read_queue_nums=4, write_queue_nums=4, order=True)


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    """Otherwise one client's broken id would make every list that contains it impossible to encode."""
    heartbeat = HeartbeatData.decode(rb'{"clientID":"\ud800 \ud83d\ude00","later":{{"a":"\udc00"}:1}}')

    assert heartbeat.client_id == "? \N{GRINNING FACE}"


def test_a_value_that_json_cannot_express_is_refused() -> None:
    with pytest.raises(MessageError, match="this KVTable cannot be encoded: .*; use text that UTF-8 can encode"):
        KVTable(table={"a": "\ud800"}).encode()
    with pytest.raises(MessageError, match="this ConsumeStats cannot be encoded"):
        ConsumeStats(consume_tps=float("nan")).encode()
