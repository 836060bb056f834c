"""Whole numbers in texts that others give."""

from __future__ import annotations

import pytest

from mqtemplate.numbers import parse_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("-3", -3), ("+3", 3), ("9" * 18, 10**18 - 1), ("-" + "9" * 18, 1 - 10**18)],
)
def test_a_number_that_java_reads_is_read(text: str, number: int) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "--3",
        "1.0",
        "1e3",
        " 1",
        "1 ",
        "1_000",
        "0x10",
        "\u0663",
        "\uff11",
        "9" * 19,
        "9" * 5_000,
        None,
        3,
        b"3",
        True,
    ],
)
def test_anything_else_is_none(text: object) -> None:
    """Digits of other scripts, and texts so long that `int` raises, come from clients."""
    assert parse_number(text) is None
