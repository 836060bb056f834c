"""Options of the data source, parsed and checked. Without Spark."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mqtemplate.errors import ConfigurationError, DestinationError, ListenerError, UnsupportedError
from mqtemplate.listener.attributes import NOT_READABLE, Attribute, flag, number
from mqtemplate.record.compression import MAX_BODY_BYTES
from mqtemplate.selectors.tags import TagSelector, tag_selector
from mqtemplate.spark.offsets import OffsetTable, parse_offsets
from mqtemplate.topics import check_topic

OPTION_NAMES = (
    *("store", "topic", "topicPattern", "tags", "subExpression", "group", "brokerName"),
    *("startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp"),
    *("maxOffsetsPerTrigger", "minPartitions", "failOnDataLoss", "includeProperties", "maxDecompressedSize"),
)
"""Names for ``.option(...)``; case does not matter."""

_BATCH_ONLY = (
    ("endingOffsets", "endingTimestamp"),
    "a stream has no end; leave it out, or read a batch with spark.read",
)
_STREAM_ONLY = ("maxOffsetsPerTrigger",), "a batch has no triggers; leave it out, or set endingOffsets"
_EXCLUSIVE = (
    ("topic", "topicPattern"),
    ("tags", "subExpression"),
    ("startingOffsets", "startingTimestamp"),
    ("endingOffsets", "endingTimestamp"),
)
_HINTS = {
    "path": "give the folder of the broker as option 'store'",
    "subscribe": "the option is 'topic' here",
    "subscribepattern": "the option is 'topicPattern' here",
}
_WORDS = ("earliest", "latest", "group")
_NUMBER = number(None, 1, 2**63 - 1)
_TRUE = flag(True)

Position = str | int | OffsetTable
"""Start or end: ``earliest``, ``latest``, ``group``; a store time in epoch ms; or an offset for each queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Checked options of one read.

    Attributes:
        topics: Names; empty if *topic_pattern* selects the topics.
        selector: Tags to keep.
        group: Consumer group whose committed offsets ``startingOffsets=group`` means.
        broker_name: Value of the column ``brokerName``; the store folder does not contain it.
        start: Start of a batch, or of a query without a checkpoint.
        end: End of a batch.
        max_offsets_per_trigger: Maximum number of messages in a micro-batch, before tags are selected; None: no limit.
        min_partitions: Minimum number of tasks; None: the size decides.
        fail_on_data_loss: Fail if messages that should be read are gone; False: warn, and continue after them.
        include_properties: Build the columns ``properties`` and ``msgId``, which take most time.
        max_body_bytes: Largest body that is decompressed; a larger one stays compressed in the column ``body``.
    """

    store: str
    topics: tuple[str, ...]
    topic_pattern: re.Pattern[str] | None
    selector: TagSelector
    group: str | None
    broker_name: str
    start: Position
    end: Position
    max_offsets_per_trigger: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    include_properties: bool
    max_body_bytes: int

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
        """Return the checked options of a read.

        Raises:
            ConfigurationError: An option is unknown, malformed, missing, or contradicts another one.
            UnsupportedError: The option ``nameServer`` is given: a remote broker cannot be read.
        """
        given = _known(options)
        _refuse_contradictions(given, streaming=streaming)
        if "store" not in given:
            raise ConfigurationError("option 'store' is missing: give the folder of the embedded broker")
        group = given.get("group")
        return cls(
            store=given["store"],
            topics=_topics(given),
            topic_pattern=_pattern(given),
            selector=_selector(given),
            group=group,
            broker_name=given.get("brokerName", "broker-a"),
            start=_position(given, "starting", "group" if streaming and group else "earliest"),
            end=_position(given, "ending", "latest"),
            max_offsets_per_trigger=_value(given, "maxOffsetsPerTrigger", _NUMBER),
            min_partitions=_value(given, "minPartitions", _NUMBER),
            fail_on_data_loss=_value(given, "failOnDataLoss", _TRUE),
            include_properties=_value(given, "includeProperties", _TRUE),
            max_body_bytes=_value(given, "maxDecompressedSize", _NUMBER) or MAX_BODY_BYTES,
        )

    @staticmethod
    def wants_properties(options: Mapping[str, str]) -> bool:
        """Return ``includeProperties`` only: Spark requests the schema before it says if the read is a stream."""
        return bool(_value(_known(options), "includeProperties", _TRUE))


def _known(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options under their exact names."""
    options = {name.lower(): value for name, value in options.items()}
    spellings = {name.lower(): name for name in OPTION_NAMES}
    if "nameserver" in options:
        raise UnsupportedError(
            f"option nameServer={options['nameserver']!r}: reading from a remote broker is not supported; "
            "read the folder of an embedded broker with option 'store'"
        )
    for name in options:
        if name not in spellings:
            raise ConfigurationError(f"option {name!r} is unknown; {_hint(name, spellings)}")
    return {spellings[name]: value for name, value in options.items()}


