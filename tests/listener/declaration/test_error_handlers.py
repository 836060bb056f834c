"""The error handler of one listener: it may decide what happens to a message whose handler raised."""

from __future__ import annotations

import pytest

from mqtemplate import (
    ConsumeStatus,
    DeadLetter,
    MessageExt,
    MQApplication,
    RetryLater,
    VirtualClock,
    message_listener,
)
from mqtemplate.errors import ListenerError
from mqtemplate.testing import Harness

pytestmark = pytest.mark.feature("error-handler")

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}
errors: list[tuple[str, object]] = []


@pytest.fixture(autouse=True)
def no_errors() -> None:
    errors.clear()


def app_of(*components: object) -> MQApplication:
    return MQApplication(*components, settings=IN_MEMORY, environment={}, clock=VirtualClock())


def run(listener: object, *, span: str = "1s", count: int = 1) -> Harness:
    with app_of(listener) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders", [f"order {number}" for number in range(count)])
        harness.advance(span)
        harness.assert_dead_lettered("billing", 0) if span == "1s" else None
        return harness


def note(error: BaseException, message: MessageExt) -> None:
    errors.append((str(error), message.body))


def test_it_is_called_with_the_error_and_the_message_and_may_only_look() -> None:
    """Without a result the message is retried as if there were no error handler."""
    calls: list[str] = []

    @message_listener("orders", "billing", retry=["1m"], error_handler=note)
    def bill(order: str) -> None:
        calls.append(order)
        raise OSError("the bank does not answer")

    run(bill, span="90s")

    assert errors == [("the bank does not answer", b"order 0")] * 2
    assert calls == ["order 0"] * 2


def test_it_may_declare_the_message_done() -> None:
    @message_listener("orders", "billing", error_handler="on_error")
    class Billing:
        def on_message(self, order: str) -> None:
            raise OSError("no answer")

        async def on_error(self, error: OSError, message: MessageExt) -> ConsumeStatus:
            note(error, message)
            return ConsumeStatus.CONSUME_SUCCESS

    harness = run(Billing, span="1h")

    assert errors == [("no answer", b"order 0")]
    assert harness.failures == []


@pytest.mark.parametrize(
    ("outcome", "calls"),
    [
        (RetryLater("5s", "later"), 2),
        (DeadLetter("never"), 1),
        (ConsumeStatus.RECONSUME_LATER, 2),
        (ValueError("x"), 2),
    ],
)
def test_it_may_decide_otherwise(outcome: object, calls: int) -> None:
    """By the outcomes that a handler has. An error of its own takes the place of the handler's."""

    def decide(error: BaseException, message: MessageExt) -> object:
        errors.append((str(error), message.body))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @message_listener("orders", "billing", max_reconsume_times=1, error_handler=decide)
    def bill(order: str) -> None:
        raise OSError("no answer")

    with app_of(bill) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders", "tea")
        harness.advance("1m")

        assert len(errors) == calls
        assert len(harness.assert_dead_lettered("billing")) == 1


def test_a_body_that_cannot_be_converted_reaches_it_too() -> None:
    @message_listener("orders", "billing", error_handler=note)
    def bill(order: int) -> None: ...

    with app_of(bill) as app:
        app.template.sync_send("orders", "no number")
        Harness(app, raise_handler_errors=False).advance("1s")

    assert errors[0][0].startswith("the body is no int")


def test_that_of_a_batch_handler_gets_the_messages() -> None:
    def look(error: BaseException, messages: list[MessageExt]) -> ConsumeStatus:
        errors.append((str(error), [message.body for message in messages]))
        return ConsumeStatus.CONSUME_SUCCESS

    @message_listener("orders", "billing", error_handler=look)
    def bill(orders: list[str]) -> None:
        raise OSError("no answer")

    run(bill, count=3)

    assert errors == [("no answer", [b"order 0", b"order 1", b"order 2"])]


def test_a_dotted_name_names_a_function() -> None:
    @message_listener("orders", "billing", error_handler=f"{__name__}.note")
    def bill(order: str) -> None:
        raise OSError("no answer")

    with app_of(bill) as app:
        assert app.containers[0].endpoint.on_error is note


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "on_eror",
            "error_handler must be a function (error, message), or the name of a method of the listener class, got",
        ),
        ("nowhere.note", "error_handler must be a function (error, message)"),
        (7, "error_handler must be a function (error, message), or the name of a method of the listener class, got 7"),
        (lambda error: None, "cannot take (error, message): too many positional arguments"),
    ],
)
def test_a_wrong_error_handler_is_refused_at_the_start(given: object, text: str) -> None:
    @message_listener("orders", "billing", error_handler=given)  # type: ignore[arg-type]
    def bill(order: str) -> None: ...

    with pytest.raises(ListenerError) as raised:
        app_of(bill).start()

    assert text in str(raised.value)


def test_another_result_fails_the_message() -> None:
    @message_listener("orders", "billing", error_handler=lambda error, message: "done")
    def bill(order: str) -> None:
        raise OSError("no answer")

    with app_of(bill) as app:
        harness = Harness(app, raise_handler_errors=False)
        app.template.sync_send("orders", "tea")
        harness.advance("1s")

    assert isinstance(harness.failures[0].error, ListenerError)
    assert "the error handler returned 'done'; return None or a ConsumeStatus" in str(harness.failures[0].error)
