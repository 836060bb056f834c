"""POP listeners: acknowledgements that handlers do not wait for, and messages that are received ahead."""

from __future__ import annotations

from asyncio import sleep as virtual_sleep
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate import ConsumeMode, MessageExt, MessageRequestMode, PauseListener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import BrokerError
from mqtemplate.listener import ContainerState, message_listener
from mqtemplate.message import Message, MessageQueue
from tests.listener.conftest import App, Gate
from tests.waiting import PATIENCE_S, eventually

POP = MessageRequestMode.POP
Results = list[Any]


@pytest.fixture
def disk_app(tmp_path: Path) -> Iterator[App]:
    """On the real clock, with a store directory and ``SYNC_FLUSH``."""
    with EmbeddedBroker(tmp_path / "store") as broker:
        app = App(broker)
        yield app
        app.registry.stop()


class Acks:
    """The acknowledgements that a listener sends to its broker. They pass when `proceed` is set.

    Attributes:
        started: Number of messages of each request that has started.
    """

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proceed = Event()
        self.started: SimpleQueue[int] = SimpleQueue()
        self._ack_all = app.broker.pop.ack_all
        monkeypatch.setattr(app.broker.pop, "ack_all", self)

    def __call__(self, group: str, topic: str, receipts: Sequence[str]) -> Results:
        self.started.put(len(receipts))
        assert self.proceed.wait(PATIENCE_S)
        return self._ack_all(group, topic, receipts)

    def next_request(self) -> int:
        """Wait for the next request, and return its number of messages."""
        return self.started.get(timeout=PATIENCE_S)


class Outage:
    """The broker does not answer acknowledgements until the clock has reached a time.

    Attributes:
        tried: Seconds since the start at which each one was tried.
    """

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self._clock = app.broker.clock
        self._start_ms = self._clock.now_ms()
        self._seconds = seconds
        self._ack_all = app.broker.pop.ack_all
        self.tried: list[float] = []
        monkeypatch.setattr(app.broker.pop, "ack_all", self)

    def __call__(self, group: str, topic: str, receipts: Sequence[str]) -> Results:
        passed_s = (self._clock.now_ms() - self._start_ms) / 1_000
        self.tried += [passed_s] * len(receipts)
        if passed_s < self._seconds:
            return [BrokerError("the broker does not answer")] * len(receipts)
        return self._ack_all(group, topic, receipts)


def recorder(calls: list[tuple[str, str, int]], member: str, does: Callable[[MessageExt], Any], **options: Any) -> Any:
    """Return an async listener that notes (member, body, attempt), and then sleeps the seconds that *does* returns."""

    @message_listener("orders", "billing", id=member, request_mode=POP, **options)
    async def handle(message: MessageExt) -> None:
        calls.append((member, message.body.decode(), message.reconsume_times + 1))
        await virtual_sleep(does(message))

    return handle


# --- acknowledgements ------------------------------------------------------------------------------


