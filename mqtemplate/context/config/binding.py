"""Contradictions between the keys of a section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mqtemplate.context.config import schema
from mqtemplate.context.config.masking import masked, masked_text
from mqtemplate.context.config.placeholders import Placeholders
from mqtemplate.context.config.tree import (
    UNSET,
    ConfigNode,
    canonical_key,
    dotted,
    insert_mapping,
    is_empty_text,
    kebab,
    variable_name,
)
from mqtemplate.durations import ALLOWED, duration_ms, is_duration_text
from mqtemplate.errors import ConfigurationError
from mqtemplate.user_code import nearest, shown


class ContradictionError(ValueError):
    """Two keys that exclude each other, or a key that lacks another one.

    Attributes:
        keys: Paths of the keys below the section that raises. The error message names the first one that was written,
            with its file and line.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


def check_both_or_none(section: object, first: str, second: str, reason: str = "; give both or none") -> None:
    """Raise `ContradictionError` if only one of two fields has a value."""
    has_first, has_second = (getattr(section, name) is not None for name in (first, second))
    if has_first != has_second:
        given, missing = (first, second) if has_first else (second, first)
        raise ContradictionError(f"needs '{missing.replace('_', '-')}' beside it{reason}", given)


_GRPC = "it is a key of rocketmq-v5-client-spring-boot; here"
_HINTS = {
    # Source: rocketmq-spring, rocketmq-v5-client-spring-boot: RocketMQProperties
    "rocketmq.simple-consumer.await-duration": "pass a timeout to each call: template.receive(Order, timeout='5s')",
    "rocketmq.simple-consumer.request-timeout": "set rocketmq.producer.request-timeout, which holds for all requests",
    "rocketmq.push-consumer.request-timeout": "set rocketmq.producer.request-timeout, which holds for all requests",
    "rocketmq.push-consumer.topic": "write @message_listener(topic=...)",
    "rocketmq.push-consumer.tag": "write @message_listener(selector_expression=...)",
    "rocketmq.push-consumer.consumer-group": "write @message_listener(consumer_group=...)",
}
_BY_NAME = {canonical_key(name): hint for name, hint in _HINTS.items()}


def hint_for(name: str) -> str | None:
    """Return what to write instead of a key, given with dots; None for a key that the other starter does not have."""
    hint = _BY_NAME.get(canonical_key(name))
    return None if hint is None else f"{_GRPC} {hint}"


_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's name for models, and for dataclasses


_NOT_A_DURATION = ("time_delta_parsing", "time_delta_type")


