"""Rules of the protocol that RocketMQ's Java clients and brokers rely on, as far as the codec must keep them.

Those of routes, offsets, long polling and locks are in the tests of the server and of the client.
"""

from __future__ import annotations

import json

import pytest

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.hashes import crc32, java_string_hash, tags_code
from mqtemplate.message import HostAddress, MessageQueue, offset_msg_id, parse_offset_msg_id
from mqtemplate.record.codec import pack_host, parse_record
from mqtemplate.record.compression import CompressionType, compress_body, decompress_body
from mqtemplate.remoting.protocol import (
    CURRENT_VERSION,
    RemotingCommand,
    RequestCode,
    SerializeType,
    Version,
    decode_command,
    encode_command,
)
from mqtemplate.remoting.protocol.acl import is_signed_with, sign_command, signed_content
from mqtemplate.remoting.protocol.bodies.route import BrokerData, SubscriptionData, TopicOffset, TopicStatsTable
from mqtemplate.remoting.protocol.codes import Perm, PullSysFlag
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.headers.group import GetMaxOffsetRequestHeader
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    EndTransactionRequestHeader,
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    QueryMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_properties_text, encode_properties_text
from tests.remoting.protocol.code_tables import REQUEST_HEADERS
from tests.remoting.protocol.golden_file import golden

SEND = {"a": "g", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0"}
PULL = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "32",
    "sysFlag": "3",
    "commitOffset": "0",
    "suspendTimeoutMillis": "15000",
    "subVersion": "1700000000000",
}


@pytest.mark.feature("trap 1")
def test_a_response_without_the_fields_that_java_needs_cannot_be_created() -> None:
    with pytest.raises(TypeError, match="queue_id"):
        SendMessageResponseHeader(msg_id="x", queue_offset=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="next_begin_offset"):
        PullMessageResponseHeader(suggest_which_broker_id=0, min_offset=0, max_offset=0)  # type: ignore[call-arg]


@pytest.mark.feature("trap 1")
def test_the_error_for_a_response_without_them_names_them() -> None:
    """Java raises a NullPointerException here."""
    with pytest.raises(RemoteProtocolError, match="needs suggestWhichBrokerId, nextBeginOffset, minOffset, maxOffset"):
        RemotingCommand(19, 1, 1).header(PullMessageResponseHeader)


@pytest.mark.feature("trap 2")
def test_a_map_by_message_queue_has_objects_as_keys() -> None:
    table = TopicStatsTable(offset_table={MessageQueue("T", "a", 0): TopicOffset(min_offset=0, max_offset=5)})

    text = table.encode().decode()

    assert text.startswith('{"offsetTable":{{"brokerName":"a","queueId":0,"topic":"T"}:{')
    with pytest.raises(ValueError):
        json.loads(text)


@pytest.mark.feature("trap 4")
def test_all_ext_values_are_texts_and_booleans_are_lower_case() -> None:
    ext_fields = GetMaxOffsetRequestHeader(topic="T", queue_id=3, committed=False).to_ext_fields()

    assert ext_fields == {"topic": "T", "queueId": "3", "committed": "false"}


@pytest.mark.feature("trap 5")
def test_a_topic_whose_settings_are_inherited_has_permission_7() -> None:
    assert Perm.READ | Perm.WRITE | Perm.INHERIT == 7


@pytest.mark.feature("trap 6")
def test_the_flag_distinguishes_a_request_and_a_response_with_the_same_opaque() -> None:
    from_broker = decode_command(encode_command(RemotingCommand.request(40, opaque=7, one_way=True)))
    response = decode_command(encode_command(RemotingCommand.request(11, opaque=7).response()))

    assert from_broker.opaque == response.opaque
    assert (from_broker.is_response, response.is_response) == (False, True)


@pytest.mark.parametrize("serialize_type", SerializeType)
@pytest.mark.feature("trap 7")
def test_a_bit_marks_a_one_way_request(serialize_type: SerializeType) -> None:
    command = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, one_way=True)
    command.serialize_type = serialize_type

    received = decode_command(encode_command(command))

    assert (received.flag, received.is_one_way, received.is_response) == (2, True, False)
    assert not RemotingCommand.request(RequestCode.HEART_BEAT).is_one_way


@pytest.mark.feature("trap 8")
def test_our_version_allows_sql92_consumers() -> None:
    response = RemotingCommand.request(RequestCode.HEART_BEAT).response()

    assert response.version == CURRENT_VERSION >= Version.V4_1_0_SNAPSHOT


@pytest.mark.feature("trap 9")
def test_the_crc_of_a_body_has_its_top_bit_cleared() -> None:
    record = parse_record(bytes.fromhex(golden("stored")["v4"]))

    assert crc32(record.body) == 0xD893_2AAC
    assert record.body_crc == 0x5893_2AAC


