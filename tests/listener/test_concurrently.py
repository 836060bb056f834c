"""CONCURRENTLY on a virtual clock: who gets what, and what becomes of failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import Consumer, MessageModel
from mqtemplate.errors import BrokerError, ConversionError
from mqtemplate.listener import BatchFailure, ConsumeStatus, current_group, current_message, message_listener
from mqtemplate.message import Message, MessageExt

if TYPE_CHECKING:
    from tests.listener.conftest import World

SECOND = 1_000
MINUTE = 60 * SECOND


def test_a_class_with_the_decorator_hears_its_messages_without_more_ado(world: World) -> None:
    """C2, B15."""
    heard: list[str] = []

    @message_listener(topic="schedule-message-topic", consumer_group="schedule-consumer-group")
    class ScheduleListener:
        def on_message(self, message: str) -> None:
            heard.append(message)

    world.listen(ScheduleListener())
    world.send("schedule-message-topic", "one", "two")
    world.confirm()

    assert heard == ["one", "two"]
    assert world.committed("schedule-consumer-group", "schedule-message-topic") == 2


def test_only_the_selected_tags_arrive(world: World) -> None:
    heard: list[str | None] = []

    @message_listener(topic="orders", consumer_group="billing", selector_expression="paid || refunded")
    def bill(message: MessageExt) -> None:
        heard.append(message.tags)

    world.listen(bill)
    for tag in ("paid", "new", "refunded", None):
        world.send("orders", "x", tag=tag)
    world.confirm()

    assert heard == ["paid", "refunded"]
    assert world.committed("billing") == 4


def test_a_listener_of_several_topics_hears_all_of_them(world: World) -> None:
    heard: list[str] = []

    @message_listener(topic=["orders", "refunds"], consumer_group="billing")
    def bill(message: MessageExt) -> None:
        heard.append(message.topic)

    world.listen(bill)
    world.send("orders", "x")
    world.send("refunds", "y")
    world.confirm()

    assert sorted(heard) == ["orders", "refunds"]


@pytest.mark.feature("F1")
def test_a_delayed_message_is_ordinary_to_its_listener(world: World) -> None:
    """Only the sender knows of the delay."""
    heard: list[tuple[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        heard.append((message, world.broker.clock.now_ms()))

    world.listen(bill)
    sent_ms = world.broker.clock.now_ms()

    world.broker.send(Message("orders", b"later", {"DELAY": "3"}))
    world.advance(MINUTE)

    assert heard == [("later", sent_ms + 10 * SECOND)]


@pytest.mark.feature("U19")
def test_a_message_that_failed_comes_again_later_and_knows_how_often_it_came(world: World) -> None:
    """10 s, 30 s, 1 m: the broker's ladder from level 3 on; the other messages do not wait for it."""
    start_ms = world.broker.clock.now_ms()
    tries: list[tuple[int, int]] = []
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str, message: MessageExt) -> None:
        if body == "bad":
            tries.append((message.reconsume_times, (world.broker.clock.now_ms() - start_ms) // SECOND))
            assert message.topic == "orders"
            if message.reconsume_times < 3:
                raise RuntimeError("not today")
        heard.append(body)

    world.listen(bill)
    world.send("orders", "before", "bad", "after")
    world.confirm()
    assert heard == ["before", "after"]
    assert world.committed("billing") == 3

    world.advance(5 * MINUTE)

    assert tries == [(0, 0), (1, 10), (2, 40), (3, 100)]
    assert heard == ["before", "after", "bad"]
    assert world.committed("billing", "%RETRY%billing") == 3


def test_after_the_last_retry_a_message_is_a_dead_letter(world: World) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=2)
    def bill(message: MessageExt) -> None:
        tries.append(message.reconsume_times)
        raise RuntimeError("never")

    world.listen(bill)
    world.send("orders", "bad")
    world.advance(60 * MINUTE)

    assert tries == [0, 1, 2]
    assert world.bodies("%DLQ%billing") == ["bad"]


def test_without_a_limit_of_its_own_a_message_is_retried_sixteen_times(world: World) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: MessageExt) -> None:
        tries.append(message.reconsume_times)
        raise RuntimeError("never")

    world.listen(bill)
    world.send("orders", "bad")
    world.advance(24 * 60 * MINUTE)

    assert tries == list(range(17))
    assert world.bodies("%DLQ%billing") == ["bad"]