@dataclass(slots=True)
class Binding:
    """The keys of one section in the form that pydantic takes.

    Attributes:
        prefix: Path of the section in the configuration.
        values: Values by field name. An unknown key is there as written, so that pydantic refuses it.
        origins: Origins of values and sections, by pydantic's location.
    """

    section: type
    prefix: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[schema.Location, str] = field(default_factory=dict)

    def explain(self, error: ValidationError) -> ConfigurationError:
        """Return one error that lists all problems, one per line. It contains no values of secrets."""
        return _not_usable([self._line(problem) for problem in error.errors(include_url=False)])

    def name_of(self, location: schema.Location) -> str:
        """Return the key at a location, as a file writes it."""
        return dotted((*self.prefix, *schema.as_written(self.section, location)))

    def _line(self, problem: ErrorDetails) -> str:
        location = problem["loc"]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ContradictionError):
            return f"{self._place(self._first_written(location, cause))}: {masked_text(str(cause))}"
        where = self._place(location)
        if problem["type"] in _UNKNOWN_KEY:
            return self.unknown(location)
        if problem["type"] == "missing":
            in_list = any(isinstance(part, int) for part in location)  # a variable cannot name an item of a list
            variable = "" if in_list else f" or as {variable_name(map(str, (*self.prefix, *location)))}"
            return f"{where}: required; set it in application.yml{variable}"
        text = f"{where}: {masked_text(message_of(problem))}"
        if problem["type"] in _NOT_A_DURATION:
            text = f"{where}: must be a duration: {ALLOWED}, or a number of seconds"
        if schema.is_secret(self.section, location):
            return f"{text} (its value is not shown)"
        if not isinstance(problem["input"], str | int | float):
            return text  # a whole section or list, which may contain secrets
        return f"{text} (got {shown(masked(problem['input']))})"

    def unknown(self, location: schema.Location) -> str:
        """Return the problem of a key that is not declared."""
        hint = hint_for(self.name_of(location))
        return f"{self._place(location)}: no such key{self._nearest(location) if hint is None else f'; {hint}'}"

    def _place(self, location: schema.Location) -> str:
        """Return the origin of a value, or of the nearest section around it, and its key."""
        around = location
        while around and around not in self.origins:
            around = around[:-1]
        return f"{self.origins.get(around) or 'defaults'}: {self.name_of(location)}"

    def _first_written(self, location: schema.Location, error: ContradictionError) -> schema.Location:
        """Return the first key of a contradiction that was written; the first at all if none was."""
        candidates = [(*location, *key.split(".")) for key in error.keys] or [location]
        return next((candidate for candidate in candidates if candidate in self.origins), candidates[0])

    def _nearest(self, location: schema.Location) -> str:
        """Return a hint: a similar key of the same section, a similar key elsewhere, or the keys of the section."""
        known = [schema.as_written(self.section, path) for path, _ in schema.all_fields(self.section)]
        section = schema.as_written(self.section, location[:-1])
        holder = schema.section_at(self.section, location[:-1])
        names = () if holder is None else map(kebab, schema.fields_of(holder))
        siblings = {name: (*section, name) for name in names}
        if (close := nearest(str(location[-1]), siblings)) is not None:
            return f"; did you mean '{dotted((*self.prefix, *siblings[close]))}'?"
        wanted = dotted(schema.as_written(self.section, location))
        anywhere = {key: path for path in known if not wanted.startswith(key := dotted(path))}
        if (close := nearest(wanted, anywhere, cutoff=0.75)) is not None:
            return f"; did you mean '{dotted((*self.prefix, *anywhere[close]))}'?"
        return f"; here may stand: {', '.join(siblings)}" if siblings else ""


def message_of(problem: ErrorDetails) -> str:
    """Return the text of one of pydantic's problems, as the validator wrote it."""
    return problem["msg"].removeprefix("Value error, ")


def bind(
    node: ConfigNode,
    section: type,
    placeholders: Placeholders,
    prefix: tuple[str, ...] = (),
    *,
    empty_is_given: bool = True,
) -> Binding:
    """Read the keys below *node* as the section declares them.

    Args:
        empty_is_given: False: a placeholder that stands for an empty text counts as not given; see `is_empty_text`.

    Raises:
        ConfigurationError: A placeholder cannot be resolved, a section has a value, a value has keys below it, or one
            field is given in two spellings.
    """
    binding = Binding(section, prefix)
    binding.values = _TreeReader(binding, placeholders, empty_is_given=empty_is_given).section(node, section, ())
    return binding


def check_names(node: ConfigNode, section: type) -> None:
    """Check the keys below *node*, and no value: it may need variables that only another program has.

    Raises:
        ConfigurationError: A key is not declared; the error lists all.
    """
    binding = Binding(section, ())
    unknown = [binding.unknown(location) for location in _unknown_keys(node, section, (), binding)]
    if unknown:
        raise _not_usable(unknown)


def _unknown_keys(node: ConfigNode, section: type, at: schema.Location, binding: Binding) -> Iterator[schema.Location]:
    for key, child in node.children.items():
        name = schema.field_named(section, key)
        location = (*at, name or key)
        binding.origins[location] = child.origin
        if name is None:
            if getattr(section, "model_config", {}).get("extra") != "allow":
                yield location
            continue
        shape = schema.shape_of(schema.fields_of(section)[name].annotation)
        if shape.section is not None:
            yield from _unknown_keys(child, shape.section, location, binding)
        elif shape.item_section is not None:
            for position, item in _items(child):
                yield from _unknown_keys(item, shape.item_section, (*location, position), binding)


def _items(node: ConfigNode) -> Iterator[tuple[int | str, ConfigNode]]:
    """Yield the sections in a map, or in a list."""
    yield from node.children.items()
    for index, item in enumerate(node.value if isinstance(node.value, list) else ()):
        if isinstance(item, Mapping):
            root = ConfigNode(origin=node.origin)
            insert_mapping(root, item, node.origin)
            yield index, root


