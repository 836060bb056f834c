"""Reader of TOML files into `ConfigNode` trees, with line numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mqtemplate.context.config.text_file import read_text
from mqtemplate.context.config.tree import UNSET, ConfigNode
from mqtemplate.errors import ConfigurationError

_TABLE = re.compile(r"\s*\[+\s*(?P<name>[^\[\]#]+?)\s*\]+")
_KEY = re.compile(r"""\s*(?P<name>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")


def read_toml(file: Path) -> ConfigNode:
    """Return the keys of a file.

    Dates and times become text, as in YAML files: no key is a date.

    Raises:
        ConfigurationError: The file is not UTF-8 or not TOML, or too long.
    """
    import tomllib  # most applications have no such file

    text = read_text(file)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigurationError(f"{file.name}: not valid TOML: {exc}") from exc
    except RecursionError as exc:
        raise ConfigurationError(f"{file.name}: values are nested too deeply; write fewer levels") from exc
    root = ConfigNode(origin=file.name)
    _insert(root, values, (), _Lines(file.name, text))
    return root


def _insert(root: ConfigNode, values: Mapping[str, object], path: tuple[str, ...], lines: _Lines) -> None:
    for key, value in values.items():
        below = (*path, *key.split("."))
        origin = lines.origin(below)
        if isinstance(value, Mapping):
            root.put(below, UNSET, origin)
            _insert(root, value, below, lines)
        else:
            root.put(below, _plain(value), origin)


def _plain(value: object) -> object:
    """Return a value as YAML files have it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value if isinstance(value, str | bool | int | float) else str(value)


class _Lines:
    """Line of each key. tomllib does not tell it, so headers and assignments are searched in the text."""

    def __init__(self, file: str, text: str) -> None:
        self._file = file
        self._lines: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), start=1):
            if (found := _TABLE.match(line)) is not None:
                table = _parts(found["name"])
                self._lines.setdefault(table, number)
            elif (found := _KEY.match(line)) is not None:
                self._lines.setdefault((*table, *_parts(found["name"])), number)

    def origin(self, path: tuple[str, ...]) -> str:
        """Return ``application.toml:4``; for a key inside of ``{...}`` the line of the key that has it."""
        at = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in self._lines), None)
        return self._file if at is None else f"{self._file}:{self._lines[at]}"


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a dotted key; a quoted part may have dots, which part keys here too."""
    return tuple(part for found in _PART.finditer(name) for part in "".join(filter(None, found.groups())).split("."))
