"""Pulling: the table of answers, what a pull gets, and what it may select by."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.message import Message, MessageQueue
from mqtemplate.record.codec import parse_record, without_check
from mqtemplate.record.layout import CHECK_NAME
from mqtemplate.record.properties import decode_properties
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server import BrokerServerSettings
from mqtemplate.store import FlushDiskType
from tests.server.serving import Serving

OWN = PullSysFlag.SUBSCRIPTION


@pytest.fixture
def serving():
    with Serving() as serving:
        yield serving


def bodies(answer: RemotingCommand | None) -> list[bytes]:
    assert answer is not None
    return [message.body for message in decode_messages(answer.body, "broker-a")]


def numbers(answer: RemotingCommand | None) -> tuple[int, int, int, int, int]:
    """Code, next, min, max, and whom to ask next."""
    assert answer is not None
    header = answer.header(PullMessageResponseHeader)
    return (
        answer.code,
        header.next_begin_offset,
        header.min_offset,
        header.max_offset,
        header.suggest_which_broker_id,
    )


# --- the table ---------------------------------------------------------------------------------------


def test_messages_come_in_order_with_the_place_to_go_on(serving: Serving) -> None:
    for body in (b"one", b"two", b"three"):
        serving.send("orders", body)
    serving.heartbeat("billing", "orders")

    answer = serving.pull("billing", "orders", 1)

    assert numbers(answer) == (ResponseCode.SUCCESS, 3, 0, 3, 0)
    assert bodies(answer) == [b"two", b"three"]


@pytest.mark.parametrize(
    ("asked", "code", "next_offset"),
    [
        (2, ResponseCode.PULL_NOT_FOUND, 2),
        (3, ResponseCode.PULL_OFFSET_MOVED, 2),
        (-1, ResponseCode.PULL_OFFSET_MOVED, 0),
    ],
)
def test_an_offset_beside_the_messages_is_told_where_they_are(
    serving: Serving, asked: int, code: int, next_offset: int
) -> None:
    serving.send("orders")
    serving.send("orders")

    assert numbers(serving.pull_all("orders", asked)) == (code, next_offset, 0, 2, 0)


@pytest.mark.parametrize(("asked", "code"), [(0, ResponseCode.PULL_NOT_FOUND), (5, ResponseCode.PULL_OFFSET_MOVED)])
def test_an_empty_queue_begins_at_zero(serving: Serving, asked: int, code: int) -> None:
    serving.send("orders", queue_id=1)

    assert numbers(serving.pull_all("orders", asked)) == (code, 0, 0, 0, 0)


def test_an_offset_that_retention_deleted_is_moved_to_the_first_that_is_left() -> None:
    settings = EmbeddedSettings(mapped_file_size_commit_log=4_096, mapped_file_size_consume_queue=200)
    with Serving(engine_settings=settings) as serving:
        for _ in range(10):
            serving.send("orders", b"x" * 1_000)
        store = serving.engine.store
        store.delete_before(store.end_offset)
        low = serving.engine.min_offset(MessageQueue("orders", "broker-a", 0))

        answer = serving.pull_all("orders", 0)

        assert low > 0
        assert numbers(answer) == (ResponseCode.PULL_OFFSET_MOVED, low, low, 10, 0)


def test_an_unknown_topic_is_not_made_by_a_pull(serving: Serving) -> None:
    answer = serving.pull_all("fresh")

    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert serving.engine.topics.config("fresh") is None


def test_a_topic_that_is_closed_to_reading_gives_nothing(serving: Serving) -> None:
    serving.engine.topics.update("inbox", {"perm": 2, "writeQueueNums": 1, "readQueueNums": 1})

    assert serving.pull_all("inbox").code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize("queue_id", [-1, 4])
def test_a_queue_that_is_not_there_is_an_invalid_parameter(serving: Serving, queue_id: int) -> None:
    serving.send("orders")

    answer = serving.pull_all("orders", queue_id=queue_id)

    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert f"asked was queue {queue_id}" in answer.remark


def test_a_group_that_nobody_made_is_made_or_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as closed:
        closed.send("orders")
        answer = closed.pull_all("orders")
    with Serving() as open_to_all:
        open_to_all.send("orders")
        open_to_all.pull_all("orders")
        made = open_to_all.server.groups.find("reader")

    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert made is not None


def test_a_group_that_may_not_consume_gets_nothing(serving: Serving) -> None:
    serving.send("orders")
    serving.server.groups.put([SubscriptionGroupConfig(group_name="reader", consume_enable=False)])

    assert serving.pull_all("orders").code == ResponseCode.NO_PERMISSION


def test_a_group_that_may_not_broadcast_gets_nothing(serving: Serving) -> None:
    serving.send("orders")
    serving.server.groups.put([SubscriptionGroupConfig(group_name="news", consume_broadcast_enable=False)])
    serving.heartbeat("news", "orders", model="BROADCASTING")

    answer = serving.pull("news", "orders")

    assert answer.code == ResponseCode.NO_PERMISSION
    assert "may not broadcast" in answer.remark


# --- how much ----------------------------------------------------------------------------------------


def test_a_pull_gets_as_many_as_it_wants_and_no_more_than_the_broker_gives(serving: Serving) -> None:
    for _ in range(40):
        serving.send("orders")

    few = serving.pull("reader", "orders", sys_flag=OWN, max_msg_nums=3)
    many = serving.pull("reader", "orders", sys_flag=OWN, max_msg_nums=2_147_483_647)

    assert (len(bodies(few)), len(bodies(many))) == (3, 32)


def test_a_pull_gets_as_many_bytes_as_it_wants_and_at_least_one_message(serving: Serving) -> None:
    for _ in range(4):
        serving.send("orders", b"x" * 1_000)

    two = serving.pull("reader", "orders", sys_flag=OWN, max_msg_bytes=2_600)
    one = serving.pull("reader", "orders", sys_flag=OWN, max_msg_bytes=1)

    assert (len(bodies(two)), len(bodies(one))) == (2, 1)


def test_the_broker_limits_the_bytes_of_an_answer() -> None:
    with Serving(BrokerServerSettings(max_pull_bytes=3_000)) as serving:
        for _ in range(4):
            serving.send("orders", b"x" * 1_000)

        answer = serving.pull("reader", "orders", sys_flag=OWN, max_msg_bytes=2_147_483_647)

    assert len(bodies(answer)) == 2


# --- what the bytes are --------------------------------------------------------------------------------


def test_records_come_as_they_are_stored_without_the_check_that_only_we_write(serving: Serving) -> None:
    """Applications would find a property that they did not send."""
    serving.send("orders", b"paid", {"TAGS": "t"})

    answer = serving.pull_all("orders")

    assert CHECK_NAME.encode() not in answer.body
    (message,) = decode_messages(answer.body, "broker-a")
    stored = serving.engine.store.read_at(message.physical_offset)
    assert stored is not None
    assert message.store_size == len(answer.body) == stored.total_size - 24
    assert message.properties == decode_properties(stored.properties_bytes)


def test_a_record_without_our_check_comes_whole(serving: Serving) -> None:
    """As another broker wrote it into this folder."""
    serving.send("orders", b"paid", {"TAGS": "t"})
    bare = serving.pull_all("orders").body

    assert without_check(bare, parse_record(bare)) == bare


def test_a_damaged_record_is_passed_over(serving: Serving) -> None:
    """Its bytes would end the reader's decoding of all that follow."""
    for body in (b"one", b"two", b"three"):
        serving.send("orders", body)
    damage(serving, 1)

    with capture_logs() as logs:
        answer = serving.pull_all("orders")

    assert (bodies(answer), numbers(answer)[1]) == ([b"one", b"three"], 3)
    (told,) = [line for line in logs if line["event"] == "pull.record_damaged"]
    assert (told["topic"], told["queue"], told["offset"]) == ("orders", 0, 1)
    assert "CRC-32" in told["reason"]