def _not_usable(problems: Sequence[str]) -> ConfigurationError:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return ConfigurationError("\n  ".join([f"configuration is not usable: {count}", *problems]))


def with_durations(value: object) -> object:
    """Replace texts such as ``1h 30m`` by timedeltas; pydantic knows the other forms of a timedelta."""
    if isinstance(value, list):
        return [with_durations(item) for item in value]
    if isinstance(value, str) and is_duration_text(value):
        return timedelta(milliseconds=duration_ms(value))
    return value


class _TreeReader:
    """Reader of one tree of keys into the values and origins of a `Binding`."""

    def __init__(self, binding: Binding, placeholders: Placeholders, *, empty_is_given: bool) -> None:
        self._binding = binding
        self._empty_is_given = empty_is_given
        self._placeholders = placeholders

    def section(self, node: ConfigNode, section: type, at: schema.Location) -> dict[str, Any]:
        """Return the values of a section by field name."""
        self._binding.origins[at] = node.origin
        if node.value is not UNSET:
            name = self._binding.name_of(at)
            raise ConfigurationError(f"{node.origin}: {name} is a section; write keys below it, not a value")
        values: dict[str, Any] = {}
        spellings: dict[str, str] = {}
        for key, child in node.children.items():
            field_name = schema.field_named(section, key)
            if field_name is None:
                self._binding.origins[(*at, key)] = child.origin
                allowed = getattr(section, "model_config", {}).get("extra") == "allow"
                values[key] = self._plain(child) if allowed else None  # pydantic refuses the key, whatever its value
                continue
            if (twin := spellings.setdefault(field_name, key)) != key:
                raise ConfigurationError(f"{child.origin}: '{key}' and '{twin}' are one key in two spellings; keep one")
            shape = schema.shape_of(schema.fields_of(section)[field_name].annotation)
            if shape.section is not None or not child.is_empty:
                value = self._field(child, shape, (*at, field_name))
                if self._empty_is_given or not is_empty_text(value):
                    values[field_name] = value
        return values

    def _field(self, node: ConfigNode, shape: schema.FieldShape, at: schema.Location) -> object:
        self._binding.origins[at] = node.origin
        if shape.section is not None:
            return self.section(node, shape.section, at)
        if shape.map_depth and node.value is UNSET:
            return self._map(node, shape, at)
        if node.children:
            key = next(iter(node.children))
            name = self._binding.name_of(at)
            raise ConfigurationError(
                f"{node.children[key].origin}: {name} takes one value, and has no key {shown(key)}; write one value "
                f"after {name}"
            )
        value = self._placeholders.resolve(node.value, node.origin)
        if shape.item_section is not None and isinstance(value, list):
            return [self._item(item, shape.item_section, (*at, index), node.origin) for index, item in enumerate(value)]
        return with_durations(value) if shape.is_duration else value

    def _map(self, node: ConfigNode, shape: schema.FieldShape, at: schema.Location) -> dict[str, Any]:
        """Read keys that the user chose: unchanged, and dots belong to the last of them."""
        if shape.item_section is not None and shape.map_depth == 1:
            return {key: self.section(child, shape.item_section, (*at, key)) for key, child in node.children.items()}
        values: dict[str, Any] = {}
        for path, leaf in node.leaves():
            *outer, last = ".".join(path).split(".", shape.map_depth - 1)
            inner = values
            for part in outer:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    name = self._binding.name_of((*at, *outer))
                    raise ConfigurationError(f"{leaf.origin}: {name} has a value and keys below it; keep one")
            value = self._placeholders.resolve(leaf.value, leaf.origin)
            inner[last] = with_durations(value) if shape.is_duration else value
            self._binding.origins[(*at, *outer, last)] = leaf.origin
        return values

    def _plain(self, node: ConfigNode) -> object:
        """Return a key that the section does not declare, as it was written."""
        if node.value is not UNSET:
            return self._placeholders.resolve(node.value, node.origin)
        return {key: self._plain(child) for key, child in node.children.items()}

    def _item(self, item: object, section: type, at: schema.Location, origin: str) -> object:
        if not isinstance(item, Mapping):
            return item
        root = ConfigNode(origin=origin)
        insert_mapping(root, item, origin)
        return self.section(root, section, at)
