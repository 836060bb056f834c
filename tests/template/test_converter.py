"""Conversion of payloads to bodies and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from mqtemplate import converter
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import ConversionError
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import messages_in

CONVERTER = JsonMessageConverter()


class Colour(Enum):
    RED = "red"


class Grade(IntEnum):
    A = 1


@dataclass
class Line:
    article: str
    price: Decimal
    tags: set[str] = field(default_factory=set)


class Order(BaseModel):
    order_id: int = Field(alias="orderId")
    placed: datetime
    lines: list[Line] = []


ORDER = Order(orderId=7, placed=datetime(2026, 1, 1, 12, tzinfo=UTC), lines=[Line("pen", Decimal("1.50"), {"blue"})])
ORDER_AS_JSON = (
    '{"orderId":7,"placed":"2026-01-01T12:00:00Z","lines":[{"article":"pen","price":"1.50","tags":["blue"]}]}'
)


def round_trip(payload: object, target_type: Any) -> object:
    body, _ = CONVERTER.to_body(payload)
    return CONVERTER.from_body(body, target_type, {})


def test_bytes_are_not_changed_and_text_is_utf8() -> None:
    """Bytes have the content type that rocketmq-spring gives them; text has none."""
    assert CONVERTER.to_body(b"\x00\xff") == (b"\x00\xff", "application/octet-stream")
    assert CONVERTER.to_body(bytearray(b"ab")) == (b"ab", "application/octet-stream")
    assert CONVERTER.to_body(memoryview(b"ab")) == (b"ab", "application/octet-stream")
    assert CONVERTER.to_body("grün") == ("grün".encode(), None)
    assert CONVERTER.from_body(b"\x00\xff", bytes, {}) == b"\x00\xff"
    assert CONVERTER.from_body("grün".encode(), str, {}) == "grün"


@pytest.mark.parametrize(
    ("payload", "body"),
    [
        ({"id": 1, "name": "grün", "none": None}, '{"id":1,"name":"grün","none":null}'),
        ((1, 2.5, True), "[1,2.5,true]"),
        (5, "5"),
        ({}, "{}"),
        ({1: "int key"}, '{"1":"int key"}'),
        ({"big": 2**70}, '{"big":1180591620717411303424}'),
        ({"at": datetime(2026, 1, 1, 12, tzinfo=UTC)}, '{"at":"2026-01-01T12:00:00Z"}'),
        ({"on": date(2026, 1, 1)}, '{"on":"2026-01-01"}'),
        ({"price": Decimal("1.50")}, '{"price":"1.50"}'),
        ({"for": timedelta(minutes=90)}, '{"for":"PT1H30M"}'),
        ({"id": UUID(int=7)}, '{"id":"00000000-0000-0000-0000-000000000007"}'),
        ({"colour": Colour.RED, "grade": Grade.A}, '{"colour":"red","grade":1}'),
        (Line("pen", Decimal("1.50"), {"blue"}), '{"article":"pen","price":"1.50","tags":["blue"]}'),
        (ORDER, ORDER_AS_JSON),
        ({"orders": [ORDER]}, None),
    ],
)
def test_other_payloads_become_json(payload: object, body: str | None) -> None:
    written, content_type = CONVERTER.to_body(payload)

    assert content_type == "application/json"
    if body is not None:
        assert written.decode() == body
    json.loads(written)


@pytest.mark.parametrize(
    ("payload", "target_type"),
    [
        (ORDER, Order),
        ((ORDER, ORDER), tuple[Order, Order]),
        (Line("pen", Decimal("1.50"), {"blue"}), Line),
        ({"a": Line("pen", Decimal("1.50"))}, dict[str, Line]),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), datetime),
        (Colour.RED, Colour),
        (UUID(int=7), UUID),
        (5, int),
        ({"id": 1}, dict),
        (5, Annotated[int, Field(gt=1)]),
    ],
)
def test_a_payload_is_converted_back_to_its_type(payload: object, target_type: Any) -> None:
    assert round_trip(payload, target_type) == payload


def test_orjson_writes_the_same_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the extra ``speed`` a message has the same body, and the same payloads are refused."""
    pytest.importorskip("orjson", reason="the extra 'speed' is not installed")
    payloads = [
        ORDER,
        {"lines": ORDER.lines, "at": ORDER.placed, "on": date(2026, 1, 1), "colour": Colour.RED, "grade": Grade.A},
        {1: None, "big": 2**70, "id": UUID(int=7), "price": Decimal("1.50"), "for": timedelta(minutes=90)},
        {"lost": float("nan")},
        {"inside": Unsupported()},
    ]

    def written(payload: object) -> bytes | None:
        try:
            return CONVERTER.to_body(payload)[0]
        except ConversionError:
            return None

    fast = [written(payload) for payload in payloads]
    monkeypatch.setattr(converter, "_dump", converter._dump_with_json)

    assert fast == [written(payload) for payload in payloads]


