"""Converter, content type and charset of one listener."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mqtemplate import JsonMessageConverter, message_listener, service
from mqtemplate.converter import CONTENT_TYPE
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.testing import Harness, messages_in
from tests.kit import application

pytestmark = pytest.mark.feature("listener-converter")


class Upper:
    """Converter whose bodies are upper case, and which notes the content types that it sees."""

    content_types: list[str]

    def __init__(self) -> None:
        self.content_types = []

    def to_body(self, payload: object) -> tuple[bytes, str | None]:
        return str(payload).upper().encode(), "text/upper"

    def from_body(self, body: bytes, target_type: Any, properties: Mapping[str, str]) -> object:
        self.content_types.append(properties.get(CONTENT_TYPE, "none"))
        return body.decode().lower()


@pytest.mark.parametrize("converter", [Upper(), Upper, f"{__name__}.Upper"])
def test_a_listener_has_a_converter_of_its_own_for_bodies_and_replies(converter: object) -> None:
    """An object, a class, or its dotted name. Other listeners and the template use the application's converter."""

    @message_listener("prices", "pricing", converter=converter)
    def price(item: str) -> str:
        return f"{item}: 3 eur"

    with application(price) as app:
        answer = app.template.async_send_and_receive("prices", "TEA", bytes)
        Harness(app).run_until_idle()

        assert answer.result(0) == b"TEA: 3 EUR"


def test_a_class_of_converters_is_that_of_the_application() -> None:
    @service
    class Own(Upper): ...

    @message_listener("prices", "pricing", converter=Own)
    def price(item: str) -> None: ...

    with application(price, Own) as app:
        assert app.containers[0].converter is app.get(Own)


def test_a_content_type_holds_for_bodies_without_one_and_for_replies() -> None:
    converter = Upper()

    @message_listener("prices", "pricing", converter=converter, content_type="text/plain")
    def price(item: str) -> str:
        return item

    with application(price) as app:
        app.template.sync_send("prices", "TEA")
        app.template.sync_send("prices", "TEA", headers={"contentType": "text/csv"})
        reply = app.template.async_send_and_receive("prices", "TEA", dict, timeout="3s")
        Harness(app).run_until_idle()

        assert sorted(converter.content_types) == ["text/csv", "text/plain", "text/plain"]
        assert reply.exception(0) is not None, "the reply is text, and no JSON"


def test_a_charset_holds_for_text() -> None:
    """Bodies of older programs may be in another encoding than UTF-8."""
    received: list[str] = []

    @message_listener("news", "readers", charset="gbk")
    def read(text: str) -> None:
        received.append(text)

    with application(read) as app:
        app.template.sync_send("news", "消息".encode("gbk"))
        Harness(app).run_until_idle()

    assert received == ["消息"]


def test_a_template_writes_text_in_the_charset_of_its_converter() -> None:
    with application(JsonMessageConverter("gbk")) as app:
        app.template.sync_send("news", "消息")

        assert messages_in(app.broker, "news")[0].body == "消息".encode("gbk")


@pytest.mark.parametrize(
    ("attributes", "error", "text"),
    [
        ({"converter": "nowhere.Upper"}, ListenerError, "converter must be a converter, or a class of converters, got"),
        ({"converter": object()}, ListenerError, "converter must be a converter, or a class of converters"),
        (
            {"converter": Upper, "charset": "gbk"},
            ListenerError,
            "charset='gbk' is given, and .*Upper.* has no with_charset; remove charset, or give a conv",
        ),
        (
            {"charset": "utf-99"},
            ConfigurationError,
            "charset 'utf-99' is not an encoding; give a name that",
        ),
    ],
)
def test_a_wrong_converter_is_refused_at_the_start(
    attributes: dict[str, Any], error: type[Exception], text: str
) -> None:
    @message_listener("prices", "pricing", **attributes)
    def price(item: str) -> None: ...

    with pytest.raises(error, match=text):
        application(price).start()