def damage(serving: Serving, queue_offset: int) -> None:
    """Change one byte of a message's body."""
    store = serving.engine.store
    unit = store.consume_queue("orders", 0).unit(queue_offset)
    found = store._commit_log.find(unit.physical_offset)
    assert found is not None
    file, start = found
    file.view[unit.physical_offset - start + 88] ^= 0xFF


def test_places_in_a_queue_that_hold_no_message_any_more_are_no_damage(serving: Serving) -> None:
    """What waited by level and was handed over leaves a mark there."""
    serving.send("orders", b"cancelled", {"DELAY": "1"})
    serving.advance(2_000)
    queue = serving.engine.store.consume_queue("SCHEDULE_TOPIC_XXXX", 0)
    queue.mark_done(0)

    with capture_logs() as logs:
        answer = serving.pull_all("SCHEDULE_TOPIC_XXXX")

    assert numbers(answer)[:2] == (ResponseCode.PULL_RETRY_IMMEDIATELY, 1)
    assert [line for line in logs if line["log_level"] == "error"] == []


def test_what_is_not_safe_yet_is_not_seen() -> None:
    """With sync flush a record is read once it is on the disk, and not before."""
    with Serving(engine_settings=EmbeddedSettings(flush_disk_type=FlushDiskType.SYNC_FLUSH)) as serving:
        serving.send("orders")
        draft, _ = serving.engine.drafts.make(Message("orders", b"unsafe"), 0, serving.clock.now_ms())
        serving.engine.store.put(draft)

        answer = serving.pull_all("orders")

    assert numbers(answer) == (ResponseCode.SUCCESS, 1, 0, 1, 0)


