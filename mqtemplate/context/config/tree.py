"""All keys that were read, with the place each one came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from mqtemplate.context.config.relaxed_keys import same_key


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(slots=True, eq=False)
class ConfigNode:
    """One key: its value, the keys below it, and where it was written.

    - Keys are kept as written, since below a user's own section they may be data. Between files, spellings of one
      key meet (`merge`).
    - A node may have a value *and* children: Spark's ``spark.speculation`` and ``spark.speculation.interval``
      are both settings.
    - A value given later replaces the earlier one whole, lists too; children are merged.
    - An empty value (``key:`` with nothing behind it) counts as not given.

    Attributes:
        value: A scalar or a list, placeholders not yet resolved.
        origin: ``application.yml:4``, ``environment ROCKETMQ_NAME_SERVER`` or ``argument settings``.
    """

    value: object = UNSET
    origin: str = ""
    children: dict[str, ConfigNode] = field(default_factory=dict)

    def child(self, key: str) -> ConfigNode | None:
        """The node of *key*, in whatever spelling; the exact one goes first."""
        if (exact := self.children.get(key)) is not None:
            return exact
        return next((node for name, node in self.children.items() if same_key(name, key)), None)

    def find(self, path: Sequence[str]) -> ConfigNode | None:
        node: ConfigNode | None = self
        for part in path:
            if node is None:
                return None
            node = node.child(part)
        return node

    def put(self, path: Sequence[str], value: object, origin: str) -> ConfigNode:
        """Set the value of *path*, spelled exactly so; `UNSET` only makes the node, to know the place of a section."""
        node = self
        for part in path:
            node = node.children.setdefault(part, ConfigNode(origin=origin))
        if value is not UNSET:
            node.origin = origin
            node.value = UNSET if value is None else value
        return node

    def merge(self, later: ConfigNode) -> None:
        """Lay a later tree over this one."""
        for key, node in later.children.items():
            mine = self.child(key)
            if mine is None:
                self.children[key] = node
                continue
            if node.value is not UNSET:
                mine.value, mine.origin = node.value, node.origin
            mine.merge(node)

    def leaves(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ConfigNode]]:
        """Every node that has a value, with its path as written."""
        if self.value is not UNSET:
            yield path, self
        for key, node in self.children.items():
            yield from node.leaves((*path, key))

    @property
    def is_empty(self) -> bool:
        return self.value is UNSET and all(node.is_empty for node in self.children.values())


def insert_mapping(root: ConfigNode, mapping: Mapping[str, object], origin: str, path: tuple[str, ...] = ()) -> None:
    """Put a nested mapping into a tree; keys may be dotted, as in a file."""
    for key, value in mapping.items():
        below = (*path, *key.split("."))
        if isinstance(value, Mapping):
            root.put(below, UNSET, origin)
            insert_mapping(root, value, origin, below)
        else:
            root.put(below, value, origin)
