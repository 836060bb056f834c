"""Schedules in an application on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, timedelta
from typing import Annotated, Any

import pytest

from mqtemplate import (
    Depends,
    MessageExt,
    MQApplication,
    ScheduledRun,
    Schedules,
    VirtualClock,
    scheduled,
    service,
)
from mqtemplate.broker import Broker, QueueLock
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.engine.groups import _LocalQueueLock
from mqtemplate.errors import ScheduleError, SendError
from mqtemplate.message import Message
from mqtemplate.testing.harness import Harness

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}
Start = Callable[..., MQApplication]


@pytest.fixture
def clock() -> VirtualClock:
    """A clock at 2026-01-01T00:00:00Z, a Thursday."""
    return VirtualClock()


@pytest.fixture
def broker(clock: VirtualClock) -> Any:
    with EmbeddedBroker(None, clock=clock) as broker:
        yield broker


@pytest.fixture
def start(broker: EmbeddedBroker) -> Any:
    """Function that starts an application of components over the broker; several may run, as processes would."""
    running: list[MQApplication] = []

    def started(*components: object, **settings: object) -> MQApplication:
        keys = {**IN_MEMORY, **settings}
        app = MQApplication(*components, settings=keys, environment={}, starters=[], overrides={Broker: broker})
        app.start()
        running.append(app)
        return app

    yield started
    for app in running:
        app.stop()


def harness_of(broker: EmbeddedBroker, *apps: MQApplication, **options: bool) -> Harness:
    return Harness(broker, *(container for app in apps for container in app.containers), **options)


def recorder(**arguments: Any) -> tuple[Callable[..., None], list[ScheduledRun]]:
    """Return a scheduled function that records its runs, and the runs."""
    runs: list[ScheduledRun] = []

    @scheduled(**{"name": "report", **arguments})
    def report(run: ScheduledRun) -> None:
        runs.append(run)

    return report, runs


def hours(runs: list[ScheduledRun]) -> list[str]:
    return [run.scheduled_at.strftime("%m-%d %H:%M") for run in runs]


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.feature("X17")
def test_a_year_of_weekdays_at_nine_in_berlin(broker: EmbeddedBroker, start: Start) -> None:
    """Each run is at 09:00 on the wall in Berlin, in summer and in winter."""
    report, runs = recorder(cron="0 9 * * MON-FRI", zone="Europe/Berlin")

    harness_of(broker, start(report)).advance("365d")

    assert len(runs) == 261
    assert {run.scheduled_at.strftime("%H:%M") for run in runs} == {"09:00"}
    assert {run.scheduled_at.astimezone(UTC).hour for run in runs} == {7, 8}
    assert {run.scheduled_at.weekday() for run in runs} == {0, 1, 2, 3, 4}
    assert {run.late for run in runs} == {timedelta(0)}


def test_a_function_without_parameters_and_an_async_method_run(broker: EmbeddedBroker, start: Start) -> None:
    done: list[str] = []

    @scheduled(every="1h")
    def plain() -> None:
        done.append("plain")

    @service
    class Reports:
        @scheduled(every="${reports.every:2h}")
        async def send(self) -> None:
            done.append(type(asyncio.current_task()).__name__)

    app = start(plain, Reports)
    Harness(app).advance("2h 5m")

    assert done == ["plain", "plain", "Task"]
    assert [state.name for state in app.get(Schedules).list()] == ["Reports-send", "plain"]


# --- several processes, crashes ------------------------------------------------------------------


def test_a_run_that_fails_is_retried_and_the_next_one_is_on_time(broker: EmbeddedBroker, start: Start) -> None:
    runs: list[tuple[str, int, str]] = []

    @scheduled(every="1m", retry=["90s"])
    def report(run: ScheduledRun) -> None:
        runs.append((run.scheduled_at.strftime("%H:%M"), run.attempt, run.id))
        if run.scheduled_at.minute == 1 and run.attempt == 1:
            raise OSError("the printer is out of paper")

    Harness(start(report), raise_handler_errors=False).advance("3m")

    identity = "report@2026-01-01T00:01:00.000+00:00"
    assert [run[:2] for run in runs] == [("00:01", 1), ("00:02", 1), ("00:01", 2), ("00:03", 1)]
    assert [run[2] for run in runs if run[0] == "00:01"] == [identity, identity]


class Failing(EmbeddedBroker):
    """Broker whose call number *fails_at* raises, and the next ones too, as often as *times* says."""

    calls, fails_at, times = 0, 0, 0

    def _count(self) -> None:
        self.calls += 1
        if self.fails_at <= self.calls < self.fails_at + self.times:
            raise SendError("the broker is busy")

    def start(self) -> None:
        super().start()
        parts = {"send": self.sends, "messages_by_key": self.reader}
        parts |= {"committed_offset": self.groups, "commit_offset": self.groups}
        for name, part in parts.items():
            setattr(part, name, self._counted(getattr(part, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._count()
            return method(*arguments, **options)

        return call


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("call", range(1, 13))
def test_a_call_of_the_broker_that_fails_neither_ends_nor_doubles_a_schedule(call: int, times: int) -> None:
    """Two runs make twelve calls; each one fails once, or three times in a row. The run is repeated by a retry."""
    report, runs = recorder(every="1h", catch_up="all")
    with Failing(None, clock=VirtualClock()) as broker:
        app = MQApplication(report, settings=IN_MEMORY, environment={}, starters=[], overrides={Broker: broker})
        with app:
            broker.calls, broker.fails_at, broker.times = 0, call, times
            harness = Harness(app, raise_handler_errors=False)
            harness.advance("4h 30m")

            assert sorted(hours(runs)) == [f"01-01 0{hour}:00" for hour in range(1, 5)]
            assert len(app.get(Schedules).topic.pending("report")) == 1
            assert broker.calls > 12


def test_a_message_of_someone_else_in_the_topic_is_a_dead_letter(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h", max_reconsume_times=0)
    harness = Harness(start(report), raise_handler_errors=False)

    broker.sends.send(Message("mqtemplate-schedules", b"hello", {"TAGS": "report"}))
    harness.advance("1h")

    [dead] = harness.assert_dead_lettered("mqtemplate-schedules-report", 1)
    assert "is not a run of a schedule" in dead.properties["dead_letter_message"]
    assert hours(runs) == ["01-01 01:00"]


# --- declarations --------------------------------------------------------------------------------


def takes_an_order(order: str) -> None: ...
def takes_two_runs(run: ScheduledRun, other: ScheduledRun) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (takes_an_order, r"schedule 'takes_an_order': .*order.*; a scheduled function takes a ScheduledRun"),
        (takes_two_runs, "the function must take one ScheduledRun, by name"),
    ],
)
def test_a_function_takes_one_run_and_objects(start: Start, function: Callable[..., None], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        start(scheduled(every="1h")(function))


@service
class Ledger:
    def __init__(self) -> None:
        self.lines: list[str] = []


def entry(ledger: Ledger, message: MessageExt) -> Iterator[str]:
    ledger.lines.append("begin")
    yield f"entry of {message.tags}"
    ledger.lines.append("commit")


def test_a_function_takes_objects_of_the_application_and_values_of_functions(
    start: Start, broker: EmbeddedBroker
) -> None:
    """As a handler does after its payload; the run may stand anywhere."""

    @scheduled(every="1h")
    def report(entry: Annotated[str, Depends(entry)], run: ScheduledRun, ledger: Ledger, copies: int = 2) -> None:
        ledger.lines.append(f"{entry} at {run.scheduled_at:%H:%M}, {copies} copies")

    app = start(report, Ledger)
    harness_of(broker, app).advance("1h")

    assert app.get(Ledger).lines == ["begin", "entry of report at 01:00, 2 copies", "commit"]


async def async_entry(ledger: Ledger) -> AsyncIterator[str]:
    yield "entry"
    ledger.lines.append("closed")


def test_an_async_function_takes_async_values(start: Start, broker: EmbeddedBroker) -> None:
    @scheduled(every="1h")
    async def report(ledger: Ledger, entry: Annotated[str, Depends(async_entry)]) -> None:
        ledger.lines.append(entry)

    app = start(report, Ledger)
    harness_of(broker, app).advance("1h")

    assert app.get(Ledger).lines == ["entry", "closed"]


def test_two_schedules_of_one_name_are_refused(start: Start) -> None:
    with pytest.raises(ScheduleError, match="two schedules are called 'report'; give one of them another name="):
        start(recorder(every="1h")[0], recorder(every="2h")[0])


def test_an_unknown_attribute_and_a_class_are_refused() -> None:
    with pytest.raises(TypeError, match="@scheduled has no attribute 'cronn'"):
        scheduled(every="1h", cronn="@daily")  # type: ignore[call-arg]
    with pytest.raises(ScheduleError, match="put it on the method of the class"):
        scheduled(every="1h")(type("Report", (), {}))


def test_the_decorator_returns_the_function() -> None:
    def report() -> str:
        return "called"

    assert scheduled(every="1h")(report) is report


# --- several processes ---------------------------------------------------------------------------


def lock_of_another_process(broker: EmbeddedBroker, app: MQApplication) -> QueueLock:
    lock = app.get(Schedules).topic.lock("report", broker.name)
    assert lock is not None
    return lock


def test_a_run_that_another_process_does_is_not_repeated(broker: EmbeddedBroker, start: Start) -> None:
    """The queue may move to this process while the function runs in the other one, before its message is done."""
    report, runs = recorder(every="1h")
    app = start(report)
    topic, harness = app.get(Schedules).topic, harness_of(broker, app)
    lock = lock_of_another_process(broker, app)
    harness.advance("1h 30m")
    during = list(runs)

    topic.note_done("report", broker.clock.now_ms() - 1_800_000)
    lock.release()
    harness.advance("30m")

    assert during == []
    assert hours(runs) == ["01-01 02:00"]


def test_a_run_that_another_process_did_not_end_is_repeated(broker: EmbeddedBroker, start: Start) -> None:
    """The process has died: its lock is free, and the run is not noted as done."""
    report, runs = recorder(every="1h")
    app = start(report)
    harness = harness_of(broker, app)
    lock = lock_of_another_process(broker, app)
    harness.advance("1h 30m")

    lock.release()
    harness.advance("1m")

    assert hours(runs) == ["01-01 01:00"]


def test_a_process_that_has_lost_the_lock_before_the_function_runs_looks_again(
    broker: EmbeddedBroker, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still after it had looked whether the run is done, for so long that another process did the run."""
    report, runs = recorder(every="1h")
    app = start(report)
    topic, first = app.get(Schedules).topic, [True]

    def is_held(lock: object) -> bool:
        if first.pop() if first else False:
            topic.note_done("report", broker.clock.now_ms())  # by the other process
            return False
        return True

    monkeypatch.setattr(_LocalQueueLock, "is_held", property(is_held))
    harness_of(broker, app).advance("2h")

    assert hours(runs) == ["01-01 02:00"]


