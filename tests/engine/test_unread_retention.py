"""Retention keeps unread messages of known groups, and dead letters, until the disk is full."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from mqtemplate.broker import ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.files.store_files import DiskUsage
from mqtemplate.testing import Harness
from tests.store.small_store import used as used_space

pytestmark = pytest.mark.usefixtures("utc")  # delete hours are local time

FILE = 65_536
DAY_MS = 86_400_000
BODY = bytes(20_000)  # three messages fill a file
SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=FILE,
    mapped_file_size_consume_queue=10_000,
    default_topic_queue_nums=1,
)
ORDERS = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def broker(tmp_path: Path, clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        yield broker


def send(broker: EmbeddedBroker, numbers: range, topic: str = "orders") -> None:
    for number in numbers:
        broker.sends.send(Message(topic, b"%d" % number + BODY))


def join(broker: EmbeddedBroker, group: str = "billing", topic: str = "orders", **changes: object) -> Consumer:
    first = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    spec = {"group": group, "subscriptions": {topic: TagSelector()}, "consume_from_where": first} | changes
    return broker.groups.subscribe(ConsumerSpec(**spec))  # type: ignore[arg-type]


def consume(broker: EmbeddedBroker, group: str = "billing", topic: str = "orders", count: int = 1_000) -> list[int]:
    """Let a group consume messages, commit and leave. Return their numbers."""
    consumer = join(broker, group, topic)
    found = [int(message.body.rstrip(b"\0")) for message in consumer.poll(count)]
    queue = MessageQueue(topic, "broker-a", 0)
    consumer.commit(queue, consumer.position(queue))
    consumer.close()
    return found


def advance_days(broker: EmbeddedBroker, days: int, topic: str = "filler") -> None:
    """Let days pass, with other messages on each of them, so that files become complete."""
    harness = Harness(broker)
    for _ in range(days):
        send(broker, range(3), topic)
        harness.advance("1d")


def first_file(broker: EmbeddedBroker) -> int:
    return broker.store.start_offset // FILE


def events(logs: list[EventDict], name: str) -> list[EventDict]:
    return [line for line in logs if line["event"] == name]


# --- groups that are away -----------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["never", "cleanly", "killed"])
def test_a_group_that_is_away_for_ten_days_gets_everything(tmp_path: Path, clock: VirtualClock, ends: str) -> None:
    """Files are kept for three days. The broker restarts each day. Afterwards the files are deleted."""
    broker = EmbeddedBroker(tmp_path, SMALL, clock)
    broker.start()
    send(broker, range(1))
    consume(broker)
    broker.groups.committed.persist()

    for day in range(10):
        send(broker, range(10 * day, 10 * day + 10))
        Harness(broker).advance("1d")
        if ends != "never":
            broker.close() if ends == "cleanly" else broker.store.release()
            broker = EmbeddedBroker(tmp_path, SMALL, clock)
            broker.start()
    kept = first_file(broker)
    read = consume(broker)
    Harness(broker).advance("2d")

    assert read == list(range(100))
    assert kept == 0
    assert first_file(broker) > 20
    broker.close()


def test_with_rocketmqs_rule_a_file_is_deleted_by_its_age(tmp_path: Path, clock: VirtualClock) -> None:
    settings = dataclasses.replace(SMALL, keep_unread_messages=False)
    with EmbeddedBroker(tmp_path, settings, clock) as broker:
        send(broker, range(1))
        consume(broker)
        send(broker, range(100))
        send(broker, range(3), "%DLQ%billing")
        advance_days(broker, 10)

        read = consume(broker)
        holds = broker.retention_holds()

    assert len(read) < 3
    assert holds == ()
    assert not (tmp_path / "config" / "groupActivity.json").exists()


def test_messages_in_the_retry_topic_of_a_group_are_kept(broker: EmbeddedBroker) -> None:
    """The group left after the messages had failed."""
    send(broker, range(1))
    consume(broker)
    retries = MessageQueue("%RETRY%billing", "broker-a", 0)
    send(broker, range(4), retries.topic)
    broker.groups.commit_offset("billing", retries, 0)

    advance_days(broker, 10)

    assert broker.reader.min_offset(retries) == 0


def test_a_member_without_a_commit_keeps_messages_from_its_first_position(broker: EmbeddedBroker) -> None:
    """It has fetched three messages of 100 and is still handling the first."""
    send(broker, range(100))
    consumer = join(broker)
    assert len(consumer.poll(3)) == 3

    advance_days(broker, 10)
    kept = broker.reader.min_offset(ORDERS)
    consumer.commit(ORDERS, 50)
    advance_days(broker, 1)

    assert kept == 0
    assert 47 <= broker.reader.min_offset(ORDERS) <= 50


def test_a_new_member_at_the_end_keeps_no_old_messages(broker: EmbeddedBroker) -> None:
    send(broker, range(10))
    advance_days(broker, 5)
    assert broker.reader.min_offset(ORDERS) == 10
    send(broker, range(6))
    consumer = join(broker, consume_from_where=ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
    assert consumer.poll(10) == []

    advance_days(broker, 5)

    assert broker.reader.min_offset(ORDERS) == 16


def test_offsets_of_broadcasting_members_keep_no_file(broker: EmbeddedBroker) -> None:
    """Also if the group has offsets from the time when it was a clustering one."""
    send(broker, range(1))
    consume(broker)
    join(broker, message_model=MessageModel.BROADCASTING, instance_name="one")
    send(broker, range(10))

    advance_days(broker, 5)

    assert broker.reader.min_offset(ORDERS) == 11


def test_the_values_that_schedules_store_as_offsets_keep_no_file(broker: EmbeddedBroker) -> None:
    send(broker, range(10), "mqtemplate-schedules")
    queue = MessageQueue("mqtemplate-schedules", "broker-a", 0)
    for kind in ("paused", "done"):
        broker.groups.commit_offset(f"mqtemplate-schedules-report-{kind}", queue, broker.clock.now_ms())

    advance_days(broker, 5)

    assert broker.reader.min_offset(queue) == 10


# --- groups that are gone -----------------------------------------------------------------------------


def test_a_group_that_is_gone_is_forgotten_after_the_configured_time(broker: EmbeddedBroker) -> None:
    send(broker, range(1))
    consume(broker)
    send(broker, range(10))

    with capture_logs() as logs:
        advance_days(broker, 29)
        before = broker.reader.min_offset(ORDERS), events(logs, "group.gone")
        advance_days(broker, 2)

    (gone,) = [line for line in events(logs, "group.gone") if line["topic"] == "orders"]
    assert before == (0, [])
    assert broker.reader.min_offset(ORDERS) == 11
    assert (gone["group"], gone["idle_hours"], gone["log_level"]) == ("billing", 720, "warning")
    assert gone["hint"] == (
        "its unread messages are not kept any more (group-reserved-time); when it returns, it continues with the first "
        "message that exists; forget it with: mqtemplate offsets forget billing"
    )


def test_a_group_that_returns_after_it_was_gone_is_known_again(broker: EmbeddedBroker) -> None:
    send(broker, range(1))
    consume(broker)
    advance_days(broker, 40)
    send(broker, range(5))
    read = consume(broker)
    send(broker, range(5, 10))

    advance_days(broker, 20)

    assert read == [0, 1, 2, 3, 4], "its committed offset was kept"
    assert consume(broker) == [5, 6, 7, 8, 9]


def test_a_group_with_a_member_is_never_gone(broker: EmbeddedBroker) -> None:
    """It commits nothing for 50 days: its listener is paused."""
    send(broker, range(1))
    consume(broker)
    join(broker)
    send(broker, range(3))

    advance_days(broker, 50)

    assert broker.reader.min_offset(ORDERS) == 0


def test_a_topic_that_a_group_reads_no_more_is_forgotten_although_the_group_is_active(broker: EmbeddedBroker) -> None:
    send(broker, range(1))
    consume(broker)
    join(broker, topic="invoices")
    send(broker, range(3))

    advance_days(broker, 29)
    before = broker.reader.min_offset(ORDERS)
    advance_days(broker, 2)

    assert (before, broker.reader.min_offset(ORDERS)) == (0, 4)


def test_time_without_a_broker_does_not_count(tmp_path: Path, clock: VirtualClock) -> None:
    """The groups could not be active then. Time before a restart counts."""
    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        send(broker, range(1))
        consume(broker)
        send(broker, range(10))
        advance_days(broker, 20)
    clock.set_ms(clock.now_ms() + 100 * DAY_MS)
    with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
        advance_days(broker, 9)
        before = broker.reader.min_offset(ORDERS)
        stored = json.loads((tmp_path / "config" / "groupActivity.json").read_text())["activityTable"]
        advance_days(broker, 2)

        assert before == 0
        assert 28 * DAY_MS < stored["orders@billing"]["idleMs"] <= 29 * DAY_MS
        assert broker.reader.min_offset(ORDERS) == 11


def test_short_runs_of_an_application_keep_its_groups_active(tmp_path: Path, clock: VirtualClock) -> None:
    """Each run has a member, which has nothing to commit, and takes a day."""
    for _ in range(40):
        with EmbeddedBroker(tmp_path, SMALL, clock) as broker:
            if not broker.groups.consumed_topics():
                send(broker, range(1))
                consume(broker)
                send(broker, range(3))
            join(broker).close()
            advance_days(broker, 1)

            assert broker.reader.min_offset(ORDERS) == 0


# --- dead letters -------------------------------------------------------------------------------------


def test_dead_letters_are_kept_for_thirty_days(broker: EmbeddedBroker) -> None:
    letters = MessageQueue("%DLQ%billing", "broker-a", 0)
    send(broker, range(2), letters.topic)

    advance_days(broker, 29)
    after_29 = broker.reader.min_offset(letters)
    advance_days(broker, 2)

    assert (after_29, broker.reader.min_offset(letters)) == (0, 2)


def test_without_a_time_of_their_own_dead_letters_are_deleted_with_other_messages(
    tmp_path: Path, clock: VirtualClock
) -> None:
    letters = MessageQueue("%DLQ%billing", "broker-a", 0)
    with EmbeddedBroker(tmp_path, dataclasses.replace(SMALL, dead_letter_reserved_time=0), clock) as broker:
        send(broker, range(2), letters.topic)
        advance_days(broker, 5)

        assert broker.reader.min_offset(letters) == 2


# --- the disk -----------------------------------------------------------------------------------------


def fill_disk(broker: EmbeddedBroker, used: float) -> list[EventDict]:
    """Let the cleaning run once with this used part of the disk."""
    cleaning = broker.store.cleaning
    broker.store.disk.read = lambda: used_space(used)
    with capture_logs() as logs:
        cleaning.clean()
    return logs


def test_a_disk_that_fills_warns_first_and_then_deletes_the_oldest_files(
    broker: EmbeddedBroker, clock: VirtualClock
) -> None:
    """The order: a warning, files that all groups have read at any hour, unread ones oldest first, no new messages."""
    send(broker, range(1))
    consume(broker)
    consume(broker, "audit")
    send(broker, range(1, 9))  # with the first one three files
    send(broker, range(2), "%DLQ%billing")
    Harness(broker).advance("3d 5h")

    below = fill_disk(broker, 0.75)
    near = fill_disk(broker, 0.76)
    kept = first_file(broker)
    consume(broker, "audit")
    consume(broker, count=4)
    clock.set_ms(clock.now_ms() + 600_000)  # the next attempt with a file that was kept
    read = fill_disk(broker, 0.76)
    unread = [*fill_disk(broker, 0.86), *fill_disk(broker, 0.86), *fill_disk(broker, 0.86)]
    full = fill_disk(broker, 0.91)
    after = fill_disk(broker, 0.5)

    assert below == []
    (warning,) = events(near, "store.disk_nearly_full")
    assert (warning["log_level"], warning["used"], warning["limit"]) == ("warning", 0.76, 0.85)
    assert warning["first_file"] == (
        "group 'audit' has not consumed messages of topic 'orders'; "
        "group 'billing' has not consumed messages of topic 'orders'"
    )
    assert warning["hint"] == (
        "above the limit the oldest files are deleted, also those with unread messages and dead letters; free disk "
        "space, let these groups consume, or forget groups that are gone with: mqtemplate offsets forget GROUP"
    )
    assert kept == 0
    assert [(line["event"], line["file"]) for line in read] == [("store.file_deleted", f"{0:020d}")]
    lost = [
        (line["file"], line["messages"], line["topics"], line["unread"])
        for line in events(unread, "store.messages_deleted")
    ]
    assert lost == [
        (f"{FILE:020d}", 3, "orders: 3", "1 of orders by billing"),
        (f"{2 * FILE:020d}", 3, "orders: 3", "3 of orders by billing"),
    ]
    (first, _) = events(unread, "store.messages_deleted")
    assert (first["log_level"], first["used"], first["limit"]) == ("error", 0.86, 0.85)
    assert (first["first"], first["last"]) == ("2026-01-01 00:00:00", "2026-01-01 00:00:00")
    assert first["hint"] == (
        "the disk is full, so messages are deleted before file-reserved-time; free space, or let the groups consume, "
        "before more are deleted; to refuse new messages instead, set clean-file-forcibly-enable to false"
    )
    assert [line["event"] for line in full] == ["store.messages_refused"]
    assert {line["event"] for line in after} == {"store.messages_accepted", "store.disk_has_space"}
    metrics = broker.metrics.snapshot()
    assert metrics["store.unread_deleted{group=billing,topic=orders}"] == 4
    assert metrics["store.forcibly_deleted"] == 6
    assert metrics["store.disk_near_limit"] == 0


def test_a_large_disk_warns_before_its_last_gigabytes(broker: EmbeddedBroker) -> None:
    """The limits count only while the disk has space for few files. The warning counts earlier."""
    broker.store.disk.read = lambda: DiskUsage(used=10_000 * FILE, free=20 * FILE)

    with capture_logs() as logs:
        broker.store.cleaning.clean()
        broker.store.cleaning.clean()

    assert [line["event"] for line in logs] == ["store.disk_nearly_full"]
    assert broker.store.cleaning.is_near_limit


def test_messages_without_a_known_group_are_deleted_with_an_error_that_counts_them(broker: EmbeddedBroker) -> None:
    """No group says that they are unread, so the topics have to be named."""
    send(broker, range(2))
    send(broker, range(2), "payments")

    logs = fill_disk(broker, 0.86)

    (line,) = events(logs, "store.messages_deleted")
    assert (line["log_level"], line["messages"], line["topics"], line["unread"]) == (
        "error",
        3,
        "orders: 2, payments: 1",
        "none by a known group",
    )
    assert broker.metrics.snapshot()["store.forcibly_deleted"] == 3


def test_without_forcible_cleaning_the_warning_names_what_happens(tmp_path: Path, clock: VirtualClock) -> None:
    with EmbeddedBroker(tmp_path, dataclasses.replace(SMALL, clean_file_forcibly_enable=False), clock) as broker:
        below, near = fill_disk(broker, 0.80), fill_disk(broker, 0.81)

    assert below == []
    (warning,) = near
    assert (warning["limit"], warning["first_file"]) == (0.9, "no unread messages")
    assert warning["hint"].startswith("above the limit new messages are refused; free disk space")


# --- what operators see -------------------------------------------------------------------------------


def test_a_file_that_stays_is_logged_once_with_the_groups(broker: EmbeddedBroker) -> None:
    send(broker, range(1))
    consume(broker)
    send(broker, range(3))
    send(broker, range(1), "%DLQ%audit")

    with capture_logs() as logs:
        advance_days(broker, 6)

    (line,) = events(logs, "store.file_kept")
    assert line["reason"] == (
        "group 'billing' has not consumed messages of topic 'orders'; it stays until they are consumed or old, or the "
        "disk is full; forget a group that is gone with: mqtemplate offsets forget GROUP"
    )


def test_holds_name_group_topic_messages_time_and_bytes(broker: EmbeddedBroker, clock: VirtualClock) -> None:
    start_ms = clock.now_ms()
    send(broker, range(1))
    consume(broker)
    send(broker, range(5))
    send(broker, range(3), "%DLQ%audit")
    young = broker.retention_holds()

    advance_days(broker, 10)
    holds = {(hold.group, hold.topic): hold for hold in broker.retention_holds()}

    assert young == ()
    assert holds.keys() == {("billing", "orders"), ("audit", "%DLQ%audit")}
    billing = holds["billing", "orders"]
    assert (billing.message_count, billing.since_ms) == (5, start_ms + 3 * DAY_MS)
    assert billing.byte_count % FILE == 0
    assert holds["audit", "%DLQ%audit"].byte_count == billing.byte_count - 2 * FILE
    snapshot = broker.metrics.snapshot()
    assert snapshot["store.retention_held{group=billing}"] == billing.byte_count