# --- subscriptions -----------------------------------------------------------------------------------


def test_without_a_heartbeat_there_is_no_subscription(serving: Serving) -> None:
    serving.send("orders")

    answer = serving.pull("billing", "orders")

    assert answer.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert "no member that sent a heartbeat" in answer.remark


def test_a_topic_that_the_group_did_not_subscribe_to_is_not_given(serving: Serving) -> None:
    serving.send("orders")
    serving.heartbeat("billing", "invoices")

    answer = serving.pull("billing", "orders")

    assert answer.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert "no subscription to 'orders'" in answer.remark


def test_a_subscription_that_is_newer_than_the_heartbeats_waits_for_it(serving: Serving) -> None:
    serving.send("orders")
    serving.heartbeat("billing", "orders", sub_version=5)

    assert serving.pull("billing", "orders", sub_version=6).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert serving.pull("billing", "orders", sub_version=5).code == ResponseCode.SUCCESS
    assert serving.pull("billing", "orders", sub_version=4).code == ResponseCode.SUCCESS


def test_tags_are_sieved_by_the_broker(serving: Serving) -> None:
    for tag in ("paid", "open", "refunded", "paid"):
        serving.send("orders", tag.encode(), {"TAGS": tag})
    serving.send("orders", b"none")
    serving.heartbeat("billing", "orders", expression="paid || refunded")

    answer = serving.pull("billing", "orders")

    assert bodies(answer) == [b"paid", b"refunded", b"paid"]
    assert numbers(answer)[1] == 5


def test_two_tags_with_one_hash_are_told_apart(serving: Serving) -> None:
    """ "Aa" and "BB" have the same hash in Java."""
    for tag in ("Aa", "BB"):
        serving.send("orders", tag.encode(), {"TAGS": tag})
    serving.heartbeat("billing", "orders", expression="BB")

    assert bodies(serving.pull("billing", "orders")) == [b"BB"]


def test_where_nothing_matches_the_reader_is_led_past_it(serving: Serving) -> None:
    """Trap 26: NOT_FOUND with the old offset would let it wait behind them for ever."""
    for _ in range(3):
        serving.send("orders", properties={"TAGS": "open"})
    serving.heartbeat("billing", "orders", expression="paid")

    answer = serving.pull("billing", "orders", sys_flag=PullSysFlag.SUSPEND)

    assert numbers(answer) == (ResponseCode.PULL_RETRY_IMMEDIATELY, 3, 0, 3, 0)
    assert len(serving.server.hold) == 0


