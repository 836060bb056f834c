"""Broker and schedule source of taskiq, with taskiq's own receiver."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from mqtemplate import ScheduleChangeStatus
from mqtemplate.errors import ConfigurationError, MessageError, MQTemplateError

pytest.importorskip("taskiq", reason="taskiq is not installed: pip install 'mqtemplate[taskiq]'")

from taskiq import AsyncTaskiqTask, BrokerMessage, InMemoryBroker, TaskiqScheduler
from taskiq.api import run_receiver_task
from taskiq.brokers.inmemory_broker import InmemoryResultBackend
from taskiq.scheduler.scheduled_task import ScheduledTask

from mqtemplate_starter_taskiq import MQTemplateBroker, MQTemplateScheduleSource
from tests.programs import PATHS, end_group, environment, run_python
from tests.waiting import PATIENCE_S

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}


def new_broker(settings: dict[str, object] | None = None, **options: Any) -> MQTemplateBroker:
    broker = MQTemplateBroker(settings=settings or IN_MEMORY, environment={}, **options)
    return broker.with_result_backend(InmemoryResultBackend())


@asynccontextmanager
async def started(broker: MQTemplateBroker) -> AsyncIterator[MQTemplateBroker]:
    await broker.startup()
    try:
        yield broker
    finally:
        await broker.shutdown()


@asynccontextmanager
async def working(broker: MQTemplateBroker) -> AsyncIterator[MQTemplateBroker]:
    """Start the broker, and a worker in this process."""
    async with started(broker):
        worker = asyncio.create_task(run_receiver_task(broker))
        try:
            yield broker
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))  # type: ignore[arg-type]


def test_tasks_run_in_a_worker_and_their_results_come_back() -> None:
    broker = new_broker()

    @broker.task
    async def add(first: int, second: int) -> int:
        return first + second

    @broker.task
    def shout(text: str) -> str:
        return text.upper()

    @broker.task
    async def fail() -> None:
        raise ValueError("of the task")

    async def test() -> None:
        async with working(broker):
            tasks = [await add.kiq(1, second=2), await shout.kiq("tea"), await fail.kiq()]
            results = [await task.wait_result(check_interval=0.01) for task in tasks]
        assert [result.return_value for result in results] == [3, "TEA", None]
        assert [result.is_err for result in results] == [False, False, True]
        assert str(results[2].error) == "of the task"

    run(test)


def test_a_message_is_yielded_with_its_bytes_and_acknowledged() -> None:
    """As the tests of taskiq's own brokers: what was kicked comes out of ``listen``."""
    broker = new_broker()
    sent = BrokerMessage(task_id="7", task_name="any", message=b"any bytes \x00", labels={"other": "label"})

    async def test() -> None:
        async with started(broker):
            await broker.kick(sent)
            stream = broker.listen()
            message = await anext(stream)
            assert message.data == sent.message
            assert not message.ack()  # a function that is not async
            await stream.aclose()

    run(test)


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_a_task_that_was_not_acknowledged_comes_again_after_a_restart(tmp_path: Path, is_acknowledged: bool) -> None:
    settings: dict[str, object] = {"rocketmq.name-server": f"embedded:{tmp_path / 'store'}"}

    async def first() -> None:
        async with started(new_broker(settings)) as broker:
            await broker.kick(BrokerMessage(task_id="7", task_name="any", message=b"first", labels={}))
            stream = broker.listen()
            message = await anext(stream)
            if is_acknowledged:
                message.ack()

    async def second() -> None:
        async with started(new_broker(settings)) as broker:
            await broker.kick(BrokerMessage(task_id="8", task_name="any", message=b"second", labels={}))
            stream = broker.listen()
            found = {(await anext(stream)).data}
            if not is_acknowledged:
                found.add((await anext(stream)).data)
            assert found == ({b"second"} if is_acknowledged else {b"first", b"second"})

    run(first)
    run(second)


@pytest.mark.parametrize(
    ("delay", "milliseconds"), [("3h", 10_800_000), (2, 2_000), ("1.5", 1_500), (timedelta(minutes=1), 60_000)]
)
def test_a_task_with_a_delay_waits_in_the_broker(
    mqtemplate_applications: list[Any], mqtemplate_clock: Any, delay: object, milliseconds: int
) -> None:
    broker = new_broker()

    async def test() -> None:
        async with started(broker):
            labels = {"delay": delay}
            await broker.kick(BrokerMessage(task_id="7", task_name="shop:remind", message=b"{}", labels=labels))
            (pending,) = broker.template.pending(topic="taskiq").messages
            assert pending.deliver_ms == mqtemplate_clock.now_ms() + milliseconds
            assert pending.keys == "7"

            change = await broker.cancel("7")
            assert change.status is ScheduleChangeStatus.CANCELLED
            assert not broker.template.pending(topic="taskiq").messages

    run(test)


