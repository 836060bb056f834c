"""Headers survive encoding and decoding, and have the fields of Java's headers."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long, wire
from mqtemplate.remoting.protocol.headers.group import (
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
)
from tests.remoting.protocol.code_tables import HEADERS
from tests.remoting.protocol.golden_file import golden
from tests.remoting.protocol.strategies import instances

KINDS = list(HEADERS.values())

SHARED = {
    # RocketMQ's class -> our class: one of ours stands for several that have the same fields
    "AddWritePermOfBrokerRequestHeader": "BrokerNameRequestHeader",
    "CreateTopicListRequestHeader": "RpcRequestHeader",
    "DeleteKVConfigRequestHeader": "KVConfigKeyRequestHeader",
    "DeleteTopicRequestHeader": "TopicNameRequestHeader",
    "GetConsumerConnectionListRequestHeader": "ConsumerGroupRequestHeader",
    "GetConsumerListByGroupRequestHeader": "ConsumerGroupRequestHeader",
    "GetEarliestMsgStoretimeRequestHeader": "TopicQueueRequestHeader",
    "GetKVConfigRequestHeader": "KVConfigKeyRequestHeader",
    "GetKVListByNamespaceRequestHeader": "KVNamespaceRequestHeader",
    "GetMaxOffsetResponseHeader": "OffsetResponseHeader",
    "GetMinOffsetRequestHeader": "TopicQueueRequestHeader",
    "GetMinOffsetResponseHeader": "OffsetResponseHeader",
    "GetProducerConnectionListRequestHeader": "ProducerGroupRequestHeader",
    "GetSubscriptionGroupConfigRequestHeader": "GroupRequestHeader",
    "GetTopicConfigRequestHeader": "TopicNameRequestHeader",
    "GetTopicStatsInfoRequestHeader": "TopicNameRequestHeader",
    "HeartbeatRequestHeader": "RpcRequestHeader",
    "LockBatchMqRequestHeader": "RpcRequestHeader",
    "NotifyConsumerIdsChangedRequestHeader": "ConsumerGroupRequestHeader",
    "QueryConsumerOffsetResponseHeader": "OffsetResponseHeader",
    "QueryDataVersionRequestHeader": "BrokerRequestHeader",
    "QueryTopicConsumeByWhoRequestHeader": "TopicNameRequestHeader",
    "QueryTopicsByConsumerRequestHeader": "GroupRequestHeader",
    "SearchOffsetResponseHeader": "OffsetResponseHeader",
    "UnRegisterBrokerRequestHeader": "BrokerRequestHeader",
    "UnlockBatchMqRequestHeader": "RpcRequestHeader",
    "WipeWritePermOfBrokerRequestHeader": "BrokerNameRequestHeader",
}

IGNORED = {
    # fields that our classes ignore and do not write: Java's internal note, namespaces of version 2, static topics, and
    # headers of the proxy
    *("oway", "ns", "nsd", "lo"),
    *("batchUniqId", "forbiddenType", "groupSysFlag", "indexType", "lastKey", "liteTopic", "offsetDelta"),
    *("proxyFrowardClientId", "requestSource"),
}
IGNORED_IN = {
    "ConsumeMessageDirectlyResultRequestHeader": {"brokerName", "topicSysFlag"},
    "CreateTopicRequestHeader": {"force"},
    "PullMessageResponseHeader": {"topicSysFlag"},
    "RegisterBrokerRequestHeader": {"enableActingMaster"},
    "RegisterBrokerResponseHeader": {"haServerAddr"},
    "SendMessageRequestHeaderV2": {"bname"},  # which is `n` in this header
}


def class_of(name: str) -> type[CommandHeader]:
    """Return our class for a class of RocketMQ."""
    return HEADERS[SHARED.get(name, name)]


@pytest.mark.parametrize("name", golden("header"))
def test_a_header_is_written_as_java_writes_it(name: str) -> None:
    """Except the ignored fields, each field of Java's header has the same name and the same text."""
    ext_fields = json.loads(golden("header")[name])
    ignored = IGNORED | IGNORED_IN.get(name, set())

    ours = class_of(name).from_ext_fields(ext_fields)

    assert ours.to_ext_fields() == {key: text for key, text in ext_fields.items() if key not in ignored}


