"""All settings with their values and origins, for diagnosis. Secrets are hidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mqtemplate.context.config.masking import HIDDEN, masked
from mqtemplate.context.config.relaxed_keys import kebab
from mqtemplate.context.config.schema import field_named, fields_of, is_secret, is_section

if TYPE_CHECKING:
    from mqtemplate.context.settings.app import AppSettings

_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ExplainedSetting:
    """One setting.

    Attributes:
        key: The key as a file writes it, such as ``rocketmq.name-server``.
        value: A text, number, truth value, list or map, or None; `HIDDEN` for a secret.
        origin: ``application.yml:4``, ``environment ROCKETMQ_NAME_SERVER``, ``argument settings``, or ``default``.
    """

    key: str
    value: Any
    origin: str

    @property
    def is_default(self) -> bool:
        """True if no source sets the key."""
        return self.origin == _DEFAULT


def explain_settings(settings: AppSettings) -> list[ExplainedSetting]:
    """Return all settings of the library, defaults included, then those of the application itself."""
    return [*_of_section(settings, type(settings), ()), *_of_application(settings)]


def _of_section(settings: AppSettings, section: type, path: tuple[str, ...]) -> Iterator[ExplainedSetting]:
    value: Any = settings
    for part in path:
        value = getattr(value, part)
    for name in fields_of(section):
        below, at = getattr(value, name), (*path, name)
        if is_section(type(below)):
            yield from _of_section(settings, type(below), at)
            continue
        key = ".".join(map(kebab, at))
        yield ExplainedSetting(key, _plain(below, at, settings), settings.origins.of(key))


def _of_application(settings: AppSettings) -> Iterator[ExplainedSetting]:
    """Yield the keys of sections that belong to the application. A name like ``api-token`` hides its value."""
    for path, node in settings.origins.root.leaves():
        if field_named(type(settings), path[0]) is None:
            hidden = is_secret(type(settings), path)
            key = ".".join(path)
            origin = settings.origin_of(key) or node.origin  # a variable of the environment wins over a file
            value = settings.get(key)
            yield ExplainedSetting(key, HIDDEN if hidden and _may_be_secret(value) else masked(value), origin)


def _plain(value: Any, path: tuple[str | int, ...], settings: AppSettings) -> Any:
    """Return a value as JSON has it, without secrets."""
    if is_secret(type(settings), path) and _may_be_secret(value):
        return HIDDEN
    if is_section(type(value)):
        return {kebab(name): _plain(getattr(value, name), (*path, name), settings) for name in fields_of(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(each, (*path, str(key)), settings) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return [_plain(each, (*path, index), settings) for index, each in enumerate(value)]
    return masked(value)


def _may_be_secret(value: Any) -> bool:
    return value is not None and not isinstance(value, bool)
