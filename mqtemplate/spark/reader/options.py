"""Options of the data source, parsed and checked. Without Spark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.record.compression import MAX_BODY_BYTES
from mqtemplate.selectors.sql92 import make_selector
from mqtemplate.selectors.tags import Selector, SelectorType
from mqtemplate.spark.location import option_values as values
from mqtemplate.spark.location.location import CLIENT_OPTIONS, PATH, BrokerLocation
from mqtemplate.spark.records.offsets import GivenOffsets, parse_offsets, parse_queue_table

OPTION_NAMES = (
    *("store", "nameServer", *CLIENT_OPTIONS, "brokerName"),
    *("topic", "topicPattern", "assign", "tags", "subExpression", "sql", "group"),
    *("startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp"),
    *("startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"),
    *("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    *("minPartitions", "maxRecordsPerPartition", "failOnDataLoss", "includeProperties", "maxDecompressedSize"),
    *("checkCrcs", "retryTimeout", "columns"),
)
"""Names for ``.option(...)``; case does not matter."""

_ALIASES = {
    **PATH,
    "subscribe": "topic",
    "subscribepattern": "topicPattern",
    "kafka.group.id": "group",
    "includeheaders": "includeProperties",
}
"""Other name for an option, as Spark's file sources and its Kafka source have it -> our name."""

_SPARKS_OWN = frozenset({"provider", "owner", "location", "external", "comment", "serialization.format", "table"})
"""Names, in lower case, that Spark adds to the options of a table of its catalog."""

_BATCH_ONLY = (
    ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    "a stream has no end; leave it out, or read a batch with spark.read",
)
_STREAM_ONLY = (
    ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
    "a batch has no triggers; leave it out, or set endingOffsets",
)
_EXCLUSIVE = (
    ("topic", "topicPattern", "assign"),
    ("tags", "subExpression", "sql"),
    ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
)
_HINTS = {"kafka.bootstrap.servers": "give the name servers of the cluster as option 'nameServer'"}
_WORDS = ("earliest", "latest", "group")
_STRATEGIES = ("error", "latest")


@dataclass(frozen=True, slots=True)
class OffsetsByTime:
    """Start or end by a store time for each queue, in epoch milliseconds."""

    times: GivenOffsets