def test_handlers_go_on_while_the_broker_acknowledges_and_all_that_end_meanwhile_are_one_request(
    disk_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks, gate = Acks(disk_app, monkeypatch), Gate().opened()
    container = disk_app.listen(gate.listener(request_mode=POP, consume_thread_number=1))
    disk_app.send("orders", "first")
    assert acks.next_request() == 1

    disk_app.send("orders", *map(str, range(30)))
    gate.take(31)
    eventually(lambda: container.in_flight == 31, "each has been handled, and none is acknowledged")
    acks.proceed.set()

    eventually(lambda: container.in_flight == 0, "all are acknowledged")
    requests = [acks.next_request() for _ in range(acks.started.qsize())]
    assert sum(requests) == 30
    assert len(requests) < 30
    assert disk_app.committed("billing") == 31


def test_a_stop_waits_until_the_acknowledgements_are_durable(disk_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    acks, gate = Acks(disk_app, monkeypatch), Gate().opened()
    container = disk_app.listen(gate.listener(request_mode=POP))
    disk_app.send("orders", "a")
    acks.next_request()

    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(container.stop)
        eventually(lambda: container.state is ContainerState.STOPPING, "the stop has begun")
        assert not stopping.done()
        acks.proceed.set()
        stopping.result(PATIENCE_S)

    assert (container.in_flight, disk_app.committed("billing")) == (0, 1)


def test_a_pause_waits_until_the_acknowledgements_are_durable(disk_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    acks, gate = Acks(disk_app, monkeypatch), Gate().opened()
    container = disk_app.listen(gate.listener(request_mode=POP))
    disk_app.send("orders", "a")
    acks.next_request()

    with ThreadPoolExecutor(1) as thread:
        pausing = thread.submit(container.pause)
        eventually(lambda: container.state is ContainerState.PAUSED, "the pause has begun")
        assert not pausing.done()
        acks.proceed.set()
        pausing.result(PATIENCE_S)

    assert (container.in_flight, disk_app.committed("billing")) == (0, 1)


def test_what_a_stop_has_acknowledged_does_not_come_again_after_a_restart(tmp_path: Path) -> None:
    bodies = [str(number) for number in range(200)]
    gate = Gate().opened()
    with EmbeddedBroker(tmp_path / "store") as broker:
        app = App(broker)
        app.listen(gate.listener(request_mode=POP, consume_from_where="CONSUME_FROM_FIRST_OFFSET"))
        app.send("orders", *bodies[:100])
        handled = gate.take(60)
        app.registry.stop()
    while not gate.is_empty:
        handled += gate.take()

    again = Gate().opened()
    with EmbeddedBroker(tmp_path / "store") as broker:
        app = App(broker)
        app.listen(again.listener(request_mode=POP))
        app.send("orders", *bodies[100:])
        rest = again.take(200 - len(handled))
        app.registry.stop()

    assert again.is_empty
    assert sorted(handled + rest) == sorted(bodies)


def test_an_acknowledgement_is_tried_each_second_and_logged_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, int]] = []
    outage = Outage(app, monkeypatch, seconds=3.5)
    container = app.listen(recorder(calls, "bill", lambda _: 0, invisible_duration="10s"))
    app.send("orders", "a")
    with capture_logs() as logs:
        app.advance("1h")

    assert outage.tried == [0, 1, 2, 3, 4]
    assert [log["reason"] for log in logs if log["event"] == "listener.ack_failed"] == ["the broker does not answer"]
    assert calls == [("bill", "a", 1)]
    assert (container.in_flight, app.committed("billing")) == (0, 1)


def test_an_acknowledgement_is_not_tried_after_the_invisible_time_and_the_message_comes_again(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str, int]] = []
    outage = Outage(app, monkeypatch, seconds=2.5)
    container = app.listen(recorder(calls, "bill", lambda _: 0, invisible_duration="2s"))
    app.send("orders", "a")
    with capture_logs() as logs:
        app.advance("1h")

    assert calls == [("bill", "a", 1), ("bill", "a", 2)]
    assert [log["is_handled"] for log in logs if log["event"] == "listener.message_expired"] == [True]
    assert container.renewals == (0, 1)
    assert outage.tried == [0, 1, 2, 2, 3]  # the last two are of the second delivery


def test_a_stop_without_an_answer_of_the_broker_says_how_many_messages_come_again(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str, int]] = []
    Outage(app, monkeypatch, seconds=60)
    container = app.listen(recorder(calls, "a", lambda _: 0, invisible_duration="10s"))
    app.send("orders", "1", "2")
    app.run_until_idle()
    with capture_logs() as logs:
        container.stop()

    [stopped] = [log for log in logs if log["event"] == "listener.stopped"]
    assert (stopped["log_level"], stopped["unfinished"]) == ("warning", 2)