def _hint(name: str, spellings: Mapping[str, str]) -> str:
    if name in _HINTS:
        return _HINTS[name]
    close = difflib.get_close_matches(name, spellings, n=1)
    return f"did you mean {spellings[close[0]]!r}?" if close else f"known are {', '.join(OPTION_NAMES)}"


def _refuse_contradictions(given: Mapping[str, str], *, streaming: bool) -> None:
    for one, other in _EXCLUSIVE:
        if one in given and other in given:
            raise ConfigurationError(f"options {one!r} and {other!r} contradict each other; give one of them")
    wrong, reason = _BATCH_ONLY if streaming else _STREAM_ONLY
    for name in wrong:
        if name in given:
            raise ConfigurationError(f"option {name!r} does not apply: {reason}")


def _topics(given: Mapping[str, str]) -> tuple[str, ...]:
    if "topic" not in given:
        if "topicPattern" in given:
            return ()
        raise ConfigurationError("option 'topic' is missing: give one topic, several as 'a,b', or a 'topicPattern'")
    names = [name.strip() for name in given["topic"].split(",")]
    for name in names:
        try:
            check_topic(name)
        except DestinationError as exc:
            raise ConfigurationError(f"option topic={given['topic']!r}: {exc}") from exc
    if len(set(names)) < len(names):
        raise ConfigurationError(f"option topic={given['topic']!r} names one topic twice; name each once")
    return tuple(sorted(names))


def _pattern(given: Mapping[str, str]) -> re.Pattern[str] | None:
    try:
        return re.compile(given["topicPattern"]) if "topicPattern" in given else None
    except re.error as exc:
        text = given["topicPattern"]
        raise ConfigurationError(f"option topicPattern={text!r} is not a regular expression: {exc}") from exc


def _selector(given: Mapping[str, str]) -> TagSelector:
    expression = given.get("tags", given.get("subExpression", "*"))
    try:
        return tag_selector(expression)
    except ListenerError as exc:
        raise ConfigurationError(f"option tags: {exc}") from exc


def _position(given: Mapping[str, str], which: str, default: str) -> Position:
    timestamp = given.get(f"{which}Timestamp")
    if timestamp is not None:
        return _milliseconds(f"{which}Timestamp", timestamp)
    option = f"{which}Offsets"
    text = given.get(option, default)
    if text.lstrip().startswith("{"):
        return parse_offsets(text, option)
    word = text.strip().lower()
    refused = {"starting": (), "ending": ("earliest", "group")}[which]
    if word not in _WORDS or word in refused:
        allowed = [word for word in _WORDS if word not in refused]
        raise ConfigurationError(f"option {option}={text!r}: allowed are {', '.join(allowed)}, or offsets as JSON")
    if word == "group" and "group" not in given:
        raise ConfigurationError(f"option {option}='group' needs the option 'group', whose committed offsets it means")
    return word


def _milliseconds(option: str, text: str) -> int:
    if text.strip().isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as exc:
        raise ConfigurationError(
            f"option {option}={text!r}: give epoch milliseconds, or ISO 8601 such as 2026-01-31T12:00:00+00:00"
        ) from exc
    if moment.tzinfo is None:
        raise ConfigurationError(f"option {option}={text!r} has no time zone; add one, such as +00:00")
    return int(moment.timestamp() * 1_000)


def _value(given: Mapping[str, str], option: str, attribute: Attribute) -> Any:
    if option not in given:
        return attribute.default
    try:
        return attribute.read(given[option].strip())
    except NOT_READABLE:
        raise ConfigurationError(f"option {option}={given[option]!r} must be {attribute.allowed}") from None
