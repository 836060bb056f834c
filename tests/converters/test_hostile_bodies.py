"""Bodies that are made to exhaust a converter: each one is an error of the conversion, and the process lives."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from mqtemplate import JsonMessageConverter, MQApplication, VirtualClock, message_listener
from mqtemplate.converters import AvroConverter, BodyLimits, MsgspecConverter, ProtobufConverter
from mqtemplate.errors import ConversionError
from mqtemplate.testing import Harness, messages_in
from tests.thirds import examples

pytestmark = pytest.mark.feature("converters")

NODE = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [{"name": "children", "type": {"type": "array", "items": "Tree"}}, {"name": "name", "type": "string"}],
}
NULLS = {"type": "record", "name": "Nulls", "fields": [{"name": "all", "type": {"type": "array", "items": "null"}}]}
MONEY = {
    "type": "record",
    "name": "Money",
    "fields": [{"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}}],
}


@dataclass
class Node:
    next: Node | None = None


@dataclass
class Tree:
    name: str
    children: list[Tree] = field(default_factory=list)


@dataclass
class Nulls:
    all: list[None]


class Model(BaseModel):
    id: int
    inside: Any = None


class Nested(msgspec.Struct):
    inside: Any = None


def zigzag(number: int) -> bytes:
    """Return a number as Avro writes it."""
    return varint((number << 1) ^ (number >> 63))


def varint(number: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


CRASH = """
import json, sys
from mqtemplate.converters import AvroConverter
from mqtemplate.errors import ConversionError
converter = AvroConverter({dict: json.loads(sys.argv[1])})
body = converter.to_body({"next": None})[0][:10] + b"\\x02" * 100_000 + b"\\x00"
try:
    converter.from_body(body, dict, {})
except ConversionError as error:
    print(error)
"""


def test_a_deep_body_of_a_recursive_schema_does_not_end_the_process() -> None:
    """Avro's decoder is written in C and recursive: 100 KB overflow its stack."""
    program = subprocess.run(
        [sys.executable, "-c", CRASH, msgspec.json.encode(NODE).decode()], capture_output=True, text=True, check=False
    )

    assert (program.returncode, program.stderr) == (0, "")
    assert "the body cannot be read as Node: the body is nested deeper than 200 values; if it must be" in program.stdout


@pytest.mark.parametrize(
    ("kind", "schema", "value", "error"),
    [
        (Node, NODE, b"\x02" * 100_000, "nested deeper than 200 values"),
        (Tree, TREE, zigzag(1) * 100_000, "nested deeper than 200 values"),
        (Tree, TREE, zigzag(1 << 60), "announces 1152921504606846976 items, allowed are 1000000"),
        (Tree, TREE, zigzag(-(1 << 60)) + zigzag(5), "announces 1152921504606846976 items"),
        (Nulls, NULLS, zigzag(1 << 40) + b"\x00", "announces 1099511627776 items, allowed are 1000000"),
        (Nulls, NULLS, zigzag(600_000) + zigzag(600_000), "announces 1200000 items"),
        (Nulls, NULLS, b"\xff" * 30, "EOFError"),
        (Node, NODE, b"", "EOFError"),
        (Node, NODE, zigzag(7), "IndexError: branch 7 of a union with 2"),
        (Tree, TREE, b"\x00" + zigzag(1 << 50), "EOFError: 1125899906842624 bytes are announced"),
        (dict, MONEY, zigzag(100_000) + b"\x7f" * 100_000, "a decimal of 100000 bytes, allowed are 13"),
    ],
)
def test_a_body_beyond_the_limits_of_avro_is_an_error(kind: type, schema: Any, value: bytes, error: str) -> None:
    converter = AvroConverter({kind: schema})

    with pytest.raises(ConversionError, match=error):
        converter.from_body(converter._by_type[kind].header + value, kind, {})


def test_the_limits_of_avro_are_a_setting() -> None:
    """Depth up to 500, so that the stack of a thread is large enough."""
    converter = AvroConverter({Node: NODE}, limits=BodyLimits(depth=3))
    deep = Node(Node(Node()))

    assert converter.from_body(converter.to_body(deep)[0], Node, {}) == deep
    with pytest.raises(ConversionError, match="nested deeper than 3 values"):
        converter.to_body(Node(Node(Node(Node(Node())))))
    for wrong in ({"depth": 0}, {"depth": 501}, {"items": 0}, {"items": True}):
        with pytest.raises(ValueError, match="must be a whole number from 1 to"):
            BodyLimits(**wrong)


@st.composite
def trees(draw: st.DrawFn, depth: int = 4) -> Tree:
    children = draw(st.lists(trees(depth=depth - 1), max_size=3)) if depth else []
    return Tree(draw(st.text(max_size=5)), children)


@settings(max_examples=examples(50), deadline=None)
@given(tree=trees())
def test_what_is_within_the_limits_is_read(tree: Tree) -> None:
    converter = AvroConverter({Tree: TREE})

    assert converter.from_body(converter.to_body(tree)[0], Tree, {}) == tree


@settings(max_examples=examples(200), deadline=None)
@given(value=st.binary(max_size=300), kind=st.sampled_from([Node, Tree, Nulls]))
def test_any_bytes_are_a_value_or_an_error_of_the_conversion(value: bytes, kind: type) -> None:
    converter = AvroConverter({Node: NODE, Tree: TREE, Nulls: NULLS})
    start = converter._by_type[kind].header

    try:
        found = converter.from_body(start + value, kind, {})
    except ConversionError:
        return
    assert isinstance(found, kind)


