"""Spark types of payload classes and of the source's columns."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")

from pyspark.sql.pandas.types import to_arrow_schema  # noqa: E402

from mqtemplate.errors import ListenerError  # noqa: E402
from mqtemplate.spark import payload_schema, source_schema  # noqa: E402
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA  # noqa: E402


class Colour(Enum):
    RED = "red"


@dataclass
class Line:
    article: str
    count: int


class Order(BaseModel):
    id: int
    paid: bool
    amount: Decimal
    weight: float | None = None
    note: str = Field("", alias="remark")
    raw: bytes = b""
    at: datetime
    day: date
    lines: list[Line]
    labels: dict[str, int]
    colour: Colour
    kind: Literal["a", "b"]
    score: Annotated[int, Field(ge=0)]
    pair: tuple[int, ...] = ()


class Tree(BaseModel):
    anything: Any


class Either(BaseModel):
    value: int | str


def test_a_model_becomes_a_struct() -> None:
    """Fields have their names in the JSON. Each one may be null, since a body may lack it."""
    schema = payload_schema(Order)

    assert schema.simpleString() == (
        "struct<id:bigint,paid:boolean,amount:decimal(38,18),weight:double,remark:string,raw:binary,at:timestamp,day:date,"
        "lines:array<struct<article:string,count:bigint>>,labels:map<string,bigint>,colour:string,kind:string,"
        "score:bigint,pair:array<bigint>>"
    )
    assert all(field.nullable for field in schema)


def test_a_dataclass_becomes_a_struct() -> None:
    assert payload_schema(Line).simpleString() == "struct<article:string,count:bigint>"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (Tree, "payload field Tree.anything: typing.Any has no counterpart in Spark"),
        (Either, "payload field Either.value: .* is more than one type"),
        (dict, "is neither a pydantic model nor a dataclass"),
    ],
)
def test_a_type_without_a_column_type_is_refused(payload: type, words: str) -> None:
    with pytest.raises(ListenerError, match=words):
        payload_schema(payload)


def test_the_columns_are_the_same_in_arrow_and_in_spark() -> None:
    """Spark refuses a first batch whose schema is not exactly the declared one."""
    assert to_arrow_schema(source_schema(), timezone="UTC").equals(ARROW_SCHEMA)
    without = to_arrow_schema(source_schema(include_properties=False), timezone="UTC")
    assert without.names == [name for name in ARROW_SCHEMA.names if name not in ("msgId", "properties")]
