"""Index of the pending messages of a RocketMQ cluster: what it keeps, and what it answers, from a scripted broker."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mqtemplate.brokers import RemoteBroker
from mqtemplate.brokers.remote.delayed.index import (
    IndexedMessage,
    IndexedSource,
    IndexFilter,
    IndexPosition,
    PendingIndex,
)
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import BrokerError
from mqtemplate.message import Property
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from tests.brokers.remote.clients import remote
from tests.brokers.remote.system_topics import DAY_MS, SLOT_MS, SystemTopics
from tests.kit import TimedClock

MINUTE_MS = 60_000
SOURCE = IndexedSource("broker-a", TIMER_TOPIC, 0)
START = IndexPosition(0)


def pending(due_ms: int, msg_id: str, **values: object) -> IndexedMessage:
    fixed = IndexedMessage(due_ms, "broker-a", msg_id, 0, "orders", None, None, 0, 1, 2, 3, 4)
    return fixed._replace(**values)


def everything(
    topic: str | None = None, tag: str | None = None, after: int = 0, before: int | None = None
) -> IndexFilter:
    return IndexFilter(None if topic is None else [topic], tag, after, before)


@pytest.fixture
def index(tmp_path: Path) -> PendingIndex:
    return PendingIndex(tmp_path / "pending.sqlite")


def ids(index: PendingIndex, query: IndexFilter | None = None) -> list[str]:
    return [each.msg_id for each in index.page(query or everything(), (0, "", ""), 100)]


def fill(index: PendingIndex, *messages: IndexedMessage, marks: tuple[tuple[int, str], ...] = ()) -> bool:
    """Add messages after those that the file has."""
    before = index.position(SOURCE)
    after = IndexPosition((before or START).next_offset + len(messages) + len(marks))
    return index.add(SOURCE, before, after, messages, marks)


# --- the file -------------------------------------------------------------------------------------


def test_the_pending_key_of_a_message_is_kept(index: PendingIndex) -> None:
    fill(index, pending(MINUTE_MS, "A", pending_key="cart 17"), pending(2 * MINUTE_MS, "B"))

    found = [each.message(str) for each in index.page(everything(), (0, "", ""), 100)]

    assert [each.pending_key for each in found] == ["cart 17", None]


def test_a_file_of_an_older_version_is_built_again(index: PendingIndex) -> None:
    """It has fewer columns."""
    with closing(sqlite3.connect(index.path)) as db:
        db.executescript("CREATE TABLE pending (id INTEGER PRIMARY KEY, due_ms INTEGER); PRAGMA user_version = 1;")
        db.executescript("CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO names VALUES (7, 'old');")

    fill(index, pending(MINUTE_MS, "A", pending_key="cart 17"))

    assert ids(index) == ["A"]


def test_pages_follow_each_other_by_due_time(index: PendingIndex) -> None:
    fill(index, *(pending(due_ms, f"m{due_ms}") for due_ms in (30, 10, 20)), pending(20, "a"))

    first = index.page(everything(), (0, "", ""), 2)
    last = first[-1]
    rest = index.page(everything(), (last.due_ms, last.broker_name, last.msg_id), 10)

    assert [each.msg_id for each in first + rest] == ["m10", "a", "m20", "m30"]


def test_messages_are_found_by_topic_tag_and_time(index: PendingIndex) -> None:
    fill(
        index,
        pending(10, "a", topic="bills"),
        pending(20, "b", tag="paid"),
        pending(30, "c", tag="paid", topic="bills"),
    )

    assert ids(index, everything("bills")) == ["a", "c"]
    assert ids(index, everything(tag="paid")) == ["b", "c"]
    assert ids(index, everything("bills", "paid")) == ["c"]
    assert ids(index, everything(after=20, before=30)) == ["b"]
    assert ids(index, everything("unknown")) == []


def test_counts_of_minutes_and_of_parts_of_them_agree_with_the_messages(index: PendingIndex) -> None:
    """Whole minutes come from a table beside the messages, the ends of a span are counted."""
    times = [5, MINUTE_MS, MINUTE_MS + 7, 3 * MINUTE_MS - 1, 3 * MINUTE_MS, 10 * MINUTE_MS + 1]
    fill(index, *(pending(due_ms, f"m{due_ms}", topic="bills" if due_ms % 2 else "orders") for due_ms in times))

    for topic in (None, "bills"):
        for after, before in [
            (0, None),
            (1, None),
            (6, 3 * MINUTE_MS),
            (MINUTE_MS + 1, MINUTE_MS + 8),
            (0, 10 * MINUTE_MS),
        ]:
            for bucket_ms in (1_000, MINUTE_MS, 5 * MINUTE_MS):
                of_topic = [each for each in times if topic is None or each % 2]
                shown = [each for each in of_topic if each >= after and (before is None or each < before)]
                expected: dict[int, int] = {}
                for due_ms in shown:
                    start = due_ms // bucket_ms * bucket_ms
                    expected[start] = expected.get(start, 0) + 1
                counts = index.counts(everything(topic, after=after, before=before), bucket_ms)
                assert (counts.total, counts.buckets) == (len(shown), expected)


def test_a_delete_marker_removes_its_timer_whether_it_is_stored_before_or_after_it(index: PendingIndex) -> None:
    fill(index, pending(50, "first"), pending(50, "other"))
    fill(index, marks=((50, "first"), (60, "second")))
    fill(index, pending(60, "second"), pending(61, "second"))

    assert [(each.due_ms, each.msg_id) for each in index.page(everything(), (0, "", ""), 10)] == [
        (50, "other"),
        (61, "second"),
    ]
    assert index.counts(everything(), MINUTE_MS).total == 2


def test_a_timer_that_was_stored_again_counts_once_with_its_newest_record(index: PendingIndex) -> None:
    fill(index, pending(50, "long", physical_offset=4))
    fill(index, pending(50, "long", physical_offset=900, rolls=1))

    [message] = index.page(everything(), (0, "", ""), 10)
    assert (message.physical_offset, message.rolls) == (900, 1)
    assert index.counts(everything(), MINUTE_MS).total == 1


def test_of_two_processes_that_read_the_same_records_one_adds_them(index: PendingIndex) -> None:
    """Both saw the file at the same position; the second one must not go back behind the first."""
    other = PendingIndex(index.path)
    after = IndexPosition(1)

    assert index.add(SOURCE, None, after, [pending(50, "a")])
    assert not other.add(SOURCE, None, after, [pending(50, "a")])
    assert other.position(SOURCE) == after
    assert other.counts(everything(), MINUTE_MS).total == 1


def test_messages_that_were_due_are_removed_with_their_counts(index: PendingIndex) -> None:
    hour_ms = 60 * MINUTE_MS
    fill(index, pending(hour_ms, "due"), pending(3 * hour_ms, "later"))

    index.remove_due(2 * hour_ms)

    assert ids(index) == ["later"]
    assert index.totals(0, "topic") == {"orders": 1}


def test_totals_are_by_topic_and_by_level(index: PendingIndex) -> None:
    fill(index, pending(50, "a"), pending(60, "b", level=3), pending(70, "c", level=3, topic="bills"))

    assert index.totals(0, "topic") == {"orders": 2, "bills": 1}
    assert index.totals(0, "level") == {"3": 2, "0": 1}


def test_only_the_user_may_read_the_file(index: PendingIndex) -> None:
    """It has keys and topics of other people's messages."""
    ids(index)

    assert index.path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_no_index_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "pending.sqlite"
    path.write_bytes(b"something else" * 500)

    with pytest.raises(
        BrokerError, match=r"pending.sqlite cannot be used: .*delete it, and it is built again, or name"
    ):
        ids(PendingIndex(path))


