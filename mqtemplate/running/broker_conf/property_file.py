"""Reader of Java's property files (``java.util.Properties``): ``key=value``, comments, long lines, escapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mqtemplate.context.config.files import read_text

# The key ends at the first separator that no backslash escapes: "=", ":", or blanks.
_LINE = re.compile(r"(?P<key>(?:\\.|[^\\\s=:])*)\s*[=:]?\s*(?P<value>.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class Entry(NamedTuple):
    """One key of a file."""

    key: str
    value: str
    line: int


def read_property_file(file: Path) -> list[Entry]:
    """Return the entries of a file, in order.

    Raises:
        ConfigurationError: The file cannot be read, is not UTF-8, or too long.
    """
    text = read_text(file, "{file} cannot be read: {reason}; give the property file of a broker")
    return [_entry(line, number) for number, line in _logical_lines(text)]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number; one that ends with a backslash continues in the next one."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.lstrip()
        if not parts and (not stripped or stripped[0] in "#!"):
            continue
        start = start if parts else number
        backslashes = len(stripped) - len(stripped.rstrip("\\"))
        if backslashes % 2:
            parts.append(stripped[:-1])
            continue
        yield start, "".join([*parts, stripped])
        parts = []
    if parts:
        yield start, "".join(parts)


def _entry(line: str, number: int) -> Entry:
    found = _LINE.match(line)
    assert found is not None  # every part of the pattern may be empty
    return Entry(_unescaped(found["key"]), _unescaped(found["value"]).strip(), number)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _CONTROL.get(found[2], found[2]), text)
