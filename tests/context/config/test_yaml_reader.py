"""Types, merge keys and aliases in YAML files."""

from __future__ import annotations

import pytest

from tests.context.loading import Load


@pytest.mark.parametrize(
    ("written", "value"),
    [("on", "on"), ("no", "no"), ("010", "010"), ("1:30", "1:30"), ("2026-01-01", "2026-01-01"), ("true", True),
     ("10", 10), ("1_000", 1000), ("1.5", 1.5), ("null", None)],
)  # fmt: skip
def test_only_plain_numbers_and_true_and_false_are_not_text(load: Load, written: str, value: object) -> None:
    """YAML 1.1 reads ``on`` as a boolean and ``010`` as eight."""
    assert load(f"a: {written}").get("a") == value


def test_merge_keys_and_aliases_work(load: Load) -> None:
    settings = load("base: &base {a: 1, b: 1}\nmine:\n  <<: *base\n  b: 2")

    assert (settings.get("mine.a"), settings.get("mine.b")) == (1, 2)
