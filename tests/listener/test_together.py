"""Middlewares, error handlers, tag methods, results, injection and message traces of one listener, together."""

from __future__ import annotations

from asyncio import sleep as virtual_sleep
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import pytest

from mqtemplate import (
    ConsumeStatus,
    Delivery,
    Depends,
    EmbeddedBroker,
    MessageExt,
    PauseListener,
    Send,
    VirtualClock,
    message_listener,
    on_tag,
    publishes,
    service,
)
from mqtemplate.calls.message_trace import ConsumeCode
from mqtemplate.context import ApplicationContext, AutoConfiguration
from mqtemplate.errors import DestinationError
from mqtemplate.testing import Harness, messages_in
from mqtemplate.topics import TRACE_TOPIC
from tests.kit import application, both_kinds, handler_of
from tests.waiting import eventually

pytestmark = pytest.mark.feature("listeners-together")


class Noting:
    """Notes what leaves the handler."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def consume(self, delivery: Delivery) -> Generator[Delivery, object]:
        try:
            result = yield delivery
        except Exception as error:
            self.events.append(error)
            raise
        self.events.append(result)


def handled(*components: object, destination: str = "orders", span: str = "1s") -> Harness:
    """Return the harness of an application whose listener has handled one message."""
    with application(*components) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send(destination, "tea")
        harness.advance(span)
        return harness


class Deciding:
    """Error handler that notes the errors, and decides the same about all of them."""

    def __init__(self, status: ConsumeStatus | None = ConsumeStatus.CONSUME_SUCCESS) -> None:
        self.status = status
        self.errors: list[BaseException] = []

    def __call__(self, error: BaseException, message: MessageExt) -> ConsumeStatus | None:
        self.errors.append(error)
        return self.status


def fail(order: str) -> object:
    raise OSError("no answer")


def trace_of(broker: Any) -> list[tuple[str, str, str]]:
    """Return (message id, success, code) of each handled message in the trace."""
    bodies = [message.body.decode() for message in messages_in(broker, TRACE_TOPIC)]
    records = [record.split("\x01") for body in bodies for record in body.split("\x02") if record]
    return [(record[2], record[4], record[6]) for record in records if record[0] == "SubAfter"]


# --- error handlers inside of middlewares ---------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("status", list(ConsumeStatus))
def test_middlewares_see_the_status_of_an_error_handler_as_the_result(is_async: bool, status: ConsumeStatus) -> None:
    """The error handler is the innermost decision about a failure; middlewares see what leaves it."""
    noting, decide = Noting(), Deciding(status)
    listener = message_listener("orders", "billing", retry=["1h"], error_handler=decide, middlewares=[noting])(
        handler_of(fail, is_async)
    )
    harness = handled(listener)

    assert (list(map(str, decide.errors)), noting.events) == (["no answer"], [status])
    assert harness.failures == []


@both_kinds
def test_middlewares_see_the_exception_that_an_error_handler_leaves(is_async: bool) -> None:
    noting = Noting()

    async def look(error: BaseException, message: MessageExt) -> None:
        await virtual_sleep(0)

    listener = message_listener("orders", "billing", error_handler=look, middlewares=[noting])(
        handler_of(fail, is_async)
    )
    handled(listener)

    assert [str(event) for event in noting.events] == ["no answer"]


def test_an_error_handler_gets_the_message_as_the_handler_got_it() -> None:
    """A middleware that decrypts a body does it for both."""
    bodies: list[bytes] = []

    class Decrypting:
        def consume(self, delivery: Delivery) -> Generator[Delivery, object]:
            yield delivery.map(lambda each: replace(each, body=b"decrypted"))

    def look(error: BaseException, message: MessageExt) -> None:
        bodies.append(message.body)

    handled(message_listener("orders", "billing", error_handler=look, middlewares=[Decrypting()])(fail))

    assert bodies == [b"decrypted"]


def test_an_error_handler_does_not_see_what_a_middleware_raises() -> None:
    decide = Deciding(None)

    class Refusing:
        def consume(self, delivery: Delivery) -> Generator[Delivery, object]:
            yield delivery
            raise PermissionError("too late")

    listener = message_listener("orders", "billing", error_handler=decide, middlewares=[Refusing()])
    harness = handled(listener(handler_of(lambda order: None, False)))

    assert decide.errors == []
    assert [str(failure.error) for failure in harness.failures] == ["too late"]


@both_kinds
def test_a_pause_is_no_error(is_async: bool) -> None:
    """A handler that pauses its listener gets the message again; there is nothing to decide."""
    calls: list[str] = []
    decide = Deciding()

    def pause_once(order: str) -> None:
        calls.append(order)
        if len(calls) == 1:
            raise PauseListener("10s", "the bank is down")

    handled(message_listener("orders", "billing", error_handler=decide)(handler_of(pause_once, is_async)), span="1m")

    assert (calls, decide.errors) == (["tea", "tea"], [])


@both_kinds
def test_an_error_handler_sees_that_a_result_could_not_be_sent(is_async: bool) -> None:
    decide = Deciding()
    to_nowhere = handler_of(lambda order: Send("no topic!", order), is_async)

    harness = handled(message_listener("orders", "billing", error_handler=decide)(to_nowhere))

    assert [type(error) for error in decide.errors] == [DestinationError]
    assert harness.failures == []


# --- tag methods ----------------------------------------------------------------------------------


@service
class Database:
    def __init__(self) -> None:
        self.events: list[str] = []


def transaction(database: Database, message: MessageExt) -> Iterator[str]:
    database.events.append(f"begin {message.tags}")
    yield f"transaction of {message.tags}"
    database.events.append("commit")


@message_listener("orders", "billing")
@publishes("receipts")
class Billing:
    @on_tag("paid")
    def paid(self, order: str, database: Database, current: Annotated[str, Depends(transaction)]) -> str:
        database.events.append(current)
        return f"receipt for {order}"

    @on_tag("refunded")
    async def refunded(self, order: str) -> Send:
        return Send("refunds", order)

    @on_tag("lost")
    @publishes("searches")
    def lost(self, order: str) -> str:
        return order

    @on_tag("checked")
    def checked(self, order: str, database: Database) -> None:
        database.events.append(f"checked {order}")


@pytest.mark.parametrize("noting", [None, Noting()], ids=["alone", "with a middleware"])
def test_tag_methods_take_injected_parameters_and_send_their_results(noting: Noting | None) -> None:
    """Each method has its own; ``@publishes`` of the class is for those that return something."""
    from mqtemplate import middleware

    around = [] if noting is None else [middleware(noting)]
    with application(Database, Billing, *around) as app:
        for tag in ("paid", "refunded", "lost", "checked"):
            app.template.sync_send(f"orders:{tag}", tag)
        Harness(app).run_until_idle()

        sent = {topic: [each.body for each in messages_in(app.broker, topic)] for topic in ("receipts", "refunds")}
        assert sent["receipts"] == [b"receipt for paid", b"lost"]
        assert sent["refunds"] == [b"refunded"]
        assert [each.body for each in messages_in(app.broker, "searches")] == [b"lost"]
        assert sorted(app.get(Database).events) == [
            "begin paid", "checked checked", "commit", "transaction of paid"
        ]  # fmt: skip
    if noting is not None:
        assert len(noting.events) == 4


def test_the_error_handler_of_a_class_is_that_of_all_its_tag_methods() -> None:
    errors: list[str] = []

    @message_listener("orders", "billing", error_handler="on_error")
    class Failing:
        @on_tag("paid")
        async def paid(self, order: str) -> None:
            fail(order)

        @on_tag("lost")
        def lost(self, order: str) -> None:
            fail(order)

        def on_error(self, error: BaseException, message: MessageExt) -> ConsumeStatus:
            errors.append(f"{message.tags}: {error}")
            return ConsumeStatus.CONSUME_SUCCESS

    with application(Failing) as app:
        for tag in ("paid", "lost"):
            app.template.sync_send(f"orders:{tag}", "tea")
        Harness(app).run_until_idle()

    assert sorted(errors) == ["lost: no answer", "paid: no answer"]


def test_the_contexts_of_frameworks_are_around_each_tag_method() -> None:
    entered: list[str] = []

    @contextmanager
    def scope() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    class FrameworkAutoConfiguration(AutoConfiguration):
        def contribute(self, context: ApplicationContext) -> None:
            context.add_handler_scope(scope)

    @message_listener("orders", "billing")
    class Routed:
        @on_tag("paid")
        def paid(self, order: str) -> None:
            entered.append("paid")

        def on_message(self, order: str) -> None:
            entered.append("other")

    with application(
        Routed, EmbeddedBroker(None, clock=VirtualClock()), starters=[FrameworkAutoConfiguration], clock=None
    ) as app:
        for destination in ("orders:paid", "orders"):
            app.template.sync_send(destination, "tea")
            Harness(app).run_until_idle()

    assert entered == ["in", "paid", "out", "in", "other", "out"]


# --- message traces -------------------------------------------------------------------------------


def test_the_trace_is_outside_of_middlewares_and_error_handlers() -> None:
    """It says what became of the message, whoever decided it."""

    class Deciding:
        def consume(self, delivery: Delivery) -> Generator[Delivery, object]:
            if delivery.message.keys == "dropped":
                return
            yield delivery
            if delivery.message.keys == "refused":
                raise PermissionError("refused")

    def decide(error: BaseException, message: MessageExt) -> ConsumeStatus:
        return ConsumeStatus.CONSUME_SUCCESS if message.keys == "suppressed" else ConsumeStatus.RECONSUME_LATER

    @message_listener(
        "orders", "billing", retry=["1h"], error_handler=decide, middlewares=[Deciding()], enable_msg_trace=True
    )
    def bill(order: str, message: MessageExt) -> None:
        if message.keys != "refused":
            fail(order)

    with application(bill) as app:
        ids = {
            key: app.template.sync_send("orders", "tea", keys=key).msg_id
            for key in ("dropped", "refused", "suppressed", "later")
        }
        Harness(app, raise_handler_errors=False).advance("1s")

        found = {msg_id: (success, code) for msg_id, success, code in trace_of(app.broker)}
        assert {key: found[msg_id] for key, msg_id in ids.items()} == {
            "dropped": ("true", str(ConsumeCode.SUCCESS.value)),
            "refused": ("false", str(ConsumeCode.EXCEPTION.value)),
            "suppressed": ("true", str(ConsumeCode.SUCCESS.value)),
            "later": ("false", str(ConsumeCode.FAILED.value)),
        }


def test_async_handlers_on_the_real_clock_are_traced_and_have_error_handlers() -> None:
    """There the event loop takes the messages itself, as tasks."""
    noting, decided = Noting(), list[str]()

    async def decide(error: BaseException, message: MessageExt) -> ConsumeStatus | None:
        decided.append(message.keys)
        return ConsumeStatus.CONSUME_SUCCESS if message.keys == "suppressed" else None

    @message_listener(
        "orders", "billing", retry=["1h"], error_handler=decide, middlewares=[noting], enable_msg_trace=True
    )
    async def bill(order: str, message: MessageExt) -> None:
        if message.keys != "done":
            raise OSError("no answer")

    with application(bill, clock=None) as app:
        ids = {
            key: app.template.sync_send("orders", "tea", keys=key).msg_id for key in ("done", "suppressed", "failed")
        }
        eventually(lambda: len(noting.events) == 3, "all three were handled")
        app.listeners.stop()
        eventually(lambda: len(trace_of(app.broker)) == 3, "the trace was sent")

        found = {msg_id: success for msg_id, success, _ in trace_of(app.broker)}
        assert {key: found[msg_id] for key, msg_id in ids.items()} == {
            "done": "true", "suppressed": "true", "failed": "false"
        }  # fmt: skip
    assert sorted(decided) == ["failed", "suppressed"]


# --- patterns of topics ---------------------------------------------------------------------------


def test_a_paused_listener_joins_new_topics_after_its_pause() -> None:
    calls: list[str] = []

    @message_listener("orders-*", "billing")
    def bill(order: str) -> None:
        calls.append(order)

    with application(bill) as app:
        harness = Harness(app)
        [container] = app.containers
        container.pause()
        app.template.sync_send("orders-eu", "tea")
        harness.advance("2m")
        assert (container.state.value, calls) == ("paused", [])

        container.resume()
        harness.advance("2m")
        assert calls == ["tea"]
