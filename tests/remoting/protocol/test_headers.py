"""Headers: every one survives being text, and each says what Java's says."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.fields import BoundaryType, CommandHeader, Long, header, wire
from mqtemplate.remoting.protocol.headers.group import (
    GetMaxOffsetRequestHeader,
    SearchOffsetRequestHeader,
    UnregisterClientRequestHeader,
)
from mqtemplate.remoting.protocol.headers.message import (
    PullMessageResponseHeader,
    QueryMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from tests.remoting.protocol import code_tables as headers
from tests.remoting.protocol.code_tables import REQUEST_HEADERS, RESPONSE_HEADERS
from tests.remoting.protocol.golden_file import golden
from tests.remoting.protocol.strategies import header_of

KINDS = [
    kind
    for kind in vars(headers).values()
    if isinstance(kind, type) and issubclass(kind, CommandHeader) and kind is not CommandHeader
]

SHARED = {
    # one class of ours does for several of upstream's
    "AddWritePermOfBrokerRequestHeader": headers.BrokerNameRequestHeader,
    "CreateAclRequestHeader": headers.AclRequestHeader,
    "CreateTopicListRequestHeader": headers.RpcRequestHeader,
    "CreateUserRequestHeader": headers.UserRequestHeader,
    "DeleteKVConfigRequestHeader": headers.KVConfigKeyRequestHeader,
    "DeleteUserRequestHeader": headers.UserRequestHeader,
    "GetAclRequestHeader": headers.AclRequestHeader,
    "GetConsumerConnectionListRequestHeader": headers.ConsumerGroupRequestHeader,
    "GetConsumerListByGroupRequestHeader": headers.ConsumerGroupRequestHeader,
    "GetEarliestMsgStoretimeRequestHeader": headers.TopicQueueRequestHeader,
    "GetKVConfigRequestHeader": headers.KVConfigKeyRequestHeader,
    "GetKVListByNamespaceRequestHeader": headers.KVNamespaceRequestHeader,
    "GetMaxOffsetResponseHeader": headers.OffsetResponseHeader,
    "GetMinOffsetRequestHeader": headers.TopicQueueRequestHeader,
    "GetMinOffsetResponseHeader": headers.OffsetResponseHeader,
    "GetProducerConnectionListRequestHeader": headers.ProducerGroupRequestHeader,
    "GetSubscriptionGroupConfigRequestHeader": headers.GroupRequestHeader,
    "GetUserRequestHeader": headers.UserRequestHeader,
    "HeartbeatRequestHeader": headers.RpcRequestHeader,
    "LockBatchMqRequestHeader": headers.RpcRequestHeader,
    "NotifyConsumerIdsChangedRequestHeader": headers.ConsumerGroupRequestHeader,
    "QueryConsumerOffsetResponseHeader": headers.OffsetResponseHeader,
    "QueryTopicsByConsumerRequestHeader": headers.GroupRequestHeader,
    "SearchOffsetResponseHeader": headers.OffsetResponseHeader,
    "UnlockBatchMqRequestHeader": headers.RpcRequestHeader,
    "UpdateAclRequestHeader": headers.AclRequestHeader,
    "UpdateUserRequestHeader": headers.UserRequestHeader,
    "WipeWritePermOfBrokerRequestHeader": headers.BrokerNameRequestHeader,
}

SEND = SendMessageRequestHeader(
    producer_group="g",
    topic="T",
    default_topic="TBW102",
    default_topic_queue_nums=4,
    queue_id=1,
    sys_flag=0,
    born_timestamp=1_700_000_000_000,
    flag=0,
    batch=False,
    broker_name="broker-a",
)


@pytest.mark.parametrize("name", golden("header"))
def test_each_header_has_every_field_that_java_writes_and_no_other(name: str) -> None:
    kind = SHARED.get(name) or getattr(headers, name)
    ext_fields = json.loads(golden("header")[name])
    ext_fields.pop("oway", None)  # a note of Java's to itself
    if kind is SendMessageRequestHeaderV2:
        ext_fields.pop("bname")  # which is `n` here
    ours = kind.from_ext_fields(ext_fields)

    assert ours.to_ext_fields() == ext_fields


def test_every_header_was_compared_with_javas() -> None:
    """But for those that upstream has no class for, or that only others are made from."""
    compared = {SHARED.get(name) or getattr(headers, name) for name in golden("header")}

    assert {kind.__name__ for kind in KINDS if kind not in compared} == {
        "HeartbeatResponseHeader",
        "TopicRequestHeader",
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(data=st.data())
def test_a_header_survives_being_text(kind: type[CommandHeader], data: st.DataObject) -> None:
    made = data.draw(header_of(kind))

    assert kind.from_ext_fields(made.to_ext_fields()) == made


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_any_text_in_any_field_is_read_or_raises_our_own_error(kind: type[CommandHeader], data: st.DataObject) -> None:
    ext_fields = data.draw(header_of(kind)).to_ext_fields()
    for name in data.draw(st.sets(st.sampled_from(sorted(ext_fields) or ["none"]))):
        ext_fields[name] = data.draw(st.text(max_size=5))
    try:
        made = kind.from_ext_fields(ext_fields)
    except RemoteProtocolError:
        return
    assert kind.from_ext_fields(made.to_ext_fields()) == made


def test_what_is_none_is_left_out() -> None:
    assert SEND.to_ext_fields() == {
        "producerGroup": "g",
        "topic": "T",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "1",
        "sysFlag": "0",
        "bornTimestamp": "1700000000000",
        "flag": "0",
        "batch": "false",
        "bname": "broker-a",
    }


def test_a_send_with_short_names_says_the_same() -> None:
    fields = {field.name: getattr(SEND, field.name) for field in dataclasses.fields(SEND)}

    short = SendMessageRequestHeaderV2(**fields).to_ext_fields()

    assert short == dict(zip("abcdefgh", ("g", "T", "TBW102", "4", "1", "0", "1700000000000", "0"), strict=True)) | {
        "m": "false",
        "n": "broker-a",
    }
    assert isinstance(SendMessageRequestHeaderV2.from_ext_fields(short), SendMessageRequestHeader)


def test_a_missing_required_field_is_named_beside_what_came() -> None:
    command = RemotingCommand(0, 7, 1, ext_fields={"msgId": "7F", "transactionId": "x"})

    with pytest.raises(
        RemoteProtocolError,
        match="SendMessageResponseHeader needs queueId, queueOffset; the fields that came are: msgId, transactionId",
    ):
        command.header(SendMessageResponseHeader)


def test_no_fields_at_all_are_told_as_such() -> None:
    with pytest.raises(RemoteProtocolError, match="needs topic, queueId; the fields that came are: none at all"):
        GetMaxOffsetRequestHeader.from_ext_fields({})


@pytest.mark.parametrize(
    ("queue_id", "text"),
    [
        ("5.0", "queueId='5.0' is not a number of 32 bits"),
        ("", "queueId='' is not a number of 32 bits"),
        ("2147483648", "queueId='2147483648' is not a number of 32 bits"),
        ("9" * 5_000, "is not a number of 32 bits"),
    ],
)
def test_a_number_that_is_none_is_told_with_its_name(queue_id: str, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"GetMaxOffsetRequestHeader cannot be read: .*{text}"):
        GetMaxOffsetRequestHeader.from_ext_fields({"topic": "T", "queueId": queue_id})


def test_an_optional_number_is_checked_too() -> None:
    fields = {"suggestWhichBrokerId": "0", "nextBeginOffset": "5", "minOffset": "0", "maxOffset": "9"}

    with pytest.raises(RemoteProtocolError, match=f"offsetDelta='{1 << 63}' is not a number of 64 bits"):
        PullMessageResponseHeader.from_ext_fields(fields | {"offsetDelta": str(1 << 63)})


def test_fields_that_nobody_declared_are_passed_over() -> None:
    """ACL, zones, ``ReqT`` and what later versions add stand beside the header proper."""
    fields = {"topic": "T", "queueId": "0", "ReqT": "0", "AccessKey": "AK", "__ZONE_NAME": "z", "new": "1"}

    assert GetMaxOffsetRequestHeader.from_ext_fields(fields) == GetMaxOffsetRequestHeader(topic="T", queue_id=0)


@pytest.mark.parametrize(
    ("text", "boundary"), [("UPPER", "UPPER"), ("upper", "UPPER"), ("lower", "LOWER"), ("?", "LOWER")]
)
def test_a_boundary_is_read_in_any_case_and_written_as_java_does(text: str, boundary: str) -> None:
    fields = {"topic": "T", "queueId": "0", "timestamp": "1", "boundaryType": text}

    read = SearchOffsetRequestHeader.from_ext_fields(fields)

    assert read.boundary_type is BoundaryType[boundary]
    assert read.to_ext_fields()["boundaryType"] == boundary


def test_a_name_that_is_not_in_camel_case_is_declared() -> None:
    leaving = UnregisterClientRequestHeader(client_id="10.0.0.1@7", producer_group="g")

    assert leaving.to_ext_fields() == {"clientID": "10.0.0.1@7", "producerGroup": "g"}


def test_a_header_is_a_frozen_value() -> None:
    offset = headers.OffsetResponseHeader(offset=5)

    with pytest.raises(dataclasses.FrozenInstanceError):
        offset.offset = 6  # type: ignore[misc]
    assert offset == headers.OffsetResponseHeader(offset=5)
    assert hash(offset) == hash(headers.OffsetResponseHeader(offset=5))
    assert repr(offset) == "OffsetResponseHeader(offset=5)"
    assert not hasattr(offset, "__dict__")


def test_a_header_is_made_by_keywords_that_it_has() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'offset'"):
        headers.OffsetResponseHeader()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'limit'"):
        headers.OffsetResponseHeader(offset=5, limit=6)  # type: ignore[call-arg]


def test_a_header_of_ones_own_takes_one_class() -> None:
    @header
    class LagRequestHeader(CommandHeader):
        topic: str
        since: Long = wire("SINCE", default=0)

    lag = LagRequestHeader(topic="T")

    assert lag.to_ext_fields() == {"topic": "T", "SINCE": "0"}
    assert LagRequestHeader.from_ext_fields({"topic": "T"}) == lag


def test_a_header_that_was_not_declared_says_so() -> None:
    class ForgottenHeader(CommandHeader):
        pass

    with pytest.raises(TypeError, match="ForgottenHeader is not declared with @header"):
        ForgottenHeader().to_ext_fields()
    with pytest.raises(TypeError, match="ForgottenHeader is not declared with @header"):
        ForgottenHeader.from_ext_fields({})


def test_the_tables_know_the_headers_of_a_code() -> None:
    assert REQUEST_HEADERS[RequestCode.SEND_BATCH_MESSAGE] is SendMessageRequestHeaderV2
    assert RESPONSE_HEADERS[RequestCode.LITE_PULL_MESSAGE] is PullMessageResponseHeader
    assert REQUEST_HEADERS[12] is QueryMessageRequestHeader
    assert RequestCode.CHECK_CLIENT_CONFIG not in REQUEST_HEADERS  # it is all in the body
