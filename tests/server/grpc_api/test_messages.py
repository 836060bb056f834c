"""Messages between RocketMQ's gRPC protocol and the records of the store."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code, Encoding, GrpcMessageType
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import RecordDraft, StoredRecord, pack_host, parse_record
from mqtemplate.record.compression import CompressionType, compress_body, decompress_body
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.server.grpc_api.encoded import ok_ack_answer, ok_answer
from mqtemplate.server.grpc_api.messages import RecordEncoder, delivered_message, queue_of_group, sent_properties

HOST = HostAddress("127.0.0.1", 10911)


def sent(kind: GrpcMessageType = GrpcMessageType.NORMAL, **system: Any) -> dict[str, str]:
    message = protos.Message(body=b"body")
    message.topic.name = "orders"
    message.user_properties.update({"colour": "blau", "size": "größe"})
    properties = message.system_properties
    properties.message_id, properties.born_timestamp.seconds = "id-1", 1_700_000_000
    properties.keys.extend(["k1", "k2"])
    for name, value in system.items():
        setattr(properties, name, value)
    return decode_properties(sent_properties(message, kind, "10.0.0.9").text.encode())


def record(properties: dict[str, str], body: bytes = b"body", sys_flag: int = 0) -> StoredRecord:
    return record_with(encode_properties(properties), body, sys_flag)


def record_with(properties: bytes, body: bytes, sys_flag: int, later: int = 0) -> StoredRecord:
    """Return a record with encoded properties; *later* changes its place and its times."""
    draft = RecordDraft(
        "orders",
        3,
        body,
        properties,
        sys_flag=sys_flag,
        born_timestamp=1_700_000_000_123 + later,
        born_host=pack_host(HostAddress("10.0.0.9", 4711)),
    )
    return parse_record(draft.encode(17 + later, 4_096, 1_700_000_000_456 + later, pack_host(HOST)))


# --- from producers -------------------------------------------------------------------------------


def test_a_message_has_the_properties_of_rocketmq() -> None:
    assert sent(tag="paid", message_group="customer-1", trace_context="trace") == {
        "UNIQ_KEY": "id-1",
        "colour": "blau",
        "size": "größe",
        "TAGS": "paid",
        "KEYS": "k1 k2",
        "__SHARDINGKEY": "customer-1",
        "TRACE_CONTEXT": "trace",
        "__BORNHOST": "10.0.0.9",
        "BORN_TIMESTAMP": "1700000000000",
        "PGROUP": "orders",
    }


def test_a_transaction_and_a_delay_are_properties() -> None:
    message = protos.Message()
    message.system_properties.message_id = "id-1"
    message.system_properties.delivery_timestamp.FromMilliseconds(1_700_000_000_789)
    message.system_properties.orphaned_transaction_recovery_duration.seconds = 60

    half = sent_properties(message, GrpcMessageType.TRANSACTION, "10.0.0.9").text

    properties = decode_properties(half.encode())
    assert properties["TRAN_MSG"] == "true"
    assert properties["CHECK_IMMUNITY_TIME_IN_SECONDS"] == "60"
    assert properties["TIMER_DELIVER_MS"] == "1700000000789"


def test_a_priority_is_a_property() -> None:
    assert sent(GrpcMessageType.PRIORITY, priority=0)["_SYS_MSG_PRIORITY_"] == "0"


def test_the_client_may_name_its_host() -> None:
    assert sent(born_host="shop-7")["__BORNHOST"] == "shop-7"


def test_only_gzip_is_marked_as_compressed() -> None:
    message = protos.Message(body=b"x")

    flags = []
    for encoding in (Encoding.ENCODING_UNSPECIFIED, Encoding.IDENTITY, Encoding.GZIP):
        message.system_properties.body_encoding = encoding
        flags.append(sent_properties(message, GrpcMessageType.NORMAL, "").sys_flag)

    assert flags == [0, 0, 1]


def test_the_queue_of_a_group_is_guavas() -> None:
    """The numbers of Guava's own test of its consistent hash, here for strings that have these hash codes."""
    golden = [0, 55, 62, 8, 45, 59, 86, 97, 82, 59, 73, 37, 17, 56, 86, 21, 90, 37, 38, 83]

    assert [queue_of_group("" if number == 0 else chr(number), 100) for number in range(20)] == golden


