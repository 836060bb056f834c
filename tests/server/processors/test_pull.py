"""Pulling: response codes, the messages that a pull returns, and selection."""

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


def bodies(response: RemotingCommand | None) -> list[bytes]:
    assert response is not None
    return [message.body for message in decode_messages(response.body, "broker-a")]


def numbers(response: RemotingCommand | None) -> tuple[int, int, int, int, int]:
    """Return the code, the next, minimum and maximum offset, and the suggested broker."""
    assert response is not None
    header = response.header(PullMessageResponseHeader)
    return (
        response.code,
        header.next_begin_offset,
        header.min_offset,
        header.max_offset,
        header.suggest_which_broker_id,
    )


# --- response codes and offsets ----------------------------------------------------------------------


def test_messages_are_returned_in_order_with_the_next_offset(serving: Serving) -> None:
    for body in (b"one", b"two", b"three"):
        serving.send("orders", body)
    serving.heartbeat("billing", "orders")

    response = serving.pull("billing", "orders", 1)

    assert numbers(response) == (ResponseCode.SUCCESS, 3, 0, 3, 0)
    assert bodies(response) == [b"two", b"three"]


@pytest.mark.parametrize(
    ("requested", "code", "next_offset"),
    [
        (2, ResponseCode.PULL_NOT_FOUND, 2),
        (3, ResponseCode.PULL_OFFSET_MOVED, 2),
        (-1, ResponseCode.PULL_OFFSET_MOVED, 0),
    ],
)
def test_an_offset_outside_the_queue_is_corrected(
    serving: Serving, requested: int, code: int, next_offset: int
) -> None:
    serving.send("orders")
    serving.send("orders")

    assert numbers(serving.pull_all("orders", requested)) == (code, next_offset, 0, 2, 0)


@pytest.mark.parametrize(("requested", "code"), [(0, ResponseCode.PULL_NOT_FOUND), (5, ResponseCode.PULL_OFFSET_MOVED)])
def test_an_empty_queue_starts_at_zero(serving: Serving, requested: int, code: int) -> None:
    serving.send("orders", queue_id=1)

    assert numbers(serving.pull_all("orders", requested)) == (code, 0, 0, 0, 0)


def test_a_deleted_offset_is_moved_to_the_first_stored_one() -> None:
    settings = EmbeddedSettings(mapped_file_size_commit_log=4_096, mapped_file_size_consume_queue=200)
    with Serving(engine_settings=settings) as serving:
        for _ in range(10):
            serving.send("orders", b"x" * 1_000)
        store = serving.engine.store
        store.delete_before(store.end_offset)
        low = serving.engine.min_offset(MessageQueue("orders", "broker-a", 0))

        response = serving.pull_all("orders", 0)

        assert low > 0
        assert numbers(response) == (ResponseCode.PULL_OFFSET_MOVED, low, low, 10, 0)


def test_a_pull_does_not_create_a_missing_topic(serving: Serving) -> None:
    response = serving.pull_all("fresh")

    assert response.code == ResponseCode.TOPIC_NOT_EXIST
    assert serving.engine.topics.config("fresh") is None


def test_a_topic_that_is_not_readable_refuses_pulls(serving: Serving) -> None:
    serving.engine.topics.update("inbox", {"perm": 2, "writeQueueNums": 1, "readQueueNums": 1})

    assert serving.pull_all("inbox").code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize("queue_id", [-1, 4])
def test_a_missing_queue_is_an_invalid_parameter(serving: Serving, queue_id: int) -> None:
    serving.send("orders")

    response = serving.pull_all("orders", queue_id=queue_id)

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert f"must be 0..3, got {queue_id}" in response.remark


def test_a_pull_creates_a_missing_group_or_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as without_creation:
        without_creation.send("orders")
        response = without_creation.pull_all("orders")
    with Serving() as with_creation:
        with_creation.send("orders")
        with_creation.pull_all("orders")
        created = with_creation.server.groups.find("reader")

    assert response.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert created is not None


def test_a_group_that_may_not_consume_is_refused(serving: Serving) -> None:
    serving.send("orders")
    serving.server.groups.put([SubscriptionGroupConfig(group_name="reader", consume_enable=False)])

    assert serving.pull_all("orders").code == ResponseCode.NO_PERMISSION


def test_a_group_that_may_not_broadcast_is_refused(serving: Serving) -> None:
    serving.send("orders")
    serving.server.groups.put([SubscriptionGroupConfig(group_name="news", consume_broadcast_enable=False)])
    serving.heartbeat("news", "orders", model="BROADCASTING")

    response = serving.pull("news", "orders")

    assert response.code == ResponseCode.NO_PERMISSION
    assert "may not use the model BROADCASTING" in response.remark


# --- limits ------------------------------------------------------------------------------------------


