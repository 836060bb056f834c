"""Keys: the spellings of one key, and the tree of the keys that were read, each with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from mqtemplate.errors import ConfigurationError
from mqtemplate.user_code import shown


def canonical_key(key: str) -> str:
    """Return the part that all spellings of a key have in common: its letters and digits, in lower case.

    The rule is Spring's: dashes, underscores and case have no meaning, so an environment variable can name any key
    (``SENDMESSAGETIMEOUT``).
    """
    return key.replace("-", "").replace("_", "").lower()


def same_key(one: str, other: str) -> bool:
    """Return True if both are spellings of one key."""
    return one == other or canonical_key(one) == canonical_key(other)


def kebab(field_name: str) -> str:
    """Return a Python field name as files and error messages write it. The field of the key ``copy`` is ``copy_``."""
    return field_name.rstrip("_").replace("_", "-")


def variable_name(path: Iterable[str]) -> str:
    """Return the recommended environment variable of a key: ``ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT``."""
    return "_".join(part.rstrip("_") for part in path).replace("-", "_").upper()


def dotted(path: Iterable[object]) -> str:
    """Return a path as a person writes it: ``a.b-c[0].d``. Numbers are positions in a list."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


_MAX_DEPTH = 50

UNSET: Final = Unset.UNSET
"""Value of a node that has no value; None is not one either, see `ConfigNode`."""


@dataclass(slots=True, eq=False)
class ConfigNode:
    """One key: its value, the keys below it, and its origin.

    - Keys are stored as written, because below a section of the application they may be data. `merge` matches different
      spellings of one key.
    - A node may have a value *and* children: ``spark.speculation`` and ``spark.speculation.interval`` are both
      settings of Spark.
    - A later value replaces the earlier one completely, lists too; children are merged.
    - A key without a value (``key:``) counts as not given. So does an empty text, see `is_empty_text`.

    Attributes:
        value: A scalar or a list, with unresolved placeholders.
        origin: ``application.yml:4``, ``environment ROCKETMQ_NAME_SERVER`` or ``argument settings``.
    """

    value: object = UNSET
    origin: str = ""
    children: dict[str, ConfigNode] = field(default_factory=dict)

    def child(self, key: str) -> ConfigNode | None:
        """Return the child for a key in any spelling; an exact match has priority."""
        if (exact := self.children.get(key)) is not None:
            return exact
        return next((node for name, node in self.children.items() if same_key(name, key)), None)

    def find(self, path: Sequence[str]) -> ConfigNode | None:
        """Return the node at a path, in any spelling; None if it is missing."""
        node: ConfigNode | None = self
        for part in path:
            node = None if node is None else node.child(part)
        return node

    def put(self, path: Sequence[str], value: object, origin: str) -> ConfigNode:
        """Set the value at a path, in exactly this spelling. `UNSET` only creates the node: a section has an origin."""
        check_depth(len(path), origin)
        node = self
        for part in path:
            node = node.children.setdefault(part, ConfigNode(origin=origin))
        if value is not UNSET:
            node.origin = origin
            node.value = UNSET if value is None else value
        return node

    def merge(self, later: ConfigNode) -> None:
        """Merge a later tree into this one; the later values win."""
        for key, node in later.children.items():
            mine = self.child(key)
            if mine is None:
                self.children[key] = node
                continue
            if node.value is not UNSET:
                mine.value, mine.origin = node.value, node.origin
            mine.merge(node)

    def copy(self) -> ConfigNode:
        """Return a copy of the tree."""
        return ConfigNode(self.value, self.origin, {key: node.copy() for key, node in self.children.items()})

    def leaves(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ConfigNode]]:
        """Yield every node that has a value, with its path as written."""
        if self.value is not UNSET:
            yield path, self
        for key, node in self.children.items():
            yield from node.leaves((*path, key))

    @property
    def is_empty(self) -> bool:
        """True if neither the node nor a node below it has a value."""
        return self.value is UNSET and all(node.is_empty for node in self.children.values())


def is_empty_text(value: object) -> bool:
    """Return True for a text that counts as not given: empty, or blanks only.

    One rule for all sources: a variable ``ROCKETMQ_PRODUCER_GROUP=`` that a shell, a unit file or a container sets to
    nothing must not replace the group in a file. The settings of the library have no meaning for an empty text. An
    application's own sections may have one, so there the texts of files and arguments stay.
    """
    return isinstance(value, str) and not value.strip()


def check_depth(depth: int, origin: str) -> None:
    """Check the number of parts of a key.

    Raises:
        ConfigurationError: There are too many.
    """
    if depth > _MAX_DEPTH:
        raise ConfigurationError(f"{origin}: a key has more than {_MAX_DEPTH} parts; no setting has so many")


def insert_mapping(root: ConfigNode, mapping: Mapping[str, object], origin: str, path: tuple[str, ...] = ()) -> None:
    """Insert a nested mapping into a tree. Keys may contain dots, as in a file."""
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise ConfigurationError(f"{origin}: a key must be text, got {type(key).__name__} {shown(key)}")
        below = (*path, *key.split("."))
        if isinstance(value, Mapping):
            root.put(below, UNSET, origin)
            insert_mapping(root, value, origin, below)
        else:
            root.put(below, value, origin)


@dataclass(frozen=True, slots=True)
class ConfigOrigins:
    """Files, profiles and variables that were read, for logs and diagnosis. It shows no values.

    Attributes:
        files: Files in the order of merging.
        profiles: Active profiles; a later one wins over an earlier one.
        unmatched_profiles: Active profiles for which there is neither a file nor a document.
        folder: Folder in which the files were searched; None if nothing was read.
        unused_variables: Environment variables with our prefix that set no key -> the variable that may be meant.
    """

    files: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    unmatched_profiles: tuple[str, ...] = ()
    unused_variables: Mapping[str, str | None] = field(default_factory=dict)
    root: ConfigNode = field(default_factory=ConfigNode, repr=False)
    folder: Path | None = None

    def of(self, key: str) -> str:
        """Return the origin of a key: ``application.yml:4``, ``environment NAME``, …; ``default`` without a value."""
        node = self.root.find(key.split("."))
        return node.origin if node is not None and not node.is_empty else "default"
