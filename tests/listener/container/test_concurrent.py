"""CONCURRENTLY on a virtual clock: which messages are handled, and what happens to those that fail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import Consumer, MessageModel
from mqtemplate.errors import BrokerError
from mqtemplate.listener import BatchFailure, ConsumeStatus, current_group, current_message, message_listener
from mqtemplate.message import Message, MessageExt
from mqtemplate.record.dead_letter import iso_time

if TYPE_CHECKING:
    from tests.listener.conftest import App

SECOND = 1_000
MINUTE = 60 * SECOND


@pytest.mark.feature("C2", "B15")
def test_a_decorated_class_receives_its_messages(app: App) -> None:
    received: list[str] = []

    @message_listener(topic="schedule-message-topic", consumer_group="schedule-consumer-group")
    class ScheduleListener:
        def on_message(self, message: str) -> None:
            received.append(message)

    app.listen(ScheduleListener())
    app.send("schedule-message-topic", "one", "two")
    app.run_until_idle()

    assert received == ["one", "two"]
    assert app.committed("schedule-consumer-group", "schedule-message-topic") == 2


def test_only_the_selected_tags_arrive(app: App) -> None:
    received: list[str | None] = []

    @message_listener(topic="orders", consumer_group="billing", selector_expression="paid || refunded")
    def bill(message: MessageExt) -> None:
        received.append(message.tags)

    app.listen(bill)
    for tag in ("paid", "new", "refunded", None):
        app.send("orders", "x", tag=tag)
    app.run_until_idle()

    assert received == ["paid", "refunded"]
    assert app.committed("billing") == 4


def test_a_listener_of_several_topics_receives_messages_of_all_of_them(app: App) -> None:
    received: list[str] = []

    @message_listener(topic=["orders", "refunds"], consumer_group="billing")
    def bill(message: MessageExt) -> None:
        received.append(message.topic)

    app.listen(bill)
    app.send("orders", "x")
    app.send("refunds", "y")
    app.run_until_idle()

    assert sorted(received) == ["orders", "refunds"]


@pytest.mark.feature("F1")
def test_a_delayed_message_is_an_ordinary_message_for_its_listener(app: App) -> None:
    """The listener needs no setting for it."""
    received: list[tuple[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        received.append((message, app.broker.clock.now_ms()))

    app.listen(bill)
    sent_ms = app.broker.clock.now_ms()

    app.broker.sends.send(Message("orders", b"later", {"DELAY": "3"}))
    app.advance(MINUTE)

    assert received == [("later", sent_ms + 10 * SECOND)]


@pytest.mark.feature("U19")
def test_a_failed_message_is_redelivered_at_increasing_levels_and_counts_its_retries(app: App) -> None:
    """10 s, 30 s, 1 m: the broker's levels from 3 on. The other messages are handled at once."""
    start_ms = app.broker.clock.now_ms()
    tries: list[tuple[int, int]] = []
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str, message: MessageExt) -> None:
        if body == "bad":
            tries.append((message.reconsume_times, (app.broker.clock.now_ms() - start_ms) // SECOND))
            assert message.topic == "orders"
            if message.reconsume_times < 3:
                raise RuntimeError("not today")
        received.append(body)

    app.listen(bill)
    app.send("orders", "before", "bad", "after")
    app.run_until_idle()
    assert received == ["before", "after"]
    assert app.committed("billing") == 3

    app.advance(5 * MINUTE)

    assert tries == [(0, 0), (1, 10), (2, 40), (3, 100)]
    assert received == ["before", "after", "bad"]
    assert app.committed("billing", "%RETRY%billing") == 3


def test_after_the_last_retry_a_message_is_a_dead_letter(app: App) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=2)
    def bill(message: MessageExt) -> None:
        tries.append(message.reconsume_times)
        raise RuntimeError("never")

    app.listen(bill)
    app.send("orders", "bad")
    app.advance(60 * MINUTE)

    assert tries == [0, 1, 2]
    assert app.bodies("%DLQ%billing") == ["bad"]


def test_without_a_limit_of_its_own_a_message_is_retried_sixteen_times(app: App) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: MessageExt) -> None:
        tries.append(message.reconsume_times)
        raise RuntimeError("never")

    app.listen(bill)
    app.send("orders", "bad")
    app.advance(24 * 60 * MINUTE)

    assert tries == list(range(17))
    assert app.bodies("%DLQ%billing") == ["bad"]


