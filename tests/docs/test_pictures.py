"""The pictures of the documents are those that their generator draws from the code."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from docs.site.pictures import FOLDER, PICTURES
from tests.docs.fences import DOCS


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_generated_one(name: str) -> None:
    """To update the pictures, run ``python -m docs.site.pictures``."""
    assert (FOLDER / f"{name}.svg").read_text("utf-8") == PICTURES[name]()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_valid_xml_with_a_title(name: str) -> None:
    picture = ET.fromstring(PICTURES[name]())

    assert picture.findtext("{http://www.w3.org/2000/svg}title")


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text("utf-8") for page in DOCS.rglob("*.md"))

    assert [name for name in PICTURES if f"pictures/{name}.svg)" not in text] == []
