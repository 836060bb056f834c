"""The figures of the last day in the store directory: a line a minute, in a file of fixed size."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.figures import (
    _FILE_BYTES,
    _LINE_BYTES,
    FIGURES_FILE,
    MINUTE_MS,
    BrokerFigures,
    decode_figures,
    encode_figures,
    read_figures,
)
from mqtemplate.message import Message, Property
from mqtemplate.operations.doctor import examine
from mqtemplate.testing import Harness


def opened(path: Path, clock: VirtualClock) -> EmbeddedBroker:
    return EmbeddedBroker(path, clock=clock)


def send(broker: EmbeddedBroker, count: int, topic: str = "orders", **properties: str) -> None:
    queue = broker.queues(topic)[0]
    for _ in range(count):
        broker.sends.send(Message(topic, b"x", properties), queue)


def read(path: Path, clock: VirtualClock) -> list[BrokerFigures]:
    return read_figures(path, clock.now_ms())


def test_each_minute_has_its_rates_its_lags_and_its_pending_messages(tmp_path: Path) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock) as broker:
        harness = Harness(broker)
        [queue, *_] = broker.queues("orders")
        send(broker, 4)
        broker.groups.commit_offset("billing", queue, 1)
        broker.groups.commit_offset("mails", queue, 4)
        harness.advance("1m")

        send(broker, 12)
        send(broker, 2, "reminders", **{Property.TIMER_DELAY_MS: "3600000"})
        send(broker, 3, "%DLQ%billing")
        broker.groups.commit_offset("billing", queue, 7)
        broker.groups.commit_offset("mails", queue, 16)
        harness.advance("1m")

    [figures] = read(tmp_path, clock)
    assert figures == BrokerFigures(
        time_ms=clock.now_ms(),
        stored=12 / 60,
        consumed=18 / 60,
        lag=9,
        lags={"billing": 9},
        pending=2,
        dead_letters=3,
        disk_free=None,
    )


def test_a_restart_keeps_the_figures_and_counts_nothing_twice(tmp_path: Path) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock) as broker:
        send(broker, 6)
        Harness(broker).advance("3m")
    with opened(tmp_path, clock) as broker:
        Harness(broker).advance("2m")

    minutes = [(each.time_ms // MINUTE_MS, each.stored) for each in read(tmp_path, clock)]
    start = minutes[0][0]
    assert minutes == [(start, 0), (start + 1, 0), (start + 3, 0)], "none for the minute of the start"


def test_the_line_of_a_minute_replaces_the_one_of_the_day_before(tmp_path: Path) -> None:
    path = tmp_path / FIGURES_FILE
    path.parent.mkdir()
    old = encode_figures(BrokerFigures(time_ms=0, stored=1, consumed=1, lag=1))
    path.write_bytes(old * (_FILE_BYTES // _LINE_BYTES))
    clock = VirtualClock()
    with opened(tmp_path, clock) as broker:
        Harness(broker).advance("4m")

    assert path.stat().st_size == _FILE_BYTES
    assert path.read_bytes().count(old) == _FILE_BYTES // _LINE_BYTES - 3
    assert len(read(tmp_path, clock)) == 3, "lines that are older than a day are not shown"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x" * _FILE_BYTES, "line 1 cannot be read: JSONDecodeError: Expecting value: line 1 column 1"),
        (b"{}".ljust(_LINE_BYTES) + bytes(_FILE_BYTES - _LINE_BYTES), "line 1 cannot be read: KeyError: 'timeMs'"),
        (b"short", "5 bytes"),
    ],
)
def test_a_damaged_file_is_replaced_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, reason: str
) -> None:
    path = tmp_path / FIGURES_FILE
    path.parent.mkdir()
    path.write_bytes(content)
    clock = VirtualClock()
    assert read(tmp_path, clock) == []

    with opened(tmp_path, clock) as broker:
        Harness(broker).advance("3m")

    [line] = [each.getMessage() for each in caplog.records if "figures.replaced" in each.getMessage()]
    assert reason in line
    assert "charts start again from now" in line
    assert len(read(tmp_path, clock)) == 2


def test_groups_for_which_a_line_has_no_space_are_left_out() -> None:
    lags = {"g" * 300: 9, "h" * 300: 8, "billing": 7}
    line = encode_figures(BrokerFigures(time_ms=1, stored=0.5, consumed=2, lag=24, lags=lags, pending=3))

    [figures] = decode_figures(line.ljust(_FILE_BYTES, b"\0"))

    assert len(line) == _LINE_BYTES
    assert figures.lags == {"g" * 300: 9, "billing": 7}
    assert (figures.stored, figures.consumed, figures.lag, figures.pending) == (0.5, 2, 24, 3)


def test_a_check_of_the_folder_finds_no_fault_in_the_file(tmp_path: Path) -> None:
    clock = VirtualClock()
    with opened(tmp_path, clock) as broker:
        send(broker, 1)
        Harness(broker).advance("3m")

    report = examine(tmp_path)

    assert not report.is_damaged
    assert report.warnings == []


def test_a_year_without_messages_on_a_virtual_clock_writes_few_lines(tmp_path: Path) -> None:
    """Their number is what such a test waits for."""
    with opened(tmp_path, clock := VirtualClock()) as broker:
        start_ms = clock.now_ms()
        Harness(broker).advance("2h")
        send(broker, 1)
        Harness(broker).advance("1h")
        minutes = [(each.time_ms - start_ms) // MINUTE_MS for each in read(tmp_path, clock)]

    assert minutes == [*range(2, 12), 71, *range(131, 142)], "each hour, and each minute after a message"


def test_a_broker_in_memory_keeps_no_figures() -> None:
    with EmbeddedBroker(clock=VirtualClock()) as broker:
        assert "engine.figures" not in [service.name for service in broker.services()]