@pytest.mark.parametrize(("level", "seconds"), [(1, 1), (2, 5)])
def test_a_fixed_level_paces_all_retries(world: World, level: int, seconds: int) -> None:
    start_ms = world.broker.clock.now_ms()
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", delay_level_when_next_consume=level)
    def bill(message: MessageExt) -> None:
        tries.append((world.broker.clock.now_ms() - start_ms) // SECOND)
        if message.reconsume_times < 2:
            raise RuntimeError("not today")

    world.listen(bill)
    world.send("orders", "bad")
    world.advance(MINUTE)

    assert tries == [0, seconds, 2 * seconds]


def test_minus_one_buries_a_message_at_its_first_failure(world: World) -> None:
    @message_listener(topic="orders", consumer_group="billing", delay_level_when_next_consume=-1)
    def bill(message: str) -> None:
        raise RuntimeError("never")

    world.listen(bill)
    world.send("orders", "bad")
    world.confirm()

    assert world.bodies("%DLQ%billing") == ["bad"]


def test_a_handler_may_ask_for_a_message_again_without_raising(world: World) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: MessageExt) -> ConsumeStatus | None:
        tries.append(message.reconsume_times)
        return ConsumeStatus.RECONSUME_LATER if message.reconsume_times == 0 else None

    with capture_logs() as logs:
        world.listen(bill)
        world.send("orders", "x")
        world.advance(MINUTE)

    assert tries == [0, 1]
    assert [event["log_level"] for event in logs if event["event"] == "listener.reconsume_later"] == ["info"]
    assert not [event for event in logs if event["event"] == "listener.failed"]


@pytest.mark.feature("U19", "C8")
def test_a_failure_is_one_structured_error_with_its_stack(world: World) -> None:
    """Which message, which handler, where it broke, what happens now."""

    @message_listener(topic="orders", consumer_group="billing", id="bill")
    def bill(message: str) -> None:
        raise LookupError("no such customer")

    with capture_logs() as logs:
        world.listen(bill)
        [sent] = world.send("orders", "bad", tag="paid", queue_id=1)
        world.confirm()

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
    }