@pytest.mark.feature("trap 10")
def test_ports_take_four_bytes() -> None:
    assert pack_host(HostAddress("127.0.0.1", 10_911)).hex() == "7f00000100002a9f"
    assert offset_msg_id(HostAddress("127.0.0.1", 10_911), 0) == "7F00000100002A9F" + "0" * 16


@pytest.mark.feature("trap 14", "trap 15")
def test_the_end_of_a_transaction_has_both_offsets_of_the_half_message() -> None:
    ended = EndTransactionRequestHeader(
        producer_group="g", tran_state_table_offset=3, commit_log_offset=1 << 40, commit_or_rollback=8, msg_id="id"
    )

    assert ended.to_ext_fields() == {
        "producerGroup": "g",
        "tranStateTableOffset": "3",
        "commitLogOffset": "1099511627776",
        "commitOrRollback": "8",
        "fromTransactionCheck": "false",
        "msgId": "id",
    }


@pytest.mark.parametrize(
    "text", ["a\x01b\x02c\x01d\x02", "a\x01b\x02c\x01d", "a\x01b\x02x\x01\x02c\x01d\x02", "a\x01b\x02\x01y\x02c\x01d"]
)
@pytest.mark.feature("trap 19")
def test_properties_are_read_with_and_without_the_last_separator(text: str) -> None:
    """Pairs without a value or without a name are dropped."""
    assert decode_properties_text(text) == {"a": "b", "c": "d"}


@pytest.mark.feature("trap 19")
def test_the_last_of_two_properties_with_the_same_name_counts() -> None:
    assert decode_properties_text("UNIQ_KEY\x01inner\x02UNIQ_KEY\x01outer\x02") == {"UNIQ_KEY": "outer"}


@pytest.mark.feature("trap 19")
def test_separators_are_escaped_in_json() -> None:
    command = RemotingCommand(310, ext_fields={"i": encode_properties_text({"WAIT": "true"})})

    assert rb'"i":"WAIT\u0001true\u0002"' in encode_command(command)


@pytest.mark.feature("trap 20")
def test_the_version_of_a_subscription_is_kept() -> None:
    heartbeat = SubscriptionData.decode(b'{"topic":"T","subString":"*","subVersion":1700000000123}')

    assert SubscriptionData.decode(heartbeat.encode()).sub_version == 1_700_000_000_123
    assert PullMessageRequestHeader.from_ext_fields(PULL).sub_version == 1_700_000_000_000


@pytest.mark.feature("trap 30")
def test_a_lite_pull_has_its_own_code_or_its_own_bit() -> None:
    lite = PullMessageRequestHeader.from_ext_fields({**PULL, "sysFlag": "22", "ReqT": "0"})

    assert REQUEST_HEADERS[RequestCode.LITE_PULL_MESSAGE] is REQUEST_HEADERS[RequestCode.PULL_MESSAGE]
    assert lite.sys_flag == PullSysFlag.LITE_PULL | PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND


@pytest.mark.feature("trap 34")
def test_the_response_to_a_batch_has_joined_ids_and_the_first_offset() -> None:
    ids = [offset_msg_id(HostAddress("127.0.0.1", 10_911), physical_offset) for physical_offset in (0, 147)]
    response = SendMessageResponseHeader(msg_id=",".join(ids), queue_id=1, queue_offset=5)

    received = SendMessageResponseHeader.from_ext_fields(response.to_ext_fields())

    assert [parse_offset_msg_id(one)[1] for one in received.msg_id.split(",")] == [0, 147]
    assert received.queue_offset == 5


@pytest.mark.parametrize("flag", [0x301, 0x1])
@pytest.mark.feature("trap 35")
def test_compression_types_3_and_0_are_both_zlib(flag: int) -> None:
    body, own_flag = compress_body(b"body")

    assert decompress_body(body, flag) == b"body"
    assert own_flag == CompressionType.ZLIB.sys_flag == 0x301


@pytest.mark.feature("trap 36")
def test_tags_are_hashed_as_java_hashes_them() -> None:
    assert (java_string_hash("TagA"), java_string_hash("TagB")) == (2_598_919, 2_598_920)
    assert java_string_hash("\N{GRINNING FACE}") == 31 * 0xD83D + 0xDE00
    assert java_string_hash("polygenelubricants") == -(1 << 31)
    assert tags_code(None) == tags_code("") == 0


@pytest.mark.feature("trap 37")
def test_a_code_of_more_than_16_bits_is_sent_as_json() -> None:
    """Each frame names the encoding of its header."""
    command = RemotingCommand(RequestCode.POP_MESSAGE, serialize_type=SerializeType.ROCKETMQ)

    frame = encode_command(command)

    assert frame[4] == SerializeType.JSON
    assert decode_command(frame).code == 200_050


