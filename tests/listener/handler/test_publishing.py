"""Results of handlers that go on to another topic: ``@publishes``, and returned ``Send``."""

from collections.abc import Callable, Generator, Iterator
from typing import Annotated, Any

import pytest

from mqtemplate import (
    ConsumeStatus,
    Deduplication,
    Delivery,
    Depends,
    EmbeddedBroker,
    Send,
    message_listener,
    publishes,
)
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import ListenerError, SendError
from mqtemplate.listener import ListenerRegistry, ResultSender
from mqtemplate.results import SendResult
from mqtemplate.testing import Harness, Inbox, RecordingTemplate
from mqtemplate.testing.harness import StartApp
from tests.kit import Kit, both_kinds, handler_of


@pytest.fixture
def receipts(mqtemplate_app: StartApp) -> Inbox:
    inbox = Inbox()
    mqtemplate_app(inbox.listener("receipts", "receipts"))
    return inbox


@both_kinds
def test_the_result_of_a_handler_goes_to_another_topic(is_async: bool, receipts: Inbox, kit: Kit) -> None:
    """None and a status are not sent; a list is a batch; the decorator sets a delay and keys."""
    results: dict[str, object] = {
        "tea": {"paid": 3},
        "none": None,
        "status": ConsumeStatus.CONSUME_SUCCESS,
        "list": ["a", "b"],
    }
    publish = publishes("${shop.receipts:receipts}:new", delay="5s", keys="7")
    kit.start(message_listener("orders", "billing")(publish(handler_of(results.__getitem__, is_async))))
    for order in results:
        kit.template.sync_send("orders", order)
    kit.harness.advance("4s")
    assert receipts.received == []
    kit.harness.advance("1s")

    assert sorted(receipts.bodies) == [b"a", b"b", b'{"paid":3}']
    assert {(message.tags, message.keys) for message in receipts.received} == {("new", "7")}


@both_kinds
@pytest.mark.parametrize("middlewares", [[], [Deduplication()]], ids=["alone", "in a middleware"])
def test_a_handler_returns_messages_to_send(
    is_async: bool, middlewares: list[object], receipts: Inbox, kit: Kit
) -> None:
    results: dict[str, object] = {
        "one": Send("receipts:new", "tea", keys="4466"),
        "two": [Send("receipts", b"cup"), Send("receipts", b"salt", hash_key="a")],
    }
    listen = message_listener("orders", "billing", middlewares=middlewares)
    kit.start(listen(handler_of(results.__getitem__, is_async)))
    for order in results:
        kit.handle(order)

    assert sorted(receipts.bodies) == [b"cup", b"salt", b"tea"]
    assert [message.keys for message in receipts.received if message.body == b"tea"] == ["4466"]


def test_each_decorator_sends_and_a_class_may_be_decorated(receipts: Inbox, kit: Kit) -> None:
    @publishes("receipts:first")
    @message_listener("orders", "billing")
    @publishes("receipts:second")
    class Billing:
        def on_message(self, order: str) -> str:
            return f"receipt of {order}"

    kit.start(Billing)
    kit.handle("tea")

    assert sorted((message.tags, message.body) for message in receipts.received) == [
        ("first", b"receipt of tea"),
        ("second", b"receipt of tea"),
    ]


@both_kinds
def test_a_batch_handler_returns_messages_to_send(is_async: bool, receipts: Inbox, kit: Kit) -> None:
    @message_listener("orders", "billing")
    def handle(orders: list[str]) -> list[Send]:
        return [Send("receipts", order) for order in orders]

    @message_listener("orders", "billing")
    async def handle_async(orders: list[str]) -> Send:
        return Send("receipts", orders)

    kit.start(handle_async if is_async else handle)
    kit.template.sync_send("orders", ["tea", "cup"])
    kit.harness.advance("3h")

    assert sorted(receipts.bodies) == [b"cup", b"tea"]


def test_a_request_gets_the_result_too(receipts: Inbox, kit: Kit) -> None:
    @message_listener("orders", "billing")
    @publishes("receipts")
    def handle(order: str) -> str:
        return f"receipt of {order}"

    kit.start(handle)

    assert kit.template.send_and_receive("orders", "tea", str) == "receipt of tea"
    kit.harness.run_until_idle()
    assert receipts.bodies == [b"receipt of tea"]


class FailingTemplate(RecordingTemplate):
    """Template whose first sends to ``receipts`` fail."""

    failures = 0

    def sync_send(self, destination: str, payload: object, *args: Any, **options: Any) -> SendResult:
        if destination == "receipts" and self.failures:
            self.failures -= 1
            raise SendError("the broker is busy")
        return super().sync_send(destination, payload, *args, **options)


@pytest.mark.parametrize("middlewares", [[], [Deduplication()]], ids=["alone", "in a middleware"])
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_result_that_cannot_be_sent_fails_the_message(
    middlewares: list[object], mqtemplate_broker: EmbeddedBroker, mqtemplate_harness: Harness
) -> None:
    """It is handled again, and the result is sent then: at least once. A de-duplication does not take it for done."""
    handled: list[str] = []
    template, inbox = FailingTemplate(mqtemplate_broker), Inbox()
    template.failures = 1

    @message_listener("orders", "billing", retry=["1s"], middlewares=middlewares)
    @publishes("receipts")
    def handle(order: str) -> str:
        handled.append(order)
        return "receipt"

    registry = ListenerRegistry(mqtemplate_broker, JsonMessageConverter(), template=lambda: template)
    for target in (handle, inbox.listener("receipts", "receipts")):
        mqtemplate_harness.add(registry.register(target)[0])
    registry.start()
    template.sync_send("orders", "tea")
    mqtemplate_harness.advance("1s")
    registry.stop()

    assert (handled, inbox.bodies) == (["tea", "tea"], [b"receipt"])


