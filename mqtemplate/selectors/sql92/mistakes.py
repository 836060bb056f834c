"""What to say where a text stops being an expression: what stands there, what could, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Collection

EXAMPLE = "region = 'north' AND price BETWEEN 10 AND 20"

_VALUE = "a property, a number, a 'text', TRUE, FALSE, NULL, NOT or '('"
_OPERATOR = "=, <>, <, <=, >, >=, IS, IN, BETWEEN, CONTAINS, STARTSWITH, ENDSWITH or NOT"

_EXPECTED: dict[str, str] = {
    # what the grammar could go on with -> how that is told; the first of a family stands for all of it
    "NAME": _VALUE,
    "ORDER": _OPERATOR,
    "_EQUAL": "=, <> or IS",
    "_AND": "AND",
    "_OR": "OR",
    "RPAR": "')'",
    "LPAR": "'('",
    "COMMA": "','",
    "$END": "the end",
    "STRING": "a 'text'",
    "NULL": "NULL",
    "NOT": "NOT",
    "_BETWEEN": "BETWEEN",
    "_IN": "IN",
    "TEST": "CONTAINS, STARTSWITH or ENDSWITH",
}
_FAMILIES: dict[str, frozenset[str]] = {
    "NAME": frozenset({"STRING", "NULL", "NOT", "LPAR"}),
    "ORDER": frozenset({"_EQUAL", "NOT", "_BETWEEN", "_IN", "TEST"}),
}

_HINTS: tuple[tuple[str, str, str], ...] = (
    # what stands before the place, what stands at it, what to do
    ("=", "=", "write one = for equal"),
    ("", "!=?", "write <> for unequal, NOT for not"),
    ("=", "[<>]", "write <= or >=, with = behind"),
    ("", "&&?", "write AND"),
    ("", r"\|\|?", "write OR (|| is for tags)"),
    ("", '"', "write texts in single quotes, as in region = 'north'"),
    ("", "'", "the text that begins here has no end; close it by ', and double a ' within it"),
    ("", r"/\*", "the comment that begins here has no end; close it by */"),
    ("", "--", "a comment that begins by -- ends with its line, and this line has no end; use /* */"),
    ("", r"(?i:like|r?regexp?|rlike|matches)\b", "write name CONTAINS 'text', name STARTSWITH 'text' or ENDSWITH"),
    (r"^\s*", r"\*\s*$", "for every message, select by tag: *"),
    (r"(?i:\bIN\s*\([^()]*)", r"[-+.\w]", "IN takes texts, as in size IN ('1', '2'); or write size = 1 OR size = 2"),
    (r"(?:^|\W)0", r"[0-9]", "write numbers without leading zeros"),
    (r"(?:^|\W)0", r"[xXlL]", "write numbers in decimal digits"),
    ("", r"[-+*/%]", "there is no arithmetic, and a property's name has letters, digits, _ and $ only"),
    (r"\w\s*", r"\.", "a property's name has letters, digits, _ and $ only"),
    ("", ";", "leave out the semicolon"),
)
_LOOK_BACK = 200
_SHOWN = 40


def reason_for(expression: str, at: int, found: str | None = None, accepted: Collection[str] = ()) -> str:
    """Say what is wrong at a place.

    Args:
        at: Index into the text; its length, or just behind the last word, where something is missing.
        found: The word there, empty at the end; None if no word begins so.
        accepted: Names of the grammar's terminals that could stand there.
    """
    if found is None:
        reason = f"{expression[at]!r} begins no word"
    else:
        reason = f"found {found[:_SHOWN]!r}" if found else "something is missing"
    if accepted:
        reason += f", expected {_listed(accepted)}"
    hint = _hint(expression, at) if found != "" else ""
    return f"{reason}{hint and '; '}{hint}; for example: {EXAMPLE}"


def _listed(accepted: Collection[str]) -> str:
    hidden = {name for head, others in _FAMILIES.items() if head in accepted for name in others}
    return ", or ".join(words for name, words in _EXPECTED.items() if name in accepted and name not in hidden)


def _hint(expression: str, at: int) -> str:
    before = expression[max(0, at - _LOOK_BACK) : at]
    for behind, here, hint in _HINTS:
        if re.match(here, expression[at : at + _LOOK_BACK]) and re.search(f"(?:{behind})$", before):
            return hint
    return ""
