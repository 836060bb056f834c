"""Dead letters say why, where and when their messages failed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import pytest

from mqtemplate.listener import ConsumeMode, MessageRequestMode, message_listener
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.record import dead_letter
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.compression import CompressionType
from mqtemplate.record.dead_letter import iso_time

if TYPE_CHECKING:
    from tests.listener.conftest import App

MODES = pytest.mark.parametrize("mode", list(ConsumeMode), ids=lambda mode: mode.value)


class PaymentError(Exception):
    """Error of an application."""


def fail(depth: int, error: Exception) -> None:
    """Raise from deep inside."""
    if depth:
        fail(depth - 1, error)
    raise error from OSError("connection refused")


def only_dead_letter(app: App) -> MessageExt:
    [message] = app.broker.reader.pull(MessageQueue("%DLQ%billing", app.broker.name, 0), 0).messages
    return message


def listen(app: App, error: Exception, depth: int = 0, **attributes: Any) -> None:
    @message_listener(topic="orders", consumer_group="billing", id="bill", **attributes)
    def bill(message: str) -> None:
        fail(depth, error)

    app.listen(bill)


@MODES
def test_a_dead_letter_explains_itself(app: App, mode: ConsumeMode) -> None:
    listen(app, PaymentError("card declined"), retry=["2s", "3s"], consume_mode=mode)
    [sent] = app.send("orders", "bad", tag="paid")
    app.advance("5s")

    dead = only_dead_letter(app)
    headers = dead.user_properties
    assert headers[dead_letter.EXCEPTION] == f"{__name__}.PaymentError"
    assert headers[dead_letter.MESSAGE] == "card declined"
    assert headers[dead_letter.LISTENER] == "bill"
    assert headers[dead_letter.ATTEMPTS] == "3"
    assert headers[dead_letter.FAILED_AT] == iso_time(app.broker.clock.now_ms())
    stack = headers[dead_letter.STACK]
    assert "in bill" in stack
    assert "in fail" in stack
    assert "PaymentError: card declined" in stack
    assert stack.endswith("caused by OSError: connection refused")
    assert "mqtemplate/listener" not in stack
    assert (dead.msg_id, dead.tags, dead.properties[Property.DLQ_ORIGIN_TOPIC]) == (sent.msg_id, "paid", "orders")


def test_long_texts_are_shortened_and_separators_of_properties_replaced(app: App) -> None:
    r"""RocketMQ separates properties by ``\x01`` and ``\x02``."""
    listen(app, PaymentError("a\x01b\x02c" + "é" * 10_000), depth=100, max_reconsume_times=0)
    app.send("orders", "bad")
    app.run_until_idle()

    headers = only_dead_letter(app).user_properties
    assert headers[dead_letter.MESSAGE].startswith("a b c")
    assert len(headers[dead_letter.MESSAGE]) == 500
    assert len(headers[dead_letter.STACK]) <= 2_000


@pytest.mark.parametrize("payload_type", [bytes, str, dict])
def test_a_body_that_becomes_too_large_is_a_dead_letter_with_the_reason(app: App, payload_type: type) -> None:
    """The listener does not get the compressed bytes instead, and the next message is handled."""
    handled: list[object] = []

    def bill(message: object) -> None:
        handled.append(message)

    bill.__annotations__["message"] = payload_type
    app.listen(message_listener(topic="orders", consumer_group="billing", id="bill")(bill))
    packed = zlib.compress(bytes(app.broker.settings.max_body_bytes() + 1))
    app.broker.engine.writer.put(
        RecordDraft("orders", 0, packed, b"", sys_flag=CompressionType.ZLIB.sys_flag), "orders", 0
    )
    app.send("orders", "{}")
    app.advance("1s")

    dead = only_dead_letter(app)
    assert dead.body == packed
    assert dead.user_properties[dead_letter.MESSAGE] == (
        f"the body of {len(packed)} bytes has more than 16777216 bytes when it is decompressed (ZLIB); it was left "
        "compressed: raise max-decompressed-size, or let producers send less in one message"
    )
    assert len(handled) == 1


# --- by pull and by POP ----------------------------------------------------------------------------


@MODES
def test_a_dead_letter_by_pop_has_the_same_properties_as_by_pull(app: App, mode: ConsumeMode) -> None:
    """All but the name of the listener, and what the broker adds to retries."""
    letters = {}
    for request_mode in MessageRequestMode:
        group = f"billing-{request_mode.value}"

        @message_listener("orders", group, id=group, retry=["2s", "3s"], consume_mode=mode, request_mode=request_mode)
        def bill(message: str) -> None:
            raise PaymentError("card declined")

        app.listen(bill)
        letters[group] = f"%DLQ%{group}"
    app.send("orders", "bad", tag="paid")
    app.advance("5s")

    pulled, popped = (
        app.broker.reader.pull(MessageQueue(topic, app.broker.name, 0), 0).messages[0] for topic in letters.values()
    )
    expected = pulled.properties | {dead_letter.LISTENER: "billing-POP"}
    if mode is ConsumeMode.CONCURRENTLY:
        assert expected[dead_letter.FIRST_FAILED_AT] == "2026-01-01T00:00:00.000Z"
        expected[dead_letter.FIRST_FAILED_AT] = "2026-01-01T00:00:00.001Z"  # it identifies the delivery as well
        expected["ORIGIN_GROUP"] = "billing-POP"  # RocketMQ's brokers add it to retries by POP
    assert popped.properties == expected
    assert (pulled.body, pulled.flag, pulled.born_timestamp) == (popped.body, popped.flag, popped.born_timestamp)
    assert (pulled.reconsume_times, pulled.sys_flag) == (popped.reconsume_times, popped.sys_flag)
