"""Sections of the application, read into models of its own."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from mqtemplate.context import AppSettings
from mqtemplate.errors import ConfigurationError
from tests.context.loading import Load


class Address(BaseModel):
    street_name: str
    house_no: int = 1


class Shop(BaseModel):
    opening_hours: str
    addresses: list[Address] = []
    prices: dict[str, float] = {}


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
