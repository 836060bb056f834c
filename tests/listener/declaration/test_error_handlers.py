"""The error handler of one listener: it may decide what happens to a message whose handler raised."""

from __future__ import annotations

import pytest

from mqtemplate import (
    ConsumeStatus,
    MessageExt,
    MQApplication,
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

    with app_of(Billing) as app:
        app.template.sync_send("orders", "order 0")
        harness = Harness(app)
        harness.advance("1h")

    assert errors == [("no answer", b"order 0")]
    assert harness.failures == []


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
