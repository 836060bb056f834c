"""The middlewares that come with the library, and pauses of listeners."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import sleep as virtual_sleep
from collections.abc import Callable, Generator
from typing import Any

import pytest

from mqtemplate import (
    CircuitBreaker,
    ConsumeMode,
    Deduplication,
    Delivery,
    MQApplication,
    PauseListener,
    RateLimit,
    RocketMQTemplate,
    TimeLimit,
    Timing,
    message_listener,
)
from mqtemplate.calls.timing import TimeLimitError, _Call, _Interruptions
from mqtemplate.errors import ConfigurationError
from mqtemplate.testing import Harness
from tests.kit import Kit
from tests.waiting import eventually

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


def listener(is_async: bool, handle: Callable[[str], object], group: str = "billing", **attributes: Any) -> Any:
    """Return a plain or an async listener of ``orders`` that calls a function."""

    def plain(order: str) -> object:
        return handle(order)

    async def with_await(order: str) -> object:
        await virtual_sleep(0)
        return handle(order)

    return message_listener("orders", group, **attributes)(with_await if is_async else plain)


def send(template: RocketMQTemplate, *orders: str) -> None:
    for order in orders:
        template.sync_send("orders", order, hash_key="one queue, so that the order is fixed")


# --- pauses -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("mode", list(ConsumeMode))
def test_a_pause_is_no_attempt_and_the_message_is_handled_first_after_it(
    kit: Kit, is_async: bool, mode: ConsumeMode
) -> None:
    got: list[tuple[str, int]] = []
    down = [True]

    def handle(order: str) -> None:
        if down:
            down.pop()
            raise PauseListener("30s", "the bank is down")
        got.append((order, kit.harness.clock.now_ms()))

    app = kit.start(listener(is_async, handle, consume_mode=mode, consume_thread_number=1))
    start_ms = kit.harness.clock.now_ms()
    send(kit.template, "tea", "cup")
    kit.harness.advance("29999ms")
    assert got == []
    kit.harness.advance("1ms")

    assert got == [("tea", start_ms + 30_000), ("cup", start_ms + 30_000)]
    assert kit.harness.failures == []
    assert app.containers[0].is_running


def test_a_batch_is_handled_whole_after_a_pause(kit: Kit) -> None:
    got: list[list[str]] = []

    @message_listener("orders", "billing")
    def handle(orders: list[str]) -> None:
        got.append(orders)
        if len(got) == 1:
            raise PauseListener("1m")

    kit.start(handle)
    kit.template.sync_send("orders", ["tea", "cup"])
    kit.harness.advance("1m")

    assert got == [["tea", "cup"], ["tea", "cup"]]


def test_resume_ends_a_pause_and_a_pause_by_hand_goes_on(kit: Kit) -> None:
    got: list[str] = []

    def handle(order: str) -> None:
        got.append(order)
        if len(got) in (1, 2):
            raise PauseListener("1h")

    [container] = kit.start(listener(False, handle)).containers
    send(kit.template, "tea")
    kit.harness.run_until_idle()
    container.resume()
    kit.harness.run_until_idle()
    assert got == ["tea", "tea"]

    container.pause()
    kit.harness.advance("2h")
    assert got == ["tea", "tea"]
    container.resume()
    kit.harness.run_until_idle()
    assert got == ["tea", "tea", "tea"]


def test_a_duration_of_a_pause_is_checked() -> None:
    with pytest.raises(ValueError, match="PauseListener: duration must be .*got 'soon'"):
        PauseListener("soon")


@BOTH
def test_a_pause_on_the_real_clock_ends_and_does_not_keep_a_stop_waiting(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[str] = []

    def handle(order: str) -> None:
        got.append(order)
        if got.count(order) == 1:
            raise PauseListener("20ms" if order == "tea" else "1h")

    settings = {"rocketmq.name-server": "embedded:memory"}
    with MQApplication(listener(is_async, handle), settings=settings, environment={}) as app:
        send(app.template, "tea")
        eventually(lambda: got == ["tea", "tea"], "the message was handled again")
        send(app.template, "cup")
        eventually(lambda: got[2:] == ["cup"], "the listener pauses")
        eventually(lambda: caplog.text.count("listener.paused") == 2, "the pause is logged")

    assert got == ["tea", "tea", "cup"]


# --- timing -------------------------------------------------------------------------------------


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_timing_logs_each_call_and_each_send(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    timing = Timing("INFO", slow="2s")

    async def handle(order: str) -> None:
        await virtual_sleep(int(order))
        if order == "1":
            raise OSError("no")

    kit.start(message_listener("orders", "billing", id="bill", max_reconsume_times=0, middlewares=[timing])(handle))
    template = RocketMQTemplate(kit.broker, middlewares=[timing])
    for seconds in range(3):
        template.sync_send("orders:paid", str(seconds))
        kit.harness.advance("3s")

    lines = [record for record in caplog.records if record.name == "mqtemplate.middlewares"]
    events: list[Any] = [(line.levelno, {"event": line.msg.split()[0]} | vars(line)) for line in lines]
    handled = [(each["event"], each["took_ms"], each["outcome"]) for _, each in events if "listener" in each]
    assert handled == [
        ("message.handled", 0, "done"),
        ("message.handled", 1_000, "OSError"),
        ("handler.slow", 2_000, "done"),
    ]
    assert [level for level, each in events if "listener" in each] == [logging.INFO, logging.INFO, logging.WARNING]
    sent = [each for _, each in events if each["event"] == "message.sent"]
    assert [(each["topic"], each["tag"], each["verb"], each["outcome"]) for each in sent] == [
        ("orders", "paid", "send", "done")
    ] * 3


# --- de-duplication -----------------------------------------------------------------------------


@BOTH
def test_a_repeat_is_dropped_while_its_key_is_kept(kit: Kit, is_async: bool) -> None:
    got: list[str] = []
    deduplication = Deduplication(lambda message: message.keys, keep="10m")
    kit.start(listener(is_async, got.append, middlewares=[deduplication]))

    for _ in range(2):
        kit.template.sync_send("orders", "tea", keys="4466")
        kit.template.sync_send("orders", "no key")
    kit.harness.advance("9m")
    kit.template.sync_send("orders", "tea", keys="4466")
    kit.harness.run_until_idle()
    assert sorted(got) == ["no key", "no key", "tea"]

    kit.harness.advance("1m")
    kit.template.sync_send("orders", "tea", keys="4466")
    kit.harness.run_until_idle()
    assert sorted(got) == ["no key", "no key", "tea", "tea"]


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_message_that_failed_is_no_repeat(kit: Kit) -> None:
    """A retry has the same message id, by which repeats are recognised without a key."""
    got: list[str] = []

    def fail_once(order: str) -> None:
        got.append(order)
        if len(got) == 1:
            raise OSError

    kit.start(listener(False, fail_once, retry=["1s"], middlewares=[Deduplication()]))
    send(kit.template, "tea")
    kit.harness.advance("1h")

    assert got == ["tea", "tea"]


def test_a_repeat_of_a_message_that_is_being_handled_comes_later(kit: Kit) -> None:
    got: list[str] = []

    async def handle(order: str) -> None:
        await virtual_sleep(3)
        got.append(order)

    deduplication = Deduplication(lambda message: message.keys)
    kit.start(message_listener("orders", "billing", middlewares=[deduplication])(handle))
    kit.template.sync_send("orders", "tea", keys="1")
    kit.template.sync_send("orders", "tea", keys="1")
    kit.harness.advance("1m")

    assert got == ["tea"]
    assert kit.harness.failures == []


def test_repeats_in_a_batch_are_dropped_alone(kit: Kit) -> None:
    got: list[list[str]] = []

    @message_listener("orders", "billing", middlewares=[Deduplication(lambda message: message.body.decode())])
    def handle(orders: list[str]) -> None:
        got.append(orders)

    kit.start(handle)
    kit.template.sync_send("orders", ["tea", "cup", "tea"])
    kit.harness.run_until_idle()
    kit.template.sync_send("orders", ["cup", "salt"])
    kit.harness.run_until_idle()
    kit.template.sync_send("orders", ["cup", "salt"])
    kit.harness.run_until_idle()

    assert got == [["tea", "cup"], ["salt"]]


def test_the_number_of_keys_is_bounded_and_groups_do_not_share_keys(kit: Kit) -> None:
    got: list[str] = []
    deduplication = Deduplication(lambda message: message.body.decode(), max_keys=2)
    kit.start(listener(False, got.append, "one", middlewares=[deduplication]))
    send(kit.template, "a", "b", "c", "a", "c")
    kit.harness.run_until_idle()
    assert got == ["a", "b", "c", "a"]
    assert len(deduplication) == 2

    kit.start(
        listener(False, got.append, "two", consume_from_where="CONSUME_FROM_FIRST_OFFSET", middlewares=[deduplication])
    )
    kit.harness.run_until_idle()
    assert got == ["a", "b", "c", "a", "a", "b", "c", "a"]


# --- time limits --------------------------------------------------------------------------------


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_an_async_handler_is_cancelled_after_its_time(kit: Kit) -> None:
    """Where it awaits. Its message is retried."""
    events: list[str] = []

    async def handle(order: str) -> None:
        try:
            await virtual_sleep(3 if len(events) else 60)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        events.append("done")

    kit.start(message_listener("orders", "billing", retry=["1s"], middlewares=[TimeLimit("5s")])(handle))
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("5s")
    assert events == ["cancelled"]
    kit.harness.advance("1m")

    assert events == ["cancelled", "done"]
    [failure] = kit.harness.failures
    assert isinstance(failure.error, TimeLimitError)
    assert str(failure.error) == "the handler ran longer than 5s"


def test_an_async_handler_may_catch_its_cancellation_and_return(kit: Kit) -> None:
    events: list[str] = []

    async def handle(order: str) -> None:
        try:
            await virtual_sleep(60)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            events.append("caught")

    kit.start(message_listener("orders", "billing", middlewares=[TimeLimit("5s")])(handle))
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("1m")

    assert events == ["caught"]


def test_a_plain_handler_is_interrupted_after_its_time() -> None:
    """Between two steps of Python, in its thread: possibly before its first one, so a middleware looks."""
    errors: list[BaseException] = []

    class Seen:
        def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
            try:
                yield delivery
            except BaseException as error:
                errors.append(error)
                raise

    @message_listener("orders", "billing", max_reconsume_times=0, middlewares=[Seen(), TimeLimit("30ms")])
    def handle(order: str) -> None:
        while order:
            pass

    with MQApplication(handle, settings={"rocketmq.name-server": "embedded:memory"}, environment={}) as app:
        app.template.sync_send("orders", "endless")
        eventually(lambda: errors, "the handler was interrupted")

    assert [(type(error), str(error)) for error in errors] == [
        (TimeLimitError, "the handler ran longer than 30ms"),
    ]


def test_a_plain_handler_in_time_runs_to_its_end() -> None:
    ended = threading.Event()

    @message_listener("orders", "billing", middlewares=[TimeLimit("1h")])
    def handle(order: str) -> None:
        ended.set()

    with MQApplication(handle, settings={"rocketmq.name-server": "embedded:memory"}, environment={}) as app:
        app.template.sync_send("orders", "tea")
        eventually(ended.is_set, "it ran to its end")


# --- rate limits --------------------------------------------------------------------------------


@BOTH
def test_a_rate_limit_spreads_messages_over_time(kit: Kit, is_async: bool) -> None:
    """Two at once, then one each 100 ms; no thread waits, and nothing counts as a failure."""
    start_ms = kit.harness.clock.now_ms()
    got: list[int] = []
    limit = RateLimit(10, "1s", burst=2)
    kit.start(listener(is_async, lambda _: got.append(kit.harness.clock.now_ms() - start_ms), middlewares=[limit]))

    send(kit.template, *"abcde")
    kit.harness.advance("1m")

    assert got == [0, 0, 100, 200, 300]
    assert kit.harness.failures == []


def test_a_batch_larger_than_the_bucket_waits_for_a_full_one_and_leaves_a_debt(kit: Kit) -> None:
    start_ms = kit.harness.clock.now_ms()
    got: list[tuple[int, int]] = []

    @message_listener("orders", "billing", middlewares=[RateLimit(2, "1s")])
    def handle(orders: list[str]) -> None:
        got.append((len(orders), kit.harness.clock.now_ms() - start_ms))

    kit.start(handle)
    kit.template.sync_send("orders", ["1", "2", "3", "4"])
    kit.harness.run_until_idle()
    kit.template.sync_send("orders", ["5"])
    kit.harness.advance("1m")

    assert got == [(4, 0), (1, 1_500)]


# --- circuit breakers ---------------------------------------------------------------------------


class Bank:
    """Dependency that can be down."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self.is_down = True
        self.clock_ms = clock_ms
        self.start_ms = clock_ms()
        self.calls: list[tuple[str, int]] = []
        self.done: list[str] = []

    def pay(self, order: str) -> None:
        self.calls.append((order, self.clock_ms() - self.start_ms))
        if self.is_down:
            raise ConnectionError("bank is down")
        self.done.append(order)


