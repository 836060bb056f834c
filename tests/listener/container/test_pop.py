"""Listeners that receive by POP: each message is acknowledged, renewed and retried by itself."""

from __future__ import annotations

import pickle
from asyncio import sleep as virtual_sleep
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate import ConsumeMode, MessageExt, MessageRequestMode, PauseListener, RetryLater
from mqtemplate.broker import Broker, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import InvalidReceiptHandleError, ListenerError, UnsupportedError
from mqtemplate.listener import ListenerRegistry, message_listener
from mqtemplate.message import Message, MessageQueue
from mqtemplate.record import dead_letter
from mqtemplate.selectors.tags import TagSelector
from tests.kit import application

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.listener.conftest import App

POP = MessageRequestMode.POP


class Recorder:
    """Listeners of ``orders`` that note (seconds since the start, member, body, attempt) of each call."""

    def __init__(self, app: App) -> None:
        self._clock = app.broker.clock
        self._start_ms = self._clock.now_ms()
        self.calls: list[tuple[float, str, str, int]] = []
        self.ended: list[str] = []

    def note(self, member: str, message: MessageExt) -> None:
        seconds = (self._clock.now_ms() - self._start_ms) / 1_000
        self.calls.append((seconds, member, message.body.decode(), message.reconsume_times + 1))

    def listener(self, member: str = "bill", does: Callable[[MessageExt], object] | None = None, **options: Any) -> Any:
        """Return a listener whose handler calls *does*."""

        @message_listener("orders", "billing", id=member, request_mode=POP, **options)
        def handle(message: MessageExt) -> object:
            self.note(member, message)
            return None if does is None else does(message)

        return handle

    def sleeper(self, member: str = "bill", seconds: float = 3, extend: str = "", **options: Any) -> Any:
        """Return an async listener whose handler sleeps."""

        @message_listener("orders", "billing", id=member, request_mode=POP, **options)
        async def handle(message: MessageExt) -> None:
            self.note(member, message)
            if extend:
                message.extend(extend)
            await virtual_sleep(seconds)
            self.ended.append(message.body.decode())

        return handle


@pytest.fixture
def recorder(app: App) -> Recorder:
    app.broker.create_topic("orders", 1)
    return Recorder(app)


def ignoring(**attributes: Any) -> Any:
    """Return a listener that does nothing."""

    @message_listener("orders", "billing", **attributes)
    def ignore(body: str) -> None: ...

    return ignore


def start(app: App, listener: object) -> None:
    """Start one listener; `App.listen` would start a stopped one again, too."""
    [container] = app.registry.register(listener)
    container.start()


def failing(*times: int) -> Callable[[MessageExt], None]:
    """Return a handler that raises in these calls, counted from 1."""
    calls = iter(range(1, 100))

    def handle(message: MessageExt) -> None:
        if next(calls) in times:
            raise ConnectionError("the bank does not answer")

    return handle


# --- acknowledgements and retries ----------------------------------------------------------------


def test_a_handled_message_is_acknowledged_and_not_delivered_again(app: App, recorder: Recorder) -> None:
    container = app.listen(recorder.listener())
    app.send("orders", "a", "b")
    app.advance("1d")

    assert recorder.calls == [(0, "bill", "a", 1), (0, "bill", "b", 1)]
    assert container.in_flight == 0
    assert app.committed("billing") == 2


def test_a_message_that_failed_comes_again_after_the_delay_of_the_policy_and_the_others_go_on(
    app: App, recorder: Recorder
) -> None:
    app.listen(recorder.listener(does=failing(1, 3), retry=["5s", "1m"]))
    app.send("orders", "a", "b")
    app.advance("1h")

    assert recorder.calls == [
        (0, "bill", "a", 1),
        (0, "bill", "b", 1),
        (5, "bill", "a", 2),
        (65, "bill", "a", 3),
    ]


def test_a_requested_delay_is_exact_also_if_the_policy_has_another_one(app: App, recorder: Recorder) -> None:
    def later(message: MessageExt) -> None:
        if not message.reconsume_times:
            raise RetryLater("90.5s")

    app.listen(recorder.listener(does=later, retry=["5s"]))
    app.send("orders", "a")
    app.advance("1h")

    assert [call[0] for call in recorder.calls] == [0, 90.5]