def test_a_body_is_converted_to_a_generic_type() -> None:
    body, _ = CONVERTER.to_body((ORDER, ORDER))

    assert CONVERTER.from_body(body, list[Order], {}) == [ORDER, ORDER]


@given(
    payload=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    ).map(lambda inner: {"inner": inner})
)
def test_any_json_is_converted_back(payload: dict[str, Any]) -> None:
    body, _ = CONVERTER.to_body(payload)

    assert CONVERTER.from_body(body, object, {"contentType": "application/json"}) == payload


@pytest.mark.parametrize(
    ("body", "properties", "expected"),
    [
        (b'{"id":1}', {"contentType": "application/json"}, {"id": 1}),
        (b'{"id":1}', {"contentType": "application/json;charset=UTF-8"}, {"id": 1}),
        (b'{"id":1}', {}, '{"id":1}'),
        (b"\xff", {}, b"\xff"),
    ],
)
def test_without_a_type_the_content_type_decides(body: bytes, properties: dict[str, str], expected: object) -> None:
    assert CONVERTER.from_body(body, object, properties) == expected
    assert CONVERTER.from_body(body, Any, properties) == expected


class Unsupported:
    """A class that cannot be written as JSON."""


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (None, "the payload is None; a message needs a body: allowed are bytes, str, dict"),
        (b"", "the payload is empty"),
        ("", "the payload is empty"),
        (Unsupported(), "a payload of type Unsupported cannot be written as JSON"),
        ({"inside": Unsupported()}, "a payload of type dict cannot be written as JSON"),
        ({"lost": float("nan")}, "a payload of type dict cannot be written as JSON"),
        (Line("pen", Decimal("1.5"), {"\ud800"}), "cannot be written as JSON"),
        ("\ud800", "the text cannot be written as UTF-8: surrogates not allowed at character 0"),
    ],
)
def test_the_error_for_an_unsupported_payload_lists_the_supported_types(payload: object, error: str) -> None:
    with pytest.raises(ConversionError) as refusal:
        CONVERTER.to_body(payload)

    assert error in str(refusal.value)


def test_a_payload_that_contains_itself_is_refused() -> None:
    payload: dict[str, Any] = {}
    payload["self"] = payload

    with pytest.raises(ConversionError, match="a payload of type dict cannot be written as JSON"):
        CONVERTER.to_body(payload)


@pytest.mark.parametrize(
    ("body", "target_type", "error"),
    [
        (b"\xff", str, "the body is not UTF-8 text: invalid start byte at byte 0; use the type bytes instead"),
        (b'{"placed":"x"}', Order, "the body cannot be read as Order: orderId: Field required; placed: Input should"),
        (b"[1]", list[Order], "the body cannot be read as list["),
        (b"not json", dict, "the body cannot be read as dict: body: Invalid JSON"),
        (b"{}", Unsupported, "a body cannot become a Unsupported"),
        (b"{", object, "the content type of the body is JSON, and it cannot be parsed"),
    ],
)
def test_a_body_of_another_type_is_an_error(body: bytes, target_type: Any, error: str) -> None:
    with pytest.raises(ConversionError) as refusal:
        CONVERTER.from_body(body, target_type, {"contentType": "application/json"})

    assert error in str(refusal.value)


def test_no_error_contains_the_body() -> None:
    """The error is logged, and the body may be secret."""
    with pytest.raises(ConversionError) as refusal:
        CONVERTER.from_body(b'{"orderId":"s3cret","placed":"s3cret"}', Order, {})

    assert "s3cret" not in str(refusal.value)


def test_another_converter_replaces_the_default(mqtemplate_broker: EmbeddedBroker) -> None:
    class Shouting:
        def to_body(self, payload: object) -> tuple[bytes, str | None]:
            return str(payload).upper().encode(), "text/shout"

        def from_body(self, body: bytes, target_type: Any, properties: Any) -> object:
            return body.decode().lower()

    template = RocketMQTemplate(mqtemplate_broker, converter=Shouting(), consumer_group="ears", consumer_topic="orders")

    template.sync_send("orders", "hello")

    [message] = messages_in(mqtemplate_broker, "orders")
    assert (message.body, message.properties["contentType"]) == (b"HELLO", "text/shout")
    assert template.receive(str) == ["hello"]


def test_json_that_is_nested_too_deeply_is_an_error_of_the_conversion() -> None:
    with pytest.raises(ConversionError, match="the content type of the body is JSON, and it cannot be parsed"):
        CONVERTER.from_body(b"[" * 100_000, object, {"contentType": "application/json"})
