"""Texts of the source code, with ``…`` for each value that is put in."""

from __future__ import annotations

import ast
from functools import cache

from tests.docs.fences import ROOT


@cache
def texts_of_the_code() -> frozenset[str]:
    """Return every text in the library and the starters; adjacent literals and ``+`` are one text."""
    files = [path for top in ("mqtemplate", "starters") for path in (ROOT / top).rglob("*.py")]
    return frozenset(
        text
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and (text := _text(node)) is not None
    )


def _text(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_text(left) or "…") + (_text(right) or "…")
    return None


def is_in_the_code(shown: str) -> bool:
    """Return True if a text of the code has all parts of *shown*, which stand between ``…``, in this order."""
    return any(_contains(text, shown.split("…")) for text in texts_of_the_code())


def _contains(text: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        found = text.find(part.strip(), at)
        if found < 0:
            return False
        at = found + len(part.strip())
    return True
