"""Schedules in an application on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import pytest

from mqtemplate import (
    CatchUp,
    Depends,
    MessageExt,
    MQApplication,
    ScheduledRun,
    Schedules,
    VirtualClock,
    scheduled,
    service,
)
from mqtemplate.broker import Broker, Capability
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import ScheduleError, SendError, UnsupportedError
from mqtemplate.message import Message
from mqtemplate.scheduling.discovery import make_schedules
from mqtemplate.scheduling.topic import SHORT_STEP_MS, RunMessage, find_run_key
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


# One run is left out on each holiday, by the dates in the zone of the schedule: at 23:30 UTC it is tomorrow in Berlin.
# A time before the first start never runs: after the broker has deleted its messages, nothing shows that it took place.
# The broker keeps a delay for forty days, and a run once a year takes place.
HOLIDAYS = {date(2026, 1, 2), date(2026, 1, 4)}
TIMES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"every": "10m"}, "30m", ["01-01 00:10", "01-01 00:20", "01-01 00:30"]),
    ({"at": "2026-01-02T18:00", "zone": "Europe/Berlin"}, "30d", ["01-02 18:00"]),
    ({"at": datetime(2025, 12, 31, tzinfo=UTC)}, "30d", []),
    ({"cron": "30 0 * * *", "zone": "Europe/Berlin", "holidays": HOLIDAYS}, "4d", ["01-03 00:30", "01-05 00:30"]),
    ({"cron": "@yearly", "zone": "Europe/Berlin"}, "366d", ["01-01 00:00"]),
]


@pytest.mark.parametrize(("arguments", "span", "expected"), TIMES)
def test_a_schedule_runs_at_its_times(
    broker: EmbeddedBroker, clock: VirtualClock, start: Start, arguments: dict[str, Any], span: str, expected: list[str]
) -> None:
    """An interval is counted from the epoch, and not from the start."""
    clock.move_ms(7 * 60_000)
    report, runs = recorder(**arguments)

    harness_of(broker, start(report)).advance(span)

    assert hours(runs) == expected


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


@pytest.mark.feature("X17")
def test_several_processes_with_the_same_schedule_run_it_once(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h")
    apps = [start(report) for _ in range(3)]

    harness_of(broker, *apps).advance("5h")

    assert hours(runs) == [f"01-01 0{hour}:00" for hour in range(1, 6)]


def test_of_two_messages_for_one_run_only_the_first_counts(broker: EmbeddedBroker, start: Start) -> None:
    """Two processes that start at once may both send the first message; the chain stays one."""
    report, runs = recorder(every="1h")
    app = start(report)
    topic = app.get(Schedules).topic
    [pending] = topic.pending()["report"]
    [schedule] = make_schedules(report)
    key = find_run_key(pending.keys)
    assert key is not None
    topic.send(RunMessage.of_run("report", key.run_ms, schedule.trigger, 0))

    Harness(app).advance("3h")

    assert hours(runs) == ["01-01 01:00", "01-01 02:00", "01-01 03:00"]
    assert len(topic.pending()["report"]) == 1


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


def test_a_run_is_sent_in_shorter_steps_to_a_broker_that_takes_no_longer_delays(clock: VirtualClock) -> None:
    """With RocketMQ's limit of three days, as its own property file sets it."""
    report, runs = recorder(cron="0 0 15 * *")
    settings = EmbeddedSettings(timer_max_delay_sec=3 * 86_400)
    with EmbeddedBroker(None, settings, clock=clock) as broker:
        app = MQApplication(report, settings=IN_MEMORY, environment={}, starters=[], overrides={Broker: broker})
        with app:
            harness_of(broker, app).advance("60d")

    assert hours(runs) == ["01-15 00:00", "02-15 00:00"]


def test_processes_that_take_different_steps_run_a_schedule_once(
    broker: EmbeddedBroker, clock: VirtualClock, start: Start
) -> None:
    """A process of an older version sends the way to the run in steps, beside the message of this one."""
    report, runs = recorder(cron="0 0 15 * *")
    app = start(report)
    (schedule,) = make_schedules(report)
    fifteenth_ms = clock.now_ms() + 14 * 86_400_000
    request = RunMessage.of_run("report", fifteenth_ms, schedule.trigger, clock.now_ms())
    app.get(Schedules).topic.send(request.in_steps(clock.now_ms(), SHORT_STEP_MS))

    harness_of(broker, app).advance("60d")

    assert hours(runs) == ["01-15 00:00", "02-15 00:00"]


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
            assert len(app.get(Schedules).topic.pending()["report"]) == 1
            assert broker.calls > 12


