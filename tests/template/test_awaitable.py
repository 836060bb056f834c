"""Awaitable forms of the verbs: futures of `concurrent.futures` that a coroutine can await, on any loop."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, as_completed, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.errors import (
    BrokerClosedError,
    ConfigurationError,
    ConversionError,
    DestinationError,
    RequestTimeoutError,
    UnsupportedError,
)
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt
from mqtemplate.results import SendStatus, TransactionState
from mqtemplate.template import RocketMQTemplate, transaction_listener
from tests.kit import Kit
from tests.waiting import eventually

PATIENCE_MS = 30_000


@transaction_listener()
class Ledger:
    def __init__(self) -> None:
        self.threads: list[str] = []

    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        self.threads.append(threading.current_thread().name)
        return TransactionState.COMMIT

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """On the real clock, where calls wait."""
    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        yield broker


@pytest.fixture
def template(broker: EmbeddedBroker) -> Iterator[RocketMQTemplate]:
    with RocketMQTemplate(
        broker, producer_group="shop", consumer_group="readers", consumer_topic="orders", default_destination="orders"
    ) as template:
        yield template


@pytest.fixture(params=["real", "virtual"])
def any_template(request: pytest.FixtureRequest) -> RocketMQTemplate:
    """The same calls on the real clock and on a virtual one."""
    if request.param == "real":
        template: RocketMQTemplate = request.getfixturevalue("template")
        return template
    return RocketMQTemplate(
        request.getfixturevalue("mqtemplate_broker"),
        producer_group="shop",
        consumer_group="readers",
        consumer_topic="orders",
        default_destination="orders",
    )


def run(coroutine: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await coroutine()

    return asyncio.run(main())


# --- every verb ----------------------------------------------------------------------------------


def test_a_send_is_awaited(any_template: RocketMQTemplate) -> None:
    async def send() -> None:
        one = await any_template.async_send("orders:paid", {"id": 1}, keys="4466")
        batch = await any_template.async_send("orders", ["a", "b"])
        spring = await any_template.asyncSend("orders", "c")
        default = await any_template.async_convert_and_send("d")

        assert {each.send_status for each in (one, batch, spring, default)} == {SendStatus.SEND_OK}

    run(send)
    assert len(any_template.receive(bytes)) == 5


def test_sends_are_awaited_together(any_template: RocketMQTemplate) -> None:
    async def send() -> list[Any]:
        return await asyncio.gather(*(any_template.async_send("orders", str(number)) for number in range(100)))

    assert len({result.offset_msg_id for result in run(send)}) == 100


def test_pending_messages_are_changed_by_awaited_verbs(any_template: RocketMQTemplate) -> None:
    async def change() -> None:
        sent = await any_template.async_send("orders", "later", delay="1h", keys="4466")
        page = await any_template.async_pending("orders", key="4466")
        counts = await any_template.async_count_pending("orders")
        moved = await any_template.async_reschedule(sent.handle, delay="2h")
        cancelled = await any_template.async_cancel(key="4466")

        assert [each.msg_id for each in page.messages] == [sent.msg_id]
        assert (counts.total, moved.status.name, cancelled.status.name) == (1, "RESCHEDULED", "CANCELLED")

    run(change)


def test_a_transaction_is_awaited(any_template: RocketMQTemplate) -> None:
    any_template.add_transaction_listener(ledger := Ledger())

    result = run(lambda: any_template.async_send_in_transaction("orders", "order", 4466))

    assert result.local_transaction_state is TransactionState.COMMIT
    assert len(ledger.threads) == 1


def test_the_loop_goes_on_while_a_transaction_runs(template: RocketMQTemplate) -> None:
    """The local transaction runs in another thread, so it may block."""
    template.add_transaction_listener(ledger := Ledger())

    run(lambda: template.async_send_in_transaction("orders", "order"))

    assert ledger.threads != [threading.current_thread().name]


def test_messages_are_received_by_await(any_template: RocketMQTemplate) -> None:
    async def exchange() -> list[str]:
        await any_template.async_send("orders", "one")
        return await any_template.async_receive(str, 1, PATIENCE_MS)

    assert run(exchange) == ["one"]


def test_the_loop_goes_on_while_a_receive_waits(template: RocketMQTemplate) -> None:
    async def exchange() -> list[str]:
        receiving = asyncio.ensure_future(template.async_receive(str, 1, PATIENCE_MS))
        await asyncio.to_thread(eventually, lambda: template.broker.queues("orders"), "the topic exists")
        await template.async_send("orders", "one")
        return await receiving

    assert run(exchange) == ["one"]


def test_every_verb_that_waits_has_an_awaitable_form() -> None:
    """It has the parameters of the verb."""
    verbs = ["convert_and_send", "send_in_transaction", "receive", "cancel", "reschedule", "pending", "count_pending"]
    for name in verbs:
        verb, form = getattr(RocketMQTemplate, name), getattr(RocketMQTemplate, f"async_{name}")
        assert form.__name__ == f"async_{name}"
        assert inspect.signature(form).parameters == inspect.signature(verb).parameters
        assert str(inspect.signature(form).return_annotation).strip("'").startswith("AwaitableFuture[")


# --- errors and cancellation ---------------------------------------------------------------------


def test_an_invalid_call_raises_in_the_coroutine(any_template: RocketMQTemplate) -> None:
    with pytest.raises(DestinationError):
        run(lambda: any_template.async_send("", "x"))
    with pytest.raises(DestinationError):
        run(lambda: any_template.async_convert_and_send("", "x"))
    with pytest.raises(ConfigurationError, match="receive needs a consumer group"):
        run(lambda: RocketMQTemplate(any_template.broker).async_receive(str))


def test_an_error_of_the_broker_is_raised_by_await(template: RocketMQTemplate, broker: EmbeddedBroker) -> None:
    broker.close()

    with pytest.raises(BrokerClosedError):
        run(lambda: template.async_send("orders", "x"))
    with pytest.raises(BrokerClosedError):
        run(template.async_count_pending)


def test_a_request_is_cancelled_with_its_task(template: RocketMQTemplate) -> None:
    """The reply that nothing waits for any more is dropped without an error, even after the loop is closed."""

    async def ask() -> Future[str]:
        future = template.async_send_and_receive("unread", "?", str, timeout="100ms")
        task = asyncio.ensure_future(future)
        await asyncio.wait([task], timeout=0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future

    future = run(ask)

    assert isinstance(future.exception(PATIENCE_MS / 1_000), RequestTimeoutError)


def test_messages_of_a_cancelled_receive_are_received_again(template: RocketMQTemplate) -> None:
    """The messages had arrived, but the task that awaited them did not get them."""

    async def give_up() -> None:
        await template.async_send("orders", ["a", "b"])
        future = template.async_receive(str, 2, PATIENCE_MS)
        task = asyncio.ensure_future(future)
        await asyncio.wait([task], timeout=0)  # the task waits now
        assert future.result(PATIENCE_MS / 1_000) == ["a", "b"]  # blocks the loop, which does not see the result
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(give_up)

    assert template.receive(str, timeout=PATIENCE_MS) == ["a", "b"]
    assert template.receive(str, timeout=0) == []


def test_a_cancelled_receive_stops_to_wait(template: RocketMQTemplate) -> None:
    """Its thread would otherwise take the messages that the next call waits for."""

    async def give_up() -> Future[list[str]]:
        future = template.async_receive(str, 1, PATIENCE_MS * 1_000)
        task = asyncio.ensure_future(future)
        await asyncio.to_thread(eventually, lambda: template.broker.queues("orders"), "the topic exists")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future

    future = run(give_up)
    template.sync_send("orders", "one")

    assert template.receive(str, 1, PATIENCE_MS) == ["one"]
    assert future.cancelled() or future.result(0) == []


# --- still a future of concurrent.futures --------------------------------------------------------


def test_a_thread_waits_for_the_same_future(any_template: RocketMQTemplate) -> None:
    sent = any_template.async_send("orders", "x")
    counted = any_template.async_count_pending("orders")

    assert isinstance(sent, Future)
    assert isinstance(counted, Future)
    assert sent.result(PATIENCE_MS / 1_000).send_status is SendStatus.SEND_OK
    assert counted.result(PATIENCE_MS / 1_000).total == 0


def test_one_future_is_awaited_on_several_loops(template: RocketMQTemplate) -> None:
    future = template.async_send("orders", "x")

    assert run(lambda: future) == run(lambda: future) == future.result()


def test_a_template_is_used_after_close_like_its_broker(template: RocketMQTemplate) -> None:
    template.close()

    assert run(template.async_count_pending).total == 0


def test_the_module_of_futures_does_not_import_asyncio() -> None:
    """Nor does ``import mqtemplate``: a program without coroutines does not pay for it here."""
    program = "import sys, mqtemplate, mqtemplate.futures; print('asyncio' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "False"


# --- on a virtual clock --------------------------------------------------------------------------


def test_time_passes_while_an_async_test_awaits_a_reply(kit: Kit) -> None:
    """No real time: the harness lets the timeout of the request pass."""
    started_ms = kit.harness.clock.now_ms()

    with pytest.raises(RequestTimeoutError):
        run(lambda: kit.template.async_send_and_receive("unread", "?", str, timeout="1h"))

    assert kit.harness.clock.now_ms() == started_ms + 3_600_000


def test_without_a_harness_an_awaited_reply_is_refused(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(mqtemplate_broker)

    with pytest.raises(UnsupportedError, match="nothing advances the virtual clock; make a Harness"):
        run(lambda: template.async_send_and_receive("unread", "?", str))


def test_an_awaited_receive_converts_like_receive(any_template: RocketMQTemplate) -> None:
    any_template.sync_send("orders", "no number")

    assert run(lambda: any_template.async_receive(int, 1, 0)) == []
    with pytest.raises(ConversionError):
        any_template.converter.from_body(b"no number", int, {})


# --- futures ----------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_all_threads_that_wait_for_a_future_get_its_result() -> None:
    future: AwaitableFuture[int] = AwaitableFuture()
    results: list[object] = []
    threads = in_threads(3, lambda: results.append(future.result(60)))
    threads += in_threads(2, lambda: results.append(future.exception(60)))
    eventually(lambda: len(future._condition._waiting) == 5, "all threads wait")  # type: ignore[attr-defined]

    future.set_result(7)
    for thread in threads:
        thread.join(60)

    assert sorted(results, key=str) == [7, 7, 7, None, None]


def test_a_future_that_is_late_can_be_waited_for_again() -> None:
    future: AwaitableFuture[int] = AwaitableFuture()
    with pytest.raises(FutureTimeoutError):
        future.result(0)
    with pytest.raises(FutureTimeoutError):
        future.exception(0.001)

    future.set_exception(ValueError("late"))

    with pytest.raises(ValueError, match="late"):
        future.result(0)
    assert future._condition._waiting == ()  # type: ignore[attr-defined]


def test_a_future_is_waited_for_with_other_futures() -> None:
    """The functions of `concurrent.futures` take it beside plain futures."""
    ours: AwaitableFuture[int] = AwaitableFuture()
    plain: Future[int] = Future()
    found: list[set[Future[int]]] = []
    (thread,) = in_threads(1, lambda: found.append(wait([ours, plain], 60).done))
    eventually(lambda: bool(ours._waiters and plain._waiters), "the thread waits")  # type: ignore[attr-defined]

    ours.set_result(1)
    plain.set_result(2)
    thread.join(60)

    assert found == [{ours, plain}]
    assert {future.result() for future in as_completed([ours, plain])} == {1, 2}


def test_a_future_that_is_cancelled_wakes_the_thread_that_waits() -> None:
    future: AwaitableFuture[int] = AwaitableFuture()
    errors: list[BaseException] = []

    def waits() -> None:
        try:
            future.result(60)
        except CancelledError as exc:
            errors.append(exc)

    (thread,) = in_threads(1, waits)
    eventually(lambda: bool(future._condition._waiting), "the thread waits")  # type: ignore[attr-defined]

    assert future.cancel()
    thread.join(60)
    assert len(errors) == 1


def test_a_new_future_has_the_attributes_of_its_base_class() -> None:
    """It sets them itself, so a new version of Python may have others."""
    own, base = vars(AwaitableFuture()), vars(Future())

    assert own.keys() == base.keys()
    assert own | {"_condition": None} == base | {"_condition": None}
