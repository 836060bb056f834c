"""Problems of now, and the progress of groups in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.broker import DiskSpace, GroupInfo, QueueProgress, RetentionHold, StoreHealth
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.operations import BrokerAccess
from mqtemplate.operations.problems import (
    BrokerReading,
    ProblemKind,
    application_problems,
    broker_problems,
    read_broker,
)
from mqtemplate.operations.progress import LagTrend, Trend, behind_ms
from mqtemplate.store.files.store_files import DiskUsage
from tests.operations.brokers import create_dead_letters, fill

MINUTE_MS = 60_000
GIB = 1 << 30


def group(name: str, lag: int = 10) -> GroupInfo:
    return GroupInfo(name, (), (), (QueueProgress(MessageQueue("orders", "broker-a", 0), 0, lag, 0),))


def texts(**figures: object) -> list[str]:
    found = broker_problems(BrokerReading(now_ms=1_000 * MINUTE_MS, **figures))  # type: ignore[arg-type]
    return [f"{each.severity.value}: {each.text}" for each in found]


# --- progress -----------------------------------------------------------------------------------


def test_time_behind_is_the_age_of_the_oldest_message_that_is_not_consumed() -> None:
    clock = VirtualClock()
    with EmbeddedBroker(clock=clock) as broker:
        broker.create_topic("orders", 2)
        first, second = broker.queues("orders")
        for queue in (first, second, second):
            broker.sends.send(Message("orders", b"x"), queue)
            clock.move_ms(MINUTE_MS)

        def behind(*committed: int) -> int | None:
            progress = [
                QueueProgress(queue, offset, broker.reader.max_offset(queue), 0)
                for queue, offset in zip((first, second), committed, strict=True)
            ]
            return behind_ms(broker, progress, clock.now_ms())

        assert behind(0, 0) == 3 * MINUTE_MS
        assert behind(1, 0) == 2 * MINUTE_MS
        assert behind(1, 1) == MINUTE_MS
        assert behind(1, 2) == 0


def test_time_behind_is_unknown_if_the_messages_cannot_be_read() -> None:
    with EmbeddedBroker(clock=VirtualClock()) as broker:
        broker.create_topic("orders", 1)
        missing = QueueProgress(broker.queues("orders")[0], 0, 5, 0)

        assert behind_ms(broker, [missing], 0) is None


@pytest.mark.parametrize(
    ("before", "now", "direction", "catch_up_ms"),
    [
        (100, 200, Trend.GROWING, None),
        (200, 100, Trend.SHRINKING, MINUTE_MS),
        (1_000, 1_005, Trend.STANDING, None),
        (1_000, 995, Trend.STANDING, None),
        (100, 0, None, None),
        (0, 0, None, None),
    ],
)
def test_a_trend_has_a_direction_and_a_time_to_catch_up(
    before: int, now: int, direction: Trend | None, catch_up_ms: int | None
) -> None:
    trend = LagTrend(before, now, MINUTE_MS)

    assert trend.direction is direction
    assert trend.catch_up_ms == catch_up_ms


# --- problems of a broker -----------------------------------------------------------------------


def test_a_broker_without_problems_has_none() -> None:
    assert texts(groups=[group("billing", 0)], behind_ms={"billing": 0}) == []
    assert texts(groups=[group("billing")], behind_ms={"billing": MINUTE_MS - 1}) == []
    assert texts(groups=[group("billing")], behind_ms={"billing": None}) == []


def test_groups_that_are_behind_come_with_their_trend_the_furthest_first() -> None:
    reading = BrokerReading(
        now_ms=0,
        groups=[group("bills", 1), group("mails", 2_000), group("smsgate", 4_711)],
        behind_ms={"bills": 2 * MINUTE_MS, "mails": 30 * MINUTE_MS, "smsgate": 12 * MINUTE_MS},
    )
    trends = {"smsgate": LagTrend(4_000, 4_711, MINUTE_MS), "mails": LagTrend(3_000, 2_000, MINUTE_MS)}

    found = broker_problems(reading, trends)

    assert [(each.severity.value, each.kind, each.name, each.text) for each in found] == [
        ("error", ProblemKind.GROUP, "smsgate", "smsgate is 12m behind and growing: 4,711 messages"),
        ("warning", ProblemKind.GROUP, "mails", "mails is 30m behind and catches up in 2m: 2,000 messages"),
        ("warning", ProblemKind.GROUP, "bills", "bills is 2m behind: 1 message"),
    ]


def test_of_many_groups_that_are_behind_five_have_a_line_each() -> None:
    groups = [group(f"group-{number}") for number in range(500)]
    behind = {each.name: 2 * MINUTE_MS + number for number, each in enumerate(groups)}

    found = texts(groups=groups, behind_ms=behind)

    assert len(found) == 6
    assert found[0] == "warning: group-499 is 2m behind: 10 messages"
    assert found[-1] == "warning: 495 more groups more than 1m behind"


def test_dead_letters_are_counted_over_all_groups_with_the_age_of_the_last_one() -> None:
    now_ms = 1_000 * MINUTE_MS
    last = {"billing": now_ms - 3 * MINUTE_MS, "mails": now_ms - 60 * MINUTE_MS}

    one = texts(letters={"billing": 1}, last_letter_ms={"billing": last["billing"]})
    several = texts(letters={"billing": 200, "mails": 28}, last_letter_ms=last)

    assert one == ["warning: 1 open dead letter, the last one came 3m ago"]
    assert several == ["warning: 228 open dead letters in 2 groups, the last one came 3m ago"]


def test_overdue_messages_are_an_error() -> None:
    assert texts(first_due_ms=940 * MINUTE_MS) == ["error: delayed messages are overdue, the first by 1h"]
    assert texts(first_due_ms=1_000 * MINUTE_MS - 1_000) == []


def test_the_disk_is_a_problem_before_it_is_full() -> None:
    def disk(full_in_hours: int | None, free: int = 20 * GIB) -> StoreHealth:
        full_in_ms = None if full_in_hours is None else full_in_hours * 60 * MINUTE_MS
        return StoreHealth(None, 0, DiskSpace(80 * GIB, free, GIB, GIB, full_in_ms, is_roomy=False))

    assert texts(store=disk(48)) == ["warning: disk full in 2d: 20.0 GiB free"]
    assert texts(store=disk(5)) == ["error: disk full in 5h: 20.0 GiB free"]
    assert texts(store=disk(0)) == ["error: disk full: 20.0 GiB free"]
    assert texts(store=disk(24 * 90)) == texts(store=disk(None)) == []
    assert texts(disk=DiskUsage(95 * GIB, 5 * GIB)) == ["warning: disk 95% used: 5.0 GiB free"]
    assert texts(disk=DiskUsage(80 * GIB, 20 * GIB)) == []


def test_a_store_that_takes_no_messages_is_an_error() -> None:
    assert texts(store=StoreHealth("no space left on device", 0, None, "the disk is full; delete files")) == [
        "error: the store takes no messages: no space left on device",
        "error: new messages are refused: the disk is full; delete files",
    ]


def test_old_files_that_stay_name_the_group() -> None:
    holds = [RetentionHold("billing", "orders", 7, 0, 3 * GIB), RetentionHold("mails", "%DLQ%mails", 7, 0, GIB)]

    assert texts(holds=holds) == [
        "warning: 3.0 GiB of old files stay until billing has consumed orders",
        "warning: 1.0 GiB of old files stay for the dead letters of mails",
    ]


def test_the_figures_come_from_any_broker(access: BrokerAccess, tmp_path: Path) -> None:
    """In memory, in a directory that is read as a snapshot, and over the wire."""
    reading = read_broker(access, access.store_path)

    assert reading.letters == {"billing": 3}
    assert list(reading.last_letter_ms) == ["billing"]
    assert reading.lag == 4
    assert 0 < (reading.behind_ms["billing"] or 0) < 10 * MINUTE_MS
    assert reading.first_due_ms is not None
    assert (reading.disk is None) == (access.store_path is None)


def test_the_overdue_messages_of_a_stopped_broker_are_found(tmp_path: Path) -> None:
    clock = VirtualClock()
    with EmbeddedBroker(clock=clock) as broker:
        fill(broker)
        create_dead_letters(broker)
        clock.move_ms(3 * 60 * MINUTE_MS)  # no service runs: nothing is released

        found = [each.text for each in broker_problems(read_broker(BrokerAccess(broker), None))]

    assert found[0] == "delayed messages are overdue, the first by 2h"


# --- problems of an application -----------------------------------------------------------------


def listener(name: str, state: str = "running", **facts: object) -> dict[str, object]:
    return {"id": name, "state": state, "autoStartup": True, "hanging": 0, "lag": 0} | facts


def test_listeners_that_do_not_handle_are_problems() -> None:
    found = application_problems(
        None,
        [
            listener("bill"),
            listener("mail", "paused", lag=4_711),
            listener("sms", "broken"),
            listener("late", "stopped", autoStartup=False),
            listener("slow", hanging=2),
            listener("odd", "paused, running", hanging=1),
        ],
    )

    assert [f"{each.severity.value}: {each.text}" for each in found] == [
        "error: listener sms is broken",
        "error: 2 handlers of listener slow hang",
        "error: 1 handler of listener odd hangs",
        "warning: listener mail is paused, with a lag of 4,711 messages",
        "warning: listener odd is paused, running",
    ]


def test_parts_of_the_health_that_are_down_are_problems() -> None:
    of_one = {
        "components": {
            "broker": {"status": "DOWN", "details": {"error": "no answer in 3 s"}},
            "listeners": {"status": "DOWN"},
            "lateness": {"status": "UP", "details": {"worstMs": 59_700}},
            "flush": {"status": "UP"},
        }
    }
    workers = {"0": {"status": "UP"}, "1": {"status": "DOWN", "details": {"error": "the process does not run"}}}
    of_several = {"components": {"workers": {"status": "DOWN", "components": workers}}}

    assert [each.text for each in application_problems(of_one, [])] == [
        "health: broker is DOWN: no answer in 3 s",
        "delayed messages of the last minutes were handled up to 59s 700ms late",
    ]
    assert [each.text for each in application_problems(of_several, [])] == [
        "health: workers is DOWN: the process does not run"
    ]