# --- missed runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "caught_up"),
    [("none", []), (CatchUp.ONE, ["01-01 01:00"]), ("all", ["01-01 01:00", "01-01 02:00", "01-01 03:00"])],
)
def test_runs_missed_while_no_process_ran(
    broker: EmbeddedBroker, start: Start, catch_up: CatchUp | str, caught_up: list[str]
) -> None:
    report, runs = recorder(every="1h", catch_up=catch_up)
    start(report).stop()
    Harness(broker).advance("3h 30m")

    harness_of(broker, start(report)).advance("30m")

    assert hours(runs) == [*caught_up, "01-01 04:00"]


def test_a_late_run_within_its_grace_is_not_missed(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h", catch_up="none", grace="10m")
    start(report).stop()
    Harness(broker).advance("1h 5m")

    harness_of(broker, start(report)).run_until_idle()

    assert [(run.scheduled_at.hour, run.late) for run in runs] == [(1, timedelta(minutes=5))]


def test_a_retry_after_the_grace_is_no_missed_run(broker: EmbeddedBroker, start: Start) -> None:
    attempts: list[int] = []

    @scheduled(every="1h", catch_up="none", retry=["5m"])
    def report(run: ScheduledRun) -> None:
        attempts.append(run.attempt)
        if run.attempt == 1:
            raise OSError("the printer is out of paper")

    Harness(start(report), raise_handler_errors=False).advance("1h 10m")

    assert attempts == [1, 2]


# --- another version of the program --------------------------------------------------------------


def test_a_new_trigger_replaces_the_old_one(broker: EmbeddedBroker, start: Start) -> None:
    old, old_runs = recorder(cron="0 9 * * *")
    new, new_runs = recorder(cron="0 10 * * *")
    start(old).stop()
    broker.clock.move_ms(1)  # type: ignore[attr-defined]

    harness_of(broker, start(new)).advance("2d")

    assert (hours(old_runs), hours(new_runs)) == ([], ["01-01 10:00", "01-02 10:00"])


def test_a_process_of_the_old_version_continues_the_new_trigger(broker: EmbeddedBroker, start: Start) -> None:
    """In a rolling deployment an old process may get the message; the schedule must not end with it."""
    old, old_runs = recorder(cron="0 9 * * *")
    new, _ = recorder(cron="0 10 * * *")
    old_app = start(old)
    broker.clock.move_ms(1)  # type: ignore[attr-defined]
    start(new).stop()

    harness_of(broker, old_app).advance("2d")

    assert hours(old_runs) == ["01-01 10:00", "01-02 10:00"]


# --- list, pause, trigger ------------------------------------------------------------------------


def test_a_schedule_is_listed_paused_resumed_and_triggered(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h")
    app = start(report)
    harness, schedules = Harness(app), app.get(Schedules)

    [state] = schedules.list()
    assert (state.name, state.trigger, state.next_run) == ("report", "every 1h", datetime(2026, 1, 1, 1, tzinfo=UTC))
    assert state.paused_until is None

    schedules.pause("report")
    assert schedules.list()[0].paused_until == datetime.max.replace(tzinfo=UTC)
    harness.advance("90m")
    schedules.trigger("report")
    harness.run_until_idle()
    assert [(run.is_manual, run.scheduled_at.minute) for run in runs] == [(True, 30)]

    schedules.resume("report")
    harness.advance("1h")
    assert hours(runs)[1:] == ["01-01 02:00"]


def test_a_pause_ends_by_itself_and_survives_the_process(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h")
    app = start(report)
    app.get(Schedules).pause("report", until=datetime(2026, 1, 1, 3, tzinfo=UTC))
    app.stop()

    app = start(report)
    assert app.get(Schedules).list()[0].paused_until == datetime(2026, 1, 1, 3, tzinfo=UTC)
    harness_of(broker, app).advance("4h")

    assert hours(runs) == ["01-01 03:00", "01-01 04:00"]


def test_a_process_without_schedules_of_its_own_controls_them(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h")
    worker, admin = start(report), start()

    [state] = admin.get(Schedules).list()
    admin.get(Schedules).trigger("report")
    harness_of(broker, worker).run_until_idle()

    assert (state.name, state.trigger, state.next_run) == ("report", None, datetime(2026, 1, 1, 1, tzinfo=UTC))
    assert [run.is_manual for run in runs] == [True]


def test_an_unknown_schedule_is_an_error_with_the_nearest_name(start: Start) -> None:
    report, _ = recorder(every="1h")
    schedules = start(report).get(Schedules)

    for verb in (schedules.pause, schedules.resume, schedules.trigger):
        with pytest.raises(ScheduleError, match="there is no schedule 'reports'; did you mean 'report'?"):
            verb("reports")
    with pytest.raises(ScheduleError, match="there is: report"):
        schedules.trigger("backup")
    with pytest.raises(ScheduleError, match="until must be an aware datetime"):
        schedules.pause("report", until=datetime(2026, 1, 1))  # noqa: DTZ001


def test_a_process_may_leave_schedules_to_others(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h")
    app = start(report, **{"mqtemplate.schedules.enabled": False})

    harness_of(broker, app).advance("2h")

    assert (runs, app.containers, app.get(Schedules).list()) == ([], (), ())


def test_a_cluster_that_cannot_list_runs_schedules_once_and_controls_any_name(
    broker: EmbeddedBroker, start: Start
) -> None:
    """As RocketMQ's: each start sends the next run again, and the reader drops the repeats."""
    broker.capabilities -= {Capability.SCHEDULE_CHANGE}
    report, runs = recorder(every="1h")
    apps = [start(report), start(report), start()]
    schedules = apps[2].get(Schedules)
    schedules.pause("report", until=datetime(2026, 1, 1, 2, tzinfo=UTC))

    harness_of(broker, *apps).advance("3h")

    assert hours(runs) == ["01-01 02:00", "01-01 03:00"]
    assert apps[0].get(Schedules).list()[0].next_run == datetime(2026, 1, 1, 4, tzinfo=UTC)
    assert schedules.list() == ()
    with pytest.raises(ScheduleError, match="must be 1..64 letters"):
        schedules.trigger("a report")


def test_a_broker_without_timers_is_refused_at_the_start(broker: EmbeddedBroker, start: Start) -> None:
    """As a cluster of RocketMQ 4."""
    broker.capabilities -= {Capability.TIMER}

    with pytest.raises(
        UnsupportedError, match="schedules need any delay or deliver time, and the broker broker-a does"
    ):
        start(recorder(every="1h")[0])


def test_a_message_of_someone_else_in_the_topic_is_a_dead_letter(broker: EmbeddedBroker, start: Start) -> None:
    report, runs = recorder(every="1h", max_reconsume_times=0)
    harness = Harness(start(report), raise_handler_errors=False)

    broker.sends.send(Message("mqtemplate-schedules", b"hello", {"TAGS": "report"}))
    harness.advance("1h")

    [dead] = harness.assert_dead_lettered("mqtemplate-schedules-report", 1)
    assert "is not a run of a schedule" in dead.properties["dead_letter_message"]
    assert hours(runs) == ["01-01 01:00"]


# --- declarations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "@scheduled takes one of cron=, every= and at=; got none"),
        ({"cron": "@daily", "every": "1h"}, "got cron, every"),
        (
            {"every": "1h", "name": "a b"},
            "the name of a schedule must be 1..64 letters, digits, '_' and '-', got 'a b'",
        ),
    ],
)
def test_a_wrong_decorator_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        scheduled(**arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"cron": "9 Uhr"}, "schedule 'report': cron must be five fields"),
        ({"cron": "@daily", "zone": "Berlin"}, "zone must be an IANA time zone such as 'Europe/Berlin', got 'Berlin'"),
        ({"every": "0.5s"}, "every must be one second or longer, got '0.5s'"),
        ({"every": "often"}, "every must be a duration"),
        ({"at": "tomorrow"}, "at must be a datetime, a text such as '2026-12-24T18:00' or epoch ms?.*got 'tomorrow'"),
        ({"every": "1h", "catch_up": "some"}, "catch_up must be 'none', 'one' or 'all', got 'some'"),
        ({"every": "1h", "grace": "-1m"}, "grace must be"),
    ],
)
def test_a_wrong_value_is_refused_at_the_start(start: Start, arguments: dict[str, Any], reason: str) -> None:
    report, _ = recorder(**arguments)

    with pytest.raises(ScheduleError, match=reason):
        start(report)


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


def test_a_calendar_that_excludes_everything_is_refused(start: Start) -> None:
    class Always:
        def __contains__(self, day: object) -> bool:
            return True

    with pytest.raises(ScheduleError, match="the calendar excludes 3660 days"):
        start(recorder(every="1h", holidays=Always())[0])


def test_an_unknown_attribute_and_a_class_are_refused() -> None:
    with pytest.raises(TypeError, match="@scheduled has no attribute 'cronn'"):
        scheduled(every="1h", cronn="@daily")  # type: ignore[call-arg]
    with pytest.raises(ScheduleError, match="put it on the method of the class"):
        scheduled(every="1h")(type("Report", (), {}))


def test_the_decorator_returns_the_function() -> None:
    def report() -> str:
        return "called"

    assert scheduled(every="1h")(report) is report
