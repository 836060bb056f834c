"""The hash of Java's strings. A Java virtual machine printed the numbers below."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.hashes import java_string_hash
from mqtemplate.store.key_reader import java_string_hashes

GOLDEN = {
    "": 0,
    "Aa": 2_112,
    "BB": 2_112,
    "orders#4466": -1_824_962_530,
    "SpecTopic#T#TagA": -1_978_225_627,
    "polygenelubricants": -(1 << 31),
    "Überweisung#kéy": 913_330_619,
    "orders#\N{GRINNING FACE}": -388_954_175,
}


@pytest.mark.parametrize(("text", "expected"), GOLDEN.items())
def test_a_text_has_the_hash_that_java_computes(text: str, expected: int) -> None:
    assert java_string_hash(text) == expected


def test_many_texts_have_the_same_hashes() -> None:
    assert java_string_hashes(list(GOLDEN)).tolist() == list(GOLDEN.values())
    assert java_string_hashes([]).tolist() == []


@given(st.lists(st.text(st.characters(codec="utf-16", exclude_categories=())), max_size=20))
def test_both_functions_agree_on_any_texts(texts: list[str]) -> None:
    """Characters beyond 16 bits, which Java counts as two, and halves of them."""
    assert java_string_hashes(texts).tolist() == [java_string_hash(text) for text in texts]