def deep_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize("depth", [201, 253, 5_000])
def test_a_payload_that_readers_would_refuse_is_refused(depth: int) -> None:
    """The readers of JSON parse up to a depth of 200."""
    with pytest.raises(ConversionError, match=r"nested deeper than 200 values, and no reader|maximum recursion depth"):
        JsonMessageConverter().to_body(deep_list(depth))


@pytest.mark.parametrize("payload", [cyclic(), deep_list(20_000)], ids=["cycle", "deep"])
@pytest.mark.parametrize(
    "converter", [JsonMessageConverter(), MsgspecConverter(), MsgspecConverter("msgpack")], ids=repr
)
def test_a_payload_that_cannot_be_written_is_refused(converter: Any, payload: object) -> None:
    with pytest.raises(ConversionError, match=r"cannot (be written as JSON|write a payload of type)"):
        converter.to_body(payload)


def test_what_json_writes_it_reads_up_to_its_depth() -> None:
    converter = JsonMessageConverter()
    wide = [{"a": [{"b": "]]]{{{["}]}] * 1_000

    for payload in (deep_list(200), wide, {"a": wide}):
        assert (
            converter.from_body(converter.to_body(payload)[0], object, {"contentType": "application/json"}) == payload
        )


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"id":' * 50_000, b'{"id":' + b"9" * 5_000 + b"}", b'{"id":1e999}', b"\x00" * 100, b"{\xff}"],
    ids=["deep array", "deep object", "long number", "large number", "zeros", "no text"],
)
@pytest.mark.parametrize("target", [Model, dict, list, object, Model | None], ids=str)
@pytest.mark.parametrize("converter", [JsonMessageConverter(), MsgspecConverter()], ids=repr)
def test_json_that_cannot_be_read_is_an_error_of_the_conversion(converter: Any, target: Any, body: bytes) -> None:
    if isinstance(converter, MsgspecConverter) and target in (Model, Model | None):
        target = Nested
    try:
        converter.from_body(body, target, {"contentType": "application/json"})
    except ConversionError:
        return
    assert body.startswith((b'{"id":1e', b'{"id":9')), "only a number may be read: some types take any"


@pytest.mark.parametrize(
    "body", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_message_pack_that_announces_too_much_is_an_error(body: bytes) -> None:
    with pytest.raises(ConversionError):
        MsgspecConverter("msgpack").from_body(body, object, {"contentType": "application/msgpack"})


def test_a_deep_message_of_protobuf_is_an_error() -> None:
    value = Struct()
    for _ in range(300):
        inside = Struct()
        inside.fields["a"].struct_value.CopyFrom(value) if _ < 40 else None
        value = inside if _ < 40 else value
    body = value.SerializeToString()
    for _ in range(200):
        inner = b"\x2a" + varint(len(body)) + body
        entry = b"\x0a\x01a\x12" + varint(len(inner)) + inner
        body = b"\x0a" + varint(len(entry)) + entry

    with pytest.raises(ConversionError, match=r"the body cannot be read as google.protobuf.Struct"):
        ProtobufConverter().from_body(body, Struct, {})


def test_a_hostile_body_is_a_dead_letter_at_once() -> None:
    """Not after all retries: none of them could help. The messages after it are handled."""
    received: list[object] = []

    @message_listener("orders", "billing")
    def bill(order: Model) -> None:
        received.append(order)

    settings_ = {"rocketmq.name-server": "embedded:memory"}
    with MQApplication(bill, settings=settings_, environment={}, clock=VirtualClock()) as app:
        app.template.sync_send("orders", b"[" * 100_000)
        app.template.sync_send("orders", Model(id=1))
        Harness(app, raise_handler_errors=False).run_until_idle()

        assert len(messages_in(app.broker, "%DLQ%billing")) == 1
    assert received == [Model(id=1)]


# --- encodings of JSON -------------------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Model, Model(id=1)),
        (Model | None, Model(id=1)),
        (dict, {"id": 1}),
        (dict[str, int], {"id": 1}),
        (object, {"id": 1}),
        (str, '\ufeff{"id":1}'),
        (bytes, BOM + b'{"id":1}'),
    ],
    ids=str,
)
def test_a_mark_of_utf8_before_json_is_ignored(target: Any, expected: object) -> None:
    """Programs of Windows write it. Text and bytes arrive as they were sent."""
    properties = {"contentType": "application/json"}

    assert JsonMessageConverter().from_body(BOM + b'{"id":1}', target, properties) == expected


def test_msgspec_ignores_it_too() -> None:
    assert MsgspecConverter().from_body(BOM + b'{"inside":1}', Nested, {}) == Nested(1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("target", [Model, dict, object, Model | None], ids=str)
def test_json_in_another_encoding_is_an_error_with_the_reason(encoding: str, target: Any) -> None:
    body = '{"id":1}'.encode(encoding)

    with pytest.raises(ConversionError, match="it seems to be UTF-16 or UTF-32, and JSON is UTF-8; let the producer"):
        JsonMessageConverter().from_body(body, target, {"contentType": "application/json"})
