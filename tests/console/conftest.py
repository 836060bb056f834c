"""A dashboard on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.pages import Shop, open_shop


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard that allows changes; the user is signed in."""
    with open_shop(tmp_path) as shop:
        shop.sign_in()
        yield shop