def test_one_pull_does_not_look_through_a_long_queue(serving: Serving) -> None:
    """It would hold up everybody else."""
    messages = [Message("orders", b"x", {"TAGS": "open"}) for _ in range(500)]
    for _ in range(10):
        serving.send_batch("orders", *messages)

    answer = serving.pull("reader", "orders", sys_flag=OWN, subscription="paid")

    assert numbers(answer) == (ResponseCode.PULL_RETRY_IMMEDIATELY, 4_096, 0, 5_000, 0)


def test_sql92_selects_by_properties_and_tag(serving: Serving) -> None:
    for price, tag in ((5, "a"), (50, "a"), (50, "b")):
        serving.send("orders", f"{tag}{price}".encode(), {"price": str(price), "TAGS": tag})
    serving.heartbeat("billing", "orders", expression="price > 10 AND TAGS = 'a'", kind="SQL92")

    assert bodies(serving.pull("billing", "orders")) == [b"a50"]


def test_one_sql92_pull_reads_a_limited_number_of_records(serving: Serving) -> None:
    serving.send_batch("orders", *[Message("orders", b"x", {"price": "1"}) for _ in range(300)])

    answer = serving.pull("reader", "orders", sys_flag=OWN, subscription="price > 10", expression_type="SQL92")

    assert numbers(answer)[:2] == (ResponseCode.PULL_RETRY_IMMEDIATELY, 128)


def test_sql92_can_be_switched_off() -> None:
    with Serving(BrokerServerSettings(enable_property_filter=False)) as serving:
        serving.send("orders")

        answer = serving.pull("reader", "orders", sys_flag=OWN, subscription="a = 1", expression_type="SQL92")

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "enable-property-filter" in answer.remark


@pytest.mark.parametrize(("kind", "expression"), [("SQL92", "price >"), ("XPATH", "//order")])
def test_an_expression_that_cannot_be_read_is_told_so(serving: Serving, kind: str, expression: str) -> None:
    serving.send("orders")

    answer = serving.pull("reader", "orders", sys_flag=OWN, subscription=expression, expression_type=kind)

    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_the_request_may_bring_its_own_subscription(serving: Serving) -> None:
    """As lite pull consumers do; empty tags are none, as Java reads them."""
    for tag in ("paid", "open"):
        serving.send("orders", tag.encode(), {"TAGS": tag})

    answer = serving.pull("reader", "orders", sys_flag=OWN, subscription="paid || ")

    assert bodies(answer) == [b"paid"]


def test_a_lite_pull_is_a_pull(serving: Serving) -> None:
    serving.send("orders", b"one")
    header = PullMessageRequestHeader(
        consumer_group="lite",
        topic="orders",
        queue_id=0,
        queue_offset=0,
        max_msg_nums=10,
        sys_flag=OWN | PullSysFlag.SUSPEND | PullSysFlag.LITE_PULL,
        commit_offset=0,
        suspend_timeout_millis=20_000,
        subscription="*",
        sub_version=1,
        max_msg_bytes=2_147_483_647,
    )

    assert bodies(serving.ask(RequestCode.LITE_PULL_MESSAGE, header)) == [b"one"]


# --- offsets that come along ---------------------------------------------------------------------------


def test_an_offset_is_committed_only_where_the_bit_says_so(serving: Serving) -> None:
    """Trap 29: the field is 0 in all other pulls."""
    serving.send("orders")
    serving.heartbeat("billing", "orders")

    serving.pull("billing", "orders", 1, sys_flag=PullSysFlag.COMMIT_OFFSET, commit_offset=1)
    serving.pull("billing", "orders", 1, commit_offset=0)

    assert serving.engine.offsets.offset("billing", "orders", 0) == 1