def test_client_and_broker_limit_the_number_of_messages(serving: Serving) -> None:
    for _ in range(40):
        serving.send("orders")

    few = serving.pull("reader", "orders", sys_flag=OWN, max_msg_nums=3)
    many = serving.pull("reader", "orders", sys_flag=OWN, max_msg_nums=2_147_483_647)

    assert (len(bodies(few)), len(bodies(many))) == (3, 32)


def test_the_client_limits_the_bytes_and_gets_at_least_one_message(serving: Serving) -> None:
    for _ in range(4):
        serving.send("orders", b"x" * 1_000)

    two = serving.pull("reader", "orders", sys_flag=OWN, max_msg_bytes=2_600)
    one = serving.pull("reader", "orders", sys_flag=OWN, max_msg_bytes=1)

    assert (len(bodies(two)), len(bodies(one))) == (2, 1)


def test_the_broker_limits_the_bytes_of_a_response() -> None:
    with Serving(BrokerServerSettings(max_pull_bytes=3_000)) as serving:
        for _ in range(4):
            serving.send("orders", b"x" * 1_000)

        response = serving.pull("reader", "orders", sys_flag=OWN, max_msg_bytes=2_147_483_647)

    assert len(bodies(response)) == 2


# --- records -------------------------------------------------------------------------------------------


def test_records_are_returned_as_they_are_stored_without_our_checksum(serving: Serving) -> None:
    """Applications would see a property that the producer did not send."""
    serving.send("orders", b"paid", {"TAGS": "t"})

    response = serving.pull_all("orders")

    assert CHECK_NAME.encode() not in response.body
    (message,) = decode_messages(response.body, "broker-a")
    stored = serving.engine.store.read_at(message.physical_offset)
    assert stored is not None
    assert message.store_size == len(response.body) == stored.total_size - 24
    assert message.properties == decode_properties(stored.properties_bytes)


def test_a_record_without_our_checksum_is_returned_unchanged(serving: Serving) -> None:
    """Another broker may have written records to this store."""
    serving.send("orders", b"paid", {"TAGS": "t"})
    bare = serving.pull_all("orders").body

    assert without_check(bare, parse_record(bare)) == bare


def test_a_corrupt_record_is_skipped(serving: Serving) -> None:
    """A Java client could not decode the records after it."""
    for body in (b"one", b"two", b"three"):
        serving.send("orders", body)
    corrupt(serving, 1)

    with capture_logs() as logs:
        response = serving.pull_all("orders")

    assert (bodies(response), numbers(response)[1]) == ([b"one", b"three"], 3)
    (entry,) = [line for line in logs if line["event"] == "pull.record_corrupt"]
    assert (entry["topic"], entry["queue"], entry["offset"]) == ("orders", 0, 1)
    assert "CRC-32" in entry["reason"]


def corrupt(serving: Serving, queue_offset: int) -> None:
    """Change one byte of a message's body."""
    store = serving.engine.store
    unit = store.consume_queue("orders", 0).unit(queue_offset)
    found = store._commit_log.find(unit.physical_offset)
    assert found is not None
    file, start = found
    file.view[unit.physical_offset - start + 88] ^= 0xFF


def test_units_without_a_message_are_not_corrupt(serving: Serving) -> None:
    """The schedule queue has a mark instead of a message that was cancelled."""
    serving.send("orders", b"cancelled", {"DELAY": "1"})
    serving.advance(2_000)
    queue = serving.engine.store.consume_queue("SCHEDULE_TOPIC_XXXX", 0)
    queue.mark_done(0)

    with capture_logs() as logs:
        response = serving.pull_all("SCHEDULE_TOPIC_XXXX")

    assert numbers(response)[:2] == (ResponseCode.PULL_RETRY_IMMEDIATELY, 1)
    assert [line for line in logs if line["log_level"] == "error"] == []


def test_a_message_is_not_readable_before_it_is_durable() -> None:
    """With SYNC_FLUSH a message becomes readable when it is on disk."""
    with Serving(engine_settings=EmbeddedSettings(flush_disk_type=FlushDiskType.SYNC_FLUSH)) as serving:
        serving.send("orders")
        draft, _ = serving.engine.engine.drafts.make(Message("orders", b"unsafe"), 0, serving.clock.now_ms())
        serving.engine.store.put(draft)

        response = serving.pull_all("orders")

    assert numbers(response) == (ResponseCode.SUCCESS, 1, 0, 1, 0)


# --- subscriptions -----------------------------------------------------------------------------------


def test_a_group_without_a_heartbeat_has_no_subscription(serving: Serving) -> None:
    serving.send("orders")

    response = serving.pull("billing", "orders")

    assert response.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert "no member that sent a heartbeat" in response.remark


def test_a_topic_without_a_subscription_is_refused(serving: Serving) -> None:
    serving.send("orders")
    serving.heartbeat("billing", "invoices")

    response = serving.pull("billing", "orders")

    assert response.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    assert "does not subscribe to 'orders'" in response.remark


