"""The error handler of one listener: it may decide what happens to a message whose handler raised."""

from __future__ import annotations

import pytest

from mqtemplate import (
    ConsumeStatus,
    MessageExt,
    message_listener,
)
from mqtemplate.errors import ListenerError
from mqtemplate.testing import Harness
from tests.kit import application

pytestmark = pytest.mark.feature("error-handler")

errors: list[tuple[str, object]] = []


@pytest.fixture(autouse=True)
def no_errors() -> None:
    errors.clear()


def note(error: BaseException, message: MessageExt) -> None:
    errors.append((str(error), message.body))


def test_it_may_declare_the_message_done() -> None:
    @message_listener("orders", "billing", error_handler="on_error")
    class Billing:
        def on_message(self, order: str) -> None:
            raise OSError("no answer")

        async def on_error(self, error: OSError, message: MessageExt) -> ConsumeStatus:
            note(error, message)
            return ConsumeStatus.CONSUME_SUCCESS

    with application(Billing) as app:
        app.template.sync_send("orders", "order 0")
        harness = Harness(app)
        harness.advance("1h")

    assert errors == [("no answer", b"order 0")]
    assert harness.failures == []


def test_a_dotted_name_names_a_function() -> None:
    @message_listener("orders", "billing", error_handler=f"{__name__}.note")
    def bill(order: str) -> None:
        raise OSError("no answer")

    with application(bill) as app:
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
        application(bill).start()

    assert text in str(raised.value)
