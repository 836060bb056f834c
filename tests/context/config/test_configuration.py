"""Sections of the application, read into models of its own. Errors and reprs never contain secrets."""

from __future__ import annotations

from typing import Self

import pytest
from pydantic import BaseModel, SecretStr, model_validator

from mqtemplate.context import AppSettings, load_settings
from mqtemplate.errors import ConfigurationError
from tests.context.loading import Load


class Address(BaseModel):
    street_name: str
    house_no: int = 1


class Shop(BaseModel):
    opening_hours: str
    addresses: list[Address] = []
    prices: dict[str, float] = {}


class SecretShop(BaseModel):
    name: str
    password: str
    token: SecretStr = SecretStr("")


class ClosedShop(SecretShop):
    @model_validator(mode="after")
    def refuse(self) -> Self:
        raise ValueError("closed on Mondays")


def test_a_section_of_the_application_is_read_into_a_model(load: Load) -> None:
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


def test_an_error_in_a_list_of_the_application_names_the_position(load: Load) -> None:
    settings = load("shop:\n  opening-hours: x\n  addresses:\n    - {street-name: a}\n    - {house-no: 1}")

    with pytest.raises(ConfigurationError, match=r"application\.yml:3: shop\.addresses\[1\]\.street-name: required"):
        settings.bind("shop", Shop)


def test_settings_that_were_created_without_a_file_have_empty_sections() -> None:
    class Defaults(BaseModel):
        limit: int = 10

    assert AppSettings().bind("shop", Defaults).limit == 10
    with pytest.raises(ConfigurationError, match=r"created without a file, and shop\.opening_hours is required"):
        AppSettings().bind("shop", Shop)


def test_a_key_has_its_default_where_no_source_sets_it(load: Load) -> None:
    settings = load("rocketmq.consumer.listeners: {billing: {paid: false}}")

    assert settings.get("nothing", "else") == "else"
    assert settings.resolve_text("${rocketmq.consumer.access-key:}") == ""
    assert not settings.rocketmq.consumer.is_listener_enabled("billing", "paid")
    assert settings.rocketmq.consumer.is_listener_enabled("billing", "another")


def test_no_error_contains_a_secret_of_the_application_s_own_section(load: Load) -> None:
    settings = load("shop: {password: [hunter2], token: [hunter2]}")

    with pytest.raises(ConfigurationError) as refused:
        settings.bind("shop", SecretShop)

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


def test_an_argument_of_the_program_wins_over_a_variable_in_a_section_of_the_application() -> None:
    given = {"shop.opening-hours": "argument"}
    settings = load_settings(profiles=(), environment={"SHOP_OPENING_HOURS": "variable"}, arguments=given)

    assert settings.bind("shop", Shop).opening_hours == "argument"
