"""Each error text of the library divides into what happened and what to do, for the report of a failed start."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mqtemplate import errors
from mqtemplate.context.failure_report import failure_report, split_advice
from mqtemplate.errors import ListenerError, SparkError

ROOT = Path(__file__).parents[2]
NAMES = {*(name for name in errors.__all__ if name.endswith("Error")), "ContradictionError", "SparkError"}
FACTS = ("there is ", "there are ", "it is ", "it was ", "got ", "they are ")
"""Beginnings of a sentence that tells a fact. What to do tells an action, or asks a question."""


@cache
def written_texts() -> dict[str, str]:
    """Return the texts of the errors that the source raises by their places, with the fields of a text in braces."""
    return dict(_written_texts())


def _written_texts() -> Iterator[tuple[str, str]]:
    for path in sorted([*(ROOT / "mqtemplate").rglob("*.py"), *(ROOT / "starters").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
                text = next((found for each in node.args if (found := text_of(each))), "")
                if " " in text:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def text_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(text_of(each) if isinstance(each, ast.Constant) else "{}" for each in values)
    return ""


def is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0


def test_both_parts_of_each_text_are_whole() -> None:
    texts = written_texts()
    assert len(texts) > 300

    broken = {place: text for place, text in texts.items() if not all(map(is_balanced, split_advice(text)))}

    assert broken == {}


def test_at_the_start_the_advice_is_an_action() -> None:
    """Texts of the packages whose errors end a start."""
    of_start = ("context/", "listener/", "cli/", "store/", "spark/", "remoting/tls", "remoting/sockets", "starters/")
    texts = {
        place: text for place, text in written_texts().items() if place.removeprefix("mqtemplate/").startswith(of_start)
    }
    assert len(texts) > 150

    facts = {place: advice for place, text in texts.items() if (advice := split_advice(text)[1]).startswith(FACTS)}

    assert facts == {}


@pytest.mark.parametrize(
    ("text", "what", "advice"),
    [
        ("none answers (a: refused; b: refused); see that one runs", "none answers (a: refused; b: refused)",
         "see that one runs"),
        ("an extension ([x; y]), which cannot be read", "an extension ([x; y]), which cannot be read", ""),
        ("bad value ':)'; write another", "bad value ':)'", "write another"),
    ],
)  # fmt: skip
def test_a_semicolon_in_brackets_divides_nothing(text: str, what: str, advice: str) -> None:
    assert split_advice(text) == (what, advice)


def test_an_error_without_advice_has_that_of_its_class() -> None:
    assert "What to do  correct it there; docs/architecture/listener.md" in failure_report(ListenerError("no"))
    assert "What to do" not in failure_report(SparkError("no"))
