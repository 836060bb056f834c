"""Sending: what a broker answers, what it stores, and what it refuses."""

from __future__ import annotations

import zlib

import pytest

from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.message import HostAddress, Message
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeader, SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_offset_msg_id, encode_batch
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import RecordingConnection, Serving


@pytest.fixture
def serving():
    with Serving() as serving:
        yield serving


# --- what comes back -------------------------------------------------------------------------------


def test_the_answer_has_what_javas_producers_fail_without(serving: Serving) -> None:
    answer = serving.send("orders", properties={"UNIQ_KEY": "0A0B", "TAGS": "paid"}, queue_id=2)

    header = answer.header(SendMessageResponseHeader)
    assert (answer.code, answer.opaque) == (ResponseCode.SUCCESS, 7)
    assert (header.queue_id, header.queue_offset, header.transaction_id) == (2, 0, "0A0B")
    assert (header.msg_region, header.trace_on) == ("DefaultRegion", "true")
    host, physical_offset = decode_offset_msg_id(header.msg_id)
    assert (host, physical_offset) == (HostAddress("127.0.0.1", 10911), 0)


def test_the_message_is_what_was_sent_and_what_the_server_knows(serving: Serving) -> None:
    """Header values travel into the record; the born host is the peer that the server sees."""
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


def test_a_peer_with_an_ipv6_address_is_kept(serving: Serving) -> None:
    serving.send("orders", over=RecordingConnection(HostAddress("2001:db8::1", 4567)))

    (message,) = serving.read("orders")
    assert message.born_host == HostAddress("2001:db8::1", 4567)
    assert message.sys_flag & SysFlag.BORN_HOST_V6


def test_a_message_without_an_id_gets_one(serving: Serving) -> None:
    answer = serving.send("orders")

    (message,) = serving.read("orders")
    assert message.properties["UNIQ_KEY"] == answer.header(SendMessageResponseHeader).transaction_id


def test_a_compressed_body_is_stored_as_it_came(serving: Serving) -> None:
    body = zlib.compress(b"x" * 5_000)

    serving.send("orders", body, sys_flag=0x301)

    (message,) = serving.read("orders")
    assert message.body == b"x" * 5_000
    record = serving.engine.store.read_at(message.physical_offset)
    assert record is not None
    assert (record.body, record.sys_flag) == (body, 0x301)


def test_what_kind_of_address_a_peer_has_is_seen_not_believed(serving: Serving) -> None:
    serving.send("orders", b"paid", sys_flag=SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)

    (message,) = serving.read("orders")
    assert (message.body, message.sys_flag) == (b"paid", 0)


def test_long_names_say_the_same(serving: Serving) -> None:
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

    answer = serving.ask(RequestCode.SEND_MESSAGE, header, b"old")

    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS
    (message,) = serving.read("orders", queue_id=1)
    assert (message.body, message.tags) == (b"old", "paid")


def test_a_one_way_message_is_stored_and_never_answered(serving: Serving) -> None:
    serving.send("orders", b"known")
    replies = len(serving.connection.replies)

    assert serving.send("orders", b"quiet", one_way=True) is None

    assert len(serving.connection.replies) == replies
    assert [message.body for message in serving.read("orders")] == [b"known", b"quiet"]


def test_offsets_count_up_queue_by_queue(serving: Serving) -> None:
    answers = [serving.send("orders", queue_id=queue_id) for queue_id in (0, 1, 0, 0)]

    offsets = [answer.header(SendMessageResponseHeader).queue_offset for answer in answers]
    assert offsets == [0, 0, 1, 2]


def test_a_negative_queue_id_lets_the_broker_choose(serving: Serving) -> None:
    answer = serving.send("orders", queue_id=-1)

    assert 0 <= answer.header(SendMessageResponseHeader).queue_id < 4


# --- what is refused ---------------------------------------------------------------------------------


def test_a_queue_that_is_not_there_is_an_invalid_parameter(serving: Serving) -> None:
    answer = serving.send("orders", queue_id=4)

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "'orders' has queues 0..3, asked was queue 4" in answer.remark