def test_a_negative_hash_code_has_a_queue() -> None:
    """``"customer-1".hashCode()`` is negative in Java; the number is widened with its sign."""
    queues = {queue_of_group(f"customer-{number}", 8) for number in range(200)}

    assert queues == set(range(8))


def test_few_groups_move_when_a_queue_is_added() -> None:
    groups = [f"group-{number}" for number in range(1_000)]

    moved = [group for group in groups if queue_of_group(group, 8) != queue_of_group(group, 9)]

    assert {queue_of_group(group, 9) for group in moved} == {8}


@pytest.mark.parametrize("message_id", ["", "1", "x" * 34, "x" * 48, "x" * 49, "x" * 300, "größe"])
@pytest.mark.parametrize("queue_offset", [0, 1, 127, 128, 300, 1 << 40])
def test_the_answer_to_a_send_is_what_protobuf_reads(message_id: str, queue_offset: int) -> None:
    answer = protos.SendMessageResponse.FromString(ok_answer(message_id, queue_offset))

    [entry] = answer.entries
    assert (answer.status.code, answer.status.message) == (Code.OK, "OK")
    assert (entry.status.code, entry.status.message) == (Code.OK, "OK")
    assert (entry.message_id, entry.transaction_id, entry.offset) == (message_id, message_id, queue_offset)


@pytest.mark.parametrize("message_id", ["", "1", "x" * 34, "x" * 200, "größe"])
@pytest.mark.parametrize("handle", ["", "1 2 3", "x" * 120, "x" * 400])
def test_the_answer_to_an_acknowledgement_is_what_protobuf_reads(message_id: str, handle: str) -> None:
    answer = protos.AckMessageResponse.FromString(ok_ack_answer(message_id, handle))

    [entry] = answer.entries
    assert (answer.status.code, answer.status.message) == (Code.OK, "OK")
    assert (entry.status.code, entry.status.message) == (Code.OK, "OK")
    assert (entry.message_id, entry.receipt_handle) == (message_id, handle)


# --- to consumers ---------------------------------------------------------------------------------


def test_a_record_is_delivered_with_its_properties() -> None:
    stored = record(
        {
            "UNIQ_KEY": "id-1",
            "TAGS": "paid",
            "KEYS": "k1 k2",
            "colour": "blau",
            "__SHARDINGKEY": "customer-1",
            "CLUSTER": "DefaultCluster",
            "TRACE_CONTEXT": "trace",
            "BORN_TIMESTAMP": "1700000000123",
            "__BORNHOST": "shop-7",
        }
    )

    message = delivered_message(stored, "orders", 1_000)

    system = message.system_properties
    assert (message.topic.name, dict(message.user_properties), message.body) == ("orders", {"colour": "blau"}, b"body")
    assert (system.tag, list(system.keys), system.message_id) == ("paid", ["k1", "k2"], "id-1")
    assert (system.message_group, system.message_type) == ("customer-1", GrpcMessageType.FIFO)
    assert (system.queue_id, system.queue_offset, system.trace_context) == (3, 17, "trace")
    assert system.born_timestamp.ToMilliseconds() == 1_700_000_000_123
    assert system.store_timestamp.ToMilliseconds() == 1_700_000_000_456
    assert (system.born_host, system.store_host) == ("shop-7", "127.0.0.1:10911")
    assert system.body_digest.checksum == hashlib.md5(b"body").hexdigest().upper()


def test_a_record_without_an_id_has_its_offset_as_id() -> None:
    message = delivered_message(record({}), "orders", 1_000)

    assert message.system_properties.message_id == "7F00000100002A9F0000000000001000"
    assert message.system_properties.born_host == "10.0.0.9"


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({}, "NORMAL"),
        ({"TRAN_MSG": "true", "DELAY": "3"}, "TRANSACTION"),
        ({"DELAY": "3", "__SHARDINGKEY": "g"}, "DELAY"),
        ({"TIMER_DELAY_MS": "3"}, "DELAY"),
        ({"__SHARDINGKEY": "g"}, "FIFO"),
        ({"_SYS_MSG_PRIORITY_": "7"}, "PRIORITY"),
        ({"__LITE_TOPIC": "a"}, "LITE"),
    ],
)
def test_the_type_of_a_record(properties: dict[str, str], kind: str) -> None:
    message = delivered_message(record(properties), "orders", 1_000)

    assert GrpcMessageType(message.system_properties.message_type).name == kind


