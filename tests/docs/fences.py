"""Fenced blocks of the pages: their language, their title, and their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r'^(?:<!-- not run: (?P<reason>[^\n]+) -->\n\n?)?^```(?P<language>[\w-]*)(?: title="(?P<title>[^"\n]*)")?\n'
    r"(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Fence(NamedTuple):
    """One fenced block of a page.

    *reason* is the comment ``<!-- not run: … -->`` in the line before the block: why no test runs it.
    """

    language: str
    title: str | None
    text: str
    reason: str | None
    line: int


def fences(page: Path) -> list[Fence]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text("utf-8")
    return [
        Fence(
            found["language"],
            found["title"],
            found["text"],
            found["reason"],
            text.count("\n", 0, found.start("language")) + 1,
        )
        for found in _FENCE.finditer(text)
    ]


def looks_like(shown: str, line: str) -> bool:
    """Return True if a line is the one that a page shows, in which ``…`` stands for any text."""
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in shown.split("…"))
    return re.fullmatch(pattern.replace(r"\ .*", ".*").replace(r".*\ ", ".*"), " ".join(line.split())) is not None


def missing_lines(shown: str, output: str) -> list[str]:
    """Return the lines that a page shows and the output does not have, in this order."""
    lines = iter(output.splitlines())
    return [line for line in shown.splitlines() if not any(looks_like(line, actual) for actual in lines)]
