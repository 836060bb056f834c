"""The start of schedules: its work does not depend on the messages of the broker, and a busy broker only delays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate import MQApplication, ScheduledRun, Schedules, VirtualClock, scheduled
from mqtemplate.broker import Broker
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.delay.delay_store import RecordLookup
from mqtemplate.delay.schedule_message_service import ScheduleMessageService
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import (
    BrokerBusyError,
    MessageError,
    MQTemplateError,
    RemoteConnectError,
    RemoteTimeoutError,
    ScheduleError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.message import HostAddress, Message
from mqtemplate.pending import PendingQuery
from mqtemplate.server.broker_server import LocalCluster
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.testing.harness import Harness

SETTINGS = {"rocketmq.name-server": "embedded:memory"}
LOCAL = HostAddress("127.0.0.1", 0)


@dataclass
class Work:
    """What the queries of pending messages have read.

    Attributes:
        records: Number of records.
        scans: Number of searches through all pending messages of a delay service.
    """

    records: int = 0
    scans: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts the work of all brokers of the test."""
    found = Work()
    read = RecordLookup.at

    def at(lookup: RecordLookup, physical_offset: int, size: int = 0) -> Any:
        found.records += 1
        return read(lookup, physical_offset, size)

    def counted(scan: Callable[..., Any]) -> Callable[..., Any]:
        def pending(*arguments: Any) -> Any:
            found.scans += 1
            return scan(*arguments)

        return pending

    monkeypatch.setattr(RecordLookup, "at", at)
    for service in (ScheduleMessageService, TimerMessageStore):
        monkeypatch.setattr(service, "pending", counted(service.pending))
    return found


def add_pending(broker: EmbeddedBroker, count: int) -> None:
    """Send delayed messages of other topics: half of them have a level, and half are timers."""
    for start in range(0, count, 1_000):
        numbers = range(start, min(start + 1_000, count))
        broker.sends.send_batch([Message("orders", b"x", {"DELAY": "18", "KEYS": f"k{each}"}) for each in numbers[::2]])
        timers = [Message("orders", b"x", {"TIMER_DELAY_SEC": "7200", "KEYS": f"k{each}"}) for each in numbers[1::2]]
        broker.sends.send_batch(timers)


@scheduled(every="1s", name="report")
def report() -> None: ...


@scheduled(every="1h", name="other")
def other() -> None: ...


def work_of_start(broker: Broker, work: Work) -> tuple[int, int]:
    """Start an application with two schedules, list and change them, and return what was read meanwhile."""
    work.records = work.scans = 0
    app = MQApplication(report, other, settings=SETTINGS, environment={}, starters=[], overrides={Broker: broker})
    with app:
        schedules = app.get(Schedules)
        assert [state.name for state in schedules.list()] == ["other", "report"]
        schedules.pause("report")
    return work.records, work.scans


@pytest.mark.parametrize("is_remote", [False, True], ids=["embedded", "server"])
def test_a_start_reads_as_many_records_with_10000_pending_messages_as_with_10(work: Work, is_remote: bool) -> None:
    found = []
    for count in (10, 10_000):
        settings = EmbeddedSettings(listen_host=LOCAL)
        with EmbeddedBroker(None, settings, VirtualClock(SystemClock().now_ms())) as broker:
            add_pending(broker, count)
            assert broker.delayed.count_pending(PendingQuery(topic="orders")).total == count
            if not is_remote:
                found += [work_of_start(broker, work) for _ in range(2)]
                continue
            with Served(broker) as remote:
                found += [work_of_start(remote, work) for _ in range(2)]

    first, again, first_of_many, again_of_many = found
    assert (first, again) == (first_of_many, again_of_many)
    assert again[1] == 0
    assert 0 < again[0] < 100


