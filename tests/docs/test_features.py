"""The table of features: each row has a place in the documents and a test, and both exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from mqtemplate.listener import ListenerAttributes
from tests.docs.fences import DOCS, ROOT
from tests.docs.test_links import anchors

PAGE = DOCS / "compare" / "features.md"
MISSING = "## What is missing"
ATTRIBUTES_OF_SPRING = ROOT / "tests" / "spring" / "rocketmq_spring_2_3_5.txt"


class Feature(NamedTuple):
    """One row: what it is, what three others have, where it is described here, and its test."""

    title: str
    others: tuple[str, ...]
    here: str
    test: str


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[0] != "Feature"]


def features() -> list[Feature]:
    """Return the features that are here."""
    found = rows(PAGE.read_text("utf-8").partition(MISSING)[0])
    assert {len(row) for row in found} == {6}
    return [Feature(title, (first, second, third), here, test) for title, first, second, third, here, test in found]


@cache
def collected_names(file: Path) -> frozenset[str]:
    """Return the names under which pytest collects a file: functions, classes, and methods of these."""
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].lower().startswith("test"))


def is_collected(test: str) -> bool:
    """Return True for ``path::name`` that pytest collects."""
    path, _, name = test.partition("::")
    file = ROOT / path
    return file.is_file() and file.name.startswith("test_") and name in collected_names(file)


@pytest.mark.parametrize("feature", features(), ids=lambda feature: feature.title[:60])
def test_a_feature_has_a_test_that_is_collected(feature: Feature) -> None:
    quoted = re.fullmatch(r"`(tests/[^`]+)`", feature.test)

    assert quoted is not None, feature.test
    assert is_collected(quoted[1])


@pytest.mark.parametrize("feature", features(), ids=lambda feature: feature.title[:60])
def test_a_feature_is_described_on_a_page(feature: Feature) -> None:
    """The link of its row leads to a page of the documents, and to a heading there if it names one."""
    link = re.fullmatch(r"\[[^\]]+\]\(([^)#]+)(?:#([^)]+))?\)", feature.here)
    assert link is not None, feature.here
    page, anchor = (PAGE.parent / link[1]).resolve(), link[2]

    assert page.is_relative_to(DOCS)
    assert page.is_file()
    assert anchor is None or anchor in anchors(page)


def test_nothing_is_said_twice_and_no_cell_is_empty() -> None:
    titles = [feature.title for feature in features()]

    assert len(titles) == len(set(titles))
    assert [feature for feature in features() if not all(feature.others)] == []


def test_what_is_missing_has_a_reason() -> None:
    missing = rows(PAGE.read_text("utf-8").partition(MISSING)[2])

    assert missing
    assert [row for row in missing if len(row) != 3 or not all(row)] == []


def test_each_attribute_of_a_listener_of_rocketmq_spring_has_a_row() -> None:
    """Those that came after 2.3.5 too."""
    lines = ATTRIBUTES_OF_SPRING.read_text("utf-8").splitlines()
    names = next(line.partition(":")[2].split() for line in lines if line.startswith("RocketMQMessageListener:"))
    ours = {re.sub(r"([A-Z]+)", lambda found: f"_{found[1].lower()}", name) for name in names}
    wanted = (ours & ListenerAttributes.__annotations__.keys()) | {
        "topic",
        "consumer_group",
        "pull_interval",
        "pull_batch_size",
        "consume_message_batch_max_size",
        "consume_from_where",
    }
    titles = " ".join(feature.title for feature in features())

    assert len(wanted) >= 28
    assert [name for name in sorted(wanted) if f"`{name}`" not in titles] == []


@pytest.mark.parametrize(
    "test", ["tests/docs/test_features.py::test_other", "tests/docs/missing.py::test_a", "tests/docs/fences.py::fences"]
)
def test_a_test_that_does_not_exist_would_be_found(test: str) -> None:
    assert not is_collected(test)
