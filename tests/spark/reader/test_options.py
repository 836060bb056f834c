"""Options: unknown and contradictory ones are errors."""

from __future__ import annotations

import re

import pytest

from mqtemplate.errors import ConfigurationError
from mqtemplate.spark.reader.options import SourceOptions

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
        ({"colour": "red"}, "option 'colour' is unknown; known are store, nameServer"),
        ({"path": "/other"}, "option 'store' is given twice, with different values, also as 'path'"),
        ({"kafka.bootstrap.servers": "a:1"}, "give the name servers of the cluster as option 'nameServer'"),
        ({"accessKey": "k"}, "it would show in plans and logs; set MQTEMPLATE_ACCESS_KEY"),
        ({"nameServer": "a:1"}, "options 'store' and 'nameServer' contradict each other"),
        ({"clientFile": "/etc/mq.json"}, "option 'clientFile' needs the option 'nameServer'"),
        ({"assign": '{"orders": [0]}'}, "options 'topic' and 'assign' contradict each other"),
        ({"tags": "a", "sql": "b = 1"}, "options 'tags' and 'sql' contradict each other"),
        ({"sql": "b ="}, "option sql: "),
        ({"topicPattern": "o.*"}, "options 'topic' and 'topicPattern' contradict each other"),
        ({"tags": "a", "subExpression": "b"}, "options 'tags' and 'subExpression' contradict each other"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "contradict each other; give one of them"),
        ({"startingOffsets": "latest"}, "a batch that starts at the end reads nothing; leave it out"),
        ({"startingOffsetsByTimestamp": "[]"}, "is not times"),
        ({"startingOffsetsByTimestampStrategy": "first"}, "allowed are error, latest"),
        ({"topic": "rmq_sys_wheel_timer"}, "read the pending messages instead: option view=pending"),
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"minOffsetsPerTrigger": "20", "maxOffsetsPerTrigger": "10"}, "minOffsetsPerTrigger=20 is above"),
        ({"maxTriggerDelay": "5m"}, "option 'maxTriggerDelay' needs the option 'minOffsetsPerTrigger'"),
        ({"minOffsetsPerTrigger": "2", "maxTriggerDelay": "soon"}, "maxTriggerDelay='soon' is not a duration"),
        ({"endingOffsetsByTimestamp": "{}"}, "option 'endingOffsetsByTimestamp' does not apply: a stream has no end"),
    ],
)
def test_the_error_for_a_wrong_option_of_a_stream_says_what_to_do(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        parse(streaming=True, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is not queues"),
        ("{}", "it names no queue"),
        ('{"orders": [-1]}', "-1 is not a queue id"),
        ('{"orders": "0"}', "'0' is not a queue id"),
    ],
)
def test_the_error_for_malformed_queues_shows_an_example(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        SourceOptions.parse({"store": "/data", "assign": text}, streaming=False)

    assert 'write JSON such as {"orders": [0, 2]}' in str(caught.value)


def test_queues_are_assigned_with_and_without_the_name_of_a_broker() -> None:
    plain = SourceOptions.parse({"store": "/data", "assign": '{"orders": [0, 2]}'}, streaming=False)
    named = SourceOptions.parse({"store": "/data", "assign": '{"orders": {"broker-b": [1]}}'}, streaming=False)

    assert (plain.topics, plain.assigned) == (("orders",), {("orders", None, 0), ("orders", None, 2)})
    assert named.assigned == {("orders", "broker-b", 1)}


def test_names_of_sparks_file_and_kafka_sources_are_aliases() -> None:
    options = SourceOptions.parse(
        {"path": "/data", "subscribe": "orders", "kafka.group.id": "g", "includeHeaders": "false"}, streaming=False
    )

    assert (options.location.store, options.topics, options.group) == ("/data", ("orders",), "g")
    assert not options.include_properties


def test_options_that_spark_adds_to_a_table_are_ignored() -> None:
    """``CREATE TABLE … USING mqtemplate`` adds the provider and the owner, and gives each option a prefix."""
    table = {"provider": "mqtemplate", "owner": "me", "option.store": "/data", "option.topic": "orders"}

    options = SourceOptions.parse(table, streaming=False)

    assert (options.location.store, options.topics) == ("/data", ("orders",))


def test_a_cluster_has_one_or_more_name_servers() -> None:
    options = SourceOptions.parse({"nameServer": "a:9876;b:9876", "topic": "orders"}, streaming=False)

    assert options.location.name_servers == ("a:9876", "b:9876")
    with pytest.raises(ConfigurationError, match="give host:port, several joined by ';'"):
        SourceOptions.parse({"nameServer": "somewhere", "topic": "orders"}, streaming=False)