@pytest.fixture
def bank(mqtemplate_harness: Harness) -> Bank:
    return Bank(mqtemplate_harness.clock.now_ms)


@BOTH
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_breaker_pauses_the_listener_while_its_dependency_is_down(kit: Kit, is_async: bool, bank: Bank) -> None:
    """After three failures one message is tried each minute. The outage uses up no retries but those three calls."""
    breaker = CircuitBreaker(3, "1m", errors=OSError, name="bank")
    kit.start(listener(is_async, bank.pay, retry=["1h"], consume_thread_number=1, middlewares=[breaker]))
    send(kit.template, *"abcde")
    kit.harness.advance("150s")

    assert bank.calls == [("a", 0), ("b", 0), ("c", 0), ("c", 60_000), ("c", 120_000)]
    assert breaker.is_open
    bank.is_down = False
    kit.harness.advance("30s")
    assert bank.done == ["c", "d", "e"]
    assert not breaker.is_open
    kit.harness.advance("1h")
    assert sorted(bank.done) == ["a", "b", "c", "d", "e"]
    assert [type(failure.error) for failure in kit.harness.failures] == [ConnectionError] * 2


def test_a_breaker_pauses_all_its_listeners_and_one_success_resumes_them(kit: Kit, bank: Bank) -> None:
    breaker = CircuitBreaker(1, "1m")
    kit.start(
        listener(False, bank.pay, "one", id="one", middlewares=[breaker]),
        listener(False, bank.pay, "two", id="two", middlewares=[breaker]),
    )
    send(kit.template, "a")
    kit.harness.advance("59s")
    assert bank.calls == [("a", 0)]

    bank.is_down = False
    kit.harness.advance("1s")
    assert bank.done == ["a", "a"]


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_other_errors_do_not_open_a_breaker(kit: Kit) -> None:
    breaker = CircuitBreaker(2, errors=(OSError,))
    got: list[str] = []

    def handle(order: str) -> None:
        got.append(order)
        raise OSError if order == "down" else ValueError

    kit.start(listener(False, handle, max_reconsume_times=0, middlewares=[breaker]))
    send(kit.template, "down", "invalid", "invalid", "invalid")
    kit.harness.run_until_idle()
    assert not breaker.is_open

    send(kit.template, "down")
    kit.harness.run_until_idle()
    assert breaker.is_open