@pytest.mark.parametrize("topic", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"])
def test_nobody_sends_to_the_brokers_own_topics(serving: Serving, topic: str) -> None:
    answer = serving.send(topic)

    assert answer.code == ResponseCode.NO_PERMISSION
    assert "belongs to the broker" in answer.remark


@pytest.mark.parametrize("topic", ["with blank", "a/b", "x" * 128])
def test_an_illegal_name_is_an_invalid_parameter(serving: Serving, topic: str) -> None:
    assert serving.send(topic).code == ResponseCode.INVALID_PARAMETER


def test_a_topic_that_is_closed_to_writing_takes_nothing(serving: Serving) -> None:
    serving.engine.topics.update("archive", {"perm": 4, "writeQueueNums": 1, "readQueueNums": 1})

    answer = serving.send("archive")

    assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, "topic 'archive' is closed to writing")


def test_what_is_too_large_is_an_illegal_message() -> None:
    with Serving(engine_settings=EmbeddedSettings(max_message_size=1_000)) as serving:
        answer = serving.send("orders", b"x" * 1_001)
        batch = serving.send_batch("orders", Message("orders", b"x" * 600), Message("orders", b"y" * 600))

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "has 1001 bytes, allowed are 1000" in answer.remark
    assert batch.code == ResponseCode.MESSAGE_ILLEGAL
    assert "send fewer messages at once" in batch.remark


def test_properties_that_take_too_much_room_are_an_illegal_message(serving: Serving) -> None:
    answer = serving.send("orders", properties={"note": "x" * 40_000})

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL


def test_a_full_disk_is_a_service_that_is_not_available(serving: Serving) -> None:
    serving.send("orders")
    serving.engine.store.cleaning.refusal = "the disk is 95% full"

    answer = serving.send("orders")

    assert (answer.code, answer.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is 95% full")


# --- topics that are made by their first message -----------------------------------------------------


@pytest.mark.parametrize(("wished", "made"), [(4, 4), (2, 2), (100, 8), (0, 1)])
def test_a_first_message_makes_its_topic_with_as_many_queues_as_both_want(
    serving: Serving, wished: int, made: int
) -> None:
    assert serving.send("fresh", default_topic_queue_nums=wished).code == ResponseCode.SUCCESS

    config = serving.engine.topics.config("fresh")
    assert config is not None
    assert (config["readQueueNums"], config["writeQueueNums"], config["perm"]) == (made, made, 6)


def test_the_settings_number_is_what_routes_tell_and_topics_get() -> None:
    """A client sends to the queues of the pattern's route before it knows the topic's own."""
    with Serving(BrokerServerSettings(default_topic_queue_nums=2)) as serving:
        route = serving.server.administration.name_server.route("TBW102")
        answer = serving.send("fresh", queue_id=1)

        assert route is not None
        assert route.queue_datas[0].write_queue_nums == serving.engine.topics.queue_count("fresh") == 2
        assert answer.code == ResponseCode.SUCCESS


def test_without_auto_creation_an_unknown_topic_is_told_so() -> None:
    with Serving(BrokerServerSettings(auto_create_topic_enable=False)) as serving:
        answer = serving.send("fresh")

        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        assert "set auto-create-topic-enable to true" in answer.remark
        assert serving.engine.topics.config("fresh") is None


def test_a_topic_is_not_made_after_one_that_is_not_to_be_followed(serving: Serving) -> None:
    serving.send("plain")

    assert serving.send("fresh", default_topic="plain").code == ResponseCode.TOPIC_NOT_EXIST


def test_dead_letters_are_no_way_round_that_rule() -> None:
    with Serving(BrokerServerSettings(auto_create_topic_enable=False)) as serving:
        assert serving.send("%DLQ%nobody").code == ResponseCode.TOPIC_NOT_EXIST


# --- batches -----------------------------------------------------------------------------------------


def test_a_batch_is_stored_as_messages_with_offsets_in_a_row(serving: Serving) -> None:
    serving.send("orders", b"before")

    answer = serving.send_batch(
        "orders",
        Message("orders", b"one", {"UNIQ_KEY": "A1", "TAGS": "t"}),
        Message("orders", b"two", {"UNIQ_KEY": "A2"}),
    )

    header = answer.header(SendMessageResponseHeader)
    assert (header.queue_offset, header.transaction_id) == (1, "A1,A2")
    ids = header.msg_id.split(",")
    messages = serving.read("orders")
    assert [message.offset_msg_id for message in messages[1:]] == ids
    assert [(message.body, message.msg_id, message.tags) for message in messages[1:]] == [
        (b"one", "A1", "t"),
        (b"two", "A2", None),
    ]
    assert {message.properties["CLUSTER"] for message in messages} == {"DefaultCluster"}


def test_a_batch_may_come_with_the_code_of_a_single_message(serving: Serving) -> None:
    serving.send("orders", encode_batch([Message("orders", b"one"), Message("orders", b"two")]), batch=True)

    assert [message.body for message in serving.read("orders")] == [b"one", b"two"]


def test_a_batch_that_cannot_be_read_is_refused(serving: Serving) -> None:
    answer = serving.send("orders", b"\0\0\0\x40short", code=RequestCode.SEND_BATCH_MESSAGE)

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "of the batch" in answer.remark


def test_an_empty_batch_is_refused(serving: Serving) -> None:
    answer = serving.send("orders", b"", code=RequestCode.SEND_BATCH_MESSAGE)

    assert (answer.code, answer.remark) == (
        ResponseCode.MESSAGE_ILLEGAL,
        "the batch is empty; give at least one message",
    )


def test_a_batch_may_not_go_to_a_retry_topic(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    answer = serving.send_batch("%RETRY%billing", Message("%RETRY%billing", b"one"))

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "one by one" in answer.remark


def test_messages_of_a_batch_may_wait(serving: Serving) -> None:
    """Java's client refuses that; ours does not, and gets a handle for each that waits."""
    answer = serving.send_batch(
        "orders", Message("orders", b"now"), Message("orders", b"later", {"DELAY": "1"}), Message("orders", b"also now")
    )

    assert "," not in answer.header(SendMessageResponseHeader).recall_handle
    assert [message.body for message in serving.read("orders")] == [b"now", b"also now"]
    serving.advance(1_000)
    assert [message.body for message in serving.read("orders")] == [b"now", b"also now", b"later"]


# --- messages that wait ------------------------------------------------------------------------------


def test_a_level_keeps_the_message_back_as_long_as_it_says(serving: Serving) -> None:
    answer = serving.send("orders", properties={"DELAY": "2", "UNIQ_KEY": "0A"}, queue_id=3, reconsume_times=2)

    assert answer.header(SendMessageResponseHeader).queue_id == 3
    serving.advance(4_999)
    assert serving.read("orders", queue_id=3) == []
    serving.advance(1)
    (message,) = serving.read("orders", queue_id=3)
    assert (message.msg_id, message.reconsume_times) == ("0A", 2)
    assert message.born_timestamp == 1_700_000_000_000


def test_a_timer_gets_a_handle_that_calls_it_back(serving: Serving) -> None:
    due_ms = serving.clock.now_ms() + 3_600_500
    answer = serving.send("orders", properties={"TIMER_DELIVER_MS": str(due_ms)})
    serving.step()

    handle = answer.header(SendMessageResponseHeader).recall_handle
    assert serving.engine.cancel(handle).status.name == "CANCELLED"
    serving.advance(3_700_000)
    assert serving.read("orders") == []


def test_a_delay_that_cannot_be_kept_is_an_illegal_message(serving: Serving) -> None:
    answer = serving.send("orders", properties={"TIMER_DELAY_SEC": "soon"})

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "TIMER_DELAY_SEC" in answer.remark


def test_what_only_a_broker_may_write_is_not_taken_from_a_sender(serving: Serving) -> None:
    """A copied message must not go where its original went; and a copied check belongs to other bytes."""
    serving.send("orders", properties={"REAL_TOPIC": "else", "DELAY": "1", "POP_CK": "1", "__CRC@": "0" * 16})

    serving.advance(1_000)

    (message,) = serving.read("orders")
    assert "POP_CK" not in message.properties
    assert serving.engine.topics.config("else") is None


# --- messages to a retry topic -----------------------------------------------------------------------


def test_a_retry_of_a_group_that_nobody_made_makes_it_or_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as closed:
        refused = closed.send("%RETRY%fresh")
    with Serving() as open_to_all:
        open_to_all.send("%RETRY%fresh", b"again")
        found = open_to_all.read("%RETRY%fresh")

    assert refused.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert [message.body for message in found] == [b"again"]


def test_a_retry_goes_to_the_retry_topic_while_there_are_tries_left(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    answer = serving.send("%RETRY%billing", b"again", {"DELAY": "1"}, reconsume_times=3, max_reconsume_times=3)

    assert answer.header(SendMessageResponseHeader).recall_handle is None
    serving.advance(1_000)
    (message,) = serving.read("%RETRY%billing")
    assert (message.body, message.reconsume_times) == (b"again", 3)


def test_a_retry_too_many_goes_to_the_dead_letters_at_once(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    serving.send("%RETRY%billing", b"dead", {"DELAY": "3"}, reconsume_times=4, max_reconsume_times=3)

    assert [message.body for message in serving.read("%DLQ%billing")] == [b"dead"]
    assert serving.read("%RETRY%billing") == []


def test_an_old_client_has_no_say_in_how_often(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    serving.send("%RETRY%billing", b"again", reconsume_times=4, max_reconsume_times=3, version=Version.V3_4_9 - 1)

    assert [message.body for message in serving.read("%RETRY%billing")] == [b"again"]


def test_what_an_ordered_group_gives_up_is_dead(serving: Serving) -> None:
    """It would come back out of order; while the group has locks, it reads in order."""
    serving.heartbeat("billing", "orders")
    queue = serving.engine.queues("orders")[0]
    serving.server.locks.lock("billing", "client@1", [queue])

    serving.send("%RETRY%billing", b"dead", reconsume_times=1, max_reconsume_times=16)

    assert [message.body for message in serving.read("%DLQ%billing")] == [b"dead"]


# --- transactions ------------------------------------------------------------------------------------


def test_a_half_message_is_not_seen_and_its_answer_tells_its_place(serving: Serving) -> None:
    serving.send("orders", b"plain")

    answer = serving.send(
        "orders", b"half", {"TRAN_MSG": "true", "PGROUP": "producers", "UNIQ_KEY": "0A"}, sys_flag=4, queue_id=1
    )

    header = answer.header(SendMessageResponseHeader)
    assert (header.queue_id, header.queue_offset, header.transaction_id) == (1, 0, "0A")
    assert serving.read("orders", queue_id=1) == []
    _, physical_offset = decode_offset_msg_id(header.msg_id)
    half = serving.engine.store.read_at(physical_offset)
    assert half is not None
    assert (half.topic, half.queue_id, half.sys_flag & SysFlag.TRANSACTION_MASK) == ("RMQ_SYS_TRANS_HALF_TOPIC", 0, 0)
    properties = decode_properties(half.properties_bytes)
    assert properties["REAL_TOPIC"] == "orders"
    assert properties["CLUSTER"] == "DefaultCluster"


def test_a_committed_message_that_is_retried_is_no_half_message_again(serving: Serving) -> None:
    """It still has the property by which consumers know that it came from a transaction."""
    serving.heartbeat("billing", "orders")

    serving.send("%RETRY%billing", b"again", {"TRAN_MSG": "true", "PGROUP": "producers"}, reconsume_times=1)

    (message,) = serving.read("%RETRY%billing")
    assert (message.body, message.properties["TRAN_MSG"]) == (b"again", "true")
