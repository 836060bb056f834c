"""Settings that the command line of this process gives: they win over files, the environment and the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mqtemplate.context.config.relaxed_keys import same_key
from mqtemplate.context.config.tree import ConfigNode, insert_mapping, is_empty_text

_NAME_SERVER = "rocketmq.name-server"
_STORE_PATH = ("mqtemplate", "broker", "store-path")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Options of ``mqtemplate run`` that change settings.

    Attributes:
        profiles: Active profiles; empty for those of the configuration.
        keys: Dotted key -> value.
    """

    profiles: tuple[str, ...] = ()
    keys: Mapping[str, object] = field(default_factory=dict)

    def apply(self, root: ConfigNode) -> None:
        """Set the keys in the tree of all sources.

        Another broker makes the store directory of the configuration meaningless, so that is removed.
        """
        given = {key: value for key, value in self.keys.items() if not is_empty_text(value)}
        if _NAME_SERVER in given:
            _remove(root, _STORE_PATH)
        overlay = ConfigNode()
        insert_mapping(overlay, given, "the command line")
        root.merge(overlay)


class ProcessCommandLine:
    """The command line of this process. Only a program that owns its process sets it."""

    def __init__(self) -> None:
        self.given = CommandLine()


PROCESS = ProcessCommandLine()


def _remove(root: ConfigNode, path: tuple[str, ...]) -> None:
    parent = root.find(path[:-1])
    for name in [name for name in (parent.children if parent else {}) if same_key(name, path[-1])]:
        assert parent is not None
        del parent.children[name]
