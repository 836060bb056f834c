"""Options and columns of the sink, parsed and checked. Without Spark's session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mqtemplate.durations import duration_ms
from mqtemplate.errors import ConfigurationError, DestinationError
from mqtemplate.pending import OnPending
from mqtemplate.spark.location import option_values as values
from mqtemplate.spark.location.location import CLIENT_OPTIONS, PATH, BrokerLocation
from mqtemplate.topics import check_send_topic
from mqtemplate.user_code import did_you_mean

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


SINK_OPTIONS = (
    *("store", "nameServer", *CLIENT_OPTIONS),
    *("topic", "tags", "keys", "queueId", "delayLevel", "delay", "deliverTime"),
    *("pendingKey", "onPending", "noLaterThan", "onPendingStrict"),
    *("txnAppId", "txnVersion", "idempotent", "sendTimeoutMs"),
)
"""Names for ``.option(...)``; case does not matter."""

_OF_SPARK = frozenset({"checkpointlocation", "queryname", "provider", "mode"})
_DEFAULTS = (
    *("tags", "keys", "queueId", "delayLevel", "delay", "deliverTime"),
    *("pendingKey", "onPending", "noLaterThan", "onPendingStrict"),
)

_TEXT, _NUMBER = frozenset({"string"}), frozenset({"tinyint", "smallint", "int", "bigint"})
COLUMNS: dict[str, tuple[frozenset[str], str]] = {
    "body": (frozenset({"string", "binary", "struct"}), "string, binary, or a struct (sent as JSON)"),
    "topic": (_TEXT, "string"),
    "tags": (_TEXT, "string"),
    "keys": (frozenset({"string", "array<string>"}), "string or array<string>"),
    "properties": (frozenset({"map<string,string>"}), "map<string,string>"),
    "queueId": (_NUMBER, "int"),
    "shardingKey": (_TEXT, "string"),
    "delayLevel": (_NUMBER, "int"),
    "delay": (_TEXT | _NUMBER | {"float", "double", "interval"}, "seconds, text such as '90s', or an interval"),
    "deliverTime": (frozenset({"timestamp", "bigint"}), "timestamp, or bigint in milliseconds"),
    "pendingKey": (_TEXT, "string"),
    "onPending": (_TEXT, "string: replace, keep, postpone or refuse"),
    "noLaterThan": (_TEXT | _NUMBER | {"float", "double", "interval"}, "seconds, text such as '2h', or an interval"),
    "onPendingStrict": (frozenset({"boolean"}), "boolean"),
}
"""Column -> its types, and the same for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Checked options of one write.

    Attributes:
        topic: Topic of all rows; None if the column ``topic`` has it.
        defaults: Column -> value for rows without one.
        txn_app_id: With *txn_version*: a write with the same pair is a repeat, whose rows are stored once.
        idempotent: True: fail if the broker does not drop repeats. False: do not number the messages. None: number them
            if the broker drops repeats.
    """

    location: BrokerLocation
    topic: str | None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    txn_app_id: str | None = None
    txn_version: int | None = None
    idempotent: bool | None = None
    send_timeout_ms: int = 30_000

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Return the checked options of a write.

        Raises:
            ConfigurationError: An option is unknown, malformed, missing, or contradicts another one.
        """
        given = values.known_options(options, SINK_OPTIONS, aliases=PATH, ignored=_OF_SPARK, where=" for a write")
        if ("txnAppId" in given) != ("txnVersion" in given):
            raise ConfigurationError("give both options 'txnAppId' and 'txnVersion', or none of them")
        values.refuse_contradictions(given, ("delayLevel", "delay", "deliverTime"))
        return cls(
            location=BrokerLocation.of_options(given),
            topic=None if "topic" not in given else _topic(given["topic"]),
            defaults=_defaults(given),
            txn_app_id=given.get("txnAppId"),
            txn_version=values.whole_number(given, "txnVersion", 0),
            idempotent=values.flag(given, "idempotent"),
            send_timeout_ms=values.whole_number(given, "sendTimeoutMs", 1, 2**31 - 1) or 30_000,
        )

    def check_columns(self, schema: StructType) -> None:
        """Check the columns of a DataFrame.

        Raises:
            ConfigurationError: A column is unknown, missing, or has another type.
        """
        for column in schema:
            if column.name not in COLUMNS:
                hint = did_you_mean(column.name, COLUMNS, f"a message has {', '.join(COLUMNS)}")
                raise ConfigurationError(
                    f"column {column.name!r} is unknown; {hint}. Put data into the body, such as "
                    "select(struct('*').alias('body'))"
                )
            kinds, text = COLUMNS[column.name]
            kind = column.dataType.simpleString()
            if not kinds & {kind, kind.split("<")[0], kind.split(" ")[0]}:
                raise ConfigurationError(f"column {column.name!r} must be {text}, got {kind}; cast it before the write")
        if "body" not in schema.names:
            raise ConfigurationError(
                f"column 'body' is missing among {', '.join(schema.names)}; for JSON of all columns write "
                "select(struct('*').alias('body'))"
            )
        if self.topic is None and "topic" not in schema.names:
            raise ConfigurationError("the topic is missing: give option 'topic', or a column 'topic'")


def _topic(text: str) -> str:
    try:
        return check_send_topic(text)
    except DestinationError as exc:
        raise ConfigurationError(f"option topic={text!r}: {exc}") from exc


def _on_pending(text: str) -> str:
    if text not in list(OnPending):
        raise ValueError(f"it must be one of {', '.join(OnPending)}")
    return text


def _defaults(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the defaults that change a row: ``onPendingStrict=false`` changes none, so its batches stay simple."""
    found = {name: _default(given, name) for name in _DEFAULTS if name in given}
    return {name: value for name, value in found.items() if value is not False}


def _default(given: Mapping[str, str], name: str) -> Any:
    """Return a default for rows, in the form of its column; a deliver time in milliseconds."""
    text = given[name]
    try:
        if name in ("queueId", "delayLevel"):
            return int(text)
        if name == "onPending":
            return _on_pending(text)
        if name in ("delay", "noLaterThan"):
            return duration_ms(text, 1_000) / 1_000
    except ValueError as exc:
        raise ConfigurationError(f"option {name}={text!r}: {exc}") from exc
    if name == "onPendingStrict":
        return values.flag(given, name)
    return values.milliseconds(given, name) if name == "deliverTime" else text
