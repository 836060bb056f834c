"""Descriptions of syntax errors: the token that was found, the tokens that are allowed, and the likely intention."""

from __future__ import annotations

import re
from collections.abc import Collection

EXAMPLE = "region = 'north' AND price BETWEEN 10 AND 20"

_OPERAND = "a property, a number, a 'string', TRUE, FALSE, NULL, NOT or '('"
_OPERATOR = "=, <>, <, <=, >, >=, IS, IN, BETWEEN, CONTAINS, STARTSWITH, ENDSWITH or NOT"

_DESCRIPTIONS: dict[str, str] = {
    # terminal of the grammar -> description; the description of a head of _FAMILIES covers its whole family
    "NAME": _OPERAND,
    "ORDER": _OPERATOR,
    "_EQUAL": "=, <> or IS",
    "_AND": "AND",
    "_OR": "OR",
    "RPAR": "')'",
    "LPAR": "'('",
    "COMMA": "','",
    "$END": "the end",
    "STRING": "a 'string'",
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
    # pattern of the text before the error, pattern of the text at the error, hint; the first match is used
    ("=", "=", "write one = for equal"),
    ("", "!=?", "write <> for unequal, NOT for not"),
    ("=", "[<>]", "write <= or >=, with = last"),
    ("", "&&?", "write AND"),
    ("", r"\|\|?", "write OR (|| is for tags)"),
    ("", '"', "write strings in single quotes, as in region = 'north'"),
    ("", "'", "the string that starts here has no end; close it with ', and double a ' inside it"),
    ("", r"/\*", "the comment that starts here has no end; close it with */"),
    ("", "--", "a comment that starts with -- ends at the end of its line, and this line has no end; use /* */"),
    ("", r"(?i:like|r?regexp?|rlike|matches)\b", "write name CONTAINS 'text', name STARTSWITH 'text' or ENDSWITH"),
    (r"^\s*", r"\*\s*$", "for all messages use the tag selector *"),
    (r"(?i:\bIN\s*\([^()]*)", r"[-+.\w]", "IN takes strings, as in size IN ('1', '2'); or write size = 1 OR size = 2"),
    (r"(?:^|\W)0", r"[0-9]", "write numbers without leading zeros"),
    (r"(?:^|\W)0", r"[xXlL]", "write numbers in decimal digits"),
    ("", r"[-+*/%]", "there is no arithmetic, and a property name may have only letters, digits, _ and $"),
    (r"\w\s*", r"\.", "a property name may have only letters, digits, _ and $"),
    ("", ";", "remove the semicolon"),
)
_HINT_CONTEXT = 200  # characters before and after the error that the patterns see
_LONGEST_TOKEN_SHOWN = 40


def describe_error(expression: str, at: int, found: str | None = None, allowed: Collection[str] = ()) -> str:
    """Return a description of a syntax error.

    Args:
        at: Index into the expression; one past the last token if something is missing there.
        found: The token at *at*, empty at the end of the expression; None if no token starts there.
        allowed: Names of the terminals that the grammar allows at *at*.
    """
    if found is None:
        reason = f"no token starts with {expression[at]!r}"
    else:
        reason = f"found {found[:_LONGEST_TOKEN_SHOWN]!r}" if found else "something is missing"
    if allowed:
        reason += f", expected {_list(allowed)}"
    hint = _hint(expression, at) if found != "" else ""
    return f"{reason}{hint and '; '}{hint}; for example: {EXAMPLE}"


def _list(terminals: Collection[str]) -> str:
    covered = {name for head, others in _FAMILIES.items() if head in terminals for name in others}
    return ", or ".join(text for name, text in _DESCRIPTIONS.items() if name in terminals and name not in covered)


def _hint(expression: str, at: int) -> str:
    before = expression[max(0, at - _HINT_CONTEXT) : at]
    for before_pattern, pattern, hint in _HINTS:
        if re.match(pattern, expression[at : at + _HINT_CONTEXT]) and re.search(f"(?:{before_pattern})$", before):
            return hint
    return ""
