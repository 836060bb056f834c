"""The traps of section 26 of the specification that are the codec's to fall into; each test names its number.

The others (routes, topics, the order of events, offsets, long polling, locks) are the server's and the client's.
"""

from __future__ import annotations

import json

import pytest

from mqtemplate.checksum import crc32
from mqtemplate.errors import RemoteProtocolError
from mqtemplate.java_hash import java_string_hash, tags_code
from mqtemplate.message import HostAddress, Message, MessageQueue, offset_msg_id
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
from mqtemplate.remoting.protocol.bodies.route import (
    BrokerData,
    ClusterInfo,
    SubscriptionData,
    TopicOffset,
    TopicStatsTable,
)
from mqtemplate.remoting.protocol.codes import Perm, PullSysFlag
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
from mqtemplate.remoting.protocol.messages import decode_batch, decode_messages, decode_offset_msg_id, encode_batch
from mqtemplate.remoting.protocol.properties import decode_properties_text, encode_properties_text
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


def test_trap_1_an_answer_without_what_java_needs_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="queue_id"):
        SendMessageResponseHeader(msg_id="x", queue_offset=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="next_begin_offset"):
        PullMessageResponseHeader(suggest_which_broker_id=0, min_offset=0, max_offset=0)  # type: ignore[call-arg]


def test_trap_1_an_answer_without_it_is_told_clearly() -> None:
    """Java falls over a null pointer here."""
    with pytest.raises(RemoteProtocolError, match="needs suggestWhichBrokerId, nextBeginOffset, minOffset, maxOffset"):
        RemotingCommand(19, 1, 1).header(PullMessageResponseHeader)


def test_trap_2_maps_by_message_queue_have_objects_as_keys() -> None:
    table = TopicStatsTable(offset_table={MessageQueue("T", "a", 0): TopicOffset(min_offset=0, max_offset=5)})

    text = table.encode().decode()

    assert text.startswith('{"offsetTable":{{"brokerName":"a","queueId":0,"topic":"T"}:{')
    with pytest.raises(ValueError):
        json.loads(text)


def test_trap_3_maps_by_number_are_read_in_both_ways() -> None:
    """``mqadmin`` and old name servers write them bare, always."""
    bare = b'{"brokerAddrTable":{"a":{"brokerAddrs":{0:"127.0.0.1:10911"},"brokerName":"a"}},"clusterAddrTable":{}}'

    info = ClusterInfo.decode(bare)

    assert info == ClusterInfo.decode(bare.replace(b"0:", b'"0":'))
    assert info.broker_addr_table["a"].broker_addrs == {0: "127.0.0.1:10911"}
    assert b'{0:"127.0.0.1:10911"}' in info.encode()


def test_trap_4_all_ext_values_are_texts_and_booleans_lower_case() -> None:
    ext_fields = GetMaxOffsetRequestHeader(topic="T", queue_id=3, committed=False).to_ext_fields()

    assert ext_fields == {"topic": "T", "queueId": "3", "committed": "false"}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("TRUE", True), ("1", False), ("yes", False), ("", False)])
def test_trap_4_only_the_word_true_is_true(text: str, value: bool) -> None:
    assert SendMessageRequestHeaderV2.from_ext_fields({**SEND, "m": text}).batch is value


@pytest.mark.parametrize(("text", "value"), [("true", True), ("TRUE", False), ("false", False)])
def test_trap_4_of_a_unique_key_query_it_is_compared_exactly(text: str, value: bool) -> None:
    fields = {"topic": "T", "key": "k", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "1"}

    assert QueryMessageRequestHeader.from_ext_fields({**fields, "_UNIQUE_KEY_QUERY": text}).unique is value


def test_trap_5_a_topic_that_lets_others_inherit_has_permission_7() -> None:
    assert Perm.READ | Perm.WRITE | Perm.INHERIT == 7


def test_trap_6_requests_and_answers_with_one_opaque_are_told_apart_by_their_flag() -> None:
    from_broker = decode_command(encode_command(RemotingCommand.request(40, opaque=7, one_way=True)))
    answer = decode_command(encode_command(RemotingCommand.request(11, opaque=7).response()))

    assert from_broker.opaque == answer.opaque
    assert (from_broker.is_response, answer.is_response) == (False, True)


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_trap_7_one_way_is_said_by_a_bit(serialize_type: SerializeType) -> None:
    command = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, one_way=True)
    command.serialize_type = serialize_type

    received = decode_command(encode_command(command))

    assert (received.flag, received.is_one_way, received.is_response) == (2, True, False)
    assert not RemotingCommand.request(RequestCode.HEART_BEAT).is_one_way


def test_trap_8_our_version_lets_sql92_consumers_live() -> None:
    answer = RemotingCommand.request(RequestCode.HEART_BEAT).response()

    assert answer.version == CURRENT_VERSION >= Version.V4_1_0_SNAPSHOT