# --- reading of a broker ----------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[SystemTopics]:
    with SystemTopics() as cluster:
        yield cluster


def console(cluster: SystemTopics, tmp_path: Path, **settings: object) -> RemoteBroker:
    return remote(cluster, pending_index=tmp_path / "pending.sqlite", **settings)


def shown(broker: RemoteBroker, query: PendingQuery | None = None) -> list[str]:
    return [each.msg_id for each in broker.delayed.pending(query or PendingQuery()).messages]


def test_timers_and_levels_are_listed_by_due_time_with_their_handles(cluster: SystemTopics, tmp_path: Path) -> None:
    cluster.timer("B", 2, **{Property.TAGS: "paid"})
    cluster.timer("A", -5)
    cluster.store(SCHEDULE_TOPIC, 1, **{Property.UNIQ_KEY: "L"})
    with console(cluster, tmp_path) as broker:
        page = broker.delayed.pending(PendingQuery()).messages

        assert [each.msg_id for each in page] == ["A", "L", "B"]
        assert [each.delay_level for each in page] == [0, 2, 0]
        handle = decode_handle(page[2].handle)
        assert (handle.topic, handle.broker_name, handle.deliver_ms) == ("orders", "broker-a", SLOT_MS + 2_001)
        assert shown(broker, PendingQuery(tag="paid")) == ["B"]
        assert broker.delayed.count_pending(PendingQuery(topic="orders")).total == 3