def test_the_delays_without_a_policy_are_those_of_pulling_listeners(app: App, recorder: Recorder) -> None:
    app.listen(recorder.listener(does=failing(1, 2, 3)))
    app.send("orders", "a")
    app.advance("1h")

    assert [call[0] for call in recorder.calls] == [0, 10, 40, 100]


def test_after_the_last_retry_a_message_is_a_dead_letter_with_the_cause(app: App, recorder: Recorder) -> None:
    def fail(message: MessageExt) -> None:
        if message.body == b"a":
            raise ConnectionError("the bank does not answer")

    app.listen(recorder.listener(does=fail, max_reconsume_times=1))
    app.send("orders", "a", "b")
    app.advance("1h")

    [letter] = app.broker.reader.pull(MessageQueue("%DLQ%billing", app.broker.name, 0), 0).messages
    assert [call[2:] for call in recorder.calls] == [("a", 1), ("b", 1), ("a", 2)]
    assert letter.body == b"a"
    assert letter.properties[dead_letter.ATTEMPTS] == "2"
    assert letter.properties[dead_letter.MESSAGE] == "the bank does not answer"


def test_a_message_that_keeps_expiring_is_a_dead_letter_too(app: App, recorder: Recorder) -> None:
    """The broker counts the deliveries, also those whose member never answered."""
    pop = app.broker.pop
    pop.join(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("*")}, max_reconsume_times=1))
    app.send("orders", "a")
    attempts = []
    for _ in range(3):
        attempts += [each.attempt for each in pop.receive("billing", "orders", 32, 60_000, 0, None)]
        app.advance("1m")

    assert attempts == [1, 2]
    assert app.bodies("%DLQ%billing") == ["a"]


def test_of_a_batch_only_the_messages_that_failed_come_again(app: App) -> None:
    batches: list[list[str]] = []
    app.broker.create_topic("orders", 1)

    @message_listener("orders", "billing", request_mode=POP, retry=["5s"])
    def bill(bodies: list[str]) -> list[int]:
        batches.append(bodies)
        return [1] if len(batches) == 1 else []

    app.listen(bill)
    app.send("orders", "a", "b", "c")
    app.advance("1h")

    assert batches == [["a", "b", "c"], ["b"]]


def test_a_listener_of_several_topics_receives_from_each(app: App) -> None:
    bodies: list[str] = []

    @message_listener(["orders", "invoices"], "billing", request_mode=POP, consume_thread_number=1)
    def bill(body: str) -> None:
        bodies.append(body)

    app.listen(bill)
    app.send("orders", "a", "b")
    app.send("invoices", "c", "d")
    app.run_until_idle()

    assert sorted(bodies) == ["a", "b", "c", "d"]


def test_a_selector_leaves_messages_out(app: App, recorder: Recorder) -> None:
    app.listen(recorder.listener(selector_expression="paid"))
    app.send("orders", "a", tag="paid")
    app.send("orders", "b", tag="refunded")
    app.run_until_idle()

    assert [call[2] for call in recorder.calls] == ["a"]
    assert app.committed("billing") == 2


# --- invisible time ------------------------------------------------------------------------------


def test_the_invisible_time_is_renewed_while_the_handler_runs(app: App, recorder: Recorder) -> None:
    container = app.listen(recorder.sleeper(seconds=600, invisible_duration="1m"))
    app.send("orders", "a")
    app.advance("1d")

    assert recorder.calls == [(0, "bill", "a", 1)]
    assert recorder.ended == ["a"]
    assert container.renewals == (20, 0)  # each 30 s


def test_a_message_of_a_member_that_is_gone_comes_again_when_its_invisible_time_is_over(
    app: App, recorder: Recorder
) -> None:
    first = app.listen(recorder.sleeper("a", 3_600, invisible_duration="1m", await_termination_millis_when_shutdown=0))
    app.send("orders", "a")
    app.run_until_idle()
    first.stop()
    start(app, recorder.listener("b"))
    app.advance("1h")

    assert recorder.calls == [(0, "a", "a", 1), (60, "b", "a", 2)]


def test_a_handler_can_ask_for_more_time(app: App, recorder: Recorder) -> None:
    """It holds without renewals too: here its member is gone at once."""
    first = app.listen(recorder.sleeper("a", 3_600, extend="10m", await_termination_millis_when_shutdown=0))
    app.send("orders", "a")
    app.run_until_idle()
    first.stop()
    start(app, recorder.listener("b"))
    app.advance("1h")

    assert recorder.calls == [(0, "a", "a", 1), (600, "b", "a", 2)]


