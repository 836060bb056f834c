"""What was sent arrives equal, for each annotation that the start accepts; others are refused at the start."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from threading import Thread
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, TypeVar, Union
from uuid import UUID

import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field, SecretStr
from typing_extensions import TypedDict

from mqtemplate import Message, MQApplication, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.converters import AvroConverter, MsgspecConverter, ProtobufConverter
from mqtemplate.errors import ConversionError, ListenerError
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import Harness
from tests.kit import application
from tests.thirds import examples

pytestmark = pytest.mark.feature("converters")

CONVERTER = JsonMessageConverter()


class Colour(StrEnum):
    RED = "red"
    NULL = "null"


class Size(str, Enum):  # noqa: UP042 (the form of older programs)
    LARGE = "large"
    ONE = "1"


class Plain(Enum):
    A = "a"
    ONE = 1


class Grade(IntEnum):
    BEST = 1


class Point(NamedTuple):
    x: int
    y: str = "-"


class Entry(TypedDict):
    id: int


@dataclass
class Line:
    article: str
    price: Decimal


class Order(BaseModel):
    id: int
    note: str | None = None


class Refund(BaseModel):
    refund: int
    at: datetime | None = None


class Paid(BaseModel):
    kind: Literal["paid"] = "paid"
    id: int


class Shipped(BaseModel):
    kind: Literal["shipped"] = "shipped"
    id: int


Sku = NewType("Sku", str)
AnyText = TypeVar("AnyText", bound=str)

TEXT = st.text(min_size=1) | st.sampled_from(
    ["null", '"quoted"', "12", "true", "{}", "[]", '{"id":1}', "1.5", "\ufeff", "red"]
)
BINARY = st.binary(min_size=1) | TEXT.map(str.encode)
INTS = st.integers()
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=-9, minutes=-30))])
MOMENTS = st.datetimes(min_value=datetime(1600, 1, 1), timezones=ZONES)  # noqa: DTZ001 (of each zone)
DATES = st.dates(min_value=date(1600, 1, 1))
SPANS = st.timedeltas(min_value=timedelta(days=-100_000), max_value=timedelta(days=100_000))
ORDERS = st.builds(Order, id=INTS, note=st.none() | TEXT)
REFUNDS = st.builds(Refund, refund=INTS, at=st.none() | MOMENTS)
LINES = st.builds(Line, article=TEXT, price=DECIMALS)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)

ACCEPTED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, TEXT),
    (str | None, TEXT),
    (Optional[str], TEXT),  # noqa: UP045 (both forms of a union)
    (Union[str, int, None], TEXT | INTS),  # noqa: UP007
    (int | str, TEXT | INTS),
    (str | int | float | bool | None, TEXT | INTS | FLOATS | st.booleans()),
    (Order | str, TEXT | ORDERS),
    (str | Order | None, TEXT | ORDERS),
    (Order | Refund, ORDERS | REFUNDS),
    (Refund | Order | Line | str | bytes | None, ORDERS | REFUNDS | LINES | TEXT | BINARY),
    (Paid | Shipped, st.builds(Paid, id=INTS) | st.builds(Shipped, id=INTS)),
    (Annotated[Paid | Shipped, Field(discriminator="kind")], st.builds(Paid, id=INTS) | st.builds(Shipped, id=INTS)),
    (bytes, BINARY),
    (bytes | None, BINARY),
    (bytes | str, BINARY | TEXT),
    (str | bytes | dict[str, int], BINARY | TEXT | st.dictionaries(st.text(), INTS)),
    (bytes | datetime, BINARY | MOMENTS),
    (bytearray, BINARY),
    (memoryview, BINARY),
    (bytearray | None, BINARY),
    (
        Any,
        BINARY | TEXT | JSON_VALUES.filter(lambda value: (value is not None and not isinstance(value, str)) or value),
    ),
    (object, BINARY | TEXT | st.lists(JSON_VALUES)),
    (Colour, st.sampled_from(Colour)),
    (Colour | None, st.sampled_from(Colour)),
    (Colour | int, st.sampled_from(Colour) | INTS),
    (Size, st.sampled_from(Size)),
    (Size | Order, st.sampled_from(Size) | ORDERS),
    (Plain, st.sampled_from(Plain)),
    (Plain | str, st.sampled_from(Plain) | TEXT),
    (Grade, st.sampled_from(Grade)),
    (Grade | str, st.sampled_from(Grade) | TEXT),
    (Literal["a", "null"], st.sampled_from(["a", "null"])),
    (Literal["a", 1, b"b", None], st.sampled_from(["a", 1, b"b"])),
    (Literal["a"] | int, st.just("a") | INTS),
    (Sku, TEXT),
    (Sku | int, TEXT | INTS),
    (AnyText, TEXT),
    (Annotated[str, Field(min_length=1)], TEXT),
    (Annotated[str | None, AfterValidator(lambda value: value)], TEXT),
    (Annotated[str, Field(min_length=1)] | int, TEXT | INTS),
    (bool, st.booleans()),
    (int, INTS),
    (float, FLOATS),
    (int | float, INTS | FLOATS),
    (Decimal, DECIMALS),
    (Decimal | str, DECIMALS | TEXT),
    (Decimal | float | int, DECIMALS | FLOATS | INTS),
    (datetime, MOMENTS),
    (datetime | str, MOMENTS | TEXT),
    (datetime | date | time, MOMENTS | DATES | st.times()),
    (date | datetime | UUID | None, DATES | MOMENTS | st.uuids()),
    (timedelta, SPANS),
    (timedelta | datetime | UUID, SPANS | MOMENTS | st.uuids()),
    (UUID | str, st.uuids() | TEXT),
    (UUID | Decimal, st.uuids() | DECIMALS),
    (dict, st.dictionaries(st.text(), JSON_VALUES)),
    (dict[int, str | None], st.dictionaries(INTS, st.none() | st.text())),
    (dict[str, Order | list[str]], st.dictionaries(st.text(), ORDERS | st.lists(st.text()), max_size=3)),
    (Entry, st.builds(lambda id: {"id": id}, INTS)),  # noqa: A006 (the name of the field)
    (Line, LINES),
    (Line | None, LINES),
    (Point, st.builds(Point, INTS, st.text())),
    (Point | str, st.builds(Point, INTS, st.text()) | TEXT),
    (tuple[int, str], st.tuples(INTS, st.text())),
    (tuple[bytes, ...] | str, st.lists(TEXT.map(str.encode)).map(tuple) | TEXT),
    (set[int] | dict[str, int], st.sets(INTS) | st.dictionaries(st.text(), INTS)),
    (frozenset[UUID], st.frozensets(st.uuids())),
    (deque[int], st.lists(INTS).map(deque)),
]


@pytest.mark.parametrize(("annotation", "payloads"), ACCEPTED, ids=lambda value: str(value)[:60])
def test_what_was_sent_arrives_equal(annotation: Any, payloads: st.SearchStrategy[Any]) -> None:
    CONVERTER.check_type(annotation)

    @settings(max_examples=examples(60), deadline=None)
    @given(payload=payloads)
    def arrives_equal(payload: object) -> None:
        body, content_type = CONVERTER.to_body(payload)

        found = CONVERTER.from_body(body, annotation, {"contentType": content_type} if content_type else {})

        assert found == payload
        assert isinstance(found, str) is isinstance(payload, str)

    arrives_equal()


REFUSED: list[tuple[Any, str]] = [
    (
        list[int] | set[int],
        r"cannot tell list\[int\] and set\[int\] apart in list\[int\] \| set\[int\]: both have the same",
    ),
    (list[int] | tuple[int, ...], "apart"),
    (list[datetime | str], r"cannot tell datetime and str apart in datetime.datetime \| str"),
    (list[bytes | str], "cannot tell bytes and str apart"),
    (dict[str, Decimal | str], "cannot tell Decimal and str apart"),
    (dict[int | str, str], r"cannot tell the keys of dict\[int \| str, str\] apart: names in JSON are text"),
    (timedelta | time, "cannot tell timedelta and time apart"),
    (datetime | Decimal, "cannot tell datetime and Decimal apart"),
    (Order | dict[str, Any], r"cannot tell Order and dict\[str, typing.Any\] apart"),
    (Entry | dict, "cannot tell Entry and dict apart"),
    (Order | Entry, "cannot tell Order and Entry apart"),
    (Grade | Plain, "cannot tell Grade and Plain apart"),
    (Plain | int, "cannot tell Plain and int apart"),
    (Literal[Plain.A], "cannot be read back from its body; use an enum of texts or numbers"),
    (Enum("Corner", {"A": (1, 2)}), r"<Corner.A: \(1, 2\)> of Corner cannot be read back from its body"),
    (SecretStr, "a SecretStr is written as asterisks, so its value cannot arrive; use str"),
    (Thread | str, "a body cannot become a Thread"),
]


@pytest.mark.parametrize(("annotation", "error"), REFUSED, ids=lambda value: str(value)[:60])
def test_an_annotation_that_cannot_keep_a_value_is_refused_at_the_start(annotation: Any, error: str) -> None:
    """With the names of both types, so that one of them can be changed; not when the first message arrives."""

    def take(payload: Any) -> None: ...

    take.__annotations__["payload"] = annotation
    listener = message_listener("orders", "billing", batch=False)(take)

    with pytest.raises(ListenerError, match=error) as refusal:
        application(listener).start()
    assert "take" in str(refusal.value)


SENT: list[tuple[Any, list[Any]]] = [
    (str | None, ["null", '"quoted"', "None"]),
    (int | str, ["12", 12]),
    (Order | str, [Order(id=1), '{"id":1}']),
    (bytes | str | None, [b"null", "null"]),
    (Colour, [Colour.NULL]),
    (Size, [Size.ONE]),
    (Literal["a"], ["a"]),
    (object, [b"text", "text", {"id": 1}]),
    (datetime | str, [datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00Z"]),
]


@pytest.mark.parametrize(("annotation", "payloads"), SENT, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("form", ["one", "batch", "async"])
def test_a_listener_gets_what_was_sent(annotation: Any, payloads: list[Any], form: str) -> None:
    """One by one, in a batch, and with an ``async def`` handler."""
    received: list[object] = []

    def take(payload: Any) -> None:
        received.extend(payload if form == "batch" else [payload])

    async def take_async(payload: Any) -> None:
        received.append(payload)

    handler = take_async if form == "async" else take
    handler.__annotations__["payload"] = list[annotation] if form == "batch" else annotation
    with application(message_listener("values", "group")(handler)) as app:
        for payload in payloads:
            app.template.sync_send("values", payload)
        Harness(app).run_until_idle()

    assert sorted(received, key=repr) == sorted(payloads, key=repr)


@pytest.mark.parametrize(("annotation", "payloads"), SENT, ids=lambda value: str(value)[:60])
def test_receive_and_a_reply_return_what_was_sent(annotation: Any, payloads: list[Any]) -> None:
    def echo(payload: Any) -> object:
        return payload

    echo.__annotations__["payload"] = annotation
    app = MQApplication(
        message_listener("questions", "group")(echo),
        settings={
            "rocketmq.name-server": "embedded:memory",
            "rocketmq.pull-consumer": {"group": "pull", "topic": "values"},
        },
        environment={},
    )
    with app:
        for payload in payloads:
            app.template.sync_send("values", payload)
        received: list[object] = []
        while len(received) < len(payloads):
            received += app.template.receive(annotation)
        replies = [app.template.send_and_receive("questions", payload, annotation) for payload in payloads]

    assert sorted(received, key=repr) == sorted(payloads, key=repr)
    assert replies == payloads


def test_receive_refuses_a_type_before_it_takes_a_message(mqtemplate_broker: EmbeddedBroker) -> None:
    """A mistake of the caller must not make dead letters of the messages."""
    template = RocketMQTemplate(mqtemplate_broker, consumer_group="pull", consumer_topic="values")
    template.sync_send("values", "kept")

    with pytest.raises(ConversionError, match="a body cannot become a Thread"):
        template.receive(Thread)
    with pytest.raises(ConversionError, match="a body cannot become a Thread"):
        template.send_and_receive("values", "never sent", Thread)

    assert template.receive(str) == ["kept"]


@pytest.mark.parametrize(
    ("body", "annotation", "expected"),
    [
        (b'{"id":1}', Order, Order(id=1)),
        (b'{"id":1}', Order | None, Order(id=1)),
        (b'{"id":1}', Order | str, '{"id":1}'),
        (b"null", Order | None, None),
        (b"12", int, 12),
        (b'"red"', Colour, Colour.RED),
        (b"\xff", str | bytes, b"\xff"),
        (b"12", Literal["a"] | int, 12),
    ],
)
def test_a_body_without_a_content_type_is_text_if_the_type_takes_text(
    body: bytes, annotation: Any, expected: object
) -> None:
    """Producers without a template, such as Java's, send no content type."""
    received: list[object] = []

    def take(payload: Any) -> None:
        received.append(payload)

    take.__annotations__["payload"] = annotation
    with application(message_listener("values", "group")(take)) as app:
        app.template.sync_send("values", Message("values", body))
        Harness(app).run_until_idle()

    assert received == [expected]


