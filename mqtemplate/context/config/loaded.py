"""The configuration once it is read: all keys, where they came from, and how to ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from mqtemplate.context.config.binding import bind
from mqtemplate.context.config.environment import bind_environment
from mqtemplate.context.config.explain import explain
from mqtemplate.context.config.placeholders import Placeholders
from mqtemplate.context.config.tree import UNSET, ConfigNode

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ConfigOrigins:
    """What was read, for the log and for a person who wonders. It holds no values.

    Attributes:
        files: The files, in the order they were laid over each other.
        profiles: The profiles in force, a later one winning over an earlier one.
        unmatched_profiles: Those of them that no file and no document is for.
        unused_variables: Environment variables that begin like ours and set nothing -> what may have been meant.
    """

    files: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    unmatched_profiles: tuple[str, ...] = ()
    unused_variables: Mapping[str, str | None] = field(default_factory=dict)
    root: ConfigNode = field(default_factory=ConfigNode, repr=False)

    def of(self, key: str) -> str:
        """Where a key was written: ``application.yml:4``, ``environment NAME``, ``argument settings``, ``default``."""
        node = self.root.find(key.split("."))
        return node.origin if node is not None and not node.is_empty else "default"


class LoadedConfig:
    """All keys, ours and the user's.

    Args:
        root: The merged tree.
        environment: Variables that ``${…}`` may name; they win over keys of the files.
    """

    def __init__(self, root: ConfigNode, environment: Mapping[str, str], origins: ConfigOrigins) -> None:
        self.root = root
        self.origins = origins
        self._environment = environment

    def lookup(self, key: str) -> tuple[object, str]:
        """The raw value of a key and where it is from; ``(UNSET, "")`` if nobody gave one."""
        for name in _variables(key):
            if name in self._environment:
                return self._environment[name], f"environment {name}"
        node = self.root.find(key.split("."))
        return (node.value, node.origin) if node is not None else (UNSET, "")

    def bind(self, section: str, model: type[Model]) -> Model:
        """Read a section of the user's own into a model of theirs; environment variables act on it too.

        Raises:
            ConfigurationError: Something in it cannot be used; all findings at once, with their places.
        """
        path = tuple(section.split("."))
        overlay = bind_environment(model, self._environment, path).root
        merged = ConfigNode()
        merged.merge(_copied(self.root))
        merged.merge(overlay)
        binding = bind(merged.find(path) or ConfigNode(), model, Placeholders(self.lookup), path)
        try:
            return model.model_validate(binding.values)
        except ValidationError as exc:
            raise explain(exc, binding) from None  # pydantic's own text may print a secret


def _variables(key: str) -> tuple[str, ...]:
    """The variables that may stand for a key: itself; for a dotted one ``SHOP_FIRST_NAME`` and ``SHOP_FIRSTNAME``."""
    if "." not in key:
        return (key,)
    upper = key.replace(".", "_").upper()
    return (key, upper.replace("-", "_"), upper.replace("-", ""))


def _copied(node: ConfigNode) -> ConfigNode:
    return ConfigNode(node.value, node.origin, {key: _copied(child) for key, child in node.children.items()})
