"""Releases that are fair by key: round robin over tenants, limits of a key, and priorities of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.context import load_settings
from mqtemplate.delay.pending_rows import NEVER_MS, DueRecord, LatenessCauses
from mqtemplate.delay.settings import TopicShape
from mqtemplate.delay.timers.fairness import FairQueue
from mqtemplate.delay.timers.shaping import NEAR_DTYPE
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import Message, MessageExt
from mqtemplate.metrics import Metrics
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.testing import Harness, messages_in


@contextmanager
def fair_broker(
    clock: VirtualClock | None = None, path: Path | None = None, **shapes: TopicShape
) -> Iterator[tuple[EmbeddedBroker, Harness]]:
    settings = EmbeddedSettings(topic_shapes=shapes, flush_disk_type=FlushDiskType.ASYNC_FLUSH)
    with EmbeddedBroker(path, settings, clock or VirtualClock()) as broker:
        yield broker, Harness(broker)


def send(broker: EmbeddedBroker, tenant: str, count: int, delay_ms: int, **properties: str) -> None:
    given = {"TIMER_DELAY_MS": str(delay_ms), **properties} | ({"tenant": tenant} if tenant else {})
    for start in range(0, count, 1_000):
        size = min(1_000, count - start)
        broker.sends.send_batch([Message("mails", b"x", dict(given)) for _ in range(size)])


def released(broker: EmbeddedBroker) -> list[MessageExt]:
    """Return the messages in the order of their release."""
    return sorted(messages_in(broker, "mails"), key=lambda message: message.physical_offset)


def lateness_ms(message: MessageExt) -> int:
    return message.store_timestamp - (message.deliver_timestamp or 0)


def test_a_tenant_with_many_messages_delays_another_one_by_one_round() -> None:
    """Without fair-by the last of the others would wait for all 2,000: 20 s."""
    with fair_broker(mails=TopicShape(fair_by="tenant", max_rate=100)) as (broker, harness):
        send(broker, "big", 2_000, 1_000)
        for number in range(10):
            send(broker, f"small-{number}", 3, 1_500)
        harness.advance("60s")

        messages = released(broker)

    quiet = [lateness_ms(message) for message in messages if message.properties["tenant"] != "big"]
    assert len(messages) == 2_030
    assert min(map(lateness_ms, messages)) >= 0
    assert max(quiet) <= 3 * 11 * 10 + 20  # three rounds of eleven tenants, a message each 10 ms
    assert max(map(lateness_ms, messages)) > 18_000


def test_each_round_has_one_message_of_each_tenant() -> None:
    with fair_broker(mails=TopicShape(fair_by="tenant", max_rate=1_000)) as (broker, harness):
        for tenant, count in (("a", 4), ("b", 2), ("c", 3)):
            send(broker, tenant, count, 1_000)
        harness.advance("2s")

        assert "".join(message.properties["tenant"] for message in released(broker)) == "abcabcaca"


def test_messages_below_the_rate_are_released_at_their_millisecond() -> None:
    with fair_broker(mails=TopicShape(fair_by="tenant", max_rate=10, max_rate_per_key=10)) as (broker, harness):
        for number in range(20):
            send(broker, f"t{number % 3}", 1, 1_003 + 137 * number)
        harness.advance("10s")

        assert [lateness_ms(message) for message in released(broker)] == [0] * 20


def test_a_key_keeps_its_own_rate_and_the_topic_keeps_its_own() -> None:
    shape = TopicShape(fair_by="tenant", max_rate=100, max_rate_per_key=20)
    with fair_broker(mails=shape) as (broker, harness):
        for tenant in ("a", "b"):
            send(broker, tenant, 300, 1_000)
        harness.advance("11s")
        of_two = Counter(message.properties["tenant"] for message in released(broker))
        for number in range(10):
            send(broker, f"t{number}", 200, 1)
        before = len(released(broker))
        harness.advance("10s")
        of_all = len(released(broker)) - before

    assert all(abs(count - 200) <= 4 for count in of_two.values()), of_two
    assert abs(of_all - 1_000) <= 20


def test_the_messages_of_a_tenant_keep_the_order_of_their_deliver_times() -> None:
    with fair_broker(mails=TopicShape(fair_by="tenant", max_rate_per_key=5)) as (broker, harness):
        for delay_ms in (1_300, 1_000, 1_200, 1_100, 5_000, 2_500):
            send(broker, "a", 1, delay_ms)
        harness.advance("10s")

        due = [message.deliver_timestamp or 0 for message in released(broker)]

    assert due == sorted(due)


def test_the_key_of_an_ordered_send_can_be_the_key() -> None:
    with fair_broker(mails=TopicShape(fair_by="hash_key", max_rate=1_000)) as (broker, harness):
        for key in ("a", "a", "a", "b"):
            send(broker, "", 1, 1_000, __SHARDINGKEY=key)
        harness.advance("2s")

        assert "".join(message.properties["__SHARDINGKEY"] for message in released(broker)) == "abaa"


def test_messages_without_the_property_are_one_key() -> None:
    with fair_broker(mails=TopicShape(fair_by="tenant", max_rate=1_000)) as (broker, harness):
        send(broker, "", 3, 1_000)
        send(broker, "a", 2, 1_000)
        harness.advance("2s")

        assert [message.properties.get("tenant") for message in released(broker)] == [None, "a", None, "a", None]


def test_a_higher_priority_of_the_message_goes_first_among_what_is_due_together() -> None:
    with fair_broker(mails=TopicShape(message_priority=True, max_rate=1_000)) as (broker, harness):
        for priority in ("0", "7", "", "3", "-1", "x", "7"):
            send(broker, "", 1, 1_000, **({"_SYS_MSG_PRIORITY_": priority} if priority else {}))
        harness.advance("2s")

        order = [message.properties.get("_SYS_MSG_PRIORITY_", "") for message in released(broker)]

    assert order == ["7", "7", "3", "0", "", "-1", "x"]


def test_a_priority_counts_within_its_tenant_only() -> None:
    """Else a tenant that marks all its messages as urgent would delay all others."""
    shape = TopicShape(fair_by="tenant", message_priority=True, max_rate=1_000)
    with fair_broker(mails=shape) as (broker, harness):
        send(broker, "a", 3, 1_000, _SYS_MSG_PRIORITY_="9")
        send(broker, "b", 1, 1_000)
        send(broker, "b", 1, 1_000, _SYS_MSG_PRIORITY_="1")
        harness.advance("2s")

        order = [
            message.properties["tenant"] + message.properties.get("_SYS_MSG_PRIORITY_", "")
            for message in released(broker)
        ]

    assert order == ["a9", "b1", "a9", "b", "a9"]


def priorities(broker: EmbeddedBroker) -> list[str]:
    """Return the priorities of the released messages, in the order of their release."""
    return [message.properties.get("_SYS_MSG_PRIORITY_", "") for message in released(broker)]


def test_without_a_shape_a_higher_priority_goes_first_at_one_deliver_time() -> None:
    with fair_broker() as (broker, harness):
        for priority in ("", "3", "0", "7", "x", "7"):
            send(broker, "", 1, 1_000, **({"_SYS_MSG_PRIORITY_": priority} if priority else {}))
        send(broker, "", 1, 1_500, _SYS_MSG_PRIORITY_="9")
        harness.advance("1200ms")
        first = priorities(broker)
        harness.advance("1s")
        everything = released(broker)

    assert first == ["7", "7", "3", "", "0", "x"]
    assert [lateness_ms(message) for message in everything] == [0] * 7


def test_of_overdue_messages_without_a_shape_those_with_a_priority_leave_by_it_and_the_others_by_time() -> None:
    """A message with a priority never waits for one without that is due later."""
    clock = VirtualClock()
    with fair_broker(clock) as (broker, harness):
        for delay_ms, priority in ((1_000, ""), (2_000, "1"), (3_000, ""), (4_000, "9"), (5_000, "")):
            send(broker, "", 1, delay_ms, key=str(delay_ms), **({"_SYS_MSG_PRIORITY_": priority} if priority else {}))
        clock.move_ms(60_000)
        harness.advance("1s")

        assert [message.properties["key"] for message in released(broker)] == ["1000", "4000", "2000", "3000", "5000"]


@pytest.mark.parametrize(("precision_ms", "delay_ms"), [(1_000, 7_200_000), (2, 72_000)])
def test_a_priority_without_a_shape_survives_a_restart_and_a_long_delay(
    tmp_path: Path, precision_ms: int, delay_ms: int
) -> None:
    """The message is parked on the way, and its delivery has the tick at which it was put on the wheel."""
    clock = VirtualClock()
    settings = EmbeddedSettings(timer_precision_ms=precision_ms, timer_roll_window_slot=3_600)
    with EmbeddedBroker(tmp_path, settings, clock) as broker:
        for priority in ("1", "", "5"):
            send(broker, "", 1, delay_ms, **({"_SYS_MSG_PRIORITY_": priority} if priority else {}))
        Harness(broker).advance("1s")
    with EmbeddedBroker(tmp_path, settings, clock) as broker:
        Harness(broker).advance(f"{delay_ms}ms")
        found = released(broker)
        order = priorities(broker)

    assert order == ["5", "1", ""]
    assert {int(message.properties["TIMER_ENQUEUE_MS"]) % precision_ms for message in found} == {0}


def test_messages_with_a_priority_are_cancelled_moved_and_counted_like_others() -> None:
    with fair_broker() as (broker, harness):
        sent = [
            broker.sends.send(Message("mails", b"x", {"TIMER_DELAY_MS": "5000", "_SYS_MSG_PRIORITY_": priority}))
            for priority in "123"
        ]
        harness.advance("4950ms")  # the slot is open
        cancelled = broker.delayed.cancel(sent[2].handle or "").status
        moved = broker.delayed.reschedule(sent[1].handle or "", broker.clock.now_ms() + 60_000).status
        counted = broker.delayed.count_pending(PendingQuery()).total
        harness.advance("1s")
        first = priorities(broker)
        harness.advance("60s")

        assert (cancelled, moved) == (ScheduleChangeStatus.CANCELLED, ScheduleChangeStatus.RESCHEDULED)
        assert (counted, first, priorities(broker)) == (2, ["1"], ["1", "2"])
        assert broker.delayed.count_pending(PendingQuery()).total == 0


def test_a_restart_while_messages_are_held_loses_and_repeats_none(tmp_path: Path) -> None:
    clock = VirtualClock()
    shape = TopicShape(fair_by="tenant", max_rate=100, jitter=timedelta(milliseconds=500))
    with fair_broker(clock, tmp_path, mails=shape) as (broker, harness):
        for tenant in "abcdefghij":
            send(broker, tenant, 100, 5_000)
        harness.advance("9s")
        assert 0 < len(released(broker)) < 1_000

    clock.move_ms(60_000)
    with fair_broker(clock, tmp_path, mails=shape) as (broker, harness):
        before = len(released(broker))
        harness.advance("1s")
        assert abs(len(released(broker)) - before - 100) <= 2
        harness.advance("30s")

        arrived = released(broker)
        assert len(arrived) == len({message.msg_id for message in arrived}) == 1_000
        assert broker.delayed.count_pending(PendingQuery()).total == 0


def test_held_messages_are_pending_and_can_be_cancelled_and_moved() -> None:
    clock = VirtualClock()
    with fair_broker(clock, mails=TopicShape(fair_by="tenant", max_rate=1)) as (broker, harness):
        handles = [
            broker.sends.send(Message("mails", b"x", {"TIMER_DELAY_MS": "1000", "tenant": tenant})).handle
            for tenant in "aaaaabbbbb"
        ]
        harness.advance("3500ms")
        assert broker.delayed.count_pending(PendingQuery()).total == 7
        assert len(broker.delayed.pending(PendingQuery(), 100, None).messages) == 7

        cancelled = broker.delayed.cancel(handles[-1])
        moved = broker.delayed.reschedule(handles[-2], clock.now_ms() + 60_000)
        again = broker.delayed.cancel(handles[-1])
        delivered = broker.delayed.cancel(handles[0])

        assert (cancelled.status, cancelled.count) == (ScheduleChangeStatus.CANCELLED, 1)
        assert moved.status is ScheduleChangeStatus.RESCHEDULED
        assert (again.status, again.count) == (ScheduleChangeStatus.CANCELLED, 0)
        assert delivered.status is ScheduleChangeStatus.ALREADY_DELIVERED
        harness.advance("20s")
        assert len(released(broker)) == 8
        harness.advance("60s")
        assert len(released(broker)) == 9


def test_a_rate_holds_nothing_until_the_time_of_a_clock_that_was_ahead() -> None:
    clock = VirtualClock()
    with fair_broker(clock, mails=TopicShape(fair_by="tenant", max_rate=10, max_rate_per_key=5)) as (broker, harness):
        clock.move_ms(3_600_000)
        send(broker, "a", 20, 1_000)
        harness.advance("1s")
        clock.move_ms(-3_600_000)
        send(broker, "b", 10, 1_000)
        assert 0 < len(released(broker)) < 20

        harness.advance("10s")

        assert len(released(broker)) == 30


def test_too_many_held_messages_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No further overdue slot is read then, so that memory stays bounded; nothing is lost."""
    monkeypatch.setattr("mqtemplate.delay.timers.fairness.MAX_FAIR_WEIGHT", 100)
    clock = VirtualClock()
    shape = TopicShape(fair_by="tenant", max_rate=10)
    with fair_broker(clock, tmp_path, mails=shape) as (broker, harness):
        for second in range(5, 15):
            send(broker, "a", 20, second * 1_000)
        harness.run_until_idle()
    clock.move_ms(60_000)

    with fair_broker(clock, tmp_path, mails=shape) as (broker, harness):
        harness.run_until_idle()
        held = broker.metrics.snapshot()["delay.held"]
        harness.advance("60s")

        assert isinstance(held, int)
        assert held <= 100
        assert len(released(broker)) == 200
    assert "shaping.overloaded" in caplog.text


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"max-rate-per-key": 5},
            "max-rate-per-key is 5, but there is no key; add fair-by with the name of a property",
        ),
        ({"max-rate-per-key": 0, "fair-by": "tenant"}, "greater than 0"),
        ({"fair-by": "a\x01b"}, "fair-by must be the name of a property of messages, 1..255 characters, or hash_key"),
        ({"fair-by": "a" * 256}, "fair-by must be the name of a property"),
    ],
)
def test_a_shape_that_cannot_be_fair_is_refused(keys: dict[str, object], text: str) -> None:
    given = {f"mqtemplate.broker.topic-shapes.mails.{key}": value for key, value in keys.items()}

    with pytest.raises(ConfigurationError, match=text):
        load_settings(None, (), {}, given)


