"""Spark types: the columns of the source, and the struct of a payload class."""

from __future__ import annotations

import dataclasses
import types
import typing
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any

from mqtemplate.errors import ListenerError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def source_schema(*, include_properties: bool = True) -> StructType:
    """Return the columns of ``format("mqtemplate")``.

    Names and types are as in rocketmq-spark where it has the column, except that ``properties`` is a map.

    Args:
        include_properties: False leaves out ``properties`` and ``msgId``, which take most time to build.
    """
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    from mqtemplate.spark.records.record_batches import ARROW_SCHEMA

    left_out = () if include_properties else ("msgId", "properties")
    return StructType([field for field in from_arrow_schema(ARROW_SCHEMA) if field.name not in left_out])


def payload_schema(payload: type) -> StructType:
    """Return the struct for the JSON bodies of a pydantic model or a dataclass.

    A field has its name in the JSON, which may be a pydantic alias. Each field may be null, since a body may lack it.
    ``X | None`` is X. An enum is the type of its values.

    Raises:
        ListenerError: The type of a field has no counterpart in Spark.
    """
    from pyspark.sql.types import StructField, StructType

    owner = payload.__qualname__
    return StructType([StructField(name, _spark_type(kind, f"{owner}.{name}")) for name, kind in _fields(payload)])


def _fields(payload: Any) -> list[tuple[str, Any]]:
    from pydantic import BaseModel

    if isinstance(payload, type) and issubclass(payload, BaseModel):
        return [(_json_name(name, field), field.annotation) for name, field in payload.model_fields.items()]
    if dataclasses.is_dataclass(payload):
        hints = typing.get_type_hints(payload)
        return [(field.name, hints[field.name]) for field in dataclasses.fields(payload)]
    raise ListenerError(f"payload {payload!r} is neither a pydantic model nor a dataclass, so it has no columns")


def _json_name(name: str, field: Any) -> str:
    from pydantic import AliasChoices

    alias = field.validation_alias or field.alias
    if isinstance(alias, AliasChoices):
        alias = alias.choices[0]
    return alias if isinstance(alias, str) else name


def _spark_type(kind: Any, where: str) -> DataType:
    from pyspark.sql import types as t

    simple: dict[Any, DataType] = {
        bool: t.BooleanType(),
        int: t.LongType(),
        float: t.DoubleType(),
        str: t.StringType(),
        bytes: t.BinaryType(),
        Decimal: t.DecimalType(38, 18),
        datetime: t.TimestampType(),
        date: t.DateType(),
    }
    if kind in simple:
        return simple[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _spark_type(arguments[0], where)
    if origin in (typing.Union, types.UnionType):
        return _spark_type(_only_one([one for one in arguments if one is not type(None)], kind, where), where)
    if origin is typing.Literal:
        return _spark_type(_only_one(list({type(value) for value in arguments}), kind, where), where)
    if origin in (list, set, frozenset, tuple):
        items = [one for one in arguments if one is not Ellipsis]
        return t.ArrayType(_spark_type(_only_one(items, kind, where), where))
    if origin is dict and arguments[0] is str:
        return t.MapType(t.StringType(), _spark_type(arguments[1], where))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _spark_type(_only_one(list({type(member.value) for member in kind}), kind, where), where)
    if hasattr(kind, "model_fields") or dataclasses.is_dataclass(kind):
        return payload_schema(kind)
    raise ListenerError(
        f"payload field {where}: {kind!r} has no counterpart in Spark; use bool, int, float, str, bytes, Decimal, "
        "datetime, date, list, dict with str keys, an enum, another model, or one of them with | None"
    )


def _only_one(kinds: list[Any], kind: Any, where: str) -> Any:
    if len(kinds) == 1:
        return kinds[0]
    raise ListenerError(f"payload field {where}: {kind!r} is more than one type; a column has one")
