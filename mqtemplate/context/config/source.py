"""Where settings come from: files, profiles, the environment, arguments; and how they are laid over each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from mqtemplate.context.config.binding import Binding, bind
from mqtemplate.context.config.environment import BoundEnvironment, bind_environment
from mqtemplate.context.config.explain import explain
from mqtemplate.context.config.loaded import ConfigOrigins, LoadedConfig
from mqtemplate.context.config.placeholders import Placeholders
from mqtemplate.context.config.schema import field_named
from mqtemplate.context.config.tree import UNSET, ConfigNode, insert_mapping
from mqtemplate.context.config.yaml_reader import YamlDocument, read_yaml
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.errors import ConfigurationError

_PROFILES_KEY = ("mqtemplate", "profiles", "active")
_ARGUMENT = "argument settings"


class RelaxedSource(PydanticBaseSettingsSource):
    """Gives pydantic-settings what was bound: files, environment and arguments, already in the model's spelling."""

    def __init__(self, settings_cls: type[BaseSettings], binding: Binding) -> None:
        super().__init__(settings_cls)
        self._binding = binding

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._binding.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._binding.values


def load_settings(
    config_folder: Path | str | None = None,
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> AppSettings:
    """Read the configuration of an application.

    A later source wins over an earlier one: ``application.yml``, then ``application-{profile}.yml`` in the order
    of the profiles, then the environment, then *arguments*.

    Args:
        config_folder: Where the files are; the working directory if not given. No file at all is fine.
        profiles: Names of profiles; if none, those of ``mqtemplate.profiles.active`` in *arguments*, else in
            ``MQTEMPLATE_PROFILES_ACTIVE``, else in ``application.yml``.
        environment: Variables; those of the process if not given.
        arguments: Keys given by the program, dotted or nested, in any spelling.

    Raises:
        ConfigurationError: It cannot be used: all findings with file, line and nearest known key.
    """
    variables = os.environ if environment is None else environment
    given = bind_environment(AppSettings, variables)
    overlay = ConfigNode()
    insert_mapping(overlay, arguments or {}, _ARGUMENT)
    files = _Files(_existing_folder(config_folder))
    active = tuple(profiles) or _profiles_of(overlay) or _profiles_of(given.root) or files.default_profiles()
    root = files.merged(active)
    root.merge(given.root)
    root.merge(overlay)
    if active:
        root.merge(_active_profiles(active))
    config = LoadedConfig(root, variables, _origins(files, active, given, root))
    return _bound(config)


def _bound(config: LoadedConfig) -> AppSettings:
    ours = ConfigNode(children={key: node for key, node in config.root.children.items() if _is_ours(key)})
    binding = bind(ours, AppSettings, Placeholders(config.lookup))

    class Bound(AppSettings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (RelaxedSource(settings_cls, binding),)

    Bound.__name__ = Bound.__qualname__ = AppSettings.__name__
    try:
        settings = Bound()
    except ValidationError as exc:
        raise explain(exc, binding) from None  # pydantic's own text may print a secret
    settings._config = config
    return settings


def _is_ours(key: str) -> bool:
    return field_named(AppSettings, key) is not None


class _Files:
    """The files of a folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.read: list[str] = []
        self.mentioned_profiles: set[str] = set()
        self._base = self._documents("application")

    def default_profiles(self) -> tuple[str, ...]:
        """What ``application.yml`` itself says; only outside of documents that are for a profile."""
        found: tuple[str, ...] = ()
        for document in self._base:
            if not document.on_profile:
                found = _profiles_of(document.root) or found
        return found

    def merged(self, profiles: Sequence[str]) -> ConfigNode:
        root = ConfigNode()
        documents = list(self._base)
        for document in self._base:
            self.mentioned_profiles |= {name.removeprefix("!") for name in document.on_profile}
        for profile in profiles:
            own = self._documents(f"application-{profile}")
            if own:
                self.mentioned_profiles.add(profile)
            documents += own
            _refuse_profiles(own)
        _refuse_profiles([document for document in self._base if document.on_profile])
        for document in documents:
            if _applies(document, profiles):
                root.merge(document.root)
        return root

    def _documents(self, stem: str) -> list[YamlDocument]:
        present = [file for ext in ("yml", "yaml") if (file := self._folder / f"{stem}.{ext}").is_file()]
        if len(present) > 1:
            raise ConfigurationError(f"{self._folder} has both {present[0].name} and {present[1].name}; keep one")
        if not present:
            return []
        self.read.append(str(present[0]))
        return read_yaml(present[0])


def _applies(document: YamlDocument, profiles: Sequence[str]) -> bool:
    if not document.on_profile:
        return True
    return any(name[1:] not in profiles if name.startswith("!") else name in profiles for name in document.on_profile)


def _existing_folder(config_folder: Path | str | None) -> Path:
    folder = Path() if config_folder is None else Path(config_folder)
    if not folder.is_dir():
        raise ConfigurationError(f"config_folder {str(folder)!r} is no folder; give the one that holds application.yml")
    return folder


def _profiles_of(root: ConfigNode) -> tuple[str, ...]:
    node = root.find(_PROFILES_KEY)
    if node is None or node.value is UNSET:
        return ()
    names = node.value if isinstance(node.value, list) else str(node.value).split(",")
    return tuple(str(name).strip() for name in names if str(name).strip())


def _refuse_profiles(documents: Sequence[YamlDocument]) -> None:
    for document in documents:
        node = document.root.find(_PROFILES_KEY)
        if node is not None and not node.is_empty:
            raise ConfigurationError(
                f"{node.origin}: mqtemplate.profiles.active cannot stand in a part that is itself for a profile; "
                "move it to the head of application.yml, or set MQTEMPLATE_PROFILES_ACTIVE"
            )


def _active_profiles(active: Sequence[str]) -> ConfigNode:
    """The profiles in force as a key, so that the settings tell what happened whoever named them."""
    overlay = ConfigNode()
    overlay.put(_PROFILES_KEY, list(active), "profiles in force")
    return overlay


def _origins(files: _Files, active: Sequence[str], given: BoundEnvironment, root: ConfigNode) -> ConfigOrigins:
    return ConfigOrigins(
        files=tuple(files.read),
        profiles=tuple(active),
        unmatched_profiles=tuple(name for name in active if name not in files.mentioned_profiles),
        unused_variables=dict(given.unused),
        root=root,
    )
