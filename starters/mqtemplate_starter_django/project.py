"""``settings.MQTEMPLATE``: the configuration of the messages of a project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.apps import apps
from django.conf import settings

from mqtemplate.errors import ConfigurationError, did_you_mean

_NAME = "MQTEMPLATE"
_OWN = ("COMPONENTS", "CONFIG_FOLDER", "PROFILES")
_LISTENERS = "listeners"


@dataclass(frozen=True, slots=True)
class Project:
    """The setting ``MQTEMPLATE``.

    Attributes:
        keys: Keys as in ``application.yml``, dotted or nested.
        components: Further components: names of modules, or objects.
        config_folder: Folder of ``application.yml``; None for the working directory.
        profiles: Active profiles.
    """

    keys: Mapping[str, object] = field(default_factory=dict)
    components: Sequence[object] = ()
    config_folder: Any = None
    profiles: Sequence[str] = ()


def read_project() -> Project:
    """Return the setting ``MQTEMPLATE`` of Django.

    Raises:
        ConfigurationError: It is no mapping, or has an unknown name in capitals.
    """
    given = getattr(settings, _NAME, {})
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"settings.{_NAME} must be a mapping, got {given!r}; write {{'rocketmq.name-server': ...}}"
        )
    for name in given:
        if name.isupper() and name not in _OWN:
            hint = did_you_mean(name, _OWN, f"allowed are {', '.join(_OWN)} and keys of application.yml")
            raise ConfigurationError(f"settings.{_NAME} has an unknown name {name!r}; {hint}")
    return Project(
        {key: value for key, value in given.items() if key not in _OWN},
        given.get("COMPONENTS", ()),
        given.get("CONFIG_FOLDER"),
        given.get("PROFILES", ()),
    )


def listener_modules() -> list[Any]:
    """Import and return the module ``listeners`` of each installed app that has one."""
    names = [f"{config.name}.{_LISTENERS}" for config in apps.get_app_configs()]
    return [import_module(name) for name in names if find_spec(name) is not None]