class Item(msgspec.Struct):
    id: int


TREE = {"type": "record", "name": "Line", "fields": [{"name": "article", "type": "string"}]}


@dataclass
class Goods:
    article: str


@pytest.mark.parametrize(
    ("converter", "annotation", "payloads"),
    [
        (MsgspecConverter(), Item | str | None, [Item(1), "null", '{"id":1}']),
        (MsgspecConverter(), bytes | str, [b"a", "a"]),
        (MsgspecConverter(), int | str, ["12", 12]),
        (MsgspecConverter(), Colour, [Colour.NULL]),
        (MsgspecConverter(), Literal["a", 1], ["a", 1]),
        (MsgspecConverter(), datetime | str, [datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00Z"]),
        (MsgspecConverter(), object, ["a", b"a", {"a": 1}]),
        (MsgspecConverter("msgpack"), Item | str | None, [Item(1), "null", "\x81"]),
        (MsgspecConverter("msgpack"), object, ["a", b"a", {"a": 1}]),
        (MsgspecConverter("msgpack"), Size | int, [Size.ONE, 1]),
        (AvroConverter({Goods: TREE}), Goods | str | None, [Goods("tea"), "null"]),
        (AvroConverter({Goods: TREE}), Goods | bytes, [Goods("tea"), b"a"]),
        (AvroConverter({Goods: TREE}), object, ["a", b"a", b"\xff"]),
        (AvroConverter({Goods: TREE}), Colour, [Colour.RED]),
        (ProtobufConverter(), Timestamp | str, [Timestamp(seconds=7), "null"]),
        (ProtobufConverter(), Timestamp | Duration | None, [Timestamp(seconds=7), Duration(seconds=7)]),
        (ProtobufConverter(), object, ["a", b"a", Timestamp(seconds=7)]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_was_sent_arrives_equal_with_each_converter(converter: Any, annotation: Any, payloads: list[Any]) -> None:
    converter.check_type(annotation)

    for payload in payloads:
        body, content_type = converter.to_body(payload)
        found = converter.from_body(body, annotation, {"contentType": content_type} if content_type else {})

        assert (found, type(found)) == (payload, type(payload))
