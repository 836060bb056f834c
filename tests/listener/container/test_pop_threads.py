"""Listeners that receive by POP with real threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate import ConsumeMode, MessageExt, MessageRequestMode
from mqtemplate.errors import BrokerError
from mqtemplate.listener import ContainerState, message_listener
from mqtemplate.listener.container import pop as pop_module
from tests.listener.concurrency import Counted, check_changes
from tests.listener.conftest import Gate
from tests.waiting import PATIENCE_S, eventually, receive_after_a_wake

if TYPE_CHECKING:
    from tests.listener.conftest import App

POP = MessageRequestMode.POP
both_kinds = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


@both_kinds
def test_each_message_of_several_topics_is_handled_once(threaded_app: App, is_async: bool) -> None:
    received: SimpleQueue[str] = SimpleQueue()
    attributes: dict[str, Any] = {"request_mode": POP, "consume_thread_number": 3, "pull_batch_size": 4}

    if is_async:

        @message_listener(["orders", "invoices"], "billing", **attributes)
        async def handle(body: str) -> None:
            received.put(body)
    else:

        @message_listener(["orders", "invoices"], "billing", **attributes)
        def handle(body: str) -> None:
            received.put(body)

    container = threaded_app.listen(handle)
    sent = [f"{topic} {number}" for number in range(40) for topic in ("orders", "invoices")]
    for body in sent:
        threaded_app.send(body.split()[0], body)

    handled = Counter(received.get(timeout=PATIENCE_S) for _ in sent)
    eventually(lambda: container.in_flight == 0, "all are acknowledged")
    assert handled == Counter(sent)
    assert threaded_app.committed("billing") == threaded_app.committed("billing", "invoices") == 40


@both_kinds
def test_the_number_of_handlers_can_be_changed(threaded_app: App, is_async: bool) -> None:
    counted = Counted()
    container = threaded_app.listen(counted.listener(is_async=is_async, request_mode=POP))

    check_changes(counted, container, lambda body: threaded_app.send("orders", body))


def test_messages_of_one_key_stay_in_their_order(threaded_app: App) -> None:
    received: SimpleQueue[str] = SimpleQueue()

    @message_listener("orders", "billing", request_mode=POP, consume_mode=ConsumeMode.ORDERLY)
    def handle(body: str) -> None:
        received.put(body)

    threaded_app.listen(handle)
    sent = [f"{key}{number}" for number in range(30) for key in "abcd"]
    threaded_app.broker.queues("orders")
    for body in sent:
        threaded_app.send("orders", body)  # without keys all of a queue are in one order

    assert [received.get(timeout=PATIENCE_S) for _ in sent] == sent


@both_kinds
def test_a_stop_lets_running_handlers_finish_and_others_have_the_rest(threaded_app: App, is_async: bool) -> None:
    gate, other = Gate(), Gate().opened()
    container = threaded_app.listen(gate.listener(is_async=is_async, request_mode=POP, consume_thread_number=1))
    threaded_app.send("orders", "a", "b")
    assert gate.started.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(container.stop)
        eventually(lambda: container.state is ContainerState.STOPPING, "the stop has begun")
        [second] = threaded_app.registry.register(other.listener(request_mode=POP, id="other"))
        second.start()
        assert other.take(1) == ["b"]
        gate.proceed.set()
        stopping.result(PATIENCE_S)

    assert gate.take(1) == ["a"]
    assert gate.is_empty
    eventually(lambda: threaded_app.committed("billing") == 2, "both are acknowledged")


def test_a_pause_lets_others_have_the_messages_and_a_resume_receives_again(threaded_app: App) -> None:
    gate = Gate().opened()
    container = threaded_app.listen(gate.listener(request_mode=POP))
    container.pause()
    threaded_app.send("orders", "a")
    eventually(lambda: container.in_flight == 0, "nothing is kept")
    container.resume()

    assert gate.take(1) == ["a"]


def test_a_hanging_handler_loses_its_message_unless_it_asked_for_more_time(threaded_app: App) -> None:
    release, attempts = Event(), SimpleQueue[tuple[str, int]]()

    @message_listener("orders", "billing", request_mode=POP, retry=["10ms"])
    def handle(message: MessageExt) -> None:
        body = message.body.decode()
        attempts.put((body, message.reconsume_times + 1))
        if body == "patient":
            message.extend("1h")
        if not message.reconsume_times:
            assert release.wait(PATIENCE_S)

    with capture_logs() as logs:
        container = threaded_app.listen(handle, consume_timeout_ms=50)
        threaded_app.send("orders", "hangs", "patient")
        found = [attempts.get(timeout=PATIENCE_S) for _ in range(3)]
        release.set()
        eventually(lambda: container.in_flight == 0, "the others end")

    assert sorted(found) == [("hangs", 1), ("hangs", 2), ("patient", 1)]
    assert [log["msg_id"] for log in logs if log["event"] == "listener.blocked"]
    assert attempts.empty()


def test_more_time_for_a_message_does_not_hold_the_event_loop(
    threaded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers only after the handler has gone on; and it refuses the second request."""
    answer, found, pop = Event(), SimpleQueue[str](), threaded_app.broker.pop
    change = pop.change_invisible

    def changes(group: str, topic: str, receipt: str, invisible_ms: int) -> str:
        if invisible_ms > 3_600_000:
            raise BrokerError("the disk is full")
        assert answer.wait(PATIENCE_S)
        return change(group, topic, receipt, invisible_ms)

    @message_listener("orders", "billing", request_mode=POP)
    async def handle(message: MessageExt) -> None:
        extension = message.extend("1h")
        answer.set()
        await extension
        with pytest.raises(BrokerError, match="the disk is full"):
            await message.extend("2h")
        found.put("handled")

    monkeypatch.setattr(pop, "change_invisible", changes)
    with capture_logs() as logs:
        container = threaded_app.listen(handle)
        threaded_app.send("orders", "a")
        assert found.get(timeout=PATIENCE_S) == "handled"
        eventually(lambda: container.in_flight == 0, "it is acknowledged")

    assert [log["reason"] for log in logs if log["event"] == "listener.extension_failed"] == ["the disk is full"]