def test_every_header_is_compared_with_javas() -> None:
    """One is only a base class."""
    compared = {class_of(name) for name in golden("header")}

    assert {kind.__name__ for kind in KINDS if kind not in compared} == {"MessageRequestHeader"}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(data=st.data())
def test_a_header_survives_encoding(kind: type[CommandHeader], data: st.DataObject) -> None:
    instance = data.draw(instances(kind))

    assert kind.from_ext_fields(instance.to_ext_fields()) == instance


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_any_text_in_any_field_is_read_or_raises_our_own_error(kind: type[CommandHeader], data: st.DataObject) -> None:
    ext_fields = data.draw(instances(kind)).to_ext_fields()
    for name in data.draw(st.sets(st.sampled_from(sorted(ext_fields) or ["none"]))):
        ext_fields[name] = data.draw(st.text(max_size=5))
    try:
        instance = kind.from_ext_fields(ext_fields)
    except RemoteProtocolError:
        return
    assert kind.from_ext_fields(instance.to_ext_fields()) == instance


def test_a_number_with_more_digits_than_python_converts_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="is not a number of 32 bits"):
        GetMaxOffsetRequestHeader.from_ext_fields({"topic": "T", "queueId": "9" * 5_000})


def test_a_header_is_a_frozen_value() -> None:
    offset = OffsetResponseHeader(offset=5)

    with pytest.raises(dataclasses.FrozenInstanceError):
        offset.offset = 6  # type: ignore[misc]
    assert offset == OffsetResponseHeader(offset=5)
    assert hash(offset) == hash(OffsetResponseHeader(offset=5))
    assert repr(offset) == "OffsetResponseHeader(offset=5)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        offset.unknown = 6  # type: ignore[attr-defined]


def test_a_header_accepts_only_its_own_keywords() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'offset'"):
        OffsetResponseHeader()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'limit'"):
        OffsetResponseHeader(offset=5, limit=6)  # type: ignore[call-arg]


def test_a_new_header_takes_one_class() -> None:
    class LagRequestHeader(CommandHeader):
        topic: str
        since: Long = wire("SINCE", default=0)

    lag = LagRequestHeader(topic="T")

    assert lag.to_ext_fields() == {"topic": "T", "SINCE": "0"}
    assert LagRequestHeader.from_ext_fields({"topic": "T"}) == lag


def test_the_base_class_of_headers_has_no_fields() -> None:
    with pytest.raises(TypeError, match="CommandHeader has no fields"):
        CommandHeader().to_ext_fields()
    with pytest.raises(TypeError, match="CommandHeader has no fields"):
        CommandHeader.from_ext_fields({})


# --- the first use of a class ----------------------------------------------------------------------


def test_a_header_is_completed_at_its_first_use_also_below_a_class_in_use() -> None:
    class Base(CommandHeader):
        topic: str

    class Derived(Base):
        queue_id: int

    assert Base(topic="T").to_ext_fields() == {"topic": "T"}
    assert Derived(topic="T", queue_id=1).to_ext_fields() == {"topic": "T", "queueId": "1"}


def test_several_threads_may_use_a_header_first() -> None:
    for _ in range(20):

        class Fresh(CommandHeader):
            topic: str
            queue_id: int

        start = threading.Barrier(4)

        def read(kind: type[Fresh] = Fresh, start: threading.Barrier = start) -> Fresh:
            start.wait()
            return kind.from_ext_fields({"topic": "T", "queueId": "1"})

        with ThreadPoolExecutor(4) as threads:
            found = [each.result() for each in [threads.submit(read) for _ in range(4)]]

        assert found == [Fresh(topic="T", queue_id=1)] * 4
