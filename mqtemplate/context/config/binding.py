"""From keys to models: the schema says how each key is to be read, and errors say where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from mqtemplate.context.config.placeholders import Placeholders
from mqtemplate.context.config.relaxed_keys import shown
from mqtemplate.context.config.schema import FieldShape, Location, as_written, field_named, shape_of
from mqtemplate.context.config.tree import UNSET, ConfigNode, insert_mapping
from mqtemplate.errors import ConfigurationError


@dataclass(slots=True)
class Binding:
    """A part of the configuration in the form that pydantic takes.

    Attributes:
        prefix: Where in the configuration the model stands.
        values: By field name; an unknown key stays as it was written, so that pydantic refuses it.
        origins: Where each value and section was written, by pydantic's location.
    """

    model: type[BaseModel]
    prefix: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)

    def origin_of(self, location: Location) -> str:
        """Where a value was written, or the nearest section around it."""
        while location and location not in self.origins:
            location = location[:-1]
        return self.origins.get(location) or "defaults"


def bind(node: ConfigNode, model: type[BaseModel], placeholders: Placeholders, prefix: tuple[str, ...] = ()) -> Binding:
    """Read the keys below *node* as *model* wants them.

    Raises:
        ConfigurationError: A placeholder cannot be filled, a section has a value, a value has keys below it,
            or one field is given in two spellings.
    """
    binding = Binding(model, prefix)
    binding.values = _Reader(binding, placeholders).section(node, model, ())
    return binding


class _Reader:
    def __init__(self, binding: Binding, placeholders: Placeholders) -> None:
        self._binding = binding
        self._placeholders = placeholders

    def section(self, node: ConfigNode, model: type[BaseModel], at: Location) -> dict[str, Any]:
        self._binding.origins[at] = node.origin
        if node.value is not UNSET:
            raise ConfigurationError(f"{node.origin}: {self._name(at)} is a section; write keys below it, not a value")
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, child in node.children.items():
            name = field_named(model, key)
            if name is None:
                self._binding.origins[(*at, key)] = child.origin
                allowed = model.model_config.get("extra") == "allow"
                values[key] = self._plain(child) if allowed else None  # else never read: pydantic refuses the key
                continue
            if (twin := spelled.setdefault(name, key)) != key:
                raise ConfigurationError(f"{child.origin}: '{key}' and '{twin}' are one key in two spellings; keep one")
            shape = shape_of(model.model_fields[name].annotation)
            if shape.model is not None or not child.is_empty:
                values[name] = self._field(child, shape, (*at, name))
        return values

    def _field(self, node: ConfigNode, shape: FieldShape, at: Location) -> object:
        self._binding.origins[at] = node.origin
        if shape.model is not None:
            return self.section(node, shape.model, at)
        if shape.map_depth and node.value is UNSET:
            return self._map(node, shape, at)
        if node.children:
            key = next(iter(node.children))
            raise ConfigurationError(
                f"{node.children[key].origin}: {self._name(at)} takes one value; there is no key '{key}' below it"
            )
        value = self._placeholders.resolve(node.value, node.origin)
        if shape.item_model is not None and isinstance(value, list):
            return [self._item(item, shape.item_model, (*at, index), node.origin) for index, item in enumerate(value)]
        return value

    def _map(self, node: ConfigNode, shape: FieldShape, at: Location) -> dict[str, Any]:
        """Keys that the user chose: taken as written, dots belong to the last of them."""
        if shape.item_model is not None and shape.map_depth == 1:
            return {key: self.section(child, shape.item_model, (*at, key)) for key, child in node.children.items()}
        values: dict[str, Any] = {}
        for path, leaf in node.leaves():
            *outer, last = ".".join(path).split(".", shape.map_depth - 1)
            place = values
            for part in outer:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    name = self._name((*at, *outer))
                    raise ConfigurationError(f"{leaf.origin}: {name} has a value and keys below it; keep one")
            place[last] = self._placeholders.resolve(leaf.value, leaf.origin)
            self._binding.origins[(*at, *outer, last)] = leaf.origin
        return values

    def _plain(self, node: ConfigNode) -> object:
        """A key that the model knows nothing about, as it was written."""
        if node.value is not UNSET:
            return self._placeholders.resolve(node.value, node.origin)
        return {key: self._plain(child) for key, child in node.children.items()}

    def _item(self, item: object, model: type[BaseModel], at: Location, origin: str) -> object:
        if not isinstance(item, Mapping):
            return item
        root = ConfigNode(origin=origin)
        insert_mapping(root, item, origin)
        return self.section(root, model, at)

    def _name(self, at: Location) -> str:
        return shown((*self._binding.prefix, *as_written(self._binding.model, at)))