def test_an_acknowledgement_that_fails_is_repeated(threaded_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate().opened()
    pop = threaded_app.broker.pop
    ack_all, refusals = pop.ack_all, iter([BrokerError("the broker does not answer")])

    def failing_ack(group: str, topic: str, receipts: Sequence[str]) -> Any:
        for refusal in refusals:
            return [refusal] * len(receipts)
        return ack_all(group, topic, receipts)

    monkeypatch.setattr(pop, "ack_all", failing_ack)
    with capture_logs() as logs:
        container = threaded_app.listen(gate.listener(request_mode=POP))
        threaded_app.send("orders", "a")
        gate.take(1)
        eventually(lambda: container.in_flight == 0, "it is acknowledged")

    assert [log["reason"] for log in logs if log["event"] == "listener.ack_failed"] == ["the broker does not answer"]
    assert threaded_app.committed("billing") == 1
    assert gate.is_empty


def test_an_outage_ends_and_the_listener_goes_on(threaded_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate().opened()
    pop = threaded_app.broker.pop
    receive, refusals = pop.receive, iter([BrokerError("the broker does not answer")])

    def failing_receive(*arguments: Any, **options: Any) -> Any:
        for refusal in refusals:
            raise refusal
        return receive(*arguments, **options)

    monkeypatch.setattr(pop, "receive", failing_receive)
    with capture_logs() as logs:
        threaded_app.listen(gate.listener(request_mode=POP))
        threaded_app.send("orders", "a")

        assert gate.take(1) == ["a"]
    assert [log["reason"] for log in logs if log["event"] == "listener.poll_failed"] == ["the broker does not answer"]


def test_a_closed_broker_shows_in_the_state(threaded_app: App) -> None:
    container = threaded_app.listen(Gate().opened().listener(request_mode=POP))

    threaded_app.broker.close()

    eventually(lambda: container.state is ContainerState.BROKEN, "the state shows it")
    container.stop()
    assert container.state is ContainerState.STOPPED


def test_a_stop_ends_a_receive_that_begins_at_the_same_moment(
    threaded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread was not waiting yet when the stop woke it, and would wait as long as the broker lets it."""
    receiving = receive_after_a_wake(monkeypatch, threaded_app.broker.pop)
    monkeypatch.setattr(pop_module, "_LONG_POLL_MS", PATIENCE_S * 10_000)
    monkeypatch.setattr(pop_module, "_JOIN_S", PATIENCE_S)
    container = threaded_app.listen(Gate().listener(request_mode=POP))
    assert receiving.wait(PATIENCE_S)
    member = container.member
    assert isinstance(member, pop_module.PopMembership)

    container.stop()

    assert not [thread.name for thread in member._receivers if thread.is_alive()]


def test_a_listener_goes_on_after_the_last_message_that_it_had_has_expired(
    threaded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler before has ended, and no other one begins: nothing else would have the next message received."""
    gate = Gate()
    threaded_app.send("orders", "first")
    container = threaded_app.listen(
        gate.listener(request_mode=POP, consume_mode=ConsumeMode.ORDERLY, consume_thread_number=1)
    )
    member = container.member
    assert isinstance(member, pop_module.PopMembership)
    gate.await_started(1)
    threaded_app.send("orders", "expired", queue_id=1)
    service = member._service
    eventually(lambda: len(service._orders) == 2 and member._waiting, "both are received, and no more")
    [(delivery, _)] = service._ready
    take = service._take

    def take_after_the_report() -> Any:
        eventually(lambda: len(service._orders) == 1, "the first one is settled")
        return take()

    monkeypatch.setattr(service, "_take", take_after_the_report)
    service.deliveries._drop(delivery, TimeoutError("its invisible time was over"))
    gate.proceed.set()
    assert gate.take() == ["first"]
    eventually(lambda: not service._orders, "the expired one is discarded")
    monkeypatch.setattr(service, "_take", take)
    threaded_app.send("orders", "next", queue_id=2)

    assert gate.take() == ["next"]