@pytest.mark.feature("trap 37")
def test_an_empty_value_is_missing_in_binary() -> None:
    command = RemotingCommand(34, ext_fields={"a": "", "b": "x"}, remark="", serialize_type=SerializeType.ROCKETMQ)
    from_java = bytes.fromhex("00000022 0100001e 0022 00 0201 00000007 00000000 00000000 00000009 0003 616263 00000000")

    received = decode_command(encode_command(command))

    assert (received.ext_fields, received.remark) == ({"b": "x"}, None)
    assert decode_command(from_java).ext_fields == {}


@pytest.mark.feature("trap 38")
def test_a_json_header_always_has_ext_fields() -> None:
    """Brokers read them without a check for null."""
    assert b'"extFields":{}' in encode_command(RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO))


@pytest.mark.feature("trap 41")
def test_an_unknown_topic_has_its_own_response_code() -> None:
    response = RemotingCommand.request(RequestCode.GET_TOPIC_CONFIG).response(17, remark="no topic T")

    assert "17 TOPIC_NOT_EXIST" in str(response)


@pytest.mark.feature("trap 42")
def test_a_signature_covers_values_in_order_of_names_and_the_body_as_sent() -> None:
    body, _ = compress_body(b"body" * 100)
    command = RemotingCommand(310, ext_fields={"b": "T", "a": "g"}, body=body)
    sign_command(command, "AK", "SK")

    assert signed_content(command.ext_fields, command.body) == b"AKgT" + body
    assert is_signed_with(command, "SK")
    command.ext_fields["__ZONE_NAME"] = "z"
    assert not is_signed_with(command, "SK")


@pytest.mark.feature("trap 43")
def test_special_characters_in_names_are_kept() -> None:
    names = {"clientID": "10.0.0.1@7#123@STREAM", "consumerGroup": "%RETRY%a|b"}

    assert decode_command(encode_command(RemotingCommand(35, ext_fields=names))).ext_fields == names


@pytest.mark.feature("trap 45")
def test_a_single_node_suggests_itself() -> None:
    response = PullMessageResponseHeader(suggest_which_broker_id=0, next_begin_offset=5, min_offset=0, max_offset=5)

    assert response.to_ext_fields()["suggestWhichBrokerId"] == "0"
    assert BrokerData(broker_name="a", broker_addrs={0: "127.0.0.1:10911"}).broker_addrs[0]


QUERY = {"topic": "T", "key": "k", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "1"}
BACK = {"offset": str(1 << 40), "group": "g", "delayLevel": "-1"}
V2, PULLED = SendMessageRequestHeaderV2, PullMessageRequestHeader


@pytest.mark.parametrize(
    ("kind", "fields", "attributes"),
    [
        pytest.param(kind, fields, attributes, marks=pytest.mark.feature(feature))
        for feature, kind, fields, attributes in [
            # only the word true is true, and one flag is compared exactly
            ("trap 4", V2, {**SEND, "m": "true"}, {"batch": True}),
            ("trap 4", V2, {**SEND, "m": "TRUE"}, {"batch": True}),
            ("trap 4", V2, {**SEND, "m": "1"}, {"batch": False}),
            ("trap 4", V2, {**SEND, "m": "yes"}, {"batch": False}),
            ("trap 4", V2, {**SEND, "m": ""}, {"batch": False}),
            ("trap 4", QueryMessageRequestHeader, {**QUERY, "_UNIQUE_KEY_QUERY": "true"}, {"unique": True}),
            ("trap 4", QueryMessageRequestHeader, {**QUERY, "_UNIQUE_KEY_QUERY": "TRUE"}, {"unique": False}),
            ("trap 4", QueryMessageRequestHeader, {**QUERY, "_UNIQUE_KEY_QUERY": "false"}, {"unique": False}),
            # a message that is sent back is identified by its physical offset
            (
                "trap 23",
                ConsumerSendMsgBackRequestHeader,
                BACK,
                {"offset": 1 << 40, "delay_level": -1, "max_reconsume_times": None},
            ),
            # a commit offset is valid only with its bit
            ("trap 29", PULLED, {**PULL, "sysFlag": "2"}, {"sys_flag": PullSysFlag.SUSPEND}),
            # the largest number is a normal limit of bytes
            ("trap 31", PULLED, {**PULL, "maxMsgBytes": "2147483647"}, {"max_msg_bytes": 2_147_483_647}),
            # the broker's name is kept
            ("trap 32", PULLED, {**PULL, "bname": "broker-a"}, {"broker_name": "broker-a"}),
            ("trap 32", V2, {**SEND, "n": "broker-a"}, {"broker_name": "broker-a"}),
            ("trap 33", V2, {**SEND, "k": "true"}, {"unit_mode": True}),
            # the bits of the compression type are sent
            ("trap 35", V2, {**SEND, "f": str(0x201)}, {"sys_flag": 0x201}),
        ]
    ],
)
def test_a_field_is_read_as_java_reads_it(
    kind: type[CommandHeader], fields: dict[str, str], attributes: dict[str, object]
) -> None:
    header = kind.from_ext_fields(fields)

    assert {name: getattr(header, name) for name in attributes} == attributes