def test_more_records_than_a_query_may_read_are_no_problem(cluster: SystemTopics, tmp_path: Path) -> None:
    for number in range(7):
        cluster.timer(f"M{number}", number)
    with remote(cluster, pending_read_limit=5) as broker, pytest.raises(BrokerError, match="more than 5 delayed"):
        shown(broker)

    with console(cluster, tmp_path, pending_read_limit=5) as broker:
        assert len(shown(broker)) == 7


def test_after_a_restart_only_new_records_are_read(cluster: SystemTopics, tmp_path: Path) -> None:
    for number in range(8):
        cluster.timer(f"M{number}", number)
    with console(cluster, tmp_path) as broker:
        shown(broker)
    before = cluster.count(RequestCode.PULL_MESSAGE)
    cluster.timer("NEW", -1)
    with console(cluster, tmp_path) as broker:
        assert shown(broker)[0] == "NEW"

    # One pull of the last record that is known, to see that the store is the same, and one of the new one.
    assert cluster.count(RequestCode.PULL_MESSAGE) - before == 2


def test_a_store_that_was_created_anew_under_the_old_name_is_read_again(cluster: SystemTopics, tmp_path: Path) -> None:
    cluster.timer("OLD")
    with console(cluster, tmp_path) as broker:
        assert shown(broker) == ["OLD"]
    cluster.queues.clear()
    cluster.store(
        TIMER_TOPIC, 0, stored_ms=SLOT_MS - 5, **{Property.UNIQ_KEY: "N", Property.TIMER_OUT_MS: str(SLOT_MS)}
    )
    with console(cluster, tmp_path) as broker:
        assert shown(broker) == ["N"]


def test_the_state_says_how_far_the_first_read_is(cluster: SystemTopics, tmp_path: Path) -> None:
    cluster.timer("A")
    with console(cluster, tmp_path) as broker:
        found = broker.delay_console
        assert found is not None
        before, counted = found.index_state(), list[int]()
        found.update_index(counted.append)
        after = found.index_state()

    assert before is not None
    assert after is not None
    assert (before.is_complete, after.is_complete) == (False, True)
    assert (sum(counted), after.read, after.total, after.notes) == (1, 1, 1, ())