def test_a_delayed_task_runs_when_it_is_due_and_a_cancelled_one_does_not() -> None:
    broker = new_broker()
    ran: list[str] = []

    @broker.task
    async def note(name: str) -> None:
        ran.append(name)

    async def test() -> None:
        async with working(broker):
            cancelled = await note.kicker().with_labels(delay="1h").kiq("cancelled")
            late = await note.kicker().with_labels(delay="1h").kiq("late")
            now = await note.kiq("now")
            await broker.cancel(cancelled.task_id)
            await now.wait_result(check_interval=0.01)
            for each in (cancelled, late):
                await broker.template.async_reschedule(key=each.task_id)  # now
            await late.wait_result(check_interval=0.01)
        assert ran == ["now", "late"]

    run(test)


def test_a_delay_that_is_no_duration_is_refused() -> None:
    async def test() -> None:
        async with started(new_broker()) as broker:
            with pytest.raises(MQTemplateError, match="delay must be .*got 'soon'"):
                await broker.kick(BrokerMessage(task_id="7", task_name="any", message=b"", labels={"delay": "soon"}))

    run(test)


def test_a_broker_that_is_not_started_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"not started; call 'await broker.startup\(\)' first"):
        _ = new_broker().template


# --- schedules ----------------------------------------------------------------------------------------


def test_a_schedule_waits_in_the_broker_and_can_be_deleted(
    mqtemplate_applications: list[Any], mqtemplate_clock: Any
) -> None:
    """No scheduler runs, and it has nothing to send either."""
    broker = new_broker()
    source = MQTemplateScheduleSource(broker)
    at = datetime.fromtimestamp(mqtemplate_clock.now_ms() / 1_000, UTC) + timedelta(days=2, microseconds=300)

    @broker.task
    async def remind(order: str) -> None:
        raise AssertionError(order)

    async def test() -> None:
        async with started(broker):
            aware = await remind.schedule_by_time(source, at, "4466")
            await remind.schedule_by_time(source, at.replace(tzinfo=None), "without a zone")
            assert await source.get_schedules() == []
            pending = broker.template.pending(topic="taskiq").messages
            days_ms = 2 * 86_400_000 + 1
            assert [each.deliver_ms - mqtemplate_clock.now_ms() for each in pending] == [days_ms, days_ms]

            await aware.unschedule()
            await source.delete_schedule("unknown")
            assert len(broker.template.pending(topic="taskiq").messages) == 1

    run(test)


def test_a_scheduled_task_runs_at_its_time_with_its_arguments() -> None:
    broker = new_broker()
    source = MQTemplateScheduleSource(broker)

    @broker.task(task_name="shop:add")
    async def add(first: int, second: int) -> int:
        return first + second

    async def test() -> None:
        async with working(broker):
            at = datetime.now(UTC) + timedelta(hours=1)
            schedule = ScheduledTask(task_name="shop:add", labels={}, args=[1], kwargs={"second": 2}, time=at)
            await source.add_schedule(schedule)
            await broker.template.async_reschedule(key=schedule.schedule_id)  # now
            task = AsyncTaskiqTask(schedule.schedule_id, broker.result_backend)
            assert (await task.wait_result(check_interval=0.01)).return_value == 3

    run(test)


@pytest.mark.parametrize(("options", "kind"), [({"cron": "* * * * *"}, "cron"), ({"interval": 60}, "interval")])
def test_a_schedule_that_repeats_is_refused(options: dict[str, Any], kind: str) -> None:
    source = MQTemplateScheduleSource(new_broker())
    schedule = ScheduledTask(task_name="shop:remind", labels={}, args=[], kwargs={}, **options)

    with pytest.raises(MessageError, match=f"takes schedules for one time, and 'shop:remind' has a {kind}; give it to"):
        asyncio.run(source.add_schedule(schedule))


def test_the_scheduler_of_taskiq_accepts_the_source() -> None:
    scheduler = TaskiqScheduler(InMemoryBroker(), [MQTemplateScheduleSource(new_broker())])

    assert asyncio.run(scheduler.sources[0].get_schedules()) == []


WORKED = """
from mqtemplate_starter_taskiq import MQTemplateBroker

broker = MQTemplateBroker(settings={"rocketmq.name-server": "embedded:./data"})

@broker.task
async def remind(order: str) -> None:
    print("reminded", order, flush=True)
"""
SENT = """
import asyncio
from shop import broker, remind

async def main() -> None:
    await broker.startup()
    await remind.kiq("4466")
    await broker.shutdown()

asyncio.run(main())
"""


def test_an_idle_worker_of_taskiq_stops_by_a_signal(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(WORKED)
    assert run_python(tmp_path, "-c", SENT).returncode == 0
    worker = subprocess.Popen(
        [sys.executable, "-m", "taskiq", "worker", "shop:broker", "--workers", "1"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{PATHS}:{tmp_path}"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    guard = Timer(PATIENCE_S, end_group, [worker])  # against hanging, not a measurement
    guard.start()
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "reminded 4466\n"
        worker.terminate()
        assert worker.wait() == 0
    finally:
        guard.cancel()
        end_group(worker)
        worker.communicate()