def test_the_acknowledgement_has_the_handle_of_the_last_renewal(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    pop = app.broker.pop
    acked: list[str] = []
    renewed: list[str] = []
    ack_all, change_all = pop.ack_all, pop.change_all

    def note_acks(group: str, topic: str, receipts: Sequence[str]) -> Results:
        acked.extend(receipts)
        return ack_all(group, topic, receipts)

    def note_changes(*arguments: Any, **options: Any) -> Results:
        results: Results = change_all(*arguments, **options)
        renewed.extend(results)
        return results

    monkeypatch.setattr(pop, "ack_all", note_acks)
    monkeypatch.setattr(pop, "change_all", note_changes)
    app.listen(recorder([], "bill", lambda _: 100, invisible_duration="1m"))
    app.send("orders", "a")
    app.advance("1h")

    assert len(renewed) == 3
    assert acked == renewed[-1:]


def test_an_unexpected_error_of_a_broker_loses_no_message(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, int]] = []
    pop = app.broker.pop
    ack_all, errors = pop.ack_all, iter([ZeroDivisionError("a fault of the broker")])

    def failing(group: str, topic: str, receipts: Sequence[str]) -> Results:
        for error in errors:
            raise error
        return ack_all(group, topic, receipts)

    monkeypatch.setattr(pop, "ack_all", failing)
    container = app.listen(recorder(calls, "bill", lambda _: 0))
    app.send("orders", "a")
    with capture_logs() as logs:
        app.advance("1h")

    assert [log["messages"] for log in logs if log["event"] == "listener.report_failed"] == [1]
    assert (calls, container.in_flight, app.committed("billing")) == ([("bill", "a", 1)], 0, 1)


def test_an_error_of_logging_keeps_no_message_unsettled(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of an application may raise anything. Here two retries are refused, and both are to be reported."""
    change_all = app.broker.pop.change_all
    refused: list[str] = []

    def refusing(group: str, topic: str, receipts: Sequence[str], *arguments: Any, **options: Any) -> Results:
        if len(refused) < 2:
            refused.extend(receipts)
            return [BrokerError("the broker does not answer")] * len(receipts)
        return change_all(group, topic, receipts, *arguments, **options)

    @message_listener("orders", "billing", request_mode=POP, invisible_duration="10s")
    def handle(message: MessageExt) -> None:
        if not message.reconsume_times:
            raise ConnectionError

    def raising(*_: object) -> None:
        raise ZeroDivisionError("the log is broken")

    monkeypatch.setattr(app.broker.pop, "change_all", refusing)
    container = app.listen(handle)
    monkeypatch.setattr(container._failures, "send_back_failed", raising)
    app.send("orders", "a", "b")
    app.advance("1h")

    assert len(refused) == 2
    assert (container.in_flight, app.committed("billing")) == (0, 2)


def test_messages_of_one_key_wait_for_the_acknowledgement_and_other_keys_do_not(
    disk_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the broker refuses it, since the invisible time was over, another member handles the message again first."""
    acks, gate = Acks(disk_app, monkeypatch), Gate().opened()
    disk_app.broker.create_topic("orders", 1)
    queue = MessageQueue("orders", disk_app.broker.name, 0)
    for body in ("a1", "a2", "b1"):
        disk_app.broker.sends.send(Message("orders", body.encode(), {"__SHARDINGKEY": body[0]}), queue)
    disk_app.listen(
        gate.listener(
            request_mode=POP, consume_mode=ConsumeMode.ORDERLY, consume_from_where="CONSUME_FROM_FIRST_OFFSET"
        )
    )

    assert sorted(gate.take(2)) == ["a1", "b1"]
    assert gate.is_empty
    acks.proceed.set()
    assert gate.take(1) == ["a2"]


# --- messages ahead --------------------------------------------------------------------------------


def test_short_handlers_have_messages_ahead_and_long_ones_have_none(app: App) -> None:
    """A tenth of a second with handlers of 2 ms is 50 messages."""
    in_flight: dict[str, list[int]] = defaultdict(list)

    def listener(topic: str, seconds: float) -> Any:
        @message_listener(topic, topic, id=topic, request_mode=POP, consume_thread_number=1)
        async def handle(body: str) -> None:
            in_flight[topic].append(app.registry.container(topic).in_flight)
            await virtual_sleep(seconds)

        return handle

    app.listen(listener("short", 0.002), listener("long", 1))
    for topic in ("short", "long"):
        app.send(topic, *map(str, range(300)))
    app.advance("1h")

    assert 20 < max(in_flight["short"]) <= 1 + 50
    assert max(in_flight["long"]) == 1


def test_messages_ahead_go_to_other_members_if_the_handlers_become_slow(app: App) -> None:
    """Their attempts are not counted, and no invisible time is over."""
    calls: list[tuple[str, str, int]] = []

    def slow_from_100_on(message: MessageExt) -> float:
        return 0.002 if int(message.body) < 100 else 3_600

    app.broker.create_topic("orders", 1)
    first = app.listen(recorder(calls, "first", slow_from_100_on, consume_thread_number=1))
    app.send("orders", *map(str, range(130)))
    app.advance("500ms")
    assert first.in_flight > 1
    app.listen(recorder(calls, "other", lambda _: 0))
    app.advance("2s")

    assert first.in_flight == 1
    assert [call for call in calls if call[0] == "other"] == [("other", str(number), 1) for number in range(101, 130)]
    assert first.renewals == (0, 0)


def test_messages_ahead_are_kept_during_a_requested_pause(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str, int]] = []
    released: list[str] = []
    change_all, pauses = app.broker.pop.change_all, iter([True])

    def note_releases(group: str, topic: str, receipts: Sequence[str], *arguments: Any, counts: bool = True) -> Results:
        released.extend(() if counts else receipts)
        return change_all(group, topic, receipts, *arguments, counts=counts)

    def pausing(message: MessageExt) -> float:
        if message.body == b"150" and next(pauses, False):
            raise PauseListener("1h")
        return 0.002

    monkeypatch.setattr(app.broker.pop, "change_all", note_releases)
    app.broker.create_topic("orders", 1)
    container = app.listen(recorder(calls, "bill", pausing, consume_thread_number=1))
    app.send("orders", *map(str, range(300)))
    app.advance("30m")
    ahead = container.in_flight
    app.advance("1h")

    assert ahead > 1
    assert released == []
    assert [int(body) for _, body, _ in calls] == [*range(151), *range(150, 300)]
    assert {attempt for *_, attempt in calls} == {1}


