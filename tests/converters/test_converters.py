"""Converters for msgspec, Avro and Protocol Buffers: round trips, types, content types, errors."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pydantic
import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from mqtemplate import JsonMessageConverter, MQApplication, VirtualClock, message_listener
from mqtemplate.converter import CONTENT_TYPE
from mqtemplate.converters import AvroConverter, ConverterByContentType, MsgspecConverter, ProtobufConverter
from mqtemplate.errors import ConfigurationError, ConversionError, ListenerError
from mqtemplate.testing import Harness, messages_in

pytestmark = pytest.mark.feature("converters")


class Item(msgspec.Struct):
    name: str
    count: int = 1


@dataclass
class Order:
    id: int
    price: float
    note: str = "-"


class OrderModel(pydantic.BaseModel):
    id: int
    price: float


OLD = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [{"name": "id", "type": "long"}, {"name": "price", "type": "double"}],
}
NEW = {**OLD, "fields": [*OLD["fields"], {"name": "note", "type": "string", "default": "-"}]}  # type: ignore[misc]


def app_of(*components: object) -> MQApplication:
    settings = {"rocketmq.name-server": "embedded:memory"}
    return MQApplication(*components, settings=settings, environment={}, clock=VirtualClock())


def again(converter: Any, payload: object, target_type: Any) -> object:
    """Return a payload after its way through a converter."""
    body, content_type = converter.to_body(payload)
    return converter.from_body(body, target_type, {} if content_type is None else {CONTENT_TYPE: content_type})


ALL = [MsgspecConverter(), MsgspecConverter("msgpack"), ProtobufConverter(), AvroConverter({Order: NEW})]


@pytest.mark.parametrize("converter", ALL, ids=repr)
def test_bytes_and_text_travel_as_they_are(converter: Any) -> None:
    assert converter.to_body(b"\xff") == (b"\xff", "application/octet-stream")
    assert converter.to_body("tea") == (b"tea", None)
    assert (converter.from_body(b"\xff", bytes, {}), converter.from_body(b"tea", str, {})) == (b"\xff", "tea")


@pytest.mark.parametrize("converter", ALL, ids=repr)
@pytest.mark.parametrize("payload", [None, b"", ""])
def test_an_empty_payload_is_refused(converter: Any, payload: object) -> None:
    with pytest.raises(ConversionError, match="a message needs a body"):
        converter.to_body(payload)


@pytest.mark.parametrize("converter", ALL, ids=repr)
def test_a_listener_takes_the_types_of_its_converter(converter: Any) -> None:
    """Through a broker: the template writes with the converter of the application, the listener reads with it."""
    payload: Any = {True: Item("tea"), False: Order(7, 2.5)}[isinstance(converter, MsgspecConverter)]
    if isinstance(converter, ProtobufConverter):
        payload = Timestamp(seconds=7)
    received: list[object] = []

    def take(payload: Any) -> None:
        received.append(payload)

    take.__annotations__["payload"] = type(payload)
    with app_of(message_listener("orders", "billing")(take), converter) as app:
        app.template.sync_send("orders", payload)
        Harness(app).run_until_idle()

        assert messages_in(app.broker, "orders")[0].properties[CONTENT_TYPE] == converter.to_body(payload)[1]
    assert received == [payload]


# --- msgspec ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_", "content_type"), [("json", "application/json"), ("msgpack", "application/msgpack")]
)
def test_msgspec_writes_one_format_and_reads_both(format_: Any, content_type: str) -> None:
    converter = MsgspecConverter(format_)

    assert converter.to_body(Item("tea"))[1] == content_type
    for other in (MsgspecConverter("json"), MsgspecConverter("msgpack")):
        body, given = other.to_body(Item("tea", 3))
        assert converter.from_body(body, Item, {CONTENT_TYPE: str(given)}) == Item("tea", 3)
    assert again(converter, {"a": [1]}, object) == {"a": [1]}


def test_msgspec_reads_what_the_default_converter_writes_and_the_other_way_round() -> None:
    assert MsgspecConverter().from_body(JsonMessageConverter().to_body({"name": "tea"})[0], Item, {}) == Item("tea")
    assert JsonMessageConverter().from_body(MsgspecConverter().to_body(Order(7, 2.5))[0], Order, {}) == Order(7, 2.5)


def test_a_body_that_msgspec_cannot_read_is_an_error_with_the_place() -> None:
    with pytest.raises(
        ConversionError, match=r"the body cannot be read as Item: Expected `int`, got `str` - at `\$\.count`"
    ):
        MsgspecConverter().from_body(b'{"name": "tea", "count": "x"}', Item, {})


def test_msgspec_refuses_types_that_it_does_not_know() -> None:
    with pytest.raises(ConversionError, match="msgspec cannot write a payload of type object: .*; allowed are structs"):
        MsgspecConverter().to_body(object())
    with pytest.raises(ValueError, match="format must be 'json' or 'msgpack', got 'xml'"):
        MsgspecConverter("xml")  # type: ignore[arg-type]


# --- Protocol Buffers ------------------------------------------------------------------------------


def test_protobuf_names_the_message_in_the_content_type() -> None:
    body, content_type = ProtobufConverter().to_body(Timestamp(seconds=7))

    assert content_type == 'application/x-protobuf; messageType="google.protobuf.Timestamp"'
    assert ProtobufConverter().from_body(body, object, {CONTENT_TYPE: content_type}) == Timestamp(seconds=7)
    assert ProtobufConverter().from_body(b"\x08\xff", object, {}) == b"\x08\xff", "the class is unknown"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda c: c.to_body({"a": 1}),
            "a payload of type dict is not a protobuf message; pass an object of a generated",
        ),
        (lambda c: c.to_body(Timestamp()), "has default values only, so its body is empty, .*; set a field"),
        (lambda c: c.from_body(b"\xff\xff", Timestamp, {}), "the body cannot be read as google.protobuf.Timestamp"),
        (
            lambda c: c.from_body(b"\x08\x07", Struct, {CONTENT_TYPE: 'x; messageType="google.protobuf.Timestamp"'}),
            "the body is a google.protobuf.Timestamp by its content type, not a google.protobuf.Struct",
        ),
        (
            lambda c: c.from_body(b"\x08\x07", object, {CONTENT_TYPE: 'x; messageType="shop.Order"'}),
            "the body is a shop.Order by its content type, and no imported module defines it; import the generated",
        ),
        (
            lambda c: c.check_type(Order),
            "Order is not a protobuf message; annotate the parameter with a generated class",
        ),
    ],
)
def test_a_mistake_with_protobuf_is_an_error(call: Any, text: str) -> None:
    with pytest.raises(ConversionError, match=text):
        call(ProtobufConverter())


# --- Avro ------------------------------------------------------------------------------------------


def test_avro_writes_the_single_object_encoding() -> None:
    """Marker, fingerprint of the schema, value: as Avro's own library writes it."""
    body, content_type = AvroConverter({Order: NEW}).to_body(Order(7, 2.5, "x"))

    canonical = fastavro.schema.to_parsing_canonical_form(NEW)
    digest = bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))
    assert (body[:2], body[2:10], content_type) == (b"\xc3\x01", digest[::-1], "avro/binary")
    assert body[10:11] == b"\x0e", "7 as a zigzag number"


