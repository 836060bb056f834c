"""Options: unknown and contradictory ones are errors."""

from __future__ import annotations

import re

import pytest

from mqtemplate.errors import ConfigurationError, UnsupportedError
from mqtemplate.spark.options import SourceOptions

NEEDED = {"store": "/data", "topic": "orders"}


def parse(streaming: bool = False, **options: str) -> SourceOptions:
    return SourceOptions.parse({**NEEDED, **options}, streaming=streaming)


def test_the_case_of_option_names_does_not_matter() -> None:
    """Spark passes option names in lower case."""
    options = SourceOptions.parse({"STORE": "/data", "Topic": "b, a", "includeproperties": "FALSE"}, streaming=False)

    assert options.topics == ("a", "b")
    assert not options.include_properties


def test_by_default_a_batch_reads_all_messages_and_a_stream_starts_at_its_groups_offsets() -> None:
    assert (parse().start, parse().end) == ("earliest", "latest")
    assert parse(streaming=True).start == "earliest"
    assert parse(streaming=True, group="g").start == "group"
    assert parse(streaming=True, group="g", startingOffsets="latest").start == "latest"


def test_times_are_epoch_milliseconds_or_iso_8601() -> None:
    assert parse(startingTimestamp="1767225600000").start == 1_767_225_600_000
    assert parse(startingTimestamp="2026-01-01T01:00:00+01:00").start == 1_767_225_600_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topics": "a"}, "option 'topics' is unknown; did you mean 'topic'?"),
        ({"colour": "red"}, "option 'colour' is unknown; known are store, topic"),
        ({"path": "/data"}, "option 'path' is unknown; give the folder of the broker as option 'store'"),
        ({"topicPattern": "o.*"}, "options 'topic' and 'topicPattern' contradict each other"),
        ({"tags": "a", "subExpression": "b"}, "options 'tags' and 'subExpression' contradict each other"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "contradict each other; give one of them"),
        ({"maxOffsetsPerTrigger": "10"}, "option 'maxOffsetsPerTrigger' does not apply: a batch has no triggers"),
        ({"endingOffsets": "earliest"}, "option endingOffsets='earliest': allowed are latest, or offsets as JSON"),
        ({"startingOffsets": "first"}, "option startingOffsets='first': allowed are earliest, latest, group, or"),
        ({"startingOffsets": "group"}, "option startingOffsets='group' needs the option 'group'"),
        ({"startingTimestamp": "yesterday"}, "give epoch milliseconds, or ISO 8601 such as"),
        ({"startingTimestamp": "2026-01-01T00:00:00"}, "has no time zone; add one"),
        ({"minPartitions": "0"}, "option minPartitions='0' must be a whole number from 1 to"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss='maybe' must be true or false"),
        ({"topic": "a,,b"}, "option topic='a,,b': the topic is empty"),
        ({"topic": "a,a"}, "names one topic twice"),
        ({"tags": "a || "}, "option tags: "),
    ],
)
def test_the_error_for_a_wrong_option_says_what_to_do(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        parse(**options)


@pytest.mark.parametrize(
    ("left", "words"), [("store", "option 'store' is missing"), ("topic", "option 'topic' is missing")]
)
def test_a_missing_option_is_named(left: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SourceOptions.parse({name: value for name, value in NEEDED.items() if name != left}, streaming=False)


def test_a_stream_cannot_have_an_end() -> None:
    with pytest.raises(ConfigurationError, match="option 'endingOffsets' does not apply: a stream has no end"):
        parse(streaming=True, endingOffsets="latest")


def test_a_pattern_must_be_a_regular_expression() -> None:
    with pytest.raises(ConfigurationError, match="is not a regular expression"):
        SourceOptions.parse({"store": "/data", "topicPattern": "("}, streaming=False)


def test_reading_from_a_remote_broker_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="reading from a remote broker is not supported; read the folder"):
        parse(nameServer="127.0.0.1:9876")
