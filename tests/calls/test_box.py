"""The middlewares that come with the library, and pauses of listeners."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import sleep as virtual_sleep
from collections.abc import Generator
from typing import Any

import pytest

from mqtemplate import (
    Deduplication,
    Delivery,
    PauseListener,
    RocketMQTemplate,
    TimeLimit,
    Timing,
    message_listener,
)
from mqtemplate.calls.timing import TimeLimitError, _Call, _Interruptions
from tests.kit import Kit, application, both_kinds, handler_of
from tests.waiting import eventually


def send(template: RocketMQTemplate, *orders: str) -> None:
    for order in orders:
        template.sync_send("orders", order, hash_key="one queue, so that the order is fixed")


# --- pauses -------------------------------------------------------------------------------------


@both_kinds
def test_a_pause_on_the_real_clock_ends_and_does_not_keep_a_stop_waiting(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[str] = []

    def handle(order: str) -> None:
        got.append(order)
        if got.count(order) == 1:
            raise PauseListener("20ms" if order == "tea" else "1h")

    listener = message_listener("orders", "billing")(handler_of(handle, is_async))
    with application(listener, clock=None) as app:
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

    with application(handle, clock=None) as app:
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

    with application(handle, clock=None) as app:
        app.template.sync_send("orders", "tea")
        eventually(ended.is_set, "it ran to its end")


# --- arguments ----------------------------------------------------------------------------------


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
