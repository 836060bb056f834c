"""The page on errors has the texts that the code writes."""

from __future__ import annotations

import re

import pytest

from tests.docs.error_texts import is_in_the_code
from tests.docs.fences import DOCS

TEXTS = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("shown", TEXTS)
def test_an_error_text_of_the_page_is_in_the_code(shown: str) -> None:
    assert is_in_the_code(shown)


def test_another_text_would_be_found() -> None:
    assert not is_in_the_code("the broker is … tired")


def test_a_text_is_not_all_placeholders() -> None:
    """A heading that consists of ``…`` and two words would match anything."""
    assert [shown for shown in TEXTS if len(shown.replace("…", "").strip()) < 8] == []
