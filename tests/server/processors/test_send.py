"""Sending: the response, the stored message, and refused messages."""

from __future__ import annotations

import zlib

import pytest

from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.message import HostAddress, Message, MessageQueue, parse_offset_msg_id
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeader, SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import count_batch, encode_batch
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.processors import send
from mqtemplate.server.requests.deferred_work import DeferredWork
from tests.server.serving import RecordingConnection, Serving

# --- the response and the stored message -----------------------------------------------------------


def test_the_response_has_the_fields_that_javas_producers_require(serving: Serving) -> None:
    response = serving.send("orders", properties={"UNIQ_KEY": "0A0B", "TAGS": "paid"}, queue_id=2)

    header = response.header(SendMessageResponseHeader)
    assert (response.code, response.opaque) == (ResponseCode.SUCCESS, 7)
    assert (header.queue_id, header.queue_offset, header.transaction_id) == (2, 0, "0A0B")
    assert (header.msg_region, header.trace_on) == ("DefaultRegion", "true")
    host, physical_offset = parse_offset_msg_id(header.msg_id)
    assert (host, physical_offset) == (HostAddress("127.0.0.1", 10911), 0)


def test_the_stored_message_has_header_fields_and_the_producers_address(serving: Serving) -> None:
    """The born host is the address that the server sees."""
    peer = RecordingConnection(HostAddress("10.1.2.3", 4567))

    serving.send("orders", b"paid", {"UNIQ_KEY": "0A0B", "KEYS": "k1 k2"}, over=peer, flag=5, sys_flag=0)

    (message,) = serving.read("orders")
    assert (message.body, message.flag, message.keys) == (b"paid", 5, "k1 k2")
    assert message.born_host == HostAddress("10.1.2.3", 4567)
    assert message.born_timestamp == 1_700_000_000_000
    assert message.store_timestamp == serving.clock.now_ms()
    assert message.properties["CLUSTER"] == "DefaultCluster"
    assert message.properties["MSG_REGION"] == "DefaultRegion"
    assert message.properties["TRACE_ON"] == "true"
    assert message.msg_id == "0A0B"


def test_the_ipv6_address_of_a_producer_is_stored(serving: Serving) -> None:
    serving.send("orders", over=RecordingConnection(HostAddress("2001:db8::1", 4567)))

    (message,) = serving.read("orders")
    assert message.born_host == HostAddress("2001:db8::1", 4567)
    assert message.sys_flag & SysFlag.BORN_HOST_V6


def test_a_message_without_a_unique_key_gets_one(serving: Serving) -> None:
    response = serving.send("orders")

    (message,) = serving.read("orders")
    assert message.properties["UNIQ_KEY"] == response.header(SendMessageResponseHeader).transaction_id


def test_a_compressed_body_is_stored_unchanged(serving: Serving) -> None:
    body = zlib.compress(b"x" * 5_000)

    serving.send("orders", body, sys_flag=0x301)

    (message,) = serving.read("orders")
    assert message.body == b"x" * 5_000
    record = serving.engine.store.read_at(message.physical_offset)
    assert record is not None
    assert (record.body, record.sys_flag) == (body, 0x301)


def test_the_address_flags_of_the_request_are_ignored(serving: Serving) -> None:
    serving.send("orders", b"paid", sys_flag=SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)

    (message,) = serving.read("orders")
    assert (message.body, message.sys_flag) == (b"paid", 0)


def test_a_header_with_long_names_is_equivalent(serving: Serving) -> None:
    header = SendMessageRequestHeader(
        producer_group="producers",
        topic="orders",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=1,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="TAGS\x01paid",
    )

    response = serving.request(RequestCode.SEND_MESSAGE, header, b"old")

    assert response is not None
    assert response.code == ResponseCode.SUCCESS
    (message,) = serving.read("orders", queue_id=1)
    assert (message.body, message.tags) == (b"old", "paid")


def test_a_one_way_message_is_stored_without_a_response(serving: Serving) -> None:
    serving.send("orders", b"first")
    replies = len(serving.connection.replies)

    assert serving.send("orders", b"one-way", one_way=True) is None

    assert len(serving.connection.replies) == replies
    assert [message.body for message in serving.read("orders")] == [b"first", b"one-way"]


def test_each_queue_has_its_own_offsets(serving: Serving) -> None:
    responses = [serving.send("orders", queue_id=queue_id) for queue_id in (0, 1, 0, 0)]

    offsets = [response.header(SendMessageResponseHeader).queue_offset for response in responses]
    assert offsets == [0, 0, 1, 2]


def test_for_a_negative_queue_id_the_broker_chooses_the_queue(serving: Serving) -> None:
    response = serving.send("orders", queue_id=-1)

    assert 0 <= response.header(SendMessageResponseHeader).queue_id < 4


