"""Limits of configuration files: what a few lines stand for must neither end the process nor hold it for long."""

from __future__ import annotations

import pytest

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.tables import read_table
from tests.context.loading import Load, Refusal

DEEP = 3_000
"""More levels than the interpreter has stack frames."""


def references(levels: int, text: str) -> str:
    """Return levels of values, each of which names the one before it nine times: 9 ** levels values."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        names = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} {text % names}")
    return "\n".join(lines)


@pytest.mark.parametrize("value", ["[" * DEEP + "]" * DEEP, "{b: " * DEEP + "}" * DEEP, "[{b: " * DEEP + "}]" * DEEP])
def test_values_that_are_nested_too_deeply_are_refused(refusal: Refusal, value: str) -> None:
    assert "application.yml:2: values are nested deeper than 50 levels; write fewer" in refusal(f"a: 1\nb: {value}")


@pytest.mark.parametrize("text", ["[%s]", "{<<: [%s]}"])
def test_aliases_that_stand_for_too_many_values_are_refused(refusal: Refusal, text: str) -> None:
    """Ten lines stand for three billion values."""
    expected = "application.yml:6: there are more than 100,000 values, including the values of aliases; write fewer"
    assert expected in refusal(references(10, text))


def test_some_aliases_of_aliases_are_allowed(load: Load) -> None:
    assert len(load(references(3, "[%s]")).get("a3")) == 9  # type: ignore[arg-type]


def test_a_file_that_is_too_long_is_refused(refusal: Refusal) -> None:
    text = f"a: {'x' * (1 << 20)}"

    assert f"application.yml: has {len(text):,} bytes, allowed are 1,048,576; shorten it" in refusal(text)


def test_a_key_with_too_many_parts_is_refused(refusal: Refusal, load: Load) -> None:
    key = ".".join(["a"] * 51)

    assert load(f"{key[2:]}: 1").get(key[2:]) == 1
    assert "application.yml:1: a key has more than 50 parts; no setting has so many" in refusal(f"{key}: 1")
    half = ".".join(["a"] * 26)
    assert "application.yml:2: a key has more than 50 parts" in refusal(f"{half}:\n  {half}: 1")


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"k{number}: ${{k{number + 1}}}" for number in range(DEEP)),  # a chain
        "k0: '" + "${x:" * DEEP + "}" * DEEP + "'",  # defaults in defaults
        "\n".join(f"k{number}: '${{k{number + 1}}}${{k{number + 1}}}'" for number in range(40)) + "\nk40: x",  # 2 ** 40
    ],
)
def test_too_many_placeholders_in_each_other_are_refused(refusal: Refusal, text: str) -> None:
    expected = (
        "placeholders are nested deeper than 50 levels, or stand for more than 10,000 others; write the value itself"
    )
    assert expected in refusal(text + "\nrocketmq:\n  name-server: ${k0}")


@pytest.mark.parametrize("text", ['{"topicConfigTable":' * 100_000, "[" * 100_000])
def test_a_table_in_json_that_is_nested_too_deeply_is_refused(text: str) -> None:
    files = MemoryStoreFiles()
    files.write_bytes("config/topics.json", text.encode())

    with pytest.raises(
        StoreFormatError, match=r"topics.json is not JSON \(its values are nested too deeply\); restore it"
    ):
        read_table(files, "config/topics.json")
