"""Options and columns of ``.option("view", "pending")``. Without Spark's session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from mqtemplate.errors import ConfigurationError
from mqtemplate.pending import PendingQuery
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.location.option_values import refuse_unknown

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


_TIME = pa.timestamp("us", "UTC")
PENDING_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("deliverTime", _TIME),
        pa.field("delayLevel", pa.int32()),
        pa.field("tags", pa.string()),
        pa.field("keys", pa.string()),
        pa.field("msgId", pa.string()),
        pa.field("bodySize", pa.int32()),
        pa.field("rollCount", pa.int32()),
        pa.field("bornTimestamp", _TIME),
        pa.field("storeTimestamp", _TIME),
        pa.field("handle", pa.string()),
    ]
)
"""Columns of the view; see `mqtemplate.pending.PendingMessage`."""

PENDING_OPTIONS = ("view", "store", "nameServer", "clientFile", "topic", "dueAfter", "dueBefore")
"""Names for ``.option(...)``; case does not matter."""

_OF_SPARK = frozenset({"path", "provider"})


def pending_schema() -> StructType:
    """Return the columns as Spark's types."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(PENDING_SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOptions:
    """Checked options of the view."""

    location: BrokerLocation
    query: PendingQuery

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> PendingOptions:
        """Return the checked options.

        Raises:
            ConfigurationError: An option is unknown, malformed or missing.
        """
        given = {name.lower(): value for name, value in options.items()}
        refuse_unknown(given, PENDING_OPTIONS, _OF_SPARK, "view='pending'")
        return cls(
            location=BrokerLocation.of_options(given),
            query=PendingQuery(
                topic=given.get("topic"),
                after_ms=_milliseconds("dueAfter", given.get("dueafter")),
                before_ms=_milliseconds("dueBefore", given.get("duebefore")),
            ),
        )


def _milliseconds(option: str, text: str | None) -> int | None:
    if text is None or text.strip().isdecimal():
        return None if text is None else int(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as exc:
        raise ConfigurationError(
            f"option {option}={text!r}: give epoch milliseconds, or ISO 8601 such as 2026-01-31T12:00:00+00:00"
        ) from exc
    if moment.tzinfo is None:
        raise ConfigurationError(f"option {option}={text!r} has no time zone; add one, such as +00:00")
    return int(moment.timestamp() * 1_000)
