"""Options and columns of ``.option("view", "pending")``. Without Spark's session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from mqtemplate.pending import PendingQuery
from mqtemplate.spark.location.location import PATH, BrokerLocation
from mqtemplate.spark.location.option_values import known_options, milliseconds

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
        given = known_options(options, PENDING_OPTIONS, aliases=PATH, ignored={"provider"}, where=" for view='pending'")
        return cls(
            location=BrokerLocation.of_options(given),
            query=PendingQuery(
                topic=given.get("topic"),
                after_ms=_time(given, "dueAfter"),
                before_ms=_time(given, "dueBefore"),
            ),
        )


def _time(given: Mapping[str, str], option: str) -> int | None:
    return milliseconds(option, given[option]) if option in given else None