def test_a_subscription_that_is_newer_than_the_heartbeat_is_refused(serving: Serving) -> None:
    serving.send("orders")
    serving.heartbeat("billing", "orders", sub_version=5)

    assert serving.pull("billing", "orders", sub_version=6).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert serving.pull("billing", "orders", sub_version=5).code == ResponseCode.SUCCESS
    assert serving.pull("billing", "orders", sub_version=4).code == ResponseCode.SUCCESS


def test_the_broker_selects_by_tags(serving: Serving) -> None:
    for tag in ("paid", "open", "refunded", "paid"):
        serving.send("orders", tag.encode(), {"TAGS": tag})
    serving.send("orders", b"none")
    serving.heartbeat("billing", "orders", expression="paid || refunded")

    response = serving.pull("billing", "orders")

    assert bodies(response) == [b"paid", b"refunded", b"paid"]
    assert numbers(response)[1] == 5


def test_two_tags_with_the_same_hash_are_distinguished(serving: Serving) -> None:
    """ "Aa" and "BB" have the same hash in Java."""
    for tag in ("Aa", "BB"):
        serving.send("orders", tag.encode(), {"TAGS": tag})
    serving.heartbeat("billing", "orders", expression="BB")

    assert bodies(serving.pull("billing", "orders")) == [b"BB"]


def test_without_a_matching_message_the_next_offset_is_after_all_messages(serving: Serving) -> None:
    """With PULL_NOT_FOUND and the requested offset, the client would repeat the same pull for ever."""
    for _ in range(3):
        serving.send("orders", properties={"TAGS": "open"})
    serving.heartbeat("billing", "orders", expression="paid")

    response = serving.pull("billing", "orders", sys_flag=PullSysFlag.SUSPEND)

    assert numbers(response) == (ResponseCode.PULL_RETRY_IMMEDIATELY, 3, 0, 3, 0)
    assert len(serving.server.hold) == 0


def test_one_pull_reads_a_limited_number_of_units(serving: Serving) -> None:
    """A pull of a long queue must not block the I/O thread."""
    messages = [Message("orders", b"x", {"TAGS": "open"}) for _ in range(500)]
    for _ in range(10):
        serving.send_batch("orders", *messages)

    response = serving.pull("reader", "orders", sys_flag=OWN, subscription="paid")

    assert numbers(response) == (ResponseCode.PULL_RETRY_IMMEDIATELY, 4_096, 0, 5_000, 0)


def test_sql92_selects_by_properties_and_tag(serving: Serving) -> None:
    for price, tag in ((5, "a"), (50, "a"), (50, "b")):
        serving.send("orders", f"{tag}{price}".encode(), {"price": str(price), "TAGS": tag})
    serving.heartbeat("billing", "orders", expression="price > 10 AND TAGS = 'a'", kind="SQL92")

    assert bodies(serving.pull("billing", "orders")) == [b"a50"]


def test_one_sql92_pull_reads_a_limited_number_of_records(serving: Serving) -> None:
    serving.send_batch("orders", *[Message("orders", b"x", {"price": "1"}) for _ in range(300)])

    response = serving.pull("reader", "orders", sys_flag=OWN, subscription="price > 10", expression_type="SQL92")

    assert numbers(response)[:2] == (ResponseCode.PULL_RETRY_IMMEDIATELY, 128)


def test_sql92_can_be_disabled() -> None:
    with Serving(BrokerServerSettings(enable_property_filter=False)) as serving:
        serving.send("orders")

        response = serving.pull("reader", "orders", sys_flag=OWN, subscription="a = 1", expression_type="SQL92")

    assert response.code == ResponseCode.SYSTEM_ERROR
    assert "enable-property-filter" in response.remark


@pytest.mark.parametrize(("kind", "expression"), [("SQL92", "price >"), ("XPATH", "//order")])
def test_an_invalid_expression_is_refused(serving: Serving, kind: str, expression: str) -> None:
    serving.send("orders")

    response = serving.pull("reader", "orders", sys_flag=OWN, subscription=expression, expression_type=kind)

    assert response.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_the_request_may_contain_a_subscription(serving: Serving) -> None:
    """Lite pull consumers send one. Java ignores empty tags."""
    for tag in ("paid", "open"):
        serving.send("orders", tag.encode(), {"TAGS": tag})

    response = serving.pull("reader", "orders", sys_flag=OWN, subscription="paid || ")

    assert bodies(response) == [b"paid"]


def test_a_lite_pull_equals_a_pull(serving: Serving) -> None:
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

    assert bodies(serving.request(RequestCode.LITE_PULL_MESSAGE, header)) == [b"one"]


# --- offsets in the request ----------------------------------------------------------------------------


def test_the_offset_is_committed_only_if_the_flag_is_set(serving: Serving) -> None:
    """Without the flag the field is 0."""
    serving.send("orders")
    serving.heartbeat("billing", "orders")

    serving.pull("billing", "orders", 1, sys_flag=PullSysFlag.COMMIT_OFFSET, commit_offset=1)
    serving.pull("billing", "orders", 1, commit_offset=0)

    assert serving.engine.engine.offsets.offset("billing", "orders", 0) == 1