class Served:
    """Serves a broker on a port of this machine, and opens a client of it."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._cluster = LocalCluster(broker.engine, BrokerServerSettings(listen=LOCAL))

    def __enter__(self) -> RemoteBroker:
        self._cluster.start()
        self._remote = RemoteBroker(RemoteSettings(name_servers=(str(self._cluster.name_server_address),)))
        self._remote.start()
        return self._remote

    def __exit__(self, *error: object) -> None:
        self._remote.close()
        self._cluster.stop()


def test_a_start_reads_a_bounded_number_of_the_past_runs(work: Work) -> None:
    found = []
    for span in ("2m", "5m"):
        with EmbeddedBroker(None, clock=VirtualClock()) as broker:
            app = MQApplication(report, settings=SETTINGS, environment={}, starters=[], overrides={Broker: broker})
            with app:
                Harness(broker, *app.containers).advance(span)
            found.append(work_of_start(broker, work))

    assert found[0] == found[1]
    assert found[0][1] == 0


def test_a_query_for_the_newest_messages_of_a_key_reads_no_others(work: Work) -> None:
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        properties = {"TIMER_DELAY_SEC": "60", "KEYS": "same"}
        sent = [broker.sends.send(Message("orders", b"x", dict(properties))).msg_id for _ in range(20)]
        work.records = 0

        page = broker.delayed.pending(PendingQuery(key="same", newest=3), 10)

        assert sorted(each.msg_id for each in page.messages) == sorted(sent[-3:])
    assert work.records == 2 * 3  # once to find them, and once for the page


@pytest.mark.parametrize(("newest", "key"), [(0, "a"), (-1, "a"), (5, None)])
def test_a_number_of_newest_messages_without_a_meaning_is_refused(newest: int, key: str | None) -> None:
    with pytest.raises(
        MessageError, match=rf"newest must be 1 or more, and needs a key, got {newest} with key {key!r}"
    ):
        PendingQuery(key=key, newest=newest)


# --- a busy broker --------------------------------------------------------------------------------


def fail(part: Any, name: str, error: MQTemplateError, times: int) -> None:
    """Let the first *times* calls of a method of a broker fail."""
    method, left = getattr(part, name), iter(range(times))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is not None:
            raise error
        return method(*arguments, **options)

    setattr(part, name, call)


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """A broker on a clock at 2026-01-01T00:00:00Z."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        yield broker


ERRORS = [
    RemoteTimeoutError("no response in 3000 ms"),
    RemoteConnectError("the connection was lost"),
    BrokerBusyError("2 SYSTEM_BUSY: it is overloaded"),
    SendTimeoutError("no response in 3000 ms"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_application_starts_beside_a_busy_broker_and_its_schedules_when_it_answers(
    broker: EmbeddedBroker, error: MQTemplateError
) -> None:
    runs: list[ScheduledRun] = []

    @scheduled(every="1m", name="minutely")
    def minutely(run: ScheduledRun) -> None:
        runs.append(run)

    is_send = isinstance(error, SendTimeoutError)
    fail(broker.sends if is_send else broker.delayed, "send" if is_send else "pending", error, 6 if is_send else 2)
    app = MQApplication(minutely, settings=SETTINGS, environment={}, starters=[], overrides={Broker: broker})
    with capture_logs() as logs, app:
        Harness(broker, *app.containers).advance("2m")

    assert [run.scheduled_at.minute for run in runs] == [1, 2]
    delayed = [each for each in logs if each["event"] == "schedules.start_delayed"]
    assert [(each["log_level"], each["reason"], each["retry_ms"]) for each in delayed] == [
        ("warning", str(error), 5_000)
    ] * 2


def test_an_error_that_a_retry_cannot_help_fails_the_start(broker: EmbeddedBroker) -> None:
    fail(broker.delayed, "pending", UnsupportedError("the broker does not list pending messages"), 1)
    app = MQApplication(report, settings=SETTINGS, environment={}, starters=[], overrides={Broker: broker})

    with pytest.raises(UnsupportedError, match="the broker does not list pending messages"), app:
        pass


def test_a_start_after_the_clock_was_set_back_is_repeated_until_the_broker_answers(broker: EmbeddedBroker) -> None:
    app = MQApplication(other, settings=SETTINGS, environment={}, starters=[], overrides={Broker: broker})
    with app:
        assert isinstance(broker.clock, VirtualClock)
        fail(broker.delayed, "pending", RemoteTimeoutError("no response in 3000 ms"), 1)
        broker.clock.set_ms(broker.clock.now_ms() - 4 * 3_600_000)
        with capture_logs() as logs:
            Harness(broker, *app.containers).advance("10s")
        [state] = app.get(Schedules).list()

    assert [each["event"] for each in logs if each["event"].startswith("schedules.")] == ["schedules.start_delayed"]
    assert state.next_run is not None
    assert f"{state.next_run:%m-%d %H:%M}" == "12-31 21:00"


# --- names ----------------------------------------------------------------------------------------


def test_names_of_other_processes_are_found_by_their_groups(broker: EmbeddedBroker) -> None:
    """Groups of other programs in the topic, and of values, are no schedules."""
    topic = "mqtemplate-schedules"

    @scheduled(every="30m", name="report")
    def half_hourly() -> None: ...

    parts = (half_hourly, other)
    app = MQApplication(*parts, settings=SETTINGS, environment={}, starters=[], overrides={Broker: broker})
    with app:
        Harness(broker, *app.containers).advance("1h")
        app.get(Schedules).pause("report")
    for group in ("audit", f"{topic}-", f"{topic}-gone", f"{topic}-x y"):
        broker.groups.commit_offset(group, broker.queues(topic)[0], 1)

    schedules = Schedules(broker)

    assert [(state.name, state.trigger) for state in schedules.list()] == [("other", None), ("report", None)]
    with pytest.raises(ScheduleError, match="there is no schedule 'reprot'; did you mean 'report'"):
        schedules.resume("reprot")
    schedules.resume("report")