def test_after_the_time_that_a_handler_asked_for_the_renewal_goes_on(app: App, recorder: Recorder) -> None:
    app.listen(recorder.sleeper(seconds=3_600, extend="10m"))
    app.send("orders", "a")
    app.advance("1d")

    assert recorder.calls == [(0, "bill", "a", 1)]


def test_more_time_is_refused_where_there_is_no_invisible_time(app: App) -> None:
    errors: list[Exception] = []
    kept: list[MessageExt] = []

    @message_listener("orders", "billing")
    def pulled(message: MessageExt) -> None:
        with pytest.raises(UnsupportedError) as refused:
            message.extend("10m")
        errors.append(refused.value)

    @message_listener("orders", "shipping", request_mode=POP)
    def popped(message: MessageExt) -> None:
        with pytest.raises(ValueError, match="duration must be a duration: .*; got 'soon'"):
            message.extend("soon")
        kept.append(message)

    app.listen(pulled, popped)
    app.send("orders", "a")
    app.run_until_idle()

    assert "was not received by POP" in str(errors[0])
    assert "request_mode=MessageRequestMode.POP" in str(errors[0])
    with pytest.raises(InvalidReceiptHandleError, match="is settled, so it gets no more time; call extend in its"):
        kept[0].extend("10m")


def test_a_message_whose_renewal_came_too_late_is_left_to_the_other_member(app: App, recorder: Recorder) -> None:
    """The clock jumps over the invisible time, as after the suspension of a machine."""
    container = app.listen(recorder.sleeper("a", 300, invisible_duration="10s"))
    app.send("orders", "a")
    app.run_until_idle()
    app.broker.clock.move_ms(60_000)  # type: ignore[attr-defined]
    with capture_logs() as logs:
        app.advance("1h")

    [expired] = [log for log in logs if log["event"] == "listener.message_expired"]
    assert (expired["attempt"], expired["is_handled"]) == (1, False)
    assert container.renewals[1] == 1
    assert [call[3] for call in recorder.calls] == [1, 2]
    assert app.committed("billing") == 1


def test_a_copy_of_a_message_can_be_passed_to_another_process(app: App, recorder: Recorder) -> None:
    """It has no invisible time there: only the member that received the message can extend it."""
    copies: list[MessageExt] = []

    def copy(message: MessageExt) -> None:
        copies.extend([pickle.loads(pickle.dumps(message)), replace(message, body=b"changed")])

    app.listen(recorder.listener(does=copy))
    app.send("orders", "a")
    app.run_until_idle()

    pickled, changed = copies
    assert (pickled.body, pickled.invisible_time) == (b"a", None)
    assert changed.invisible_time is not None  # a middleware may pass a changed copy on


# --- members -------------------------------------------------------------------------------------


def test_more_members_than_queues_work_at_the_same_time(app: App, recorder: Recorder) -> None:
    app.listen(*(recorder.sleeper(member, 60, consume_thread_number=1) for member in "abc"))
    app.send("orders", "1", "2", "3")
    app.run_until_idle()

    assert sorted(call[1] for call in recorder.calls) == ["a", "b", "c"]


def test_a_member_takes_no_message_before_a_handler_is_free(app: App, recorder: Recorder) -> None:
    """So a slow handler keeps nobody waiting but its own message."""
    app.listen(recorder.sleeper("slow", 3_600, consume_thread_number=2), recorder.listener("fast"))
    app.send("orders", *map(str, range(10)))
    app.advance("1m")

    assert sum(call[1] == "slow" for call in recorder.calls) == 2
    assert sorted(call[2] for call in recorder.calls) == [str(number) for number in range(10)]


def test_a_paused_member_lets_the_others_have_what_it_has_not_started(app: App, recorder: Recorder) -> None:
    first = app.listen(recorder.sleeper("a", 60, consume_thread_number=4))
    app.send("orders", "1", "2")
    app.run_until_idle()
    first.set_concurrency(2)
    first.pause()
    app.send("orders", "3")
    app.listen(recorder.listener("b"))
    app.run_until_idle()

    assert recorder.calls[-1] == (0, "b", "3", 1)
    first.resume()
    app.send("orders", "4")
    app.advance("2m")
    assert recorder.ended == ["1", "2"]


