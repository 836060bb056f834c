"""Spellings of one key, in files and in the environment."""

from __future__ import annotations

import itertools

import pytest

from mqtemplate.broker import MessageModel
from mqtemplate.context import AppSettings
from mqtemplate.context.config.schema import all_fields
from mqtemplate.context.config.tree import canonical_key
from mqtemplate.store.settings import FlushDiskType
from tests.context.loading import Load, Refusal


@pytest.mark.parametrize(
    "yaml",
    [
        "rocketmq:\n  producer:\n    send-message-timeout: 7",
        "rocketmq:\n  producer:\n    sendMessageTimeout: 7",
        "rocketmq:\n  producer:\n    send_message_timeout: 7",
        "ROCKETMQ:\n  PRODUCER:\n    SEND_MESSAGE_TIMEOUT: 7",
        "rocketmq.producer.send-message-timeout: 7",
        "rocketmq.producer:\n  sendMessageTimeout: 7",
    ],
)
def test_a_key_may_be_written_in_any_case(load: Load, yaml: str) -> None:
    """Files of Spring applications work unchanged, and so does snake_case."""
    assert load(yaml).rocketmq.producer.send_message_timeout == 7


@pytest.mark.feature("C7")
@pytest.mark.parametrize(
    "variable",
    [
        "ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT",
        "ROCKETMQ_PRODUCER_SENDMESSAGETIMEOUT",
        "ROCKETMQ__PRODUCER__SEND_MESSAGE_TIMEOUT",
        "rocketmq.producer.send_message_timeout",
    ],
)
def test_the_environment_binds_in_every_spelling_and_wins_over_files(load: Load, variable: str) -> None:
    """The environment overrides the file."""
    settings = load("rocketmq.producer.send-message-timeout: 7", environment={variable: "8"})

    assert settings.rocketmq.producer.send_message_timeout == 8
    assert settings.origins.of("rocketmq.producer.send-message-timeout") == f"environment {variable}"


def test_arguments_of_the_program_win_over_the_environment(load: Load) -> None:
    settings = load(
        environment={"ROCKETMQ_PRODUCER_GROUP": "env"}, arguments={"rocketmq": {"producer.group": "argument"}}
    )

    assert settings.rocketmq.producer.group == "argument"
    assert settings.origins.of("rocketmq.producer.group") == "argument settings"


def test_two_variables_with_different_values_for_one_key_are_an_error(refusal: Refusal) -> None:
    text = refusal(environment={"ROCKETMQ_PRODUCER_GROUP": "a", "ROCKETMQ__PRODUCER__GROUP": "b"})

    assert "ROCKETMQ_PRODUCER_GROUP and ROCKETMQ__PRODUCER__GROUP both set rocketmq.producer.group" in text


def test_a_variable_with_our_prefix_that_sets_no_key_is_reported(load: Load) -> None:
    settings = load(
        environment={
            "ROCKETMQ_PRODUCER_GRUOP": "x",
            "MQTEMPLATE_ZZZ": "x",
            "ROCKETMQ_HOME": "/opt",
            "OTHER": "x",
            "MQTEMPLATE_ACCESS_KEY": "x",
        }
    )

    assert settings.origins.unused_variables == {
        "ROCKETMQ_PRODUCER_GRUOP": "ROCKETMQ_PRODUCER_GROUP",
        "MQTEMPLATE_ZZZ": None,
    }


def test_no_two_keys_share_an_environment_name() -> None:
    """Underscores have no meaning in a variable, so it could not distinguish two keys that differ only by them."""
    names = [canonical_key("".join(path)) for path, shape in all_fields(AppSettings) if shape.section is None]

    assert [one for one, other in itertools.pairwise(sorted(names)) if one == other] == []


def test_two_spellings_of_one_key_in_one_file_are_an_error(refusal: Refusal) -> None:
    text = refusal(
        """
        rocketmq:
          name-server: embedded
          nameServer: embedded:memory
        """
    )

    assert text == "application.yml:3: 'nameServer' and 'name-server' are one key in two spellings; keep one"


def test_files_may_write_one_key_in_different_spellings(load: Load) -> None:
    settings = load("rocketmq.name-server: embedded", dev="rocketmq:\n  nameServer: embedded:memory", profiles=["dev"])

    assert settings.rocketmq.name_server == "embedded:memory"


def test_keys_that_the_user_chose_are_not_changed(load: Load) -> None:
    """Groups, topics and Spark's keys are data: their case is kept, and dots in them do not separate levels."""
    settings = load(
        """
        rocketmq.consumer.listeners:
          Billing_Group: {Orders-Paid: false}
          other.topic: false
        mqtemplate.spark.conf:
          spark.speculation: true
          spark.speculation.interval: 100
          spark:
            sql.shuffle.partitions: 4
        """
    )

    assert settings.rocketmq.consumer.listeners == {"Billing_Group": {"Orders-Paid": False}, "other": {"topic": False}}
    assert not settings.rocketmq.consumer.is_listener_enabled("Billing_Group", "Orders-Paid")
    assert settings.rocketmq.consumer.is_listener_enabled("Billing_Group", "another")
    assert settings.mqtemplate.spark.conf == {
        "spark.speculation": "true",
        "spark.speculation.interval": "100",
        "spark.sql.shuffle.partitions": "4",
    }


def test_keys_that_the_user_chose_can_be_set_by_the_environment(load: Load) -> None:
    settings = load(environment={"ROCKETMQ__CONSUMER__LISTENERS__Billing_Group__Orders-Paid": "false"})

    assert settings.rocketmq.consumer.listeners == {"Billing_Group": {"Orders-Paid": False}}


def test_values_have_convenient_forms(load: Load) -> None:
    settings = load(
        """
        rocketmq:
          pull-consumer: {group: 42, topic: orders, message-model: broadcasting}
        mqtemplate:
          broker:
            flush-disk-type: async-flush
            mapped-file-size-commit-log: 8MiB
            listen-host: 192.168.0.7:10912
            message-delay-level: [90s, 5s]
          autoconfigure.exclude: spark, logging
        """
    )

    assert settings.rocketmq.pull_consumer.group == "42"
    assert settings.rocketmq.pull_consumer.message_model is MessageModel.BROADCASTING
    broker = settings.mqtemplate.broker
    assert broker.flush_disk_type is FlushDiskType.ASYNC_FLUSH
    assert broker.mapped_file_size_commit_log == 8 << 20
    assert str(broker.listen_host) == "192.168.0.7:10912"
    assert broker.message_delay_level == "90s 5s"
    assert settings.mqtemplate.autoconfigure.exclude == ("spark", "logging")


def test_an_empty_value_counts_as_not_given(load: Load) -> None:
    """A section whose lines are all commented out is not an error."""
    settings = load("rocketmq:\n  producer:\n  name-server:\nmqtemplate: ~")

    assert settings.rocketmq.name_server == "embedded"
    assert settings.origins.of("rocketmq.name-server") == "default"