Position = str | int | GivenOffsets | OffsetsByTime
"""Start or end: ``earliest``, ``latest``, ``group``; a store time; or an offset or a time for each queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerLimits:
    """Limits of a micro-batch, before messages are selected. None: no limit.

    Attributes:
        max_messages: Maximum number of messages.
        max_bytes: Maximum size, estimated from some of the messages.
        min_messages: A batch waits for so many, but no longer than *max_delay_ms* after the one before.
    """

    max_messages: int | None = None
    max_bytes: int | None = None
    min_messages: int | None = None
    max_delay_ms: int = 15 * 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Checked options of one read.

    Attributes:
        location: Where the messages are.
        topics: Names; empty if *topic_pattern* selects the topics.
        assigned: Queues to read, of *topics*; empty for all. A name of a broker may be None.
        selector: Messages to keep.
        group: Consumer group whose committed offsets ``startingOffsets=group`` means.
        broker_name: Value of the column ``brokerName``; a store folder does not contain it.
        start: Start of a batch, or of a query without a checkpoint.
        end: End of a batch.
        fails_without_time: Fail if a queue has no message at or after the time of *start*; False: start at its end.
        min_partitions: Minimum number of tasks; None: the size decides.
        max_records_per_partition: Maximum number of messages of a task; None: the size decides.
        fail_on_data_loss: Fail if messages that should be read are gone; False: warn, and continue after them.
        include_properties: Build the columns ``properties`` and ``msgId``, which take most time.
        max_body_bytes: Largest body that is decompressed; a larger one stays compressed in the column ``body``.
        check_crcs: Compare the checksums of each record; False returns bytes that have changed on the disk.
        retry_ms: Time for the attempts of one request to a name server or broker that does not answer.
    """

    location: BrokerLocation
    topics: tuple[str, ...]
    topic_pattern: re.Pattern[str] | None
    assigned: frozenset[tuple[str, str | None, int]]
    selector: Selector
    group: str | None
    broker_name: str
    start: Position
    end: Position
    fails_without_time: bool
    limits: TriggerLimits
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    include_properties: bool
    max_body_bytes: int
    check_crcs: bool
    retry_ms: int

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
        """Return the checked options of a read.

        Raises:
            ConfigurationError: An option is unknown, malformed, missing, or contradicts another one.
        """
        given = _known(options)
        _refuse_contradictions(given, streaming=streaming)
        group = given.get("group")
        assigned = values.assigned_queues(given["assign"]) if "assign" in given else frozenset()
        return cls(
            location=BrokerLocation.of_options(given),
            topics=_topics(given, assigned),
            topic_pattern=_pattern(given),
            assigned=assigned,
            selector=_selector(given),
            group=group,
            broker_name=given.get("brokerName", "broker-a"),
            start=_position(given, "starting", "group" if streaming and group else "earliest", streaming),
            end=_position(given, "ending", "latest", streaming),
            fails_without_time=_strategy(given) == "error",
            limits=_limits(given),
            min_partitions=values.whole_number(given, "minPartitions"),
            max_records_per_partition=values.whole_number(given, "maxRecordsPerPartition"),
            fail_on_data_loss=values.flag(given, "failOnDataLoss") is not False,
            include_properties=values.flag(given, "includeProperties") is not False,
            max_body_bytes=values.whole_number(given, "maxDecompressedSize") or MAX_BODY_BYTES,
            check_crcs=values.flag(given, "checkCrcs") is not False,
            retry_ms=values.duration(given, "retryTimeout", "60s"),
        )

    @staticmethod
    def wants_properties(options: Mapping[str, str]) -> bool:
        """Return ``includeProperties`` only: Spark requests the schema before it says if the read is a stream."""
        return values.flag(_known(options), "includeProperties") is not False

    @staticmethod
    def columns(options: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names in ``columns``; none without the option, which means all columns."""
        names = (name.strip() for name in _known(options).get("columns", "").split(","))
        return tuple(dict.fromkeys(filter(None, names)))


def _known(options: Mapping[str, str]) -> dict[str, str]:
    return values.known_options(options, OPTION_NAMES, aliases=_ALIASES, ignored=_SPARKS_OWN, hints=_HINTS)


def _refuse_contradictions(given: Mapping[str, str], *, streaming: bool) -> None:
    values.refuse_contradictions(given, *_EXCLUSIVE)
    wrong, reason = _BATCH_ONLY if streaming else _STREAM_ONLY
    for name in wrong:
        if name in given:
            raise ConfigurationError(f"option {name!r} does not apply: {reason}")
    if "maxTriggerDelay" in given and "minOffsetsPerTrigger" not in given:
        raise ConfigurationError("option 'maxTriggerDelay' needs the option 'minOffsetsPerTrigger'")


def _topics(given: Mapping[str, str], assigned: frozenset[tuple[str, str | None, int]]) -> tuple[str, ...]:
    if assigned:
        return values.topic_names("assign", sorted({topic for topic, _, _ in assigned}))
    if "topic" not in given:
        if "topicPattern" in given:
            return ()
        raise ConfigurationError("option 'topic' is missing: give one topic, several as 'a,b', or a 'topicPattern'")
    return values.topic_names(f"topic={given['topic']!r}", [name.strip() for name in given["topic"].split(",")])


def _pattern(given: Mapping[str, str]) -> re.Pattern[str] | None:
    try:
        return re.compile(given["topicPattern"]) if "topicPattern" in given else None
    except re.error as exc:
        text = given["topicPattern"]
        raise ConfigurationError(f"option topicPattern={text!r} is not a regular expression: {exc}") from exc


def _selector(given: Mapping[str, str]) -> Selector:
    option = "sql" if "sql" in given else "tags"
    expression = given.get("sql", given.get("tags", given.get("subExpression", "*")))
    try:
        return make_selector(SelectorType.SQL92 if option == "sql" else SelectorType.TAG, expression)
    except ListenerError as exc:
        raise ConfigurationError(f"option {option}: {exc}") from exc


def _position(given: Mapping[str, str], which: str, default: str, streaming: bool) -> Position:
    timestamp = values.milliseconds(given, f"{which}Timestamp")
    if timestamp is not None:
        return timestamp
    if f"{which}OffsetsByTimestamp" in given:
        return _by_time(f"{which}OffsetsByTimestamp", given[f"{which}OffsetsByTimestamp"])
    option = f"{which}Offsets"
    text = given.get(option, default)
    if text.lstrip().startswith("{"):
        return parse_offsets(text, option)
    word = text.strip().lower()
    if which == "starting" and word == "latest" and not streaming:
        raise ConfigurationError(
            "option startingOffsets='latest': a batch that starts at the end reads nothing; leave it out for all "
            "messages, or set startingTimestamp"
        )
    refused = {"starting": (), "ending": ("earliest", "group")}[which]
    if word not in _WORDS or word in refused:
        allowed = [word for word in _WORDS if word not in refused]
        raise ConfigurationError(f"option {option}={text!r}: allowed are {', '.join(allowed)}, or offsets as JSON")
    if word == "group" and "group" not in given:
        raise ConfigurationError(f"option {option}='group' needs the option 'group', whose committed offsets it means")
    return word


def _by_time(option: str, text: str) -> OffsetsByTime:
    try:
        return OffsetsByTime(
            parse_queue_table(text, lambda value: values.milliseconds({option: str(value)}, option) or 0)
        )
    except (ValueError, AttributeError, TypeError) as exc:
        raise ConfigurationError(
            f'option {option}: {text!r} is not times ({exc}); write JSON such as {{"orders": {{"0": 1767225600000}}}}'
        ) from exc


def _strategy(given: Mapping[str, str]) -> str:
    option = "startingOffsetsByTimestampStrategy"
    word = given.get(option, "latest").strip().lower()
    if word not in _STRATEGIES:
        raise ConfigurationError(f"option {option}={given[option]!r}: allowed are {', '.join(_STRATEGIES)}")
    return word


def _limits(given: Mapping[str, str]) -> TriggerLimits:
    most = values.whole_number(given, "maxOffsetsPerTrigger")
    least = values.whole_number(given, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise ConfigurationError(f"option minOffsetsPerTrigger={least} is above maxOffsetsPerTrigger={most}")
    return TriggerLimits(
        max_messages=most,
        max_bytes=values.whole_number(given, "maxBytesPerTrigger"),
        min_messages=least,
        max_delay_ms=values.duration(given, "maxTriggerDelay", "15m"),
    )