@pytest.mark.parametrize(("level", "seconds"), [(1, 1), (2, 5)])
def test_with_a_fixed_level_all_retries_have_that_delay(app: App, level: int, seconds: int) -> None:
    start_ms = app.broker.clock.now_ms()
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", delay_level_when_next_consume=level)
    def bill(message: MessageExt) -> None:
        tries.append((app.broker.clock.now_ms() - start_ms) // SECOND)
        if message.reconsume_times < 2:
            raise RuntimeError("not today")

    app.listen(bill)
    app.send("orders", "bad")
    app.advance(MINUTE)

    assert tries == [0, seconds, 2 * seconds]


def test_with_level_minus_one_a_failed_message_goes_to_the_dead_letters_at_once(app: App) -> None:
    @message_listener(topic="orders", consumer_group="billing", delay_level_when_next_consume=-1)
    def bill(message: str) -> None:
        raise RuntimeError("never")

    app.listen(bill)
    app.send("orders", "bad")
    app.run_until_idle()

    assert app.bodies("%DLQ%billing") == ["bad"]


def test_a_handler_can_request_redelivery_without_raising(app: App) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: MessageExt) -> ConsumeStatus | None:
        tries.append(message.reconsume_times)
        return ConsumeStatus.RECONSUME_LATER if message.reconsume_times == 0 else None

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "x")
        app.advance(MINUTE)

    assert tries == [0, 1]
    assert [event["log_level"] for event in logs if event["event"] == "listener.reconsume_later"] == ["info"]
    assert not [event for event in logs if event["event"] == "listener.failed"]


@pytest.mark.feature("U19", "C8")
def test_a_failure_is_one_structured_error_with_its_stack(app: App) -> None:
    """The event names the message, the handler, the stack and the next step."""

    @message_listener(topic="orders", consumer_group="billing", id="bill")
    def bill(message: str) -> None:
        raise LookupError("no such customer")

    with capture_logs() as logs:
        app.listen(bill)
        [sent] = app.send("orders", "bad", tag="paid", queue_id=1)
        app.run_until_idle()

    [event] = [event for event in logs if event["event"] == "listener.failed"]
    assert isinstance(event.pop("exc_info"), LookupError)
    assert event == {
        "event": "listener.failed",
        "log_level": "error",
        "listener": "bill",
        "group": "billing",
        "topic": "orders",
        "tag": "paid",
        "msg_id": sent.msg_id,
        "queue": 1,
        "offset": 0,
        "reconsume_times": 0,
        "error": "LookupError: no such customer",
        "next_step": "redelivery",
        "attempt": 1,
        "attempts": 17,
        "retry_in_ms": 10_000,
        "retry_at": iso_time(app.broker.clock.now_ms() + 10_000),
    }