def test_a_success_ends_the_row_of_failures(kit: Kit, bank: Bank) -> None:
    breaker = CircuitBreaker(2)
    kit.harness.raise_handler_errors = False
    kit.start(listener(False, bank.pay, max_reconsume_times=0, middlewares=[breaker]))
    for is_down in (True, False, True, False):
        bank.is_down = is_down
        send(kit.template, "a")
        kit.harness.run_until_idle()

    assert not breaker.is_open


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "text"),
    [
        (lambda: Timing("LOUD"), "Timing: level must be one of DEBUG, INFO, WARNING, got 'LOUD'"),
        (lambda: Timing(slow="soon"), "Timing: slow must be .*got 'soon'"),
        (lambda: Deduplication(max_keys=0), "Deduplication: max_keys must be a whole number, 1 or more, got 0"),
        (lambda: Deduplication(keep="soon"), "Deduplication: keep must be .*got 'soon'"),
        (lambda: TimeLimit("soon"), "TimeLimit: limit must be .*got 'soon'"),
        (lambda: TimeLimit(0), "TimeLimit: limit must be 1 ms or longer, got 0"),
        (lambda: RateLimit(0), "RateLimit: count must be a whole number, 1 or more, got 0"),
        (lambda: RateLimit(1, burst=True), "RateLimit: burst must be a whole number, 1 or more, got True"),
        (lambda: RateLimit(1, "soon"), "RateLimit: per must be .*got 'soon'"),
        (lambda: RateLimit(1, 0), "RateLimit: per must be 1 ms or longer, got 0"),
        (lambda: CircuitBreaker(0), "CircuitBreaker: failures must be a whole number, 1 or more, got 0"),
        (lambda: CircuitBreaker(1, "soon"), "CircuitBreaker: pause must be .*got 'soon'"),
        (lambda: CircuitBreaker(1, errors="OSError"), "CircuitBreaker: errors must be classes of exceptions, got"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_that_is_not_allowed_is_refused(create: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        create()


def test_calls_are_interrupted_in_their_order_and_finished_ones_never() -> None:
    """With none left the thread that watches them ends."""
    calls, first, second = _Interruptions(10), _Call(), _Call()
    calls._is_watched = True  # this test is the thread
    calls.start(first)
    calls.start(second)
    calls.finish(first)

    assert calls._interrupt_due(second.due - 3) == 3
    calls.finish(second)
    assert calls._interrupt_due(second.due) is None
    assert [call for call in (first, second) if call.is_interrupted] == []
    assert calls._is_watched is False
