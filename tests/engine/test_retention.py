"""Effects of retention on consumers, producers and delayed messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, OffsetOutOfRangeError, SendError, StoreFullError
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.cleaning import CleaningService
from mqtemplate.store.disk_space import DiskWatch
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.testing import Harness
from tests.store.small_store import NothingPending, used

pytestmark = pytest.mark.usefixtures("utc")  # delete hours are local time

FILE = 65_536
BODY = bytes(20_000)  # three messages fill a file
SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=FILE,
    mapped_file_size_consume_queue=10_000,
    file_reserved_time=24,
    default_topic_queue_nums=1,
)
ORDERS = MessageQueue("orders", "broker-a", 0)
LATER = MessageQueue("later", "broker-a", 0)
FULL = (
    r"not stored: the disk is 95% full, and above 90% \(disk-space-warning-level-ratio\) no message is taken; free "
    "space there, or raise the ratio, then send again: what was acknowledged is safe"
)


def open_broker(folder: Path | None, clock: VirtualClock | None = None) -> EmbeddedBroker:
    return EmbeddedBroker(folder, SMALL, clock or VirtualClock())


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with open_broker(tmp_path) as broker:
        yield broker


def send(broker: EmbeddedBroker, count: int, topic: str = "orders") -> None:
    for number in range(count):
        broker.sends.send(Message(topic, b"%d" % number + BODY))


def delete(broker: EmbeddedBroker, files: int) -> None:
    """Delete the first files of the log, as on a disk that is nearly full."""
    cleaning = broker.store.cleaning
    cleaning.load(NothingPending())
    broker.store.disk.read = lambda: used(0.88)
    for _ in range(files):
        cleaning.clean()
    broker.store.disk.read = lambda: None
    cleaning.clean()


def fill_disk(broker: EmbeddedBroker) -> None:
    broker.store.disk.read = lambda: used(0.95)
    broker.store.cleaning.clean()


def join(broker: EmbeddedBroker, **changes: object) -> Consumer:
    spec: dict[str, object] = {"group": "g", "subscriptions": {"orders": TagSelector()}}
    return broker.groups.subscribe(ConsumerSpec(**(spec | changes)))  # type: ignore[arg-type]


def numbers(messages: list[MessageExt]) -> list[int]:
    return [int(message.body.rstrip(b"\0")) for message in messages]


def warnings(logs: list[dict[str, object]]) -> list[tuple[object, ...]]:
    """Return group, topic, queue and offsets of each warning about messages deleted before they were read."""
    lines = [line for line in logs if line["event"] == "consumer.messages_deleted"]
    assert {line["log_level"] for line in lines} <= {"warning"}
    return [tuple(line[name] for name in ("group", "topic", "queue", "offset", "next_offset")) for line in lines]


# --- consumers --------------------------------------------------------------------------------------


def test_a_consumer_whose_messages_were_deleted_continues_with_the_first_existing_message(
    broker: EmbeddedBroker,
) -> None:
    send(broker, 10)
    consumer = join(broker)
    assert numbers(consumer.poll(2)) == [0, 1]

    with capture_logs() as logs:
        delete(broker, 2)
        read = numbers(consumer.poll(100))

    assert read == [6, 7, 8, 9]
    assert warnings(logs) == [("g", "orders", 0, 2, 6)]


def test_a_group_whose_committed_offset_was_deleted_gets_one_warning(tmp_path: Path) -> None:
    """It continues with the first existing message."""
    clock = VirtualClock()
    with open_broker(tmp_path, clock) as broker:
        send(broker, 10)
        consumer = join(broker)
        assert len(consumer.poll(1)) == 1
        consumer.commit(ORDERS, 1)
        delete(broker, 1)

    with open_broker(tmp_path, clock) as broker, capture_logs() as logs:
        consumer = join(broker)
        assert numbers(consumer.poll(2)) == [3, 4]
        assert numbers(consumer.poll(100)) == [5, 6, 7, 8, 9]

    assert warnings(logs) == [("g", "orders", 0, 1, 3)]


def test_a_broadcasting_member_continues_with_the_first_existing_message(broker: EmbeddedBroker) -> None:
    send(broker, 7)
    one, two = (join(broker, message_model=MessageModel.BROADCASTING, instance_name=name) for name in ("one", "two"))
    assert (numbers(one.poll(100)), numbers(two.poll(1))) == (list(range(7)), [0])

    with capture_logs() as logs:
        delete(broker, 1)
        read = numbers(two.poll(100)), numbers(one.poll(100))

    assert read == ([3, 4, 5, 6], [])
    assert warnings(logs) == [("g", "orders", 0, 1, 3)]


def test_a_consumer_that_has_read_all_messages_gets_no_warning(broker: EmbeddedBroker) -> None:
    send(broker, 7)
    consumer = join(broker)
    consumer.poll(100)

    with capture_logs() as logs:
        delete(broker, 2)
        assert consumer.poll(100) == []
        send(broker, 1)
        assert numbers(consumer.poll(100)) == [0]

    assert warnings(logs) == []


@pytest.fixture
def in_between(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> EmbeddedBroker:
    """Return a broker whose first log file is deleted, and whose queues still have the old minimum."""
    monkeypatch.setattr(broker.store, "_delete_units_before_log", lambda: None)
    send(broker, 7)
    delete(broker, 1)
    assert broker.reader.min_offset(ORDERS) == 0
    return broker


def test_a_consumer_that_reads_during_the_deletion_continues_at_once(in_between: EmbeddedBroker) -> None:
    """The deleted record is not reported as corrupt, and the poll does not wait."""
    consumer = join(in_between, consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)

    with capture_logs() as logs:
        read = numbers(consumer.poll(100))

    assert read == [3, 4, 5, 6]
    assert warnings(logs) == [("g", "orders", 0, 0, 3)]


@pytest.mark.parametrize("when", ["in_between", "broker"])
def test_a_pull_of_a_deleted_message_raises_with_reason_and_next_offset(
    request: pytest.FixtureRequest, when: str
) -> None:
    """During the deletion and after it. A search by time finds the first existing message."""
    broker: EmbeddedBroker = request.getfixturevalue(when)
    if when == "broker":
        send(broker, 7)
        delete(broker, 1)

    with pytest.raises(OffsetOutOfRangeError, match="got 2, which retention deleted; continue at 3") as caught:
        broker.reader.pull(ORDERS, 2)

    assert caught.value.next_offset == broker.reader.search_offset(ORDERS, 0) == 3


@pytest.mark.parametrize(
    ("start", "read"),
    [
        (ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET, []),
        (ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, [3, 4, 5, 6]),
    ],
)
def test_a_new_group_starts_as_specified_if_the_first_messages_were_deleted(
    broker: EmbeddedBroker, start: ConsumeFromWhere, read: list[int]
) -> None:
    """RocketMQ: a new group reads a whole queue in spite of LAST_OFFSET only if the queue has its first message."""
    send(broker, 7)
    young = numbers(join(broker, group="before").poll(100))
    delete(broker, 1)

    with capture_logs() as logs:
        found = numbers(join(broker, group="after", consume_from_where=start).poll(100))

    assert (young, found) == ([0, 1, 2, 3, 4, 5, 6], read)
    assert warnings(logs) == []


def test_consumer_and_producer_work_while_files_are_deleted(tmp_path: Path) -> None:
    """Each file is deleted as soon as it is full. The messages that are read are in order, and the last is read."""
    count = 2_000
    settings = dataclasses.replace(SMALL, flush_disk_type=FlushDiskType.ASYNC_FLUSH, mapped_file_size_consume_queue=200)
    with EmbeddedBroker(tmp_path, settings) as broker, ThreadPoolExecutor(1) as pool:
        cleaning = CleaningService(broker.store)  # a second service, which this thread steps
        cleaning.disk = DiskWatch(broker.store)
        cleaning.disk.read = lambda: used(0.88)
        cleaning.load(NothingPending())
        consumer = join(broker)
        assert consumer.poll(20) == []  # so its position is now the first message
        read: list[int] = []
        sending = pool.submit(
            lambda: [
                broker.sends.send(Message("orders", str(number).encode() + bytes(1_000))) for number in range(count)
            ]
        )
        while count - 1 not in read[-100:]:
            cleaning.clean()
            read += numbers(consumer.poll(20))
        assert len(sending.result()) == count
        while broker.store.oldest_file() is not None:
            cleaning.clean()

        assert read == sorted(set(read))
        assert broker.store.start_offset >= FILE * (count * 1_000 // FILE - 1)
        assert broker.reader.min_offset(ORDERS) > count - FILE // 1_000


# --- producers --------------------------------------------------------------------------------------


def test_above_the_warning_level_each_kind_of_send_raises_with_the_reason(broker: EmbeddedBroker) -> None:
    fill_disk(broker)
    message = Message("orders", b"x")

    for send_message in (
        lambda: broker.sends.send(message),
        lambda: broker.sends.send_batch([message, message]),
        lambda: broker.sends.send_one_way(message),
        lambda: broker.sends.send_async([message]).result(0),
        lambda: broker.sends.send(Message("orders", b"x", {"DELAY": "3"})),
    ):
        with pytest.raises(SendError, match=FULL):
            send_message()


def test_messages_that_are_due_on_a_full_disk_are_delivered_when_there_is_space(broker: EmbeddedBroker) -> None:
    """Each once, none early. RocketMQ discards a timer after three attempts."""
    harness = Harness(broker)
    broker.sends.send(Message("orders", b"1", {"DELAY": "1"}))
    broker.sends.send(Message("orders", b"2", {"TIMER_DELAY_MS": "1500"}))
    fill_disk(broker)

    with capture_logs() as logs:
        harness.advance("5s")
    while_full = broker.reader.max_offset(ORDERS)
    broker.store.disk.read = lambda: used(0.5)
    harness.advance("11s")  # until the next check of the disk and the next attempt

    assert while_full == 0
    stalled = [line["service"] for line in logs if line["event"] == "release.stalled"]
    assert sorted(stalled) == ["delay.schedule", "delay.timer"], "each service fails each second, and says so once"
    assert numbers(list(broker.reader.pull(ORDERS, 0).messages)) == [1, 2]


def test_messages_that_are_due_on_a_full_disk_do_not_keep_their_file(tmp_path: Path) -> None:
    """They cannot be delivered while the disk is full. If they kept their file, there would never be space again."""
    with EmbeddedBroker(tmp_path, SMALL, VirtualClock()) as broker:
        broker.sends.send(Message("later", b"1", {"DELAY": "1"}))
        broker.sends.send(Message("later", b"2", {"TIMER_DELAY_MS": "1500"}))
        send(broker, 6)
        harness = Harness(broker)
        broker.store.disk.read = lambda: used(0.95 if broker.store.start_offset == 0 else 0.5)
        broker.store.cleaning.load(None)
        broker.store.cleaning.clean()
        harness.advance("5s")
        waited = broker.reader.max_offset(LATER)

        broker.store.cleaning.load(broker.engine.delayed.control)
        harness.advance("30s")

        assert waited == 0
        assert broker.store.start_offset == FILE
        assert sorted(numbers(list(broker.reader.pull(LATER, 0).messages))) == [1, 2]


def test_a_service_that_fails_for_the_disk_is_reported_without_a_stack(broker: EmbeddedBroker) -> None:
    """The text has the cause and what to do. An error that nobody expects has its stack."""
    [service, *_] = broker.services()

    with capture_logs() as logs:
        broker.store.report(service, StoreFullError("no room on the disk"), 3)
        broker.store.report(service, ValueError("a mistake"), 0)

    known, unknown = logs
    assert (known["event"], known["reason"], known["repeated"]) == ("service.failed", "no room on the disk", 3)
    assert "exc_info" not in known
    assert isinstance(unknown["exc_info"], ValueError)


# --- the broker -------------------------------------------------------------------------------------


def test_a_broker_deletes_old_files_at_the_hour_of_delete_when(broker: EmbeddedBroker, tmp_path: Path) -> None:
    broker.store.cleaning.make_free = lambda begin, end: True
    send(broker, 10)
    harness = Harness(broker)

    harness.advance("27h 59m")
    before = broker.reader.min_offset(ORDERS)
    harness.advance("1m")

    assert (before, broker.reader.min_offset(ORDERS), broker.reader.max_offset(ORDERS)) == (0, 9, 10)
    assert [path.name for path in (tmp_path / "commitlog").iterdir()] == [f"{3 * FILE:020d}"]


@pytest.mark.feature("D6")
@pytest.mark.parametrize("ends", ["never", "cleanly", "killed"])
def test_a_delayed_message_survives_the_deletion_of_its_file(tmp_path: Path, ends: str) -> None:
    """Files are kept for a day. Messages delayed by ten days, with a level and a timer, are delivered on time, once."""
    clock = VirtualClock()
    settings = dataclasses.replace(SMALL, message_delay_level="10d", checkpoint_interval_ms=1_000)
    due_ms = clock.now_ms() + 10 * 86_400_000
    broker = EmbeddedBroker(tmp_path, settings, clock)
    broker.start()
    broker.sends.send(Message("later", b"1", {"DELAY": "1"}))
    broker.sends.send(Message("later", b"2", {"TIMER_DELIVER_MS": str(due_ms)}))
    begins = []

    for _ in range(9):
        send(broker, 6)
        Harness(broker).advance("1d")
        begins.append(broker.store.start_offset)
        if ends != "never":
            broker.close() if ends == "cleanly" else broker.store.release()
            broker = EmbeddedBroker(tmp_path, settings, clock)
            broker.start()
    harness = Harness(broker)
    clock.set_ms(due_ms - 1)
    harness.run_until_idle()
    too_early = broker.reader.max_offset(LATER)
    harness.advance("1ms")
    harness.advance("2d")

    assert begins[3] > 2 * FILE
    assert too_early == broker.reader.min_offset(LATER) == 0
    assert sorted(numbers(list(broker.reader.pull(LATER, 0, 100).messages))) == [1, 2]
    broker.close()


@pytest.mark.feature("X12")
def test_a_delay_of_more_than_a_year_survives_files_that_are_kept_for_an_hour(tmp_path: Path) -> None:
    """400 days and three hours, with enough other messages that files expire. Delivered to the millisecond, once."""
    clock = VirtualClock()
    settings = dataclasses.replace(SMALL, file_reserved_time=1, timer_max_delay_sec=500 * 86_400)
    start_ms = clock.now_ms()
    with EmbeddedBroker(tmp_path, settings, clock) as broker:
        harness = Harness(broker)
        for days in (400, 1, 0):
            delay_ms = days * 86_400_000 + 10_800_000
            broker.sends.send(Message("later", b"%d" % days, {"TIMER_DELAY_MS": str(delay_ms)}))
        for _ in range(81):
            send(broker, 7)
            harness.advance("5d")

        arrived = broker.reader.pull(LATER, broker.reader.min_offset(LATER), 100).messages
        last = broker.store.read_at(arrived[-1].physical_offset)
        total = broker.reader.max_offset(LATER)

    assert total == 3
    assert [message.body for message in arrived] == [b"400"], (
        "the other two were delivered, and then deleted with their files"
    )
    assert last is not None
    assert last.store_timestamp == start_ms + 400 * 86_400_000 + 10_800_000
    assert int(arrived[-1].properties["TIMER_ROLL_TIMES"]) > 100


def test_a_store_directory_opens_again_after_files_were_deleted(tmp_path: Path) -> None:
    clock = VirtualClock()
    with open_broker(tmp_path, clock) as broker:
        broker.sends.send(Message("orders", b"0", {"TIMER_DELAY_MS": "1000"}))
        Harness(broker).advance("2s")
        send(broker, 9)
        delete(broker, 2)

    for _ in range(2):
        with open_broker(tmp_path, clock) as broker:
            low, high = broker.reader.min_offset(ORDERS), broker.reader.max_offset(ORDERS)
            assert low > 0
            assert len(broker.reader.pull(ORDERS, low, 100).messages) == high - low
            send(broker, 1)
            Harness(broker).advance("1h")


def test_invalid_settings_are_refused_before_files_are_opened() -> None:
    with pytest.raises(ConfigurationError, match=r"delete-when: 'four' is not an hour of the day; give 00 to 23"):
        EmbeddedBroker(None, EmbeddedSettings(delete_when="four"))
