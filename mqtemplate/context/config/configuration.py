"""The configuration after reading: all keys with their origins, from files, variables and arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from mqtemplate.context.config.binding import bind
from mqtemplate.context.config.placeholders import Found, Placeholders
from mqtemplate.context.config.schema import FieldShape, all_fields
from mqtemplate.context.config.tree import (
    UNSET,
    ConfigNode,
    ConfigOrigins,
    canonical_key,
    dotted,
    is_empty_text,
    same_key,
    variable_name,
)
from mqtemplate.errors import ConfigurationError
from mqtemplate.user_code import nearest

_NO_KEYS = {
    "ROCKETMQ_HOME",  # the folder of a RocketMQ installation; set on many machines
    # Access keys and TLS of Spark's processes, which have no configuration file: mqtemplate.spark.location.
    *("MQTEMPLATE_ACCESS_KEY", "MQTEMPLATE_SECRET_KEY", "MQTEMPLATE_SECURITY_TOKEN"),
    *("MQTEMPLATE_TLS_TRUST_CERT_PATH", "MQTEMPLATE_CLIENT_FILE"),
    "MQTEMPLATE_SPARK_SHIPPED",  # the tasks of Spark get the library as a zip: the package pyspark_mqtemplate
}


@dataclass(slots=True)
class BoundEnvironment:
    """The keys that environment variables set.

    Attributes:
        root: The keys.
        unused: Variables with our prefix that set no key -> the variable that may be meant, or None.
    """

    root: ConfigNode = field(default_factory=ConfigNode)
    unused: dict[str, str | None] = field(default_factory=dict)


def bind_environment(section: type, environment: Mapping[str, str], prefix: tuple[str, ...] = ()) -> BoundEnvironment:
    """Find the variables that set keys of a section.

    Underscores and case have no meaning, so ``ROCKETMQ_PRODUCER_SEND_MESSAGE_TIMEOUT``,
    ``ROCKETMQ_PRODUCER_SENDMESSAGETIMEOUT`` and ``ROCKETMQ__PRODUCER__SEND_MESSAGE_TIMEOUT`` are one key. The user
    chooses the keys of a map, so they need the double underscore: ``ROCKETMQ__CONSUMER__LISTENERS__group__topic``.

    An empty variable counts as not given.

    Args:
        prefix: Path of the section.

    Raises:
        ConfigurationError: Two spellings of one variable have different values.
    """
    shapes = {(*prefix, *path): shape for path, shape in all_fields(section) if shape.section is None}
    by_canonical = {canonical_key("".join(path)): path for path in shapes}
    maps = {path: shape for path, shape in shapes.items() if shape.map_depth}
    first_words = {canonical_key(path[0]) for path in shapes}
    bound = BoundEnvironment()
    by_path: dict[tuple[str, ...], str] = {}
    for name, value in sorted(environment.items()):
        first, separator, _ = name.replace(".", "_").partition("_")
        if is_empty_text(value) or not separator or canonical_key(first) not in first_words or name.upper() in _NO_KEYS:
            continue
        path = by_canonical.get(canonical_key(name.replace(".", ""))) or next(_map_entries(name, maps), None)
        if path is None:
            bound.unused[name] = nearest(name.upper(), map(variable_name, shapes), cutoff=0.75)
            continue
        if (twin := by_path.setdefault(path, name)) != name and environment[twin] != value:
            raise ConfigurationError(
                f"environment: {twin} and {name} both set {dotted(path)}, to different values; keep one"
            )
        bound.root.put(path, value, f"environment {name}")
    return bound


def _map_entries(name: str, maps: Mapping[tuple[str, ...], FieldShape]) -> Iterator[tuple[str, ...]]:
    parts = name.split("__")
    for path, shape in maps.items():
        at = len(path)
        if len(parts) >= at + shape.map_depth and all(map(same_key, parts, path)):
            yield (*path, *parts[at:])


Model = TypeVar("Model", bound=BaseModel)


class Configuration:
    """All keys of the library and of the application.

    Args:
        root: The merged tree of all sources.
        environment: Variables that ``${…}`` may name; they win over keys in files.
        arguments: The keys in *root* that win over variables: arguments of the program, options of the command line.
    """

    def __init__(
        self, root: ConfigNode, environment: Mapping[str, str], origins: ConfigOrigins, arguments: ConfigNode
    ) -> None:
        self.root = root
        self.origins = origins
        self.environment = environment
        self.arguments = arguments

    def lookup(self, key: str) -> Found | None:
        """Return the raw value of a key and its origin; None if the key has no value, or an empty one."""
        path = key.split(".")
        if (argument := _value_at(self.arguments, path)) is not None:
            return argument
        for name in _variables(key):
            if not is_empty_text(self.environment.get(name, "")):
                return self.environment[name], f"environment {name}"
        return _value_at(self.root, path)

    def bind(self, section: str, model: type[Model]) -> Model:
        """Read a section of the application into a model of its own; environment variables apply too.

        Raises:
            ConfigurationError: The section has invalid keys or values; the error lists all, with their origins.
        """
        path = tuple(section.split("."))
        merged = self.root.copy()
        merged.merge(bind_environment(model, self.environment, path).root)
        merged.merge(self.arguments.copy())
        binding = bind(merged.find(path) or ConfigNode(), model, Placeholders(self.lookup), path)
        try:
            return model.model_validate(binding.values)
        except ValidationError as exc:
            raise binding.explain(exc) from None  # pydantic's own text may contain a secret


def _value_at(root: ConfigNode, path: list[str]) -> Found | None:
    node = root.find(path)
    return None if node is None or node.value is UNSET else (node.value, node.origin)


def _variables(key: str) -> tuple[str, ...]:
    """Return the variables that may set a key: for ``shop.first-name`` ``SHOP_FIRST_NAME`` and ``SHOP_FIRSTNAME``."""
    if "." not in key:
        return (key,)
    upper = key.replace(".", "_").upper()
    return (key, upper.replace("-", "_"), upper.replace("-", ""))
