"""Placeholders ``${key:default}`` in files."""

from __future__ import annotations

import pytest

from mqtemplate.errors import ConfigurationError
from tests.context.loading import Load, Refusal


def test_a_placeholder_is_resolved_by_a_key_a_variable_or_its_default(load: Load) -> None:
    settings = load(
        """
        rocketmq.producer.group: ${shop.name}-${STAGE}-${missing:none}
        shop.name: corner
        """,
        environment={"STAGE": "dev"},
    )

    assert settings.rocketmq.producer.group == "corner-dev-none"


def test_a_value_that_is_exactly_one_placeholder_keeps_the_type(load: Load) -> None:
    settings = load("mqtemplate.autoconfigure.exclude: ${shop.unwanted}\nshop.unwanted: [a, b]\nshop.limit: ${n}\nn: 3")

    assert settings.mqtemplate.autoconfigure.exclude == ("a", "b")
    assert settings.get("shop.limit") == 3


@pytest.mark.parametrize("variable", ["SHOP_FIRST_NAME", "SHOP_FIRSTNAME", "shop.first-name"])
def test_a_variable_sets_a_key_of_the_application(load: Load, variable: str) -> None:
    """The variable wins over the file."""
    settings = load("shop.first-name: file", environment={variable: "environment"})

    assert settings.get("shop.first-name") == "environment"


def test_a_default_may_contain_a_placeholder_and_colons(load: Load) -> None:
    settings = load("a: ${b:${c:http://x:1/}}")

    assert settings.get("a") == "http://x:1/"
    assert settings.get("nothing", "else") == "else"


def test_a_doubled_dollar_is_a_literal_one(load: Load) -> None:
    assert load("a: cost $${b} or $5").get("a") == "cost ${b} or $5"


def test_a_placeholder_may_refer_to_the_default_of_a_key(load: Load) -> None:
    settings = load("timeout: ${rocketmq.producer.send-message-timeout}")

    assert settings.get("timeout") == 3_000
    assert settings.resolve_text("${rocketmq.consumer.access-key:}") == ""


@pytest.mark.parametrize(
    ("yaml", "problem"),
    [
        (
            "rocketmq.producer.group: a\nrocketmq.name-server: ${NAMESRV}",
            "application.yml:2: '${NAMESRV}' has no value and no default; set NAMESRV or write ${NAMESRV:default}",
        ),
        (
            "rocketmq.producer.group: ${a}\na: ${b}\nb: ${a}",
            "application.yml:3: placeholders refer to each other in a circle: ${a} -> ${b} -> ${a}",
        ),
        ("rocketmq.producer.group: ${a:b", "application.yml:1: a placeholder is not closed"),
        ("rocketmq.producer.group: ${:b}", "application.yml:1: '${:b}' names no key"),
    ],
)
def test_a_placeholder_that_cannot_be_resolved_is_an_error(refusal: Refusal, yaml: str, problem: str) -> None:
    assert problem in refusal(yaml)


def test_a_placeholder_is_resolved_only_when_its_key_is_read(load: Load) -> None:
    """A file that a Spring application uses too may name variables that do not exist here."""
    settings = load("spring.datasource.url: ${DATABASE_URL}")

    with pytest.raises(ConfigurationError, match=r"application\.yml:1: '\$\{DATABASE_URL\}' has no value"):
        settings.get("spring.datasource.url")