def test_trap_9_the_crc_of_a_body_has_its_top_bit_cleared() -> None:
    record = parse_record(bytes.fromhex(golden("stored")["v4"]))

    assert crc32(record.body) == 0xD893_2AAC
    assert record.body_crc == 0x5893_2AAC


def test_trap_10_ports_take_four_bytes() -> None:
    assert pack_host(HostAddress("127.0.0.1", 10_911)).hex() == "7f00000100002a9f"
    assert offset_msg_id(HostAddress("127.0.0.1", 10_911), 0) == "7F00000100002A9F" + "0" * 16


def test_trap_11_ipv6_hosts_take_16_bytes_and_a_bit_each() -> None:
    (message,) = decode_messages(bytes.fromhex(golden("stored")["v6"]), "a")

    assert message.sys_flag & 0x30 == 0x30
    assert (message.born_host.ip, message.store_host.ip) == ("fe80::1", "::1")


def test_trap_12_and_13_the_brokers_id_is_an_address_and_an_offset() -> None:
    """A commit finds its half message by it."""
    host, physical_offset = decode_offset_msg_id("7F00000100002A9F0000000000001234")

    assert (str(host), physical_offset) == ("127.0.0.1:10911", 0x1234)
    with pytest.raises(RemoteProtocolError, match="'0' is no id that a broker gives"):
        decode_offset_msg_id("0")


def test_trap_14_and_15_the_end_of_a_transaction_names_both_places_of_the_half_message() -> None:
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


def test_trap_17_ids_of_hosts_with_ipv6_have_56_characters() -> None:
    text = golden("msgid")["v6"]

    assert len(text) == 56
    assert decode_offset_msg_id(text) == (("::1", 10_911), 0x1234)


def test_trap_18_wait_is_a_property_like_others() -> None:
    (message,) = decode_batch(encode_batch([Message("T", b"", {"WAIT": "true"})]), "T")

    assert message.properties == {"WAIT": "true"}


@pytest.mark.parametrize(
    "text", ["a\x01b\x02c\x01d\x02", "a\x01b\x02c\x01d", "a\x01b\x02x\x01\x02c\x01d\x02", "a\x01b\x02\x01y\x02c\x01d"]
)
def test_trap_19_properties_are_read_with_and_without_the_last_separator(text: str) -> None:
    """What has no value, or no name, is gone."""
    assert decode_properties_text(text) == {"a": "b", "c": "d"}


def test_trap_19_the_last_of_two_with_one_name_counts() -> None:
    assert decode_properties_text("UNIQ_KEY\x01inner\x02UNIQ_KEY\x01outer\x02") == {"UNIQ_KEY": "outer"}


def test_trap_19_separators_are_escaped_in_json() -> None:
    command = RemotingCommand(310, ext_fields={"i": encode_properties_text({"WAIT": "true"})})

    assert rb'"i":"WAIT\u0001true\u0002"' in encode_command(command)


def test_trap_20_the_version_of_a_subscription_goes_through_unchanged() -> None:
    heartbeat = SubscriptionData.decode(b'{"topic":"T","subString":"*","subVersion":1700000000123}')

    assert SubscriptionData.decode(heartbeat.encode()).sub_version == 1_700_000_000_123
    assert PullMessageRequestHeader.from_ext_fields(PULL).sub_version == 1_700_000_000_000


def test_trap_23_what_is_given_back_is_named_by_its_physical_offset() -> None:
    back = ConsumerSendMsgBackRequestHeader.from_ext_fields({"offset": str(1 << 40), "group": "g", "delayLevel": "-1"})

    assert (back.offset, back.delay_level, back.max_reconsume_times) == (1 << 40, -1, None)


def test_trap_29_a_commit_offset_is_meant_only_with_its_bit() -> None:
    pull = PullMessageRequestHeader.from_ext_fields({**PULL, "sysFlag": "2"})

    assert not pull.sys_flag & PullSysFlag.COMMIT_OFFSET
    assert pull.sys_flag & PullSysFlag.SUSPEND


def test_trap_30_a_lite_pull_has_a_code_or_a_bit_of_its_own() -> None:
    lite = PullMessageRequestHeader.from_ext_fields({**PULL, "sysFlag": "22", "ReqT": "0"})

    assert REQUEST_HEADERS[RequestCode.LITE_PULL_MESSAGE] is REQUEST_HEADERS[RequestCode.PULL_MESSAGE]
    assert lite.sys_flag == PullSysFlag.LITE_PULL | PullSysFlag.SUBSCRIPTION | PullSysFlag.SUSPEND


