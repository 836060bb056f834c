"""``${key:default}`` in files, and the user's own sections."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from mqtemplate.errors import ConfigurationError
from tests.context.loading import Load, Refusal


def test_a_placeholder_takes_another_key_or_a_variable_or_its_default(load: Load) -> None:
    settings = load(
        """
        rocketmq.producer.group: ${shop.name}-${STAGE}-${nobody:none}
        shop.name: corner
        """,
        environment={"STAGE": "dev"},
    )

    assert settings.rocketmq.producer.group == "corner-dev-none"


def test_a_value_that_is_one_placeholder_keeps_the_type(load: Load) -> None:
    settings = load("mqtemplate.autoconfigure.exclude: ${shop.unwanted}\nshop.unwanted: [a, b]\nshop.limit: ${n}\nn: 3")

    assert settings.mqtemplate.autoconfigure.exclude == ("a", "b")
    assert settings.get("shop.limit") == 3


@pytest.mark.parametrize("variable", ["SHOP_FIRST_NAME", "SHOP_FIRSTNAME", "shop.first-name"])
def test_a_variable_may_stand_for_a_user_s_key(load: Load, variable: str) -> None:
    """Variables win over files here too."""
    settings = load("shop.first-name: file", environment={variable: "environment"})

    assert settings.get("shop.first-name") == "environment"


def test_a_default_may_hold_a_placeholder_and_colons(load: Load) -> None:
    settings = load("a: ${b:${c:http://x:1/}}")

    assert settings.get("a") == "http://x:1/"
    assert settings.get("nothing", "else") == "else"


def test_a_doubled_dollar_is_a_plain_one(load: Load) -> None:
    assert load("a: cost $${b} or $5").get("a") == "cost ${b} or $5"


def test_defaults_of_our_own_keys_can_be_named(load: Load) -> None:
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
def test_a_placeholder_that_cannot_be_filled_is_told(refusal: Refusal, yaml: str, problem: str) -> None:
    assert problem in refusal(yaml)


def test_what_nobody_asks_for_is_not_filled(load: Load) -> None:
    """A file shared with a Spring application names variables that do not exist here."""
    settings = load("spring.datasource.url: ${DATABASE_URL}")

    with pytest.raises(ConfigurationError, match=r"application\.yml:1: '\$\{DATABASE_URL\}' has no value"):
        settings.get("spring.datasource.url")


class Address(BaseModel):
    street_name: str
    house_no: int = 1


class Shop(BaseModel):
    opening_hours: str
    addresses: list[Address] = []
    prices: dict[str, float] = {}


def test_a_section_of_the_user_s_own_becomes_a_model(load: Load) -> None:
    settings = load(
        """
        shop:
          openingHours: "${hours}"
          addresses:
            - {street-name: Main, houseNo: 7}
            - street_name: Side
          prices: {Two-Items: 2, a.b: 1.5}
        hours: 9:30
        """,
        environment={"SHOP_OPENING_HOURS": "10:00"},
    )

    assert settings.bind("shop", Shop) == Shop(
        opening_hours="10:00",
        addresses=[Address(street_name="Main", house_no=7), Address(street_name="Side")],
        prices={"Two-Items": 2, "a.b": 1.5},
    )
    assert settings.get("shop.opening-hours") == "10:00"


def test_an_error_in_a_list_of_the_user_s_own_names_the_place(load: Load) -> None:
    settings = load("shop:\n  opening-hours: x\n  addresses:\n    - {street-name: a}\n    - {house-no: 1}")

    with pytest.raises(ConfigurationError, match=r"application\.yml:3: shop\.addresses\[1\]\.street-name: required"):
        settings.bind("shop", Shop)


@pytest.mark.parametrize(
    ("written", "value"),
    [("on", "on"), ("no", "no"), ("010", "010"), ("1:30", "1:30"), ("2026-01-01", "2026-01-01"), ("true", True),
     ("10", 10), ("1_000", 1000), ("1.5", 1.5), ("null", None)],
)  # fmt: skip
def test_yaml_reads_as_numbers_and_booleans_only_what_looks_so_to_people(
    load: Load, written: str, value: object
) -> None:
    """YAML 1.1 makes a boolean of a tag called ``on`` and an eight of ``010``."""
    assert load(f"a: {written}").get("a") == value


def test_merge_keys_and_aliases_work(load: Load) -> None:
    settings = load("base: &base {a: 1, b: 1}\nmine:\n  <<: *base\n  b: 2")

    assert (settings.get("mine.a"), settings.get("mine.b")) == (1, 2)