def test_a_stop_makes_messages_visible_at_once_that_no_handler_had(app: App, recorder: Recorder) -> None:
    """Their attempts are not counted."""

    def stopping(message: MessageExt) -> None:
        first.stop_fetching()

    first = app.listen(recorder.listener("a", stopping))
    app.send("orders", "1", "2", "3")
    app.run_until_idle()
    first.stop()
    start(app, recorder.listener("b"))
    app.run_until_idle()

    assert recorder.calls == [(0, "a", "1", 1), (0, "b", "2", 1), (0, "b", "3", 1)]


def test_a_requested_pause_keeps_the_message_and_counts_no_attempt(app: App, recorder: Recorder) -> None:
    pauses = iter([True])

    def pausing(message: MessageExt) -> None:
        if next(pauses, False):
            raise PauseListener("10m")

    app.listen(recorder.listener(does=pausing, invisible_duration="10s"))
    app.send("orders", "1", "2")
    app.advance("1h")

    assert recorder.calls == [(0, "bill", "1", 1), (600, "bill", "1", 1), (600, "bill", "2", 1)]


# --- order ---------------------------------------------------------------------------------------


def send_with_keys(app: App, *bodies: str) -> None:
    """Send messages to one queue. The first letter of a body is its key."""
    queue = MessageQueue("orders", app.broker.name, 0)
    for body in bodies:
        app.broker.sends.send(Message("orders", body.encode(), {"__SHARDINGKEY": body[0]}), queue)


def test_a_failure_keeps_the_order_of_its_key_and_other_keys_of_the_queue_go_on(app: App, recorder: Recorder) -> None:
    def handle(message: MessageExt) -> None:
        if message.body == b"a1" and message.reconsume_times < 2:
            raise ConnectionError

    app.listen(recorder.listener(does=handle, consume_mode=ConsumeMode.ORDERLY, retry=["5s", "1m"]))
    send_with_keys(app, "a1", "b1", "a2", "b2", "c1", "a3")
    app.advance("1h")

    assert sorted(call[2] for call in recorder.calls if call[0] == 0) == ["a1", "b1", "b2", "c1"]
    assert [call[2:] for call in recorder.calls if call[2][0] == "a"] == [
        ("a1", 1),
        ("a1", 2),
        ("a1", 3),
        ("a2", 1),
        ("a3", 1),
    ]
    assert [call[2] for call in recorder.calls if call[2][0] == "b"] == ["b1", "b2"]


def test_one_message_of_a_key_is_handled_at_a_time_over_all_members(app: App, recorder: Recorder) -> None:
    app.listen(*(recorder.sleeper(member, 10, consume_mode=ConsumeMode.ORDERLY) for member in "xyz"))
    send_with_keys(app, "a1", "a2", "a3", "b1", "b2")
    app.advance("1h")

    for key in "ab":
        times = [call[0] for call in recorder.calls if call[2][0] == key]
        assert [call[2] for call in recorder.calls if call[2][0] == key] == [f"{key}{n + 1}" for n in range(len(times))]
        assert all(later - earlier >= 10 for earlier, later in pairwise(times))
    assert recorder.calls[0][0] == recorder.calls[1][0] == 0  # both keys at the same time


def test_a_batch_has_the_messages_of_a_key_in_their_order(app: App) -> None:
    batches: list[list[str]] = []
    app.broker.create_topic("orders", 1)

    @message_listener("orders", "billing", request_mode=POP, consume_mode=ConsumeMode.ORDERLY, retry=["5s"])
    def bill(bodies: list[str]) -> list[int]:
        batches.append(bodies)
        return [bodies.index("a2")] if len(batches) == 1 else []

    app.listen(bill)
    send_with_keys(app, "a1", "a2", "a3", "b1")
    app.advance("1h")

    assert sorted(batches[0]) == ["a1", "a2", "a3", "b1"]
    assert [body for body in batches[0] if body[0] == "a"] == ["a1", "a2", "a3"]
    assert batches[1:] == [["a2"]]  # as with a pulling listener, the others are done