@pytest.mark.parametrize("mode", list(ConsumeMode))
def test_a_stop_lets_others_have_the_messages_ahead_at_once(app: App, mode: ConsumeMode) -> None:
    calls: list[tuple[str, str, int]] = []
    app.broker.create_topic("orders", 1)
    queue = MessageQueue("orders", app.broker.name, 0)
    for number in range(200):
        key = {"__SHARDINGKEY": str(number % 50)}
        app.broker.sends.send(Message("orders", str(number).encode(), key), queue)
    options = {"consume_mode": mode, "consume_from_where": "CONSUME_FROM_FIRST_OFFSET"}
    first = app.listen(recorder(calls, "first", lambda _: 0.002, consume_thread_number=2, **options))
    app.advance("150ms")
    assert first.in_flight > 2
    first.stop()
    handled = len(calls)
    app.listen(recorder(calls, "other", lambda _: 0, **options))
    first.stop()
    app.run_until_idle()

    assert 50 < handled < 180
    assert sorted(int(body) for _, body, _ in calls) == list(range(200))
    assert {attempt for *_, attempt in calls} == {1}
    if mode is ConsumeMode.ORDERLY:
        of_key: dict[int, list[int]] = defaultdict(list)
        for _, body, _ in calls:
            of_key[int(body) % 50].append(int(body))
        assert all(numbers == sorted(numbers) for numbers in of_key.values())


def test_large_messages_are_not_received_ahead(app: App) -> None:
    in_flight: list[int] = []

    @message_listener("orders", "billing", id="bill", request_mode=POP, consume_thread_number=1, pull_batch_size=1)
    async def handle(body: bytes) -> None:
        in_flight.append(app.registry.container("bill").in_flight)
        await virtual_sleep(0.002)

    app.listen(handle)
    app.send("orders", *["x" * (3 << 20)] * 40)
    app.advance("1h")

    assert len(in_flight) == 40
    assert max(in_flight) <= 1 + 5  # 16 MiB