def test_a_retry_does_not_undo_what_is_noted_about_later_runs(broker: EmbeddedBroker, start: Start) -> None:
    """Otherwise a process that takes over would repeat them."""
    attempts: list[str] = []

    @scheduled(every="1h", name="report", retry=["2h 30m"])
    def report(run: ScheduledRun) -> None:
        attempts.append(f"{run.scheduled_at:%H} {run.attempt}")
        if attempts == ["01 1"]:
            raise OSError("away")

    app = start(report)
    harness_of(broker, app, raise_handler_errors=False).advance("3h 40m")

    assert attempts == ["01 1", "02 1", "03 1", "01 2"]
    assert app.get(Schedules).topic.last_done_ms("report") == broker.clock.now_ms() - 40 * 60_000


def test_a_process_that_starts_during_a_long_run_skips_none_of_the_runs_that_wait(
    broker: EmbeddedBroker, start: Start
) -> None:
    """The next message of the schedule is delivered, and waits: nothing is pending."""
    report, runs = recorder(every="1h", catch_up="all")
    app = start(report)
    lock = lock_of_another_process(broker, app)
    harness_of(broker, app).advance("3h 30m")

    joining = start(report)
    harness = harness_of(broker, app, joining)
    harness.advance("40m")
    lock.release()
    harness.advance("1m")

    assert hours(runs) == ["01-01 01:00", "01-01 02:00", "01-01 03:00", "01-01 04:00"]