def test_a_fair_shape_is_read_from_the_configuration() -> None:
    keys = {"fair-by": "tenant", "max-rate": 500, "max-rate-per-key": 20, "message-priority": True}
    given = {f"mqtemplate.broker.topic-shapes.mails.{key}": value for key, value in keys.items()}

    [shape] = load_settings(None, (), {}, given).mqtemplate.broker.topic_shapes.values()

    assert shape == TopicShape(fair_by="tenant", max_rate=500, max_rate_per_key=20, message_priority=True)


# --- the queue alone -----------------------------------------------------------------------------


class Timers:
    """Timers with a key and a priority; their position in the log is also their physical offset."""

    def __init__(self) -> None:
        self.due_ms: list[int] = []
        self.keys: list[bytes] = []
        self.priorities: list[int] = []

    def add(self, due_ms: int, key: bytes, priority: int) -> int:
        self.due_ms.append(due_ms)
        self.keys.append(key)
        self.priorities.append(priority)
        return len(self.keys) - 1

    def rows(self, numbers: list[int]) -> np.ndarray:
        rows = np.zeros(len(numbers), NEAR_DTYPE)
        rows["position"] = rows["physical_offset"] = numbers
        rows["due_ms"] = [self.due_ms[number] for number in numbers]
        return rows

    def due_records(self, positions: np.ndarray) -> list[DueRecord]:
        return [DueRecord(self.due_ms[number], number, 100) for number in positions.tolist()]

    def keys_of(self, rows: np.ndarray, name: bytes) -> tuple[list[bytes], np.ndarray]:
        numbers = rows["physical_offset"].tolist()
        return [self.keys[number] for number in numbers], np.array([self.priorities[number] for number in numbers])


