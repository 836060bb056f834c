"""Configuration errors name file, line, key and the nearest known key. They never contain secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pytest
from pydantic import BaseModel, SecretStr, model_validator

from mqtemplate.context import load_settings
from mqtemplate.errors import ConfigurationError
from tests.context.loading import Load, Refusal


def test_one_error_lists_all_problems_with_their_lines(refusal: Refusal) -> None:
    text = refusal(
        """
        rocketmq:
          producer:
            gruop: billing
            send-message-timeout: soon
        mqtemplate:
          brokr: {}
        """
    )

    assert text.splitlines()[0] == "configuration is not usable: 3 problems"
    assert "  application.yml:3: rocketmq.producer.gruop: no such key; did you mean 'rocketmq.producer.group'?" in text
    assert (
        "application.yml:4: rocketmq.producer.send-message-timeout: must be a duration: '3h', '1h 30m', '250ms'" in text
    )
    assert "(got 'soon')" in text
    assert "  application.yml:6: mqtemplate.brokr: no such key; did you mean 'mqtemplate.broker'?" in text


def test_the_nearest_key_may_be_in_another_section(refusal: Refusal) -> None:
    assert "did you mean 'rocketmq.producer.send-message-timeout'?" in refusal("rocketmq.send-message-timeout: 1")


def test_without_a_similar_key_the_error_lists_the_keys_of_the_section(refusal: Refusal) -> None:
    text = refusal("rocketmq.qqqq: 1")

    assert "rocketmq.qqqq: no such key; here may stand: name-server, access-channel, producer" in text


@pytest.mark.parametrize(
    ("file", "instead"),
    [
        ("rocketmq.producer.endpoints: proxy:8081", "set rocketmq.name-server to the address of a name server"),
        ("rocketmq.producer.maxAttempts: 3", "set rocketmq.producer.retry-times-when-send-failed"),
        ("rocketmq.producer.ssl_enabled: true", "set rocketmq.producer.tls-enable"),
        ("rocketmq.producer.request-timeout: 3", "set rocketmq.producer.send-message-timeout"),
        ("rocketmq.producer.topic: orders", "each send names its topic"),
        ("rocketmq.simple-consumer.tag: paid", "set rocketmq.pull-consumer, for receive()"),
        ("rocketmq.push-consumer.endpoints: proxy:8081", "write @message_listener, and set rocketmq.name-server"),
    ],
)
def test_a_key_of_the_grpc_starter_says_what_to_write_here(refusal: Refusal, file: str, instead: str) -> None:
    """Users of rocketmq-spring paste the ``application.yml`` of either of its two starters."""
    text = refusal(file)

    assert "no such key; it is a key of rocketmq-v5-client-spring-boot, which speaks gRPC with a proxy; here " in text
    assert instead in text


def test_the_error_for_an_invalid_variable_names_it(refusal: Refusal) -> None:
    text = refusal(environment={"ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT": "0"})

    assert (
        "environment ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT: rocketmq.producer.send-message-timeout: "
        "Input should be greater than 0 (got 0)"
    ) in text


def test_the_error_for_an_item_of_a_list_contains_its_position(refusal: Refusal) -> None:
    text = refusal("mqtemplate:\n  autoconfigure:\n    exclude: [spark, [nested]]")

    assert "application.yml:3: mqtemplate.autoconfigure.exclude[1]: Input should be a valid string" in text


@pytest.mark.parametrize(
    ("yaml", "problem"),
    [
        ("a: 1\na: 2", "application.yml:2: key 'a' is given twice in the same mapping; keep one"),
        ("a.b: 1\na:\n  b: 2", "application.yml:3: key 'b' was given before, at application.yml:1; keep one"),
        ("list:\n  - {a: 1, a: 2}", "application.yml:2: key 'a' is given twice"),
        ("a: [1", "application.yml:1: not valid YAML"),
        ("a:\n\t- b", "application.yml:2: not valid YAML"),
        ("a: !!set {x}", "application.yml:1: the tag 'tag:yaml.org,2002:set' means nothing here"),
        ("a: !!python/name:os.system", "application.yml:1: not valid YAML"),
        ("- a\n- b", "application.yml:1: a document must consist of 'key: value' lines"),
        ("? [a]\n: b", "application.yml:1: a key must be plain text"),
        ("a: &x [*x]", "application.yml:1: an alias leads back"),
        ("rocketmq: embedded", "application.yml:1: rocketmq is a section; write keys below it, not a value"),
        (
            "rocketmq.name-server.port: 1",
            "rocketmq.name-server takes one value, and has no key 'port'; write one value",
        ),
        ("rocketmq.consumer.listeners: {g: true, g.t: true}", "application.yml:1: rocketmq.consumer.listeners.g has a"),
        ("rocketmq.consumer.listeners: {g: true}", "rocketmq.consumer.listeners.g: Input should be a valid dict"),
    ],
)
def test_the_error_for_an_invalid_file_contains_the_line(refusal: Refusal, yaml: str, problem: str) -> None:
    assert problem in refusal(yaml)


def test_a_file_in_another_encoding_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "application.yml").write_bytes(b"a: \xff")

    with pytest.raises(ConfigurationError, match=r"application\.yml: not UTF-8 at byte 3; save the file as UTF-8"):
        load_settings(tmp_path, environment={})


@pytest.mark.parametrize(
    ("yaml", "where", "problem"),
    [
        (
            "rocketmq.producer:\n  namespace: a\n  namespace-v2: b",
            "application.yml:3: rocketmq.producer.namespace-v2",
            "keep one of the two",
        ),
        (
            "rocketmq.consumer:\n  access-key: a",
            "application.yml:2: rocketmq.consumer.access-key",
            "needs 'secret-key'",
        ),
        ("rocketmq.pull-consumer:\n  topic: a", "application.yml:2: rocketmq.pull-consumer.topic", "needs 'group'"),
        (
            "rocketmq.name-server: 127.0.0.1:9876\nmqtemplate.broker.store-path: ./x",
            "application.yml:2: mqtemplate.broker.store-path",
            "a cluster that keeps its own files; keep one of the two keys",
        ),
        (
            "rocketmq.name-server: embedded:memory\nmqtemplate.broker.store-path: ./x",
            "application.yml:2: mqtemplate.broker.store-path",
            "which keeps no files",
        ),
        (
            "rocketmq.name-server: embedded:memory\nmqtemplate.broker.store-path: ./mqtemplate-store",
            "application.yml:2: mqtemplate.broker.store-path",
            "'mqtemplate-store' is given",
        ),
        (
            "rocketmq.name-server: embedded:./y\nmqtemplate.broker.store-path: ./x",
            "application.yml:2: mqtemplate.broker.store-path",
            "names another folder, 'y'",
        ),
        (
            "rocketmq.producer.max-message-size: 8388608",
            "application.yml:1: rocketmq.producer.max-message-size",
            "raise mqtemplate.broker.max-message-size with it",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_an_error(refusal: Refusal, yaml: str, where: str, problem: str) -> None:
    text = refusal(yaml)

    assert where in text
    assert problem in text


@pytest.mark.parametrize("value", ["embeded", "memory", "embedded:", "host", "host:0", "host:99999", "a:1;b"])
def test_a_name_server_in_an_unknown_form_is_an_error(refusal: Refusal, value: str) -> None:
    text = refusal(f"rocketmq.name-server: '{value}'")

    assert "application.yml:1: rocketmq.name-server: " in text
    assert "'embedded:memory', 'embedded:<folder>', or 'host:port;host:port'" in text


def test_the_error_for_an_invalid_delay_level_contains_its_line(refusal: Refusal) -> None:
    text = refusal("mqtemplate:\n  broker:\n    message-delay-level: 1s 5x")

    assert "application.yml:3: mqtemplate.broker.message-delay-level: entry 2 is '5x'" in text


@pytest.mark.parametrize("hours", ["24", "noon", "4;x", "[4, 25]", "';'"])
def test_the_error_for_an_invalid_hour_lists_the_allowed_ones(refusal: Refusal, hours: str) -> None:
    text = refusal(f"mqtemplate:\n  broker:\n    delete-when: {hours}")

    assert "application.yml:3: mqtemplate.broker.delete-when: " in text
    assert "is no hour of the day; give 00 to 23, several with a semicolon between them, such as 04 or 04;16" in text


def test_the_error_for_disk_ratios_that_do_not_ascend_names_the_one_that_was_written(refusal: Refusal) -> None:
    text = refusal("mqtemplate:\n  broker:\n    disk-space-clean-forcibly-ratio: 95")

    assert "application.yml:3: mqtemplate.broker.disk-space-clean-forcibly-ratio: " in text
    assert "are percent of the disk, 1 to 100, none above the next, got 75, 95 and 90" in text


def test_files_are_kept_for_an_hour_at_least(refusal: Refusal) -> None:
    text = refusal("mqtemplate.broker.file-reserved-time: 0")

    assert "mqtemplate.broker.file-reserved-time: Input should be greater than or equal to 1 (got 0)" in text


class Shop(BaseModel):
    name: str
    password: str
    token: SecretStr = SecretStr("")


class ClosedShop(Shop):
    @model_validator(mode="after")
    def refuse(self) -> Self:
        raise ValueError("closed on Mondays")


@pytest.mark.parametrize(
    "yaml",
    [
        "rocketmq.producer: {access-key: [hunter2], secret-key: [hunter2]}",
        "rocketmq.producer: {access-key: hunter2}",
        "rocketmq.producer: {acces-key: hunter2}",
        "rocketmq.producer: {access-key: hunter2, secret-key: hunter2, namespace: a, namespace-v2: b}",
    ],
)
def test_no_error_contains_a_secret(refusal: Refusal, yaml: str) -> None:
    assert "hunter2" not in refusal(yaml)


def test_no_error_contains_a_secret_of_the_application_s_own_section(load: Load) -> None:
    settings = load("shop: {password: [hunter2], token: [hunter2]}")

    with pytest.raises(ConfigurationError) as refused:
        settings.bind("shop", Shop)

    assert "hunter2" not in str(refused.value)
    assert "shop.password: Input should be a valid string (its value is not shown)" in str(refused.value)
    assert "shop.name: required; set it in application.yml or as SHOP_NAME" in str(refused.value)


def test_the_error_for_a_whole_section_does_not_contain_its_values(load: Load) -> None:
    settings = load("shop: {name: corner, password: hunter2}")

    with pytest.raises(ConfigurationError, match=r"application\.yml:1: shop: closed on Mondays$") as refused:
        settings.bind("shop", ClosedShop)

    assert "hunter2" not in str(refused.value)


def test_the_repr_of_the_settings_contains_no_secret(load: Load) -> None:
    settings = load("rocketmq.producer: {access-key: hunter1, secret-key: hunter2}")

    assert settings.rocketmq.producer.secret_key is not None
    assert settings.rocketmq.producer.secret_key.get_secret_value() == "hunter2"
    assert "hunter" not in repr(settings) + repr(settings.origins)