# --- refused messages --------------------------------------------------------------------------------


def test_a_missing_queue_is_an_invalid_parameter(serving: Serving) -> None:
    response = serving.send("orders", queue_id=4)

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark == "the queue ID of topic 'orders' must be 0..3, got 4; update the route"


@pytest.mark.parametrize("topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"])
def test_clients_cannot_send_to_system_topics(serving: Serving, topic: str) -> None:
    response = serving.send(topic)

    assert response.code == ResponseCode.NO_PERMISSION
    assert "is a system topic; send to the real topic" in response.remark


@pytest.mark.parametrize("topic", ["with blank", "a/b", "x" * 128])
def test_an_illegal_topic_name_is_an_invalid_parameter(serving: Serving, topic: str) -> None:
    assert serving.send(topic).code == ResponseCode.INVALID_PARAMETER


def test_a_topic_that_is_not_writable_refuses_messages(serving: Serving) -> None:
    serving.engine.topics.update("archive", {"perm": 4, "writeQueueNums": 1, "readQueueNums": 1})

    response = serving.send("archive")

    assert (response.code, response.remark) == (ResponseCode.NO_PERMISSION, "topic 'archive' is not writable (perm)")


def test_a_message_or_a_batch_that_is_too_large_is_illegal() -> None:
    with Serving(engine_settings=EmbeddedSettings(max_message_size=1_000)) as serving:
        response = serving.send("orders", b"x" * 1_001)
        batch = serving.send_batch("orders", Message("orders", b"x" * 600), Message("orders", b"y" * 600))

    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "has 1001 bytes, allowed are 1000" in response.remark
    assert batch.code == ResponseCode.MESSAGE_ILLEGAL
    assert "send fewer messages at once" in batch.remark


def test_a_message_with_too_large_properties_is_illegal(serving: Serving) -> None:
    response = serving.send("orders", properties={"note": "x" * 40_000})

    assert response.code == ResponseCode.MESSAGE_ILLEGAL


def test_a_full_disk_makes_the_service_unavailable(serving: Serving) -> None:
    serving.send("orders")
    serving.engine.store.cleaning.refusal = "the disk is 95% full"

    response = serving.send("orders")

    assert (response.code, response.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is 95% full")


# --- topics that are created by their first message --------------------------------------------------


@pytest.mark.parametrize(("requested", "created"), [(4, 4), (2, 2), (100, 8), (0, 1)])
def test_a_first_message_creates_its_topic_with_the_smaller_number_of_queues(
    serving: Serving, requested: int, created: int
) -> None:
    """The smaller one of the number that the producer requests and the number in the broker's settings."""
    assert serving.send("fresh", default_topic_queue_nums=requested).code == ResponseCode.SUCCESS

    config = serving.engine.topics.config("fresh")
    assert config is not None
    assert (config["readQueueNums"], config["writeQueueNums"], config["perm"]) == (created, created, 6)


def test_routes_and_new_topics_have_the_queue_number_of_the_settings() -> None:
    """A client sends to the queues in the route of TBW102 before the route of the new topic exists."""
    with Serving(BrokerServerSettings(default_topic_queue_nums=2)) as serving:
        route = serving.server.name_server.route("TBW102")
        response = serving.send("fresh", queue_id=1)

        assert route is not None
        assert route.queue_datas[0].write_queue_nums == serving.engine.topics.queue_count("fresh") == 2
        assert response.code == ResponseCode.SUCCESS


def test_without_auto_creation_a_missing_topic_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_topic_enable=False)) as serving:
        response = serving.send("fresh")

        assert response.code == ResponseCode.TOPIC_NOT_EXIST
        assert "set auto-create-topic-enable to true" in response.remark
        assert serving.engine.topics.config("fresh") is None


def test_a_topic_is_not_created_like_one_without_the_inherit_permission(serving: Serving) -> None:
    serving.send("plain")

    assert serving.send("fresh", default_topic="plain").code == ResponseCode.TOPIC_NOT_EXIST


def test_without_auto_creation_a_client_cannot_create_a_dead_letter_topic() -> None:
    with Serving(BrokerServerSettings(auto_create_topic_enable=False)) as serving:
        assert serving.send("%DLQ%missing").code == ResponseCode.TOPIC_NOT_EXIST


# --- batches -----------------------------------------------------------------------------------------


def test_the_messages_of_a_batch_have_consecutive_offsets(serving: Serving) -> None:
    serving.send("orders", b"before")

    response = serving.send_batch(
        "orders",
        Message("orders", b"one", {"UNIQ_KEY": "A1", "TAGS": "t"}),
        Message("orders", b"two", {"UNIQ_KEY": "A2"}),
    )

    header = response.header(SendMessageResponseHeader)
    assert (header.queue_offset, header.transaction_id) == (1, None)  # the header had no id of the whole batch
    ids = header.msg_id.split(",")
    messages = serving.read("orders")
    assert [message.offset_msg_id for message in messages[1:]] == ids
    assert [(message.body, message.msg_id, message.tags) for message in messages[1:]] == [
        (b"one", "A1", "t"),
        (b"two", "A2", None),
    ]
    assert [message.properties.get("CLUSTER") for message in messages] == ["DefaultCluster", None, None]