def test_a_body_that_cannot_be_read_is_a_failure_of_that_message_only(world: World) -> None:
    heard: list[dict[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(order: dict[str, int]) -> None:
        heard.append(order)

    with capture_logs() as logs:
        world.listen(bill)
        world.send("orders", "no json", '{"id": 1}')
        world.confirm()

    assert heard == [{"id": 1}]
    [event] = [event for event in logs if event["event"] == "listener.failed"]
    assert isinstance(event["exc_info"], ConversionError)


def test_sys_exit_in_a_handler_is_a_failure_like_others(world: World) -> None:
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        if message == "bad":
            raise SystemExit(1)
        heard.append(message)

    world.listen(bill)
    world.send("orders", "bad", "good")
    world.confirm()

    assert heard == ["good"]


def test_a_message_that_the_broker_does_not_take_back_is_tried_again_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither lost nor committed: it is handled again after 5 s, one higher in reconsume_times."""
    start_ms = world.broker.clock.now_ms()
    tries: list[tuple[int, int]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: MessageExt) -> None:
        tries.append((message.reconsume_times, world.broker.clock.now_ms() - start_ms))
        if message.reconsume_times == 0:
            raise RuntimeError("not today")

    container = world.listen(bill)
    consumer: Consumer = container._consumer

    def full(message: MessageExt, delay_level: int = 0) -> None:
        raise BrokerError("the disk is full")

    monkeypatch.setattr(consumer, "send_back", full)
    with capture_logs() as logs:
        world.send("orders", "x")
        world.confirm()
        assert world.committed("billing") in (None, 0)
        world.advance(MINUTE)

    assert tries == [(0, 0), (1, 5 * SECOND)]
    assert world.committed("billing") == 1
    assert [event["retry_in_ms"] for event in logs if event["event"] == "listener.send_back_failed"] == [5_000]


def test_a_broadcast_message_that_failed_is_dropped_and_reported(world: World) -> None:
    """As RocketMQ does: what every member gets has no one retry topic."""
    tries: list[str] = []

    @message_listener(topic="orders", consumer_group="caches", message_model=MessageModel.BROADCASTING)
    def refresh(message: str) -> None:
        tries.append(message)
        raise RuntimeError("never")

    with capture_logs() as logs:
        world.listen(refresh)
        world.send("orders", "x", "y")
        world.advance(60 * MINUTE)

    assert tries == ["x", "y"]
    assert [event["next_step"] for event in logs if event["event"] == "listener.failed"] == ["dropped", "dropped"]


def test_handlers_may_be_coroutines(world: World) -> None:
    """Features 2.7; the current message is known inside of them, too."""
    heard: list[tuple[str, str | None]] = []

    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        await asyncio.to_thread(lambda: None)
        current = current_message()
        heard.append((body, current and current.topic))
        if body == "bad":
            raise RuntimeError("not today")

    world.listen(bill)
    world.send("orders", "bad", "good")
    world.confirm()

    assert heard == [("bad", "orders"), ("good", "orders")]


def test_a_coroutine_can_be_driven_from_within_a_running_loop(world: World) -> None:
    """An async test moves the clock just as a plain one does."""
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        await asyncio.to_thread(lambda: None)
        heard.append(body)

    async def test() -> None:
        world.send("orders", "x")
        world.confirm()

    world.listen(bill)
    asyncio.run(test())

    assert heard == ["x"]


def test_the_current_message_is_known_while_it_is_handled_and_not_after(world: World) -> None:
    seen: list[tuple[str | None, str | None]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str) -> None:
        message = current_message()
        seen.append((current_group(), message and message.body.decode()))

    world.listen(bill)
    world.send("orders", "x")
    world.confirm()

    assert seen == [("billing", "x")]
    assert (current_group(), current_message()) == (None, None)


def test_an_answer_that_means_nothing_is_warned_of_once(world: World) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str):  # type: ignore[no-untyped-def]
        return len(body)

    with capture_logs() as logs:
        world.listen(bill)
        world.send("orders", "x", "y")
        world.confirm()

    assert [event["result"] for event in logs if event["event"] == "listener.result_ignored"] == ["1"]
    assert world.committed("billing") == 2


# --- batches ------------------------------------------------------------------------------------------


def test_a_batch_handler_gets_many_messages_in_one_call(world: World) -> None:
    """U13."""
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_message_batch_max_size=3)
    def bill(bodies: list[str]) -> None:
        batches.append(bodies)

    world.listen(bill)
    world.send("orders", *"abcdefgh")
    world.confirm()

    assert batches == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]]
    assert world.committed("billing") == 8


@pytest.mark.feature("X8")
@pytest.mark.parametrize("how", ["returned", "raised"])
def test_of_a_batch_only_the_failed_messages_come_again(world: World, how: str) -> None:
    """Fail item k of n, only k returns."""
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(bodies: list[str]) -> list[int]:
        batches.append(bodies)
        failed = [index for index, body in enumerate(bodies) if body in "bd" and len(batches) == 1]
        if failed and how == "raised":
            raise BatchFailure(failed, "two customers are unknown")
        return failed

    world.listen(bill)
    world.send("orders", *"abcde")
    world.confirm()
    assert batches == [["a", "b", "c", "d", "e"]]
    assert world.committed("billing") == 5

    world.advance(MINUTE)

    assert batches[1:] == [["b", "d"]]


def test_a_batch_handler_that_raises_gets_the_whole_batch_again(world: World) -> None:
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(bodies: list[str]) -> None:
        batches.append(bodies)
        if len(batches) == 1:
            raise RuntimeError("not today")

    with capture_logs() as logs:
        world.listen(bill)
        world.send("orders", "a", "b")
        world.advance(MINUTE)

    assert batches == [["a", "b"], ["a", "b"]]
    [event] = [event for event in logs if event["event"] == "listener.failed"]
    assert (event["count"], len(event["msg_ids"])) == (2, 2)


def test_one_unreadable_body_does_not_spoil_its_batch(world: World) -> None:
    batches: list[list[dict[str, int]]] = []

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    def bill(orders: list[dict[str, int]]) -> list[int]:
        batches.append(orders)
        return [1]

    world.listen(bill)
    world.send("orders", "no json", '{"id": 1}', '{"id": 2}')
    world.confirm()

    assert batches == [[{"id": 1}, {"id": 2}]]
    assert world.bodies("%DLQ%billing") == ["no json", '{"id": 2}']


def test_an_index_that_is_not_in_the_batch_fails_all_of_it(world: World) -> None:
    """Nobody knows what was meant, so nothing may count as done."""

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    def bill(bodies: list[str]) -> list[int]:
        return [7]

    world.listen(bill)
    world.send("orders", "a", "b")
    world.confirm()

    assert world.bodies("%DLQ%billing") == ["a", "b"]


def test_async_batch_handlers_answer_alike(world: World) -> None:
    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    async def bill(bodies: list[str]) -> list[int]:
        return [0]

    world.listen(bill)
    world.send("orders", "a", "b")
    world.confirm()

    assert world.bodies("%DLQ%billing") == ["a"]


def test_a_plain_handler_may_take_several_messages_at_a_time_and_each_counts_alone(world: World) -> None:
    """rocketmq-spring redelivers the whole batch when one of it fails; here only that one comes again."""
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_message_batch_max_size=3, max_reconsume_times=0)
    def bill(body: str) -> None:
        heard.append(body)
        if body == "b":
            raise RuntimeError("never")

    world.listen(bill)
    world.send("orders", "a", "b", "c")
    world.confirm()

    assert heard == ["a", "b", "c"]
    assert world.bodies("%DLQ%billing") == ["b"]