def test_an_unreadable_body_fails_only_its_own_message(app: App) -> None:
    received: list[dict[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(order: dict[str, int]) -> None:
        received.append(order)

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "no json", '{"id": 1}')
        app.run_until_idle()

    assert received == [{"id": 1}]
    [event] = [event for event in logs if event["event"] == "listener.failed"]
    assert event["error"].startswith("ConversionError: the body is no ")
    assert "exc_info" not in event


def test_sys_exit_in_a_handler_fails_only_its_message(app: App) -> None:
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        if message == "bad":
            raise SystemExit(1)
        received.append(message)

    app.listen(bill)
    app.send("orders", "bad", "good")
    app.run_until_idle()

    assert received == ["good"]


def test_a_message_that_the_broker_does_not_take_back_is_retried_in_the_container(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither lost nor committed. It is handled again after 5 s, with reconsume_times one higher."""
    start_ms = app.broker.clock.now_ms()
    tries: list[tuple[int, int]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: MessageExt) -> None:
        tries.append((message.reconsume_times, app.broker.clock.now_ms() - start_ms))
        if message.reconsume_times == 0:
            raise RuntimeError("not today")

    container = app.listen(bill)
    consumer: Consumer = container.member.consumer

    def full(message: MessageExt, delay_level: int = 0) -> None:
        raise BrokerError("the disk is full")

    monkeypatch.setattr(consumer, "send_back", full)
    with capture_logs() as logs:
        app.send("orders", "x")
        app.run_until_idle()
        assert app.committed("billing") in (None, 0)
        app.advance(MINUTE)

    assert tries == [(0, 0), (1, 5 * SECOND)]
    assert app.committed("billing") == 1
    assert [event["retry_in_ms"] for event in logs if event["event"] == "listener.send_back_failed"] == [5_000]


def test_a_failed_broadcast_message_is_dropped_and_reported(app: App) -> None:
    """As RocketMQ does: a retry topic belongs to the whole group, not to one member."""
    tries: list[str] = []

    @message_listener(topic="orders", consumer_group="caches", message_model=MessageModel.BROADCASTING)
    def refresh(message: str) -> None:
        tries.append(message)
        raise RuntimeError("never")

    with capture_logs() as logs:
        app.listen(refresh)
        app.send("orders", "x", "y")
        app.advance(60 * MINUTE)

    assert tries == ["x", "y"]
    assert [event["next_step"] for event in logs if event["event"] == "listener.failed"] == ["dropped", "dropped"]


def test_a_handler_can_be_a_coroutine_function(app: App) -> None:
    """The current message is set inside of it, too."""
    received: list[tuple[str, str | None]] = []

    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        await asyncio.to_thread(lambda: None)
        current = current_message()
        received.append((body, current and current.topic))
        if body == "bad":
            raise RuntimeError("not today")

    app.listen(bill)
    app.send("orders", "bad", "good")
    app.run_until_idle()

    assert received == [("bad", "orders"), ("good", "orders")]


def test_a_coroutine_handler_runs_when_a_running_loop_moves_the_clock(app: App) -> None:
    """An async test moves the clock just as a plain one does."""
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        await asyncio.to_thread(lambda: None)
        received.append(body)

    async def test() -> None:
        app.send("orders", "x")
        app.run_until_idle()

    app.listen(bill)
    asyncio.run(test())

    assert received == ["x"]


def test_the_current_message_is_set_only_while_it_is_handled(app: App) -> None:
    seen: list[tuple[str | None, str | None]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str) -> None:
        message = current_message()
        seen.append((current_group(), message and message.body.decode()))

    app.listen(bill)
    app.send("orders", "x")
    app.run_until_idle()

    assert seen == [("billing", "x")]
    assert (current_group(), current_message()) == (None, None)


def test_a_result_without_meaning_is_logged_once(app: App) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str):  # type: ignore[no-untyped-def]
        return len(body)

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "x", "y")
        app.run_until_idle()

    assert [event["result"] for event in logs if event["event"] == "listener.result_ignored"] == ["1"]
    assert app.committed("billing") == 2


# --- batches ------------------------------------------------------------------------------------------


@pytest.mark.feature("U13")
def test_a_batch_handler_gets_many_messages_in_one_call(app: App) -> None:
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_message_batch_max_size=3)
    def bill(bodies: list[str]) -> None:
        batches.append(bodies)

    app.listen(bill)
    app.send("orders", *"abcdefgh")
    app.run_until_idle()

    assert batches == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]]
    assert app.committed("billing") == 8


@pytest.mark.feature("X8")
@pytest.mark.parametrize("how", ["returned", "raised"])
def test_only_the_failed_messages_of_a_batch_are_redelivered(app: App, how: str) -> None:
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(bodies: list[str]) -> list[int]:
        batches.append(bodies)
        failed = [index for index, body in enumerate(bodies) if body in "bd" and len(batches) == 1]
        if failed and how == "raised":
            raise BatchFailure(failed, "two customers are unknown")
        return failed

    app.listen(bill)
    app.send("orders", *"abcde")
    app.run_until_idle()
    assert batches == [["a", "b", "c", "d", "e"]]
    assert app.committed("billing") == 5

    app.advance(MINUTE)

    assert batches[1:] == [["b", "d"]]


def test_a_batch_handler_that_raises_gets_the_whole_batch_again(app: App) -> None:
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(bodies: list[str]) -> None:
        batches.append(bodies)
        if len(batches) == 1:
            raise RuntimeError("not today")

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "a", "b")
        app.advance(MINUTE)

    assert batches == [["a", "b"], ["a", "b"]]
    [event] = [event for event in logs if event["event"] == "listener.failed"]
    assert (event["count"], len(event["msg_ids"])) == (2, 2)


def test_one_unreadable_body_does_not_fail_its_batch(app: App) -> None:
    batches: list[list[dict[str, int]]] = []

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    def bill(orders: list[dict[str, int]]) -> list[int]:
        batches.append(orders)
        return [1]

    app.listen(bill)
    app.send("orders", "no json", '{"id": 1}', '{"id": 2}')
    app.run_until_idle()

    assert batches == [[{"id": 1}, {"id": 2}]]
    assert app.bodies("%DLQ%billing") == ["no json", '{"id": 2}']


def test_an_index_outside_of_the_batch_fails_the_whole_batch(app: App) -> None:
    """The meaning is unclear, so no message may count as done."""

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    def bill(bodies: list[str]) -> list[int]:
        return [7]

    app.listen(bill)
    app.send("orders", "a", "b")
    app.run_until_idle()

    assert app.bodies("%DLQ%billing") == ["a", "b"]


def test_an_async_batch_handler_returns_indices_too(app: App) -> None:
    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    async def bill(bodies: list[str]) -> list[int]:
        return [0]

    app.listen(bill)
    app.send("orders", "a", "b")
    app.run_until_idle()

    assert app.bodies("%DLQ%billing") == ["a"]


def test_a_handler_of_single_messages_fails_each_message_alone(app: App) -> None:
    """rocketmq-spring redelivers the whole batch if one message of it fails. Here only that one is redelivered."""
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_message_batch_max_size=3, max_reconsume_times=0)
    def bill(body: str) -> None:
        received.append(body)
        if body == "b":
            raise RuntimeError("never")

    app.listen(bill)
    app.send("orders", "a", "b", "c")
    app.run_until_idle()

    assert received == ["a", "b", "c"]
    assert app.bodies("%DLQ%billing") == ["b"]
