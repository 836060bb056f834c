"""Readers of configuration files: TOML as a tree of keys with line numbers, and ``.env`` as variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mqtemplate.context.config.tree import UNSET, ConfigNode
from mqtemplate.errors import ConfigurationError

_MAX_BYTES = 1 << 20


def read_text(file: Path, unreadable: str = "{file}: cannot be read: {reason}") -> str:
    """Return the text of a file.

    Args:
        unreadable: Error text for a file that the system does not read.

    Raises:
        ConfigurationError: The file cannot be read, is too long, or is not UTF-8.
    """
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigurationError(f"{file.name}: has {size:,} bytes, allowed are {_MAX_BYTES:,}; shorten it")
        return file.read_bytes().decode("utf-8-sig")  # editors of Windows write a byte order mark
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file.name}: not UTF-8 at byte {exc.start}; save the file as UTF-8") from exc
    except OSError as exc:
        raise ConfigurationError(unreadable.format(file=file, reason=exc.strerror)) from exc


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One document of a file.

    Attributes:
        root: The keys of the document.
        on_profile: Profiles to which the document applies (``!name``: all but that one); empty for all profiles.
    """

    root: ConfigNode
    on_profile: tuple[str, ...]


def split_names(value: object) -> tuple[str, ...]:
    """Return the names in a list, or in a text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return tuple(str(name).strip() for name in names if str(name).strip())


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


ENV_FILE = ".env"


def read_env_file(file: Path) -> dict[str, str]:
    """Return the variables of a file. ``${NAME}`` is replaced by variables of the process and of the file.

    Raises:
        ConfigurationError: It cannot be read, or a line is not ``NAME=value``.
    """
    from dotenv.main import DotEnv  # only needed where there is such a file
    from dotenv.parser import parse_stream

    try:
        with file.open(encoding="utf-8-sig") as stream:
            for binding in parse_stream(stream):
                if binding.error:
                    raise ConfigurationError(
                        f"{file}:{binding.original.line}: {binding.original.string.strip()!r} is not a variable; "
                        "write NAME=value"
                    )
        values = DotEnv(file, encoding="utf-8-sig", override=False).dict()
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file}: not UTF-8 at byte {exc.start}; save the file as UTF-8") from exc
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be read: {exc.strerror}; give the path of a file") from exc
    return {name: value for name, value in values.items() if value is not None}


def with_env_file(folder: Path) -> Mapping[str, str]:
    """Return the variables of the process and, below them, of ``.env`` in a folder. The process is not changed.

    Raises:
        ConfigurationError: The file is invalid.
    """
    file = folder / ENV_FILE
    return below_environment(read_env_file(file)) if file.is_file() else os.environ


def below_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return *variables* and, above them, the variables of the process. An empty one counts as not given."""
    return {**variables, **{name: value for name, value in os.environ.items() if value or name not in variables}}