_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.lists(st.tuples(st.integers(1, 400), st.sampled_from(b"abcd"), st.integers(0, 2)))
        ),
        st.tuples(st.just("advance"), st.integers(1, 150)),
        st.tuples(st.just("take"), st.integers(1, 20), st.floats(0, 1)),
        st.tuples(st.just("remove"), st.integers(0, 200)),
    ),
    max_size=40,
)


@given(steps=_STEPS, rates=st.sampled_from([(None, None), (100.0, None), (None, 20.0), (50.0, 10.0)]))
def test_each_timer_leaves_once_and_never_early_and_a_key_waits_one_round(
    steps: list[tuple], rates: tuple[float | None, float | None]
) -> None:
    """Takes that are cut short, as by a full disk, removals and late arrivals, against the list of what is there."""
    shape = TopicShape(fair_by="tenant", max_rate=rates[0], max_rate_per_key=rates[1], message_priority=True)
    timers, queue = Timers(), FairQueue("mails", shape, LatenessCauses(Metrics()))
    held: set[int] = set()
    left: list[tuple[int, int]] = []
    now_ms = 1_000

    def take(count: int, share: float) -> None:
        found = [item for _, item, _ in queue.take(now_ms, count, timers)]
        assert all(item.due_ms <= now_ms and item.physical_offset in held for item in found)
        taken = found[: round(len(found) * share)]
        assert queue.drop(taken) == []
        for item in taken:
            held.remove(item.physical_offset)
            left.append((now_ms, item.physical_offset))
        if rates[1] is None and found:
            # A key that still has due messages had as many turns as any other one, or one less.
            rest = held - {item.physical_offset for item in found}
            turns = Counter(timers.keys[item.physical_offset] for item in found)
            behind = {timers.keys[at] for at in rest if timers.due_ms[at] <= now_ms}
            assert all(max(turns.values()) - turns[key] <= 1 for key in behind)

    for step in steps:
        if step[0] == "add" and step[1]:
            numbers = [timers.add(now_ms + delay, bytes([key]), priority) for delay, key, priority in step[1]]
            rows = timers.rows(numbers)
            queue.add(rows, rows["due_ms"].copy())
            held.update(numbers)
        elif step[0] == "advance":
            now_ms += step[1]
        elif step[0] == "take":
            take(step[1], step[2])
        elif step[0] == "remove":
            is_held = step[1] in held
            assert queue.contains(step[1]) == is_held
            assert queue.remove(step[1], timers.due_ms[step[1]] if is_held else 0) == is_held
            held.discard(step[1])
        assert queue.count == len(held)
        assert sorted(queue.positions().tolist()) == sorted(held)
        assert queue.first_due_ms <= min((timers.due_ms[at] for at in held), default=NEVER_MS)
    while held:
        now_ms = max(now_ms, queue.next_release_ms())
        before = len(left)
        take(1_000, 1)
        assert len(left) > before or queue.next_release_ms() > now_ms
    assert len(left) == len({number for _, number in left})
    assert queue.count == 0
    assert queue.next_release_ms() == NEVER_MS
    now_ms += 1_000
    take(1, 1)
    assert queue.weight == 0  # no key is left behind
    if rates[0]:
        times = [at for at, _ in left]
        for start in range(len(times)):
            in_second = sum(1 for at in times[start:] if at < times[start] + 1_000)
            assert in_second <= rates[0] * 1.02 + 1
