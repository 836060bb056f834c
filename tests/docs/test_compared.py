"""The comparison of dashboards: each row that claims something of this library names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/compare/dashboards.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| |")
]


@pytest.mark.feature("14.2")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test_that_exists(row: str) -> None:
    named = re.findall(r"`(tests/[^`]+)`", row.rstrip("| ").rpartition("|")[2])

    assert named
    for name in named:
        path, _, function = name.partition("::")
        assert (ROOT / path).exists()
        assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")
