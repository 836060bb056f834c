"""Readers of configuration files: YAML and TOML as trees of keys with line numbers, and ``.env`` as variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from mqtemplate.context.config.tree import UNSET, ConfigNode, check_depth
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


_ACTIVATION_KEYS = (
    ("config", "activate", "on-profile"),
    ("spring", "config", "activate", "on-profile"),  # in files shared with a Spring application
)
_TIMESTAMP, _BOOL, _INT, _NULL, _MERGE = (
    f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "bool", "int", "null", "merge")
)
_MAX_DEPTH = 50
_MAX_VALUES = 100_000
_COLLECTIONS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _LimitError(Exception):
    """A file has more than is allowed.

    Attributes:
        line: Where that is, counted from 1.
    """

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem)
        self.line = mark.line + 1


class _Loader(yaml.SafeLoader):
    """A safe loader with fewer implicit types.

    YAML 1.1 reads ``on`` and ``no`` as booleans, ``010`` as eight, ``1:30`` as ninety and a bare date as a date. Here
    they stay text: a tag may be called ``on``.

    Depth and number of the values are limited. Few lines with aliases of aliases can stand for billions of values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[int] = []  # for each collection around the current node, its number of values so far
        self._sizes: dict[int, int] = {}  # id of a node -> its number of values, aliases included

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if len(self._open) >= _MAX_DEPTH:
            raise _LimitError(f"values are nested deeper than {_MAX_DEPTH} levels", mark)
        self._open.append(1)
        node = super().compose_node(parent, index)
        size = self._open.pop()
        if is_alias:
            size = self._sizes.get(id(node), 1)
        self._sizes[id(node)] = size
        if self._open:
            self._open[-1] += size
            if self._open[-1] > _MAX_VALUES:
                raise _LimitError(f"there are more than {_MAX_VALUES:,} values, including the values of aliases", mark)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in {_TIMESTAMP, _BOOL, _INT}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(true|false)$", re.IGNORECASE), list("tTfF"))
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One document of a file.

    Attributes:
        root: The keys of the document.
        on_profile: Profiles to which the document applies (``!name``: all but that one); empty for all profiles.
    """

    root: ConfigNode
    on_profile: tuple[str, ...]


def read_yaml(file: Path) -> list[YamlDocument]:
    """Return the documents of a file.

    Raises:
        ConfigurationError: The file is not UTF-8 or not YAML, a document is not a mapping, or a key is given twice; or
            the file is too long, its values are nested too deeply, or its aliases stand for too many values.
    """
    text = read_text(file)
    try:
        loader = _Loader(text)
        try:
            return list(_documents(loader, file.name))
        finally:
            loader.dispose()
    except _LimitError as exc:
        raise ConfigurationError(f"{file.name}:{exc.line}: {exc}; write fewer") from exc
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else "?"
        raise ConfigurationError(f"{file.name}:{line}: not valid YAML: {exc.problem}") from exc
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"{file.name}: not valid YAML: {exc}") from exc


def _documents(loader: _Loader, file: str) -> Iterator[YamlDocument]:
    while loader.check_node():
        node = loader.get_node()
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL):
            continue
        origin = f"{file}:{node.start_mark.line + 1}"
        if not isinstance(node, yaml.MappingNode):
            raise ConfigurationError(f"{origin}: a document must consist of 'key: value' lines")
        root = ConfigNode(origin=origin)
        _TreeBuilder(loader, file).add_mapping(node, root, 0)
        yield YamlDocument(root, _remove_activation(root))


def split_names(value: object) -> tuple[str, ...]:
    """Return the names in a list, or in a text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return tuple(str(name).strip() for name in names if str(name).strip())


def _remove_activation(root: ConfigNode) -> tuple[str, ...]:
    """Remove the activation key, which is not a setting, and return its profiles."""
    for path in _ACTIVATION_KEYS:
        activate = root.find(path[:-1])
        node = root.find(path)
        if activate is None or node is None or node.value is UNSET:
            continue
        activate.children.pop(next(key for key, child in activate.children.items() if child is node))
        return split_names(node.value)
    return ()


class _TreeBuilder:
    """Converter of the YAML nodes of one document to config nodes."""

    def __init__(self, loader: _Loader, file: str) -> None:
        self._loader = loader
        self._file = file
        self._open: set[int] = set()  # mappings and lists around the current node: an alias may refer to one

    def add_mapping(self, node: yaml.MappingNode, parent: ConfigNode, depth: int) -> None:
        """Add the keys of a mapping below *parent*, which is *depth* levels below the root."""
        self._enter(node)
        for key_node, value_node in self._pairs(node):
            below = tuple(self._key(key_node).split("."))
            origin = self._at(key_node)
            below_depth = depth + len(below)
            check_depth(below_depth, origin)
            if isinstance(value_node, yaml.MappingNode):
                self.add_mapping(value_node, parent.put(below, UNSET, origin), below_depth)
                continue
            twin = parent.put(below, UNSET, origin)
            if twin.value is not UNSET:
                key = ".".join(below)
                raise ConfigurationError(f"{origin}: key '{key}' was given before, at {twin.origin}; keep one")
            parent.put(below, self._plain(value_node), origin)
        self._open.discard(id(node))

    def _plain(self, node: yaml.Node) -> object:
        """Return a scalar, or a list or mapping with all it contains, as Python values."""
        if isinstance(node, yaml.ScalarNode):
            return self._loader.construct_object(node)
        self._enter(node)
        plain: object
        if isinstance(node, yaml.SequenceNode):
            plain = [self._plain(item) for item in node.value]
        else:
            assert isinstance(node, yaml.MappingNode)
            plain = {self._key(key): self._plain(value) for key, value in self._pairs(node)}
        self._open.discard(id(node))
        return plain

    def _pairs(self, node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return the pairs of a mapping with ``<<`` merged; the mapping's own pairs come last, so they win."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self._key(key_node)
            if key in seen and key_node.tag != _MERGE:
                at = self._at(key_node)
                raise ConfigurationError(f"{at}: key '{key}' is given twice in the same mapping; keep one")
            seen.add(key)
        self._loader.flatten_mapping(node)
        return list({self._key(pair[0]): pair for pair in node.value}.values())

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigurationError(f"{self._at(node)}: a key must be plain text, this one is a list or a mapping")
        return str(node.value)

    def _at(self, node: yaml.Node) -> str:
        return f"{self._file}:{node.start_mark.line + 1}"

    def _enter(self, node: yaml.Node) -> None:
        if node.tag not in _COLLECTIONS:
            raise ConfigurationError(
                f"{self._at(node)}: the tag {node.tag!r} means nothing here; write plain keys and lists"
            )
        if id(node) in self._open:
            raise ConfigurationError(f"{self._at(node)}: an alias leads back to the value it stands in")
        self._open.add(id(node))


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
