"""The configuration after reading: all keys and their origins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from mqtemplate.context.config.binding import bind
from mqtemplate.context.config.environment import bind_environment
from mqtemplate.context.config.placeholders import Found, Placeholders
from mqtemplate.context.config.tree import UNSET, ConfigNode, ConfigOrigins, is_empty_text

Model = TypeVar("Model", bound=BaseModel)


class Configuration:
    """All keys, those of the library and those of the application.

    Args:
        root: The merged tree.
        environment: Variables that ``${…}`` may name; they win over keys in files.
    """

    def __init__(self, root: ConfigNode, environment: Mapping[str, str], origins: ConfigOrigins) -> None:
        self.root = root
        self.origins = origins
        self._environment = environment

    def lookup(self, key: str) -> Found | None:
        """Return the raw value of a key and its origin; None if the key has no value. An empty variable is none."""
        for name in _variables(key):
            if not is_empty_text(self._environment.get(name, "")):
                return self._environment[name], f"environment {name}"
        node = self.root.find(key.split("."))
        return None if node is None or node.value is UNSET else (node.value, node.origin)

    def bind(self, section: str, model: type[Model]) -> Model:
        """Read a section of the application into a model of its own; environment variables apply too.

        Raises:
            ConfigurationError: The section has invalid keys or values; the error lists all, with their origins.
        """
        path = tuple(section.split("."))
        merged = self.root.copy()
        merged.merge(bind_environment(model, self._environment, path).root)
        binding = bind(merged.find(path) or ConfigNode(), model, Placeholders(self.lookup), path)
        try:
            return model.model_validate(binding.values)
        except ValidationError as exc:
            raise binding.explain(exc) from None  # pydantic's own text may contain a secret


def _variables(key: str) -> tuple[str, ...]:
    """Return the variables that may set a key: for ``shop.first-name`` ``SHOP_FIRST_NAME`` and ``SHOP_FIRSTNAME``."""
    if "." not in key:
        return (key,)
    upper = key.replace(".", "_").upper()
    return (key, upper.replace("-", "_"), upper.replace("-", ""))
