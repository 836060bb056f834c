"""Reader of YAML files as trees of keys with line numbers. It is imported where there is such a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from mqtemplate.context.config.files import YamlDocument, read_text, split_names
from mqtemplate.context.config.tree import UNSET, ConfigNode, check_depth
from mqtemplate.errors import ConfigurationError

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
