"""Conversion of payloads to bodies and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
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
from tests.golden import check_script
from tests.sessions import Session

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


class Unsupported:
    """A class that cannot be written as JSON."""


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


def from_json(body: bytes, target_type: Any, length: int = 61) -> object:
    """Convert a body. The error has so many characters: its rest is of pydantic, and differs between versions."""
    try:
        return CONVERTER.from_body(body, target_type, {"contentType": "application/json"})
    except ConversionError as error:
        raise ConversionError(str(error)[:length].rstrip()) from None


def to_json(payload: object) -> object:
    """Convert a payload. The error ends before the reason of the library that writes JSON."""
    try:
        return CONVERTER.to_body(payload)
    except ConversionError as error:
        raise ConversionError(str(error).partition(" JSON:")[0]) from None


def round_trip(payload: object, target_type: Any) -> object:
    return CONVERTER.from_body(CONVERTER.to_body(payload)[0], target_type, {})


def test_no_error_contains_the_body() -> None:
    """The error is logged, and the body may be secret."""
    with pytest.raises(ConversionError) as refusal:
        CONVERTER.from_body(b'{"orderId":"s3cret","placed":"s3cret"}', Order, {})

    assert "s3cret" not in str(refusal.value)


def test_the_converter_does_as_the_script_says() -> None:
    kinds = (Annotated, Any, Colour, Decimal, Field, Grade, Line, Order, UUID, Unsupported, date, datetime, timedelta)
    names = {getattr(each, "__name__", "Any"): each for each in kinds}
    names |= {
        "UTC": UTC,
        "CONVERTER": CONVERTER,
        "ORDER": ORDER,
        "from_json": from_json,
        "to_json": to_json,
        "round_trip": round_trip,
    }

    check_script(Path(__file__).parent / "converter.script", Session(names))