@pytest.mark.parametrize(
    ("target_type", "expected"),
    [
        (Order, Order(7, 2.5, "x")),
        (dict, {"id": 7, "price": 2.5, "note": "x"}),
        (object, {"id": 7, "price": 2.5, "note": "x"}),
        (OrderModel, OrderModel(id=7, price=2.5)),
    ],
)
def test_avro_reads_dataclasses_models_and_dicts(target_type: Any, expected: object) -> None:
    assert again(AvroConverter({Order: NEW}), Order(7, 2.5, "x"), target_type) == expected


def test_avro_reads_bodies_of_an_older_schema(tmp_path: Path) -> None:
    """The fields that the writer did not know have their defaults."""
    (tmp_path / "order-1.avsc").write_text(msgspec.json.encode(OLD).decode())
    body, _ = AvroConverter({OrderModel: OLD}).to_body(OrderModel(id=7, price=2.5))

    assert AvroConverter({Order: NEW}, older=[tmp_path / "order-1.avsc"]).from_body(body, Order, {}) == Order(7, 2.5)


def test_a_dict_is_written_with_the_only_schema() -> None:
    assert again(AvroConverter({Order: NEW}), {"id": 7, "price": 1.0, "note": "x"}, Order) == Order(7, 1.0, "x")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda c: c.to_body(Item("x")),
            ConversionError,
            r"no Avro schema for a payload of type Item \(there is: Order\)",
        ),
        (lambda c: c.to_body(Order("x", 1.0)), ConversionError, "type Order does not fit the Avro schema shop.Order"),
        (lambda c: c.from_body(b"{}", Order, {}), ConversionError, "must start with the bytes C3 01"),
        (
            lambda c: c.from_body(AvroConverter({Order: OLD}).to_body(Order(7, 1.0))[0], Order, {}),
            ConversionError,
            r"a schema of fingerprint [0-9a-f]{16}, and the converter knows shop.Order; add that schema: AvroConverter",
        ),
        (
            lambda c: c.from_body(c.to_body(Order(7, 1.0))[0][:-5], Order, {}),
            ConversionError,
            "the body cannot be read as shop.Order",
        ),
        (
            lambda c: AvroConverter({Order: "{"}),
            ConfigurationError,
            "an Avro schema cannot be read: .*; give a schema as",
        ),
        (lambda c: AvroConverter({Order: Path("none.avsc")}), ConfigurationError, "an Avro schema cannot be read"),
        (lambda c: c.check_type(threading.Thread), ConversionError, "an Avro record cannot become a"),
    ],
)
def test_a_mistake_with_avro_is_an_error(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(AvroConverter({Order: NEW}))


# --- several formats -------------------------------------------------------------------------------


def test_bodies_go_to_the_converter_of_their_content_type() -> None:
    converter = ConverterByContentType(
        {"application/x-protobuf": ProtobufConverter(), "application/msgpack": MsgspecConverter("msgpack")}
    )

    assert again(converter, Timestamp(seconds=7), Timestamp) == Timestamp(seconds=7)
    assert again(converter, Item("tea"), Item) == Item("tea")
    assert converter.to_body({"a": 1}) == (b'{"a":1}', "application/json"), "the default converter"
    assert again(converter, Order(7, 2.5), Order) == Order(7, 2.5)


def test_each_type_that_one_of_the_converters_knows_is_accepted_at_the_start() -> None:
    converter = ConverterByContentType({"application/x-protobuf": ProtobufConverter()})

    converter.check_type(Timestamp)
    converter.check_type(Order)
    with pytest.raises(ConversionError, match="a body cannot become a"):
        converter.check_type(threading.Thread)


def test_an_application_refuses_a_handler_whose_type_the_converter_does_not_know() -> None:
    @message_listener("orders", "billing")
    def bill(order: Order) -> None: ...

    with pytest.raises(ListenerError, match="bill: Order is not a protobuf message; annotate the parameter with"):
        app_of(bill, ProtobufConverter()).start()