def test_no_more_records_a_second_are_read_than_the_rate_allows_over_all_queues(
    cluster: SystemTopics, tmp_path: Path
) -> None:
    for number in range(7):
        cluster.timer(f"M{number}", number)
        cluster.store(SCHEDULE_TOPIC, number % 2, **{Property.UNIQ_KEY: f"L{number}"})
    clock = TimedClock(time.time_ns() // 1_000_000)  # the threads of the client take it for a real one
    with console(cluster, tmp_path, pending_read_rate=2, clock=clock) as broker:
        found, read_at_ms = broker.delay_console, list[tuple[int, int]]()
        assert found is not None
        started_ms = clock.steady_ms()
        found.update_index(lambda count: read_at_ms.append((clock.steady_ms() - started_ms, count)))
        ended_ms = clock.steady_ms() - started_ms

    assert sum(count for _, count in read_at_ms) == 14
    assert max(count for _, count in read_at_ms) <= 2
    assert ended_ms == 7_000
    for number, (at_ms, _) in enumerate(read_at_ms):
        assert at_ms == sum(count for _, count in read_at_ms[:number]) * 500


def test_an_update_after_the_first_one_does_not_wait_for_records_that_were_read_before(
    cluster: SystemTopics, tmp_path: Path
) -> None:
    for number in range(4):
        cluster.timer(f"M{number}", number)
    clock = TimedClock(time.time_ns() // 1_000_000)  # the threads of the client take it for a real one
    with console(cluster, tmp_path, pending_read_rate=2, clock=clock) as broker:
        assert broker.delay_console is not None
        broker.delay_console.update_index(lambda count: None)
        clock.move_ms(5_000)
        before_ms = clock.steady_ms()
        broker.delay_console.update_index(lambda count: None)

    assert clock.steady_ms() == before_ms


def test_an_account_that_may_not_read_the_settings_sees_the_messages_all_the_same(
    cluster: SystemTopics, tmp_path: Path
) -> None:
    cluster.refuse(RequestCode.GET_BROKER_CONFIG, ResponseCode.NO_PERMISSION, "no right")
    cluster.timer("A")
    with console(cluster, tmp_path) as broker:
        assert shown(broker) == ["A"]
        assert broker.delay_console is not None
        state = broker.delay_console.index_state()

    assert state is not None
    assert "broker-a does not report its settings" in state.notes[0]


# --- state of the delay services ------------------------------------------------------------------


def test_the_state_of_a_broker_says_which_timers_and_levels_are_late_and_why(cluster: SystemTopics) -> None:
    cluster.store(SCHEDULE_TOPIC, 0, stored_ms=SLOT_MS - DAY_MS - 600_000, **{Property.UNIQ_KEY: "L"})
    table = (
        '{"table":{"timerReadBehind":"75","timerOffsetBehind":"40000","timerCongestNum":"1234","timerEnqueueTps":"12.5",'
        '"timerDequeueTps":"0.0","scheduleMessageOffset_1":"0,1","scheduleMessageOffset_2":"4,4"}}'
    )
    cluster.script(RequestCode.GET_BROKER_RUNTIME_INFO, lambda request: request.response(body=table.encode()))
    with remote(cluster) as broker:
        assert broker.delay_console is not None
        [state] = broker.delay_console.brokers()

    assert (state.timer_behind_ms, state.timer_unread, state.timer_pending) == (75_000, 40_000, 1_234)
    assert [(each.level, each.delay_ms, each.pending) for each in state.levels] == [(1, 1_000, 1), (2, DAY_MS, 0)]
    assert (state.levels[0].late_ms or 0) >= 599_000
    assert state.levels[1].late_ms == 0
    unread, wheel, levels = state.causes
    assert "40,000 stored timers are not on its wheel yet" in unread
    assert "75 s behind; it delivers none now" in wheel
    assert "delay levels are late: 1 by" in levels


def test_a_level_that_a_broker_does_not_report_counts_by_its_queue(cluster: SystemTopics) -> None:
    """RocketMQ 4.9 reports a level from its first delivery on."""
    cluster.store(SCHEDULE_TOPIC, 1, **{Property.UNIQ_KEY: "L"})
    cluster.script(RequestCode.GET_BROKER_RUNTIME_INFO, lambda request: request.response(body=b'{"table":{}}'))
    with remote(cluster) as broker:
        assert broker.delay_console is not None
        [state] = broker.delay_console.brokers()

    assert [(each.level, each.pending, each.late_ms) for each in state.levels] == [(2, 1, 0)]


def test_a_broker_that_refuses_its_state_is_shown_with_the_reason(cluster: SystemTopics) -> None:
    cluster.refuse(RequestCode.GET_BROKER_RUNTIME_INFO, ResponseCode.NO_PERMISSION, "no right")
    with remote(cluster) as broker:
        assert broker.delay_console is not None
        [state] = broker.delay_console.brokers()

    assert "no right" in (state.problem or "")
    assert state.causes == []