def test_a_dead_letter_names_its_origin() -> None:
    origin = {"DLQ_ORIGIN_TOPIC": "orders", "DLQ_ORIGIN_MESSAGE_ID": "id-1"}

    dead = delivered_message(record(origin), "%DLQ%billing", 1_000).system_properties.dead_letter_queue

    assert (dead.topic, dead.message_id) == ("orders", "id-1")


@pytest.mark.parametrize("kind", CompressionType)
def test_a_body_of_another_client_is_unpacked(kind: CompressionType) -> None:
    """Python and Node know gzip only. The digest is of the bytes that are sent."""
    body, flag = compress_body(b"a long body " * 20, kind)

    message = delivered_message(record({}, body, flag), "orders", 1_000)

    assert message.body == b"a long body " * 20
    assert message.system_properties.body_encoding == Encoding.IDENTITY
    assert message.system_properties.body_digest.checksum == hashlib.md5(message.body).hexdigest().upper()


def test_a_gzip_body_stays_packed() -> None:
    body = gzip.compress(b"a long body")

    message = delivered_message(record({}, body, 1), "orders", 1_000)

    assert (message.body, message.system_properties.body_encoding) == (body, Encoding.GZIP)


@pytest.mark.parametrize("body", [b"not packed", zlib.compress(b"x" * 2_000)], ids=["corrupt", "too large"])
def test_a_body_that_cannot_be_unpacked_is_marked_as_packed(body: bytes) -> None:
    message = delivered_message(record({}, body, 1), "orders", 1_000)

    assert (message.body, message.system_properties.body_encoding) == (body, Encoding.GZIP)


def test_a_gzip_body_is_read_by_other_clients_of_this_library() -> None:
    """gRPC clients pack by gzip without naming the method, which was zlib for the clients before them."""
    assert decompress_body(gzip.compress(b"a long body"), 1) == b"a long body"


_NAMES = ["UNIQ_KEY", "KEYS", "XKEYS", "TAGS", "BORN_TIMESTAMP", "__BORNHOST", "colour", "DELAY", "TIMER_DELIVER_MS"]
_NAMES += ["TRAN_MSG", "__SHARDINGKEY", "TRACE_CONTEXT", "_SYS_MSG_PRIORITY_", "DLQ_ORIGIN_TOPIC", ""]
_VALUES = [b"", b"a", b"id-2", b"k1 k2", b" k1  ", "größe".encode(), b"\xff", b"1700000000789", b"true", b"a\x01b"]
_PROPERTIES = st.lists(st.tuples(st.sampled_from(_NAMES), st.sampled_from(_VALUES)), max_size=6)


@settings(max_examples=300, deadline=None)
@given(_PROPERTIES, st.sampled_from([b"", b"body", bytes(300)]), st.sampled_from([0, 1]), st.booleans())
def test_an_encoded_message_is_what_protobuf_would_encode(
    properties: list[tuple[str, bytes]], body: bytes, sys_flag: int, ends_with_separator: bool
) -> None:
    """Also the second and the third one with the same properties, but for the id and the keys."""
    encoder = RecordEncoder(lambda: 1 << 20)
    for number in range(4):
        own = [("UNIQ_KEY", b"0102FC00%d" % number), ("KEYS", b"order-%d" % number)]
        encoded = b"".join(name.encode() + b"\x01" + value + b"\x02" for name, value in [*own, *properties])
        stored = record_with(encoded if ends_with_separator else encoded[:-1], body, sys_flag, number)
        expected = delivered_message(stored, "shop", 1 << 20)
        expected.system_properties.receipt_handle = f"1 2 {number}"
        expected.system_properties.delivery_attempt = number + 1

        found = encoder.encode(stored, "shop", f"1 2 {number}", number + 1)

        assert protos.ReceiveMessageResponse.FromString(found) == protos.ReceiveMessageResponse(message=expected)