def test_a_batch_may_have_the_code_of_a_single_message(serving: Serving) -> None:
    serving.send("orders", encode_batch([Message("orders", b"one"), Message("orders", b"two")]), batch=True)

    assert [message.body for message in serving.read("orders")] == [b"one", b"two"]


def test_a_malformed_batch_is_refused(serving: Serving) -> None:
    response = serving.send("orders", b"\0\0\0\x40short", code=RequestCode.SEND_BATCH_MESSAGE)

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert "of the batch" in response.remark


def test_an_empty_batch_is_refused(serving: Serving) -> None:
    response = serving.send("orders", b"", code=RequestCode.SEND_BATCH_MESSAGE)

    assert (response.code, response.remark) == (
        ResponseCode.MESSAGE_ILLEGAL,
        "the batch is empty; give at least one message",
    )


def test_a_batch_for_a_retry_topic_is_refused(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    response = serving.send_batch("%RETRY%billing", Message("%RETRY%billing", b"one"))

    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "one by one" in response.remark


def test_a_batch_may_contain_delayed_messages(serving: Serving) -> None:
    """Java's client refuses that. The remote broker does not, and receives a handle for each delayed message."""
    response = serving.send_batch(
        "orders", Message("orders", b"now"), Message("orders", b"later", {"DELAY": "1"}), Message("orders", b"also now")
    )

    assert "," not in response.header(SendMessageResponseHeader).recall_handle
    assert [message.body for message in serving.read("orders")] == [b"now", b"also now"]
    serving.advance(1_000)
    assert [message.body for message in serving.read("orders")] == [b"now", b"also now", b"later"]


# --- delayed messages --------------------------------------------------------------------------------


def test_a_message_with_a_level_is_delivered_after_its_delay(serving: Serving) -> None:
    response = serving.send("orders", properties={"DELAY": "2", "UNIQ_KEY": "0A"}, queue_id=3, reconsume_times=2)

    assert response.header(SendMessageResponseHeader).queue_id == 3
    serving.advance(4_999)
    assert serving.read("orders", queue_id=3) == []
    serving.advance(1)
    (message,) = serving.read("orders", queue_id=3)
    assert (message.msg_id, message.reconsume_times) == ("0A", 2)
    assert message.born_timestamp == 1_700_000_000_000


def test_a_message_with_a_timer_can_be_recalled_by_its_handle(serving: Serving) -> None:
    due_ms = serving.clock.now_ms() + 3_600_500
    response = serving.send("orders", properties={"TIMER_DELIVER_MS": str(due_ms)})
    serving.step()

    handle = response.header(SendMessageResponseHeader).recall_handle
    assert serving.engine.cancel(handle).status.name == "CANCELLED"
    serving.advance(3_700_000)
    assert serving.read("orders") == []


def test_a_message_with_an_invalid_delay_is_illegal(serving: Serving) -> None:
    response = serving.send("orders", properties={"TIMER_DELAY_SEC": "soon"})

    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "TIMER_DELAY_SEC" in response.remark


def test_properties_that_only_a_broker_may_set_are_removed(serving: Serving) -> None:
    """A copied message must not reach the topic of its original, and a copied checksum is for other bytes."""
    serving.send("orders", properties={"REAL_TOPIC": "else", "DELAY": "1", "POP_CK": "1", "__CRC@": "0" * 16})

    serving.advance(1_000)

    (message,) = serving.read("orders")
    assert "POP_CK" not in message.properties
    assert serving.engine.topics.config("else") is None


# --- messages to a retry topic -----------------------------------------------------------------------


def test_a_retry_creates_a_missing_group_or_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as without_creation:
        refused = without_creation.send("%RETRY%fresh")
    with Serving() as with_creation:
        with_creation.send("%RETRY%fresh", b"again")
        found = with_creation.read("%RETRY%fresh")

    assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert [message.body for message in found] == [b"again"]


def test_a_retry_is_stored_in_the_retry_topic_up_to_the_maximum(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    response = serving.send("%RETRY%billing", b"again", {"DELAY": "1"}, reconsume_times=3, max_reconsume_times=3)

    assert response.header(SendMessageResponseHeader).recall_handle is None
    serving.advance(1_000)
    (message,) = serving.read("%RETRY%billing")
    assert (message.body, message.reconsume_times) == (b"again", 3)


def test_a_retry_above_the_maximum_is_a_dead_letter_at_once(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    serving.send("%RETRY%billing", b"dead", {"DELAY": "3"}, reconsume_times=4, max_reconsume_times=3)

    assert [message.body for message in serving.read("%DLQ%billing")] == [b"dead"]
    assert serving.read("%RETRY%billing") == []


def test_the_maximum_of_an_old_client_is_ignored(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    serving.send("%RETRY%billing", b"again", reconsume_times=4, max_reconsume_times=3, version=Version.V3_4_9 - 1)

    assert [message.body for message in serving.read("%RETRY%billing")] == [b"again"]


def test_a_retry_of_an_ordered_group_is_a_dead_letter(serving: Serving) -> None:
    """From the retry topic it would be consumed out of order. A group is ordered while a client holds a lock."""
    serving.heartbeat("billing", "orders")
    queue = serving.engine.queues("orders")[0]
    serving.server.locks.lock("billing", "client@1", [queue])

    serving.send("%RETRY%billing", b"dead", reconsume_times=1, max_reconsume_times=16)

    assert [message.body for message in serving.read("%DLQ%billing")] == [b"dead"]


# --- transactions ------------------------------------------------------------------------------------


def test_a_half_message_is_not_readable_and_the_response_has_its_offset(serving: Serving) -> None:
    serving.send("orders", b"plain")

    response = serving.send(
        "orders", b"half", {"TRAN_MSG": "true", "PGROUP": "producers", "UNIQ_KEY": "0A"}, sys_flag=4, queue_id=1
    )

    header = response.header(SendMessageResponseHeader)
    assert (header.queue_id, header.queue_offset, header.transaction_id) == (1, 0, "0A")
    assert serving.read("orders", queue_id=1) == []
    _, physical_offset = parse_offset_msg_id(header.msg_id)
    half = serving.engine.store.read_at(physical_offset)
    assert half is not None
    assert (half.topic, half.queue_id, half.sys_flag & SysFlag.TRANSACTION_MASK) == ("RMQ_SYS_TRANS_HALF_TOPIC", 0, 0)
    properties = decode_properties(half.properties_bytes)
    assert properties["REAL_TOPIC"] == "orders"
    assert properties["CLUSTER"] == "DefaultCluster"


def test_the_retry_of_a_committed_message_is_no_half_message(serving: Serving) -> None:
    """It still has the property that marks messages of transactions."""
    serving.heartbeat("billing", "orders")

    serving.send("%RETRY%billing", b"again", {"TRAN_MSG": "true", "PGROUP": "producers"}, reconsume_times=1)

    (message,) = serving.read("%RETRY%billing")
    assert (message.body, message.properties["TRAN_MSG"]) == (b"again", "true")


# --- batches that are made to take long ---------------------------------------------------------------


@pytest.mark.parametrize(("count", "text"), [(11, "has more than 10 messages; send fewer at once, or raise max-batch")])
def test_a_batch_with_too_many_messages_is_refused_before_it_is_read(
    count: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """700,000 empty messages, far more than max-message-size allows, held the I/O thread for 3.6 seconds."""
    monkeypatch.setattr(send, "split_batch", lambda body: pytest.fail("it was read"))
    with Serving(BrokerServerSettings(max_batch_messages=10)) as serving:
        response = serving.send_batch("orders", *[Message("orders", b"") for _ in range(count)])

    assert response is not None
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert text in (response.remark or "")


def test_a_batch_with_too_many_bytes_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "split_batch", lambda body: pytest.fail("it was read"))
    with Serving(engine_settings=EmbeddedSettings(max_message_size=100)) as serving:
        response = serving.send_batch("orders", Message("orders", bytes(101)))

    assert response is not None
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "allowed are 100; send fewer messages at once" in (response.remark or "")


@pytest.mark.parametrize(("count", "deferred"), [(64, 0), (65, 1)])
def test_a_long_batch_is_stored_in_another_thread(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, count: int, deferred: int
) -> None:
    serving.send("orders")
    runs: list[object] = []
    run = DeferredWork.run
    monkeypatch.setattr(DeferredWork, "run", lambda *arguments: runs.append(arguments) or run(*arguments))

    response = serving.send_batch("orders", *[Message("orders", b"x") for _ in range(count)])

    assert response is not None
    assert (response.code, len(runs)) == (ResponseCode.SUCCESS, deferred)
    assert serving.engine.max_offset(MessageQueue("orders", "broker-a", 0)) == count + 1


@pytest.mark.parametrize(
    ("body", "count"),
    [(b"", 0), (bytes(21), 0), (bytes(22), 1), (b"\xff" * 44, 2), (b"\x7f" * 44, 1), (bytes(22 * 100), 6)],
)
def test_the_messages_of_a_malformed_batch_are_counted_without_reading_them(body: bytes, count: int) -> None:
    assert count_batch(body, 5) == count