def test_trap_31_the_largest_number_of_bytes_is_a_normal_wish() -> None:
    assert (
        PullMessageRequestHeader.from_ext_fields({**PULL, "maxMsgBytes": "2147483647"}).max_msg_bytes == 2_147_483_647
    )


def test_trap_32_the_brokers_name_is_kept() -> None:
    assert PullMessageRequestHeader.from_ext_fields({**PULL, "bname": "broker-a"}).broker_name == "broker-a"
    assert SendMessageRequestHeaderV2.from_ext_fields({**SEND, "n": "broker-a"}).broker_name == "broker-a"


def test_trap_33_unit_mode_is_read() -> None:
    assert SendMessageRequestHeaderV2.from_ext_fields({**SEND, "k": "true"}).unit_mode is True


def test_trap_34_the_answer_to_a_batch_has_its_ids_joined_and_the_first_offset() -> None:
    ids = [offset_msg_id(HostAddress("127.0.0.1", 10_911), physical_offset) for physical_offset in (0, 147)]
    answer = SendMessageResponseHeader(msg_id=",".join(ids), queue_id=1, queue_offset=5)

    received = SendMessageResponseHeader.from_ext_fields(answer.to_ext_fields())

    assert [decode_offset_msg_id(one)[1] for one in received.msg_id.split(",")] == [0, 147]
    assert received.queue_offset == 5


@pytest.mark.parametrize("flag", [0x301, 0x1])
def test_trap_35_types_3_and_0_are_both_zlib(flag: int) -> None:
    body, own_flag = compress_body(b"body")

    assert decompress_body(body, flag) == b"body"
    assert own_flag == CompressionType.ZLIB.sys_flag == 0x301


def test_trap_35_the_bits_of_the_type_travel() -> None:
    assert SendMessageRequestHeaderV2.from_ext_fields({**SEND, "f": str(0x201)}).to_ext_fields()["f"] == "513"


def test_trap_36_tags_are_hashed_as_java_hashes_them() -> None:
    assert (java_string_hash("TagA"), java_string_hash("TagB")) == (2_598_919, 2_598_920)
    assert java_string_hash("\N{GRINNING FACE}") == 31 * 0xD83D + 0xDE00
    assert java_string_hash("polygenelubricants") == -(1 << 31)
    assert tags_code(None) == tags_code("") == 0


def test_trap_37_a_code_beyond_16_bits_goes_as_json() -> None:
    """The frame says by itself how its header is written."""
    command = RemotingCommand(RequestCode.POP_MESSAGE, serialize_type=SerializeType.ROCKETMQ)

    frame = encode_command(command)

    assert frame[4] == SerializeType.JSON
    assert decode_command(frame).code == 200_050


def test_trap_37_an_empty_value_is_none_in_binary() -> None:
    command = RemotingCommand(34, ext_fields={"a": "", "b": "x"}, remark="", serialize_type=SerializeType.ROCKETMQ)
    from_java = bytes.fromhex("00000022 0100001e 0022 00 0201 00000007 00000000 00000000 00000009 0003 616263 00000000")

    received = decode_command(encode_command(command))

    assert (received.ext_fields, received.remark) == ({"b": "x"}, None)
    assert decode_command(from_java).ext_fields == {}


def test_trap_38_ext_fields_always_stand_in_a_json_header() -> None:
    """Brokers look into them without asking whether they are there."""
    assert b'"extFields":{}' in encode_command(RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO))


def test_trap_41_a_topic_that_is_unknown_has_a_code_of_its_own() -> None:
    answer = RemotingCommand.request(RequestCode.GET_TOPIC_CONFIG).response(17, remark="no topic T")

    assert "17 TOPIC_NOT_EXIST" in str(answer)


def test_trap_42_a_signature_is_over_values_by_name_and_the_body_as_sent() -> None:
    body, _ = compress_body(b"body" * 100)
    command = RemotingCommand(310, ext_fields={"b": "T", "a": "g"}, body=body)
    sign_command(command, "AK", "SK")

    assert signed_content(command.ext_fields, command.body) == b"AKgT" + body
    assert is_signed_with(command, "SK")
    command.ext_fields["__ZONE_NAME"] = "z"
    assert not is_signed_with(command, "SK")


def test_trap_43_strange_characters_in_names_go_through() -> None:
    names = {"clientID": "10.0.0.1@7#123@STREAM", "consumerGroup": "%RETRY%a|b"}

    assert decode_command(encode_command(RemotingCommand(35, ext_fields=names))).ext_fields == names


def test_trap_45_a_single_node_suggests_itself() -> None:
    answer = PullMessageResponseHeader(suggest_which_broker_id=0, next_begin_offset=5, min_offset=0, max_offset=5)

    assert answer.to_ext_fields()["suggestWhichBrokerId"] == "0"
    assert BrokerData(broker_name="a", broker_addrs={0: "127.0.0.1:10911"}).broker_addrs[0]