def test_after_the_last_retry_the_key_goes_on(app: App, recorder: Recorder) -> None:
    def handle(message: MessageExt) -> None:
        if message.body == b"a1":
            raise ConnectionError

    app.listen(recorder.listener(does=handle, consume_mode=ConsumeMode.ORDERLY, max_reconsume_times=2))
    send_with_keys(app, "a1", "a2")
    app.advance("1h")

    assert recorder.calls == [
        (0, "bill", "a1", 1),
        (1, "bill", "a1", 2),
        (2, "bill", "a1", 3),
        (2, "bill", "a2", 1),
    ]
    assert app.bodies("%DLQ%billing") == ["a1"]


# --- refused -------------------------------------------------------------------------------------


def test_a_broker_without_pop_refuses_the_listener_at_its_start(app: App) -> None:
    @message_listener("orders", "billing", id="bill", request_mode="POP")
    def bill(body: str) -> None: ...

    class PullingBroker(EmbeddedBroker):
        pop = Broker.pop

    registry = ListenerRegistry(PullingBroker(clock=app.broker.clock), app.registry._converter)
    registry.register(bill)

    with pytest.raises(
        UnsupportedError,
        match="listener bill: request_mode=POP cannot be honoured: .* has no consumption by POP; leave request_mode",
    ):
        registry.start()


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"invisible_duration": "1m"}, "invisible_duration has no effect on a listener that pulls; add request_mode"),
        ({"request_mode": "POP", "message_model": "BROADCASTING"}, "BROADCASTING and POP exclude each other"),
        (
            {"request_mode": "POP", "consume_from_where": "CONSUME_FROM_TIMESTAMP"},
            "CONSUME_FROM_TIMESTAMP and POP exclude each other.* mqtemplate offsets reset GROUP TOPIC",
        ),
        ({"request_mode": "PUSH"}, "request_mode must be one of PULL, POP, got 'PUSH'"),
        (
            {"request_mode": "POP", "invisible_duration": "500ms"},
            r"invisible_duration must be a duration from 1s to 12h .*, got '500ms'",
        ),
    ],
    ids=str,
)
def test_attributes_that_contradict_each_other_are_refused(app: App, attributes: dict[str, Any], reason: str) -> None:
    bill = ignoring(**attributes)

    with pytest.raises(ListenerError, match=reason):
        app.listen(bill)


def test_the_members_of_a_group_have_one_request_mode(app: App) -> None:
    pulls = ignoring(id="pulls")
    pops = ignoring(id="pops", request_mode=POP)

    with pytest.raises(ListenerError, match="have different request modes: PULL and POP"):
        app.listen(pulls, pops)

    other = ListenerRegistry(app.broker, app.registry._converter)
    [container] = other.register(pulls)
    container.start()
    [second] = ListenerRegistry(app.broker, app.registry._converter).register(pops)
    with pytest.raises(ListenerError, match="'billing' has a member in this process that pulls; .* a group of its own"):
        second.start()
    container.stop()
    second.start()
    with pytest.raises(ListenerError, match="'billing' has a member in this process that receives by POP; .* its own"):
        container.start()
    second.stop()
    container.start()


def test_a_member_has_no_read_positions_of_its_own(app: App, recorder: Recorder) -> None:
    container = app.listen(recorder.listener())

    assert container.positions() == {}
    with pytest.raises(ListenerError, match="move those of the group: mqtemplate offsets reset billing TOPIC --to"):
        container.rewind("1h")


def test_an_administrator_moves_the_group_while_it_has_members(app: App, recorder: Recorder) -> None:
    app.listen(recorder.listener())
    app.send("orders", "a", "b")
    app.run_until_idle()
    app.broker.admin().set_offsets("billing", {MessageQueue("orders", app.broker.name, 0): 1})
    app.run_until_idle()

    assert [call[2] for call in recorder.calls] == ["a", "b", "b"]
    assert [member.client_id for member in app.broker.admin().group("billing").members] == ["POP@000001"]


def test_the_configuration_has_the_invisible_time_of_listeners_that_do_not_say_it() -> None:
    @message_listener("orders", "billing", id="bill", request_mode="${shop.mode:PULL}")
    def bill(body: str) -> None: ...

    settings = {"mqtemplate.listener.invisible-duration": "5m", "shop.mode": "POP"}
    with application(bill, settings=settings) as app:
        [container] = app.containers

        assert container.endpoint.settings.is_pop
        assert container.endpoint.settings.invisible_duration == 300_000