def test_a_middleware_sees_the_result_after_it_was_sent(receipts: Inbox, kit: Kit) -> None:
    seen: list[tuple[object, int]] = []

    class Results:
        def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
            result = yield delivery
            seen.append((result, sum(call.topic == "receipts" for call in kit.template.sent)))

    @message_listener("orders", "billing", middlewares=[Results()])
    @publishes("receipts")
    def handle(order: str) -> str:
        return "receipt"

    kit.start(handle)
    kit.handle("tea")

    assert seen == [("receipt", 1)]


# --- what is refused ------------------------------------------------------------------------------


def batch(orders: list[str]) -> object: ...
def returns_none(order: str) -> None: ...


@pytest.mark.parametrize(
    ("handler", "destination", "text"),
    [
        (batch, "receipts", r"@publishes is for handlers of single messages, .*return Send\(...\) or a list of them"),
        (returns_none, "receipts", "@publishes sends what the handler returns, and it returns None"),
        (handler_of(str, False), "re ceipts", "@publishes: .*re ceipts"),
        (handler_of(str, False), ":tag", "@publishes: destination ':tag' has no topic"),
    ],
)
def test_a_wrong_declaration_is_refused_at_the_start(
    handler: Any, destination: str, text: str, mqtemplate_app: StartApp
) -> None:
    with pytest.raises(ListenerError, match=text):
        mqtemplate_app(message_listener("orders", "billing")(publishes(destination)(handler)))


@pytest.mark.parametrize("call", [lambda: publishes("receipts", key="1"), lambda: Send("receipts", "tea", key="1")])
def test_an_unknown_option_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="has no option 'key'; it has delay_level, delay, deliver_at, hash_key"):
        call()


def test_only_a_handler_can_be_decorated() -> None:
    with pytest.raises(ListenerError, match="@publishes is for handlers, got 7"):
        publishes("receipts")(7)  # type: ignore[type-var]


def test_without_a_template_the_error_says_what_to_do(mqtemplate_harness: Harness) -> None:
    mqtemplate_harness.raise_handler_errors = False
    registry = ListenerRegistry(mqtemplate_harness.broker, JsonMessageConverter())
    listen = message_listener("orders", "billing", max_reconsume_times=0)
    mqtemplate_harness.add(registry.register(listen(handler_of(lambda order: Send("receipts", order), False)))[0])
    registry.start()
    RecordingTemplate(mqtemplate_harness.broker).sync_send("orders", "tea")
    mqtemplate_harness.run_until_idle()
    registry.stop()

    [failure] = mqtemplate_harness.failures
    assert "the registry has no template; give the ListenerRegistry template=..., or let an MQApplication run" in str(
        failure.error
    )


def test_equal_sends_are_equal() -> None:
    assert Send("receipts", "tea", keys="1") == Send("receipts", "tea", keys="1")
    assert Send("receipts", "tea") != Send("receipts", "cup")
    assert repr(Send("receipts", "tea")) == "Send('receipts', 'tea')"


# --- in the transaction of the handler ------------------------------------------------------------


class Notes(ResultSender):
    """A sender of the scope, which notes what it sends."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def send(self, destination: str, payload: object, delay_level: int = 0, **options: Any) -> object:
        self.events.append((destination, payload, options))
        return None


class AsyncNotes(Notes):
    async def send(self, destination: str, payload: object, delay_level: int = 0, **options: Any) -> object:
        return super().send(destination, payload, delay_level, **options)


@both_kinds
@pytest.mark.parametrize("kind", [Notes, AsyncNotes])
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_sender_of_the_scope_sends_before_the_scope_ends(is_async: bool, kind: type[Notes], kit: Kit) -> None:
    events: list[Any] = []

    def scope() -> Iterator[Notes]:
        yield kind(events)
        events.append("commit")

    @message_listener("orders", "billing", max_reconsume_times=0)
    @publishes("receipts", keys="1")
    def handle(order: str, sender: Annotated[Notes, Depends(scope)]) -> str:
        return "receipt"

    @message_listener("orders", "billing", max_reconsume_times=0)
    @publishes("receipts", keys="1")
    async def handle_async(order: str, sender: Annotated[Notes, Depends(scope)]) -> str:
        return "receipt"

    kit.start(handle_async if is_async else handle)
    kit.handle("tea")

    if kind is AsyncNotes and not is_async:
        assert "AsyncNotes.send is async; write the handler with 'async def'" in str(kit.harness.failures[0].error)
    else:
        assert events == [("receipts", "receipt", {"keys": "1"}), "commit"]
        assert [call.topic for call in kit.template.sent] == ["orders"]


def test_two_senders_are_refused(mqtemplate_app: StartApp) -> None:
    def one() -> Notes:
        return Notes([])

    def two() -> Notes:
        return Notes([])

    @message_listener("orders", "billing")
    def handle(order: str, a: Annotated[Notes, Depends(one)], b: Annotated[Notes, Depends(two)]) -> None: ...

    with pytest.raises(ListenerError, match="parameter 'b' is the second one that sends results; keep one"):
        mqtemplate_app(handle)
