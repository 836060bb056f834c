"""Plain technical English: words that are not the field's terms do not come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TERMS = {
    # word or phrase -> the term to use
    r"keepers?": "implementation, DelayStore",
    r"steer(s|ed|ing)?": "cancel and reschedule",
    r"(giv(e|es|ing)|gave|given) back": "send back, release",
    r"call(s|ed|ing)? back a": "recall",
    r"ask(s|ed|ing)? for": "requested, checked, passed",
    r"(what|who) waits?": "pending, delayed",
    r"waiting (messages?|room)": "pending message, delayed message",
    r"hand(s|ed|ing)? over": "delivery to the real topic, delivered",
    r"strangers?": "unrelated record, unregistered client",
    r"front door": "send path, public API",
    r"at home": "directory",
    r"bells?": "WakeEvent",
    r"wish(es|ed)?": "request, change",
    r"(is|are|not) sound": "valid, corrupt",
    r"neighbours?": "the other messages, the other connections",
    r"promis(e|es|ed|ing)": "guarantee",
    r"str(uck|ike|ikes|iking) out": "marked as cancelled",
    r"(is|are|was|were) made": "created",
    r"told": "reported, notified",
    r"somebody|nobody|whoever|whom": "producer, consumer, client, caller, thread",
    r"amid|nought|anew": "during, 0, again",
    r"the begin": "the start",
    r"specification": "the name of the document in docs/",
}
PATTERN = re.compile(r"\b(?:" + "|".join(f"(?:{term})" for term in TERMS) + r")\b", re.IGNORECASE)


def texts() -> list[Path]:
    sources = [path for top in ("mqtemplate", "starters", "examples") for path in (ROOT / top).rglob("*.py")]
    return sorted([*sources, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_text_uses_the_fields_terms(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()!r}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in PATTERN.finditer(line)
    ]

    assert found == []


def test_a_docstring_begins_with_what_the_thing_is_or_does() -> None:
    """A noun or an imperative verb; not "What waits …", "Whether …", "How …"."""
    found = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {docstring.splitlines()[0]}"
        for path in texts()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (docstring := ast.get_docstring(node)) and re.match(r"(What|Whether|Who|Whom|How|Where)\b", docstring)
    ]

    assert found == []
